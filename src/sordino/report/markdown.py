"""The report as Markdown: the same contents as the page, without the drawings."""

from collections.abc import Iterable, Iterator, Sequence

from sordino.report import tables
from sordino.report.numerals import epsilon_words, percent_up, power_of_ten
from sordino.report.schema import Report
from sordino.runs import LossPoint, smoothed

__all__ = ["comparison_markdown", "markdown"]

_NOT_STATED = "*not stated*"
_MOST_LOSSES = 12
_SPECIAL = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", **{mark: f"\\{mark}" for mark in "\\`*_[]{}#|~!"}})


def markdown(report: Report) -> str:
    """The report as one Markdown document."""
    return "\n".join(_sections(report)).rstrip("\n") + "\n"


def comparison_markdown(reports: Sequence[Report]) -> str:
    """Several runs in one table."""
    names = [_safe(report.name) for report in reports]
    head = ["# Runs, side by side", "", f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    rows = tables.comparison_rows(list(reports))
    body = [f"| {_safe(name)} | {' | '.join(_stated(value) for value in values)} |" for name, values in rows]
    return "\n".join([*head, *body]) + "\n"


def _sections(report: Report) -> Iterator[str]:
    guarantee = report.guarantee
    yield f"# Privacy report: {_safe(report.name)}\n"
    if report.not_for_release:
        yield f"> **NOT FOR RELEASE.** {_safe(report.not_for_release)}\n"
    yield f"**ε = {epsilon_words(guarantee.epsilon)}, δ = {power_of_ten(guarantee.delta)}**\n"
    yield f"{_safe(guarantee.sentence)}.\n\nReleased: {_stated(report.released)}\n"
    yield from _attack(report)
    yield from _table("How ε was found", tables.accounting_rows(report))
    if report.user_level:
        yield from _table("If a user owns several examples", tables.user_rows(report))
    yield from _table("The mechanism", tables.mechanism_rows(report))
    yield from _table("Randomness and processes", tables.process_rows(report))
    yield "## What can go wrong, and whether it did\n"
    for item in report.pitfalls:
        word = "holds" if item.status == "ok" else f"{item.status} ({item.severity})"
        yield f"- **{word}**: {_safe(item.title)}. {_safe(item.text)}"
    yield ""
    yield from _table("What else touched the records", [(touch.title, touch.text) for touch in report.touches])
    yield from _table("Other uses of the same records", tables.composition_rows(report))
    yield f"## Who is trusted\n\n{_safe(report.trust)}\n"
    yield from _audits(report)
    yield from _utility(report)
    yield from _evaluations(report)
    yield from _losses(report)
    yield from _remarks("What is covered", ((item.title, item.text) for item in report.covered))
    yield from _remarks("What is not covered", ((item.title, item.text) for item in report.not_covered))
    yield from _table("Training", report.training)
    yield from _table("Data", report.data)
    yield from _table("Software", report.environment)
    if report.missing:
        yield f"Not stated by the run: {_safe(', '.join(report.missing))}.\n"


def _attack(report: Report) -> Iterator[str]:
    risk = report.risk
    if risk is None:
        return
    yield "## What an attacker can at most do\n"
    yield (
        f"Whoever knows every other record and wants to know {risk.question} is right at most "
        f"{percent_up(risk.right_guesses)} of the time when a fair coin decided; the advantage (found minus wrongly "
        f"accused) is at most {percent_up(risk.advantage)}.\n"
    )
    yield "| wrongly accuses | finds at most |\n|---|---|"
    for rate, found in risk.found:
        yield f"| {100 * rate:g} % | {percent_up(found)} |"
    yield "\n| a record guessed blindly | reconstructed at most |\n|---|---|"
    for prior, chance in risk.reconstruction:
        yield f"| one time in {1 / prior:,.0f} | {percent_up(chance)} of the time |"
    yield ""


def _audits(report: Report) -> Iterator[str]:
    yield "## Audits\n"
    for audit in report.audits:
        right = "" if audit.correct is None else f", {audit.correct:,} right"
        yield (
            f"- {_safe(audit.method)}: ε ≥ {audit.epsilon_lower:.2f} with {100 * (1 - audit.alpha):g} % confidence; "
            f"{audit.canaries:,} canaries, {audit.guesses:,} guesses{right}. Attacker: {_safe(audit.attacker)}."
        )
    yield "" if report.audits else "None is in the run folder.\n"


def _utility(report: Report) -> Iterator[str]:
    utility = report.utility
    yield "## How well it predicts\n"
    if not utility.accuracy:
        yield "Not measured on public records.\n"
    else:
        yield from _rows([(item.name, f"{100 * item.value:.1f} %") for item in utility.accuracy])
    if utility.calibration:
        found = utility.calibration
        yield (
            f"Calibration: mean gap (ECE) {100 * found.expected_error:.1f} %, largest gap (MCE) "
            f"{100 * found.maximum_error:.1f} %.\n"
        )
    if utility.subgroups:
        yield "| subgroup | records | accuracy | 95 % interval |\n|---|---|---|---|"
        for group in utility.subgroups:
            yield (
                f"| {_safe(group.column)}: {_safe(group.value)} | {group.records:,} | {100 * group.accuracy:.1f} % | "
                f"{100 * group.lower:.1f} to {100 * group.upper:.1f} % |"
            )
        yield ""
    if utility.withheld:
        yield f"Measured values that are marked private and not shown: {utility.withheld}.\n"


def _evaluations(report: Report) -> Iterator[str]:
    if not report.evaluations:
        return
    yield from _table("Measured on private records, and paid for", tables.evaluation_rows(report))
    for one in report.evaluations:
        if not one.shares:
            yield f"The evaluation on {_safe(one.records)} was paid for and gave no answer.\n"
            continue
        yield f"| {_safe(one.records)} | records, noisy | accuracy | 95 % interval, chance and noise |"
        yield "|---|---|---|---|"
        for share in one.shares:
            name = _safe(share.value if share.column == "all" else f"{share.column}: {share.value}")
            yield (
                f"| {name} | {share.records:,} | {share.words} | {100 * share.lower:.1f} to {100 * share.upper:.1f} % |"
            )
        yield ""
        if one.calibration and one.calibration_noise is not None:
            yield (
                f"Calibration: mean gap (ECE) {100 * one.calibration.expected_error:.1f} %, of which noise alone makes "
                f"about {100 * one.calibration_noise:.1f} %.\n"
            )


def _losses(report: Report) -> Iterator[str]:
    bought = report.losses
    if bought is None or not bought.points:
        return
    yield "## Training loss, as it was bought\n"
    yield (
        f"{bought.released:,} noisy means of losses cut to {bought.bound:g}; ε covers them. Each line is the mean "
        "since the line before.\n"
    )
    yield "| steps | loss | noise, 95 % |\n|---|---|---|"
    points = [LossPoint(step=point.steps, loss=point.loss, stddev=point.noise) for point in bought.points]
    for point in smoothed(points, _MOST_LOSSES):
        yield f"| {point.step:,} | {point.loss:.3f} | ± {1.96 * point.stddev:.3f} |"
    yield ""


def _table(title: str, rows: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    listed = list(rows)
    if listed:
        yield f"## {title}\n"
        yield from _rows(listed)


def _rows(rows: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for name, value in rows:
        yield f"| {_safe(name)} | {_stated(value)} |"
    yield ""


def _remarks(title: str, remarks: Iterable[tuple[str, str]]) -> Iterator[str]:
    listed = list(remarks)
    if listed:
        yield f"## {title}\n"
        yield from (f"- **{_safe(head)}.** {_safe(text)}" for head, text in listed)
        yield ""


def _stated(value: str | None) -> str:
    return _NOT_STATED if value is None or value == "" else _safe(value)


def _safe(text: str) -> str:
    """Text from a run folder on one line, in which no character means anything to Markdown or HTML."""
    return " ".join(text.split()).translate(_SPECIAL)
