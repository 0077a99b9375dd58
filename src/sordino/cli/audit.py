"""`sordino audit`: train with canaries and bound ε from below; replay on neighbors; check the engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.audit import AuditResult, CaseResult

__all__ = ["audit"]

_DEFAULT = "training"


class _OneByDefault(TyperGroup):
    """A group in which ``audit TARGET`` is ``audit training TARGET``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of what is none."""
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


audit = typer.Typer(
    cls=_OneByDefault, help="What an attacker can show about ε: audits, replays, checks.", no_args_is_help=True
)


@audit.command(_DEFAULT)
def training(
    target: Annotated[
        str, typer.Argument(metavar="RUN|DATA", help="Run folder, or data as for `sordino train` with --epsilon.")
    ],
    epsilon: Annotated[float | None, typer.Option(help="For DATA: stated ε.")] = None,
    delta: Annotated[float | None, typer.Option(help="For DATA: δ. Default: 1e-5 or less.")] = None,
    model: Annotated[str, typer.Option(help="For DATA: logistic, mlp or cnn.")] = "logistic",
    label: Annotated[str | None, typer.Option("--target", help="For a file: column to predict.")] = None,
    schema: Annotated[Path | None, typer.Option(help="For a file: its schema file.")] = None,
    public_schema_from: Annotated[
        Path | None, typer.Option(help="For a file: PUBLIC sample to infer the schema from.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="For a run: its training data, if not found by name.")] = None,
    canaries: Annotated[str, typer.Option(help="Kind of canaries: gradients, mislabeled or random.")] = "gradients",
    count: Annotated[int, typer.Option(help="Number of canaries.")] = 1000,
    attacker: Annotated[
        str, typer.Option(help="Attacker: white-box sees every step, black-box the final model.")
    ] = "white-box",
    confidence: Annotated[float, typer.Option(help="Confidence level of the bound.")] = 0.95,
    plot: Annotated[
        Path | None, typer.Option(help="Picture file, .png or .svg. Default for a run: its audit.png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train once with canaries, attack, and show ε from below. Exit code 1 when the claim is rejected."""
    output, found = call("audit_training", locals())
    output.print_result(found.to_dict(), *_page(found.result, found.picture))
    if not found.result.passed:
        raise typer.Exit(1)


def _page(result: "AuditResult", picture: Path | None) -> tuple[RenderableType, ...]:
    bound, claimed = result.bound, result.claimed
    verdict = "Nothing speaks against the claim; that is no proof of it." if result.passed else "The claim is REJECTED."
    rows = [
        ("claimed", f"ε = {format_upper_bound(claimed.epsilon)} at δ = {claimed.delta:g}"),
        ("shown", f"ε ≥ {bound.epsilon:.2f} with {100 * bound.confidence:g} % confidence, if {bound.family}"),
        ("could be shown", f"at most {bound.ceiling:.2f}, had all {bound.guesses} guesses been right"),
        ("attacker", result.report_entry()["attacker"]),
        ("guesses", f"{bound.correct} right of {bound.guesses}, on {bound.canaries:,} canaries ({result.canaries})"),
        *((f"{attacker}, {one.method}", f"ε ≥ {one.epsilon:.2f}") for attacker, one in result.others),
        *((check.name, _describe(check.passed, check.measured, check.expected)) for check in result.checks),
        ("training", f"{result.seconds:.0f} seconds"),
        *([] if picture is None else [("picture", str(picture))]),
    ]
    return heading(
        f"ε ≥ {bound.epsilon:.2f} was shown, ε = {format_upper_bound(claimed.epsilon)} is claimed", verdict
    ), key_value_table([(name, str(value)) for name, value in rows])


def _describe(passed: bool, measured: float, expected: float) -> str:
    return f"{'yes' if passed else 'NO'}: {measured:.4f}, expected {expected:g}"


@audit.command("replay")
def replay_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:CASE]",
            help="MODULE:OBJECT with pipeline, data and neighbors. Default: all built-in pipelines.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run pipelines on neighboring data with all releases forced. Exit code 1 when anything else differs."""
    output, found = call("audit_replay", locals())
    table = _table("path", "releases", "largest share of a sensitivity", "")
    for name, report in found.found.items():
        words = "; ".join(sorted({f"{one.kind}: {one.what}" for one in report.violations}))
        table.add_row(name, str(report.releases), f"{report.largest_share:.4f}", words or Text("pass", style="green"))
    verdict = (
        "No record shows in addition to the releases."
        if found.passed
        else "A record shows in addition to the releases."
    )
    output.print_result(found.to_dict(), heading(verdict, "On the neighbors that were tried; that is no proof."), table)
    if not found.passed:
        raise typer.Exit(1)


@audit.command()
def conformance(
    path: Annotated[
        list[str] | None,
        typer.Option(help="Training path of sordino, or MODULE:OBJECT of another library; may be repeated."),
    ] = None,
    only: Annotated[str, typer.Option(help="Run only cases whose name contains this text.")] = "",
    every_path: Annotated[
        bool, typer.Option("--every-path", help="Run all training paths, including the compiled one; takes minutes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Try every case on which training libraries are known to be wrong. Exit code 1 when one fails."""
    output, done = call("audit_conformance", locals())
    table = _table("case", *done.found)
    for case in done.cases:
        table.add_row(case, *(_verdict(findings[case]) for findings in done.found.values()))
    good = f"{len(done.cases)} cases, as they should be."
    verdict = f"{done.failed} of the findings are wrong." if done.failed else good
    output.print_result(done.to_dict(), heading(verdict, "That is no proof; a case that fails is one."), table)
    if done.failed:
        raise typer.Exit(1)


def _verdict(found: "CaseResult") -> Text:
    if found.verdict == "not offered":
        return Text("–", style="dim")
    if found.passed:
        return Text(found.verdict, style="green")
    return Text(f"FAIL: {found.description or found.verdict}", style="bold red")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
