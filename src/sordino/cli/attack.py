"""`sordino attack RUN` and `sordino diagnose RUN`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.audit.attacks import MembershipReport
    from sordino.commands import Diagnosis
    from sordino.research import SubgroupGap, TangentKernel
    from sordino.runs import Metric

__all__ = ["attack_command", "diagnose_command"]


_PRIVATE = "Private: these numbers are statistics of the members, without noise. Keep them with the data."
_SHOWN_SLICES = 5
_MARK = {True: "yes", False: "no"}


def attack_command(
    run: Annotated[Path, typer.Argument(help="Run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="Training records of the run, a name or a file. Default: the run's own.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="Schema file that declares your table's columns.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="File with records that were NOT in training, with the same columns.")
    ] = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="Declare both files public; the results may be released.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    references: Annotated[
        int, typer.Option(help="Number of reference models, even; 0 runs only attacks without them.")
    ] = 8,
    members: Annotated[
        int, typer.Option(help="Number of members to attack, and of non-members; the first of each.")
    ] = 2000,
    out: Annotated[
        Path | None, typer.Option(help="Folder for attack.json and attack.png. Default: attacks/NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attack a run's model: who was in its training data? Results stay local; a failed attack is no proof."""
    output, found = call("attack", locals())
    files = {"picture": str(found.picture), "numbers": str(found.file)}
    output.print_result(found.to_dict(), *_page(found.report, files))
    if found.report.above_ceiling:
        raise typer.Exit(1)


def _page(report: "MembershipReport", files: dict[str, str]) -> tuple[RenderableType, ...]:
    best, ceiling = report.strongest, report.ceiling
    words = f"{best.name} finds members best: AUC {best.roc.auc:.3f}, no attack can exceed {ceiling.auc:.3f}"
    verdict = [
        Text(
            f"ABOVE THE CEILING: {', '.join(report.above_ceiling)}. The claimed guarantee is refuted.", style="bold red"
        )
        if report.above_ceiling
        else Text("No attack is above the ceiling."),
        Text("An attack that fails is no proof of privacy.", style="dim"),
    ]
    banner = [] if report.public else [Text(_PRIVATE, style="bold yellow"), Text()]
    claim = (
        "none"
        if report.claim is None
        else f"ε = {format_upper_bound(report.claim.epsilon)}, δ = {report.claim.delta:g}"
    )
    rows = [
        ("claim", claim),
        ("ceiling from", ceiling.source),
        ("attacked", f"{best.roc.members:,} members, {best.roc.non_members:,} others"),
        ("reference models", f"{report.references}, trained as the run was"),
        *files.items(),
    ]
    known = key_value_table([(one.name, one.knowledge) for one in report.attacks])
    blocks = (
        _attacks(report),
        Text("What the attacker knows besides the record"),
        known,
        _slices(report),
        key_value_table(rows),
    )
    return (*banner, heading(words), Group(*verdict), Text(), *blocks)


def _attacks(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rates = [rate.false_positive_rate for rate in report.strongest.roc.rates]
    table.add_column("attack", overflow="fold")
    for name in ("AUC", "advantage", *(f"TPR at {100 * rate:g} %" for rate in rates)):
        table.add_column(name, justify="right")
    for one in report.attacks:
        shown = [f"{100 * rate.value:.1f} % ({100 * rate.lower:.1f}–{100 * rate.upper:.1f})" for rate in one.roc.rates]
        table.add_row(one.name, f"{one.roc.auc:.3f}", f"{one.roc.advantage:.3f}", *shown)
    most = [f"{100 * report.ceiling.true_positive_rate(rate):.1f} %" for rate in rates]
    style, advantage = "bold", f"{report.ceiling.advantage:.3f}"
    table.add_row("ceiling of the claim", f"{report.ceiling.auc:.3f}", advantage, *most, style=style)
    return table


def _slices(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worst groups, each alone", "members", "AUC"):
        table.add_column(name, justify="left" if name.startswith("worst") else "right")
    for part in report.slices[:_SHOWN_SLICES]:
        table.add_row(part.name, f"{part.members:,}", f"{part.auc:.3f} ({part.lower:.3f}–{part.upper:.3f})")
    return table


def diagnose_command(
    run: Annotated[Path, typer.Argument(help="Run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="Training records of the run, a name or a file. Default: the run's own.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="Schema file that declares your table's columns.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="PUBLIC file with the same columns; all figures are measured on it.")
    ] = None,
    data_is_public: Annotated[
        bool,
        typer.Option(
            "--data-is-public", help="Declare the training records public; a non-private baseline is trained."
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    records: Annotated[int, typer.Option(help="Number of test records in the tangent kernel.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of training with noise only, clipping only, both, neither.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tangent kernel, convergence, calibration and subgroups of a run's model, on public test records only."""
    output, found = call("diagnose", locals())
    output.print_result(found.to_dict(), *_diagnose_page(found))


def _diagnose_page(found: "Diagnosis") -> tuple[RenderableType, ...]:
    blocks: list[RenderableType] = []
    if found.kernel is not None:
        refuted = [f"{row.name} ({', '.join(row.refutes)})" for row in found.kernel.rows if row.refutes]
        words = f"Beyond the published table: not kept here by {'; '.join(refuted)}" if refuted else ""
        note = f"clipping norm {found.kernel.max_grad_norm:g}; symmetric, form ≥ 0, eigenvalues ≥ 0; slope of the loss"
        head = heading("Clipping and the tangent kernel", note)
        blocks += [head, _kernel(found.kernel), Text(words, style="yellow"), Text()]
    if found.courses is not None:
        last = [(name, f"loss {losses[0]:.4f} → {losses[-1]:.4f}") for name, losses in found.courses.losses.items()]
        blocks += [
            heading("Noise and clipping apart", f"{found.courses.steps} full-batch steps"),
            key_value_table(last),
            Text(),
        ]
    blocks += [heading("Calibration"), _calibration(found.calibration)]
    if found.gaps:
        blocks += [heading("Whom privacy costs"), _gaps(found.gaps)]
    return tuple(blocks)


def _kernel(kernel: "TangentKernel") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("clipping", "sym.", "form", "eig.", "predicted", "measured", "kept"):
        table.add_column(name, justify="left" if name == "clipping" else "right", no_wrap=True)
    for row in kernel.rows:
        marks = (_MARK[row.symmetric], _MARK[row.positive_form], _MARK[row.positive_eigenvalues])
        slopes = (f"{row.predicted:.4g}", f"{row.measured:.4g}", f"{100 * row.kept:.0f} %")
        table.add_row(row.name, *marks, *slopes)
    return table


def _calibration(calibration: "dict[str, dict[str, Metric]]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "accuracy", "ECE", "MCE"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, metrics in calibration.items():
        keys = ("test_accuracy", "test_ece", "test_mce")
        # A model without probabilities has no calibration.
        shown = [f"{100 * metrics[key].value:.1f} %" if key in metrics else "" for key in keys]
        table.add_row(name, *shown)
    return table


def _gaps(gaps: "Sequence[SubgroupGap]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", "records", "private", "baseline", "gap (95 %)"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for gap in gaps:
        span = f"{100 * gap.gap:+.1f} ({100 * gap.lower:+.1f} to {100 * gap.upper:+.1f})"
        shares = (f"{100 * gap.private:.1f} %", f"{100 * gap.plain:.1f} %")
        table.add_row(f"{gap.column}: {gap.value}", f"{gap.records:,}", *shares, span)
    return table
