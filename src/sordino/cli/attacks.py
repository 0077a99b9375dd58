"""`sordino attack`, `diagnose` and `audit`: what attackers find, what privacy costs, and what can be shown about ε."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sordino.cli.console import Output, heading, key_value_table
from sordino.cli.options import Form, command
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.audit import AuditResult, CaseResult
    from sordino.audit.attacks import MembershipReport
    from sordino.commands import Attacks, Conformance, Diagnosis, Replays, TrainingAudit
    from sordino.research import SubgroupGap, TangentKernel
    from sordino.runs import Metric

_PRIVATE = "Private: these numbers are statistics of the members, without noise. Keep them with the data."
_SHOWN_SLICES = 5
_MARK = {True: "yes", False: "no"}


def _table(first: str, *others: str) -> Table:
    """A ruled table with words in its first column and numbers in the others."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


@command("attack")
def print_attack(output: Output, found: "Attacks") -> None:
    """Attack a run's model: who was in its training data? Results stay local; a failed attack is no proof."""
    files = {"picture": str(found.picture), "numbers": str(found.file)}
    output.print_result(found.to_dict(), *_attack_page(found.report, files))
    if found.report.above_ceiling:
        raise typer.Exit(1)


def _attack_page(report: "MembershipReport", files: dict[str, str]) -> tuple[RenderableType, ...]:
    best, ceiling = report.strongest, report.ceiling
    words = f"{best.name} finds members best: AUC {best.roc.auc:.3f}, no attack can exceed {ceiling.auc:.3f}"
    verdict = [
        Text(
            f"ABOVE THE ATTACK BOUND: {', '.join(report.above_ceiling)}. The claimed guarantee is refuted.",
            style="bold red",
        )
        if report.above_ceiling
        else Text("No attack is above the attack bound."),
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
        ("bound from", ceiling.source),
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
    rates = [rate.false_positive_rate for rate in report.strongest.roc.rates]
    table = _table("attack", "AUC", "advantage", *(f"TPR at {100 * rate:g} %" for rate in rates))
    for one in report.attacks:
        shown = [f"{100 * rate.value:.1f} % ({100 * rate.lower:.1f}–{100 * rate.upper:.1f})" for rate in one.roc.rates]
        table.add_row(one.name, f"{one.roc.auc:.3f}", f"{one.roc.advantage:.3f}", *shown)
    most = [f"{100 * report.ceiling.true_positive_rate(rate):.1f} %" for rate in rates]
    ceiling = (f"{report.ceiling.auc:.3f}", f"{report.ceiling.advantage:.3f}")
    table.add_row("bound of the claim", *ceiling, *most, style="bold")
    return table


def _slices(report: "MembershipReport") -> RenderableType:
    table = _table("worst groups, each alone", "members", "AUC")
    for part in report.slices[:_SHOWN_SLICES]:
        table.add_row(part.name, f"{part.members:,}", f"{part.auc:.3f} ({part.lower:.3f}–{part.upper:.3f})")
    return table


# ----------------------------------------------------------------------------------------------------------------------
# What clipping and noise did to a model.
# ----------------------------------------------------------------------------------------------------------------------


@command("diagnose")
def print_diagnosis(output: Output, found: "Diagnosis") -> None:
    """Tangent kernel, convergence, calibration and subgroups of a run's model, on public test records only."""
    output.print_result(found.to_dict(), *_diagnosis_page(found))


def _diagnosis_page(found: "Diagnosis") -> tuple[RenderableType, ...]:
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
        blocks += [heading("Cost of privacy by subgroup"), _gaps(found.gaps)]
    return tuple(blocks)


def _kernel(kernel: "TangentKernel") -> Table:
    table = _table("clipping", "sym.", "form", "eig.", "predicted", "measured", "kept")
    for row in kernel.rows:
        marks = (_MARK[row.symmetric], _MARK[row.positive_form], _MARK[row.positive_eigenvalues])
        slopes = (f"{row.predicted:.4g}", f"{row.measured:.4g}", f"{100 * row.kept:.0f} %")
        table.add_row(row.name, *marks, *slopes)
    return table


def _calibration(calibration: "dict[str, dict[str, Metric]]") -> Table:
    table = _table("model", "accuracy", "ECE", "MCE")
    for name, metrics in calibration.items():
        keys = ("test_accuracy", "test_ece", "test_mce")
        # A model without probabilities has no calibration.
        shown = [f"{100 * metrics[key].value:.1f} %" if key in metrics else "" for key in keys]
        table.add_row(name, *shown)
    return table


def _gaps(gaps: "Sequence[SubgroupGap]") -> Table:
    table = _table("group", "records", "private", "baseline", "gap (95 %)")
    for gap in gaps:
        span = f"{100 * gap.gap:+.1f} ({100 * gap.lower:+.1f} to {100 * gap.upper:+.1f})"
        shares = (f"{100 * gap.private:.1f} %", f"{100 * gap.plain:.1f} %")
        table.add_row(f"{gap.column}: {gap.value}", f"{gap.records:,}", *shares, span)
    return table


# ----------------------------------------------------------------------------------------------------------------------
# Audits: ε from below, replays on neighbors, cases on which libraries are known to be wrong.
# ----------------------------------------------------------------------------------------------------------------------


_DEFAULT = "training"


class AuditGroup(TyperGroup):
    """A group in which ``audit TARGET`` is ``audit training TARGET``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of what is none."""
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


@command(
    "audit training",
    calls="audit_with_canaries",
    forms={"target": Form(metavar="RUN|DATA"), "label": Form(flag="--target")},
)
def print_audit(output: Output, found: "TrainingAudit") -> None:
    """Train once with canaries, attack, and show ε from below. Exit code 1 when the claim is rejected."""
    output.print_result(found.to_dict(), *_audit_page(found.result, found.picture))
    if not found.result.passed:
        raise typer.Exit(1)


def _audit_page(result: "AuditResult", picture: Path | None) -> tuple[RenderableType, ...]:
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


@command("audit replay", forms={"target": Form(metavar="[MODULE:CASE]")})
def print_replay(output: Output, found: "Replays") -> None:
    """Run pipelines on neighboring data with all releases forced. Exit code 1 when anything else differs."""
    table = _findings_table("path", "releases", "largest share of a sensitivity", "")
    for name, report in found.found.items():
        words = "; ".join(sorted({f"{one.kind}: {one.what}" for one in report.violations}))
        table.add_row(name, str(report.releases), f"{report.largest_share:.4f}", words or Text("pass", style="green"))
    verdict = f"{'No' if found.passed else 'A'} record shows in addition to the releases."
    output.print_result(found.to_dict(), heading(verdict, "On the neighbors that were tried; that is no proof."), table)
    if not found.passed:
        raise typer.Exit(1)


@command("audit conformance", forms={"path": Form(flag="--path")})
def print_conformance(output: Output, found: "Conformance") -> None:
    """Try every case on which training libraries are known to be wrong. Exit code 1 when one fails."""
    table = _findings_table("case", *found.found)
    for case in found.cases:
        table.add_row(case, *(_verdict(findings[case]) for findings in found.found.values()))
    good = f"{len(found.cases)} cases, as they should be."
    verdict = f"{found.failed} of the findings are wrong." if found.failed else good
    output.print_result(found.to_dict(), heading(verdict, "That is no proof; a case that fails is one."), table)
    if found.failed:
        raise typer.Exit(1)


def _verdict(found: "CaseResult") -> Text:
    if found.verdict == "not offered":
        return Text("–", style="dim")
    if found.passed:
        return Text(found.verdict, style="green")
    return Text(f"FAIL: {found.description or found.verdict}", style="bold red")


def _findings_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
