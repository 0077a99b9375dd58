"""The tables of a report as names and values in words; None is shown as "not stated"."""

import math

from sordino.definitions import round_up
from sordino.report.numerals import epsilon_words, shown
from sordino.report.schema import Report

__all__ = [
    "Rows",
    "accounting_rows",
    "comparison_rows",
    "composition_rows",
    "evaluation_rows",
    "mechanism_rows",
    "process_rows",
    "user_rows",
]

Rows = list[tuple[str, str | None]]


def accounting_rows(report: Report) -> Rows:
    """ε, its interval, and ε without amplification."""
    found, claim = report.accounting, report.accounting.claimed_epsilon
    interval = found.interval
    bare = found.without_amplification
    if not report.accounting.sampled:
        plain: str | None = "the same: batches are not sampled"
    else:
        plain = None if bare is None else f"ε = {epsilon_words(bare)}"
    mu, regret = report.curves.gaussian_mu, report.curves.gaussian_regret
    summary = None
    if mu is not None and math.isfinite(mu):
        summary = f"μ = {round_up(mu, 3)}"
        if regret is not None:
            # Below a millionth the curve is the run's own, up to rounding.
            summary += ", exact" if regret < 1e-6 else f", overstates an attack by up to {100 * regret:.1f} points"
    return [
        ("ε as the run claims it", "the run did not end" if claim is None else epsilon_words(claim)),
        ("ε computed from the transcript", epsilon_words(interval.upper)),
        ("the true ε lies at most below it by", _width(interval.width)),
        ("accountant", f"{found.accountant.replace('_', ' ')}, sordino {found.version}"),
        ("ε without amplification by sampling", plain),
        ("Gaussian summary (μ-GDP)", summary),
        ("target ε", None if report.target_epsilon is None else f"{report.target_epsilon:g}"),
    ]


def user_rows(report: Report) -> Rows:
    """ε for users with several examples."""
    return [(f"{level.size} examples each", f"ε = {epsilon_words(level.epsilon)}") for level in report.user_level]


def mechanism_rows(report: Report) -> Rows:
    """What was planned and what was charged."""
    found = report.mechanism
    public = found.dataset_size_is_public
    return [
        ("noise multiplier σ", _setting(found.noise_multiplier)),
        ("clipping norm C", _setting(found.max_grad_norm)),
        ("clipping", found.clipping),
        ("noise of the steps", found.noise),
        ("sample rate q", _setting(found.sample_rate)),
        ("expected batch size (public divisor)", _setting(found.expected_batch_size)),
        ("steps planned", None if found.steps_planned is None else f"{found.steps_planned:,}"),
        ("steps charged", f"{found.steps_charged:,}"),
        ("batches, as claimed", found.sampler_claimed),
        ("batches, as each step charged them", found.sampler_charged),
        ("steps that commit to their batch", f"{found.committed_steps:,}"),
        *_loss_rows(report),
        ("size of the data set is public", None if public is None else shown(public)),
        ("protected unit", report.guarantee.unit.words),
        ("neighbouring data sets", report.guarantee.relation.words),
        ("δ", f"{report.guarantee.delta:g}"),
    ]


def _loss_rows(report: Report) -> Rows:
    bought = report.losses
    if bought is None:
        return []
    words = f"losses up to {bought.bound:g}, for {100 * bought.share:g} % of each step's budget"
    return [("loss curve", f"{words}: {100 * (bought.price - 1):.1f} % more noise on the gradient")]


def evaluation_rows(report: Report) -> Rows:
    """What evaluations on private records cost, one by one and with training."""
    rows: Rows = []
    for number, one in enumerate(report.evaluations, 1):
        name = "" if len(report.evaluations) == 1 else f"evaluation {number}: "
        rows.append((f"{name}records", one.records))
        rows.append((f"{name}cost", f"ε = {epsilon_words(one.epsilon)}, δ = {one.delta:g}"))
        rows.append((f"{name}noise on each count", f"± {one.noise:.1f} (standard deviation)"))
        rows.append((f"{name}charged to a ledger", shown(one.charged)))
        whose = "nobody is in both, as declared" if one.disjoint else "may be the same; costs add up"
        rows.append((f"{name}people in these and in the training records", whose))
    if report.evaluations:
        total = report.epsilon_together
        words = None if total is None else f"ε = {epsilon_words(total)}, δ = {report.guarantee.delta:g}"
        rows.append(("training and evaluations together", words))
    return rows


def process_rows(report: Report) -> Rows:
    """Randomness, resumes, and the anchor of the transcript."""
    found = report.process
    keys = {True: "yes", False: "no"}.get(found.fresh_keys) if found.fresh_keys is not None else None
    return [
        ("random generator", found.randomness),
        ("arithmetic of the noise", found.arithmetic),
        ("processes that worked on it", None if found.segments is None else f"{found.segments:,}"),
        ("resumes", None if found.segments is None else f"{found.segments - 1:,}"),
        ("steps repeated, and charged again", f"{found.repeated_steps:,}"),
        ("each process with a fresh key", keys),
        ("head of the transcript (SHA-256)", found.head),
    ]


def composition_rows(report: Report) -> Rows:
    """What a ledger or the run knows of other uses."""
    known = report.composition
    rows: Rows = [("ledger account", known.account), ("as stated", known.text)]
    if known.spent is not None:
        rows.append(("ε of all charges together", epsilon_words(known.spent)))
    if known.budget is not None:
        rows.append(("ε that may be spent", epsilon_words(known.budget)))
        if known.spent is not None:
            rows.append(("ε that is left", f"{max(0.0, known.budget - known.spent):.2f}"))
    return rows


def comparison_rows(reports: list[Report]) -> list[tuple[str, list[str | None]]]:
    """Several runs, one column each; rows that no run states are left out."""
    columns = [_column(report) for report in reports]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name) for column in columns]) for name in names]
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def _bought(report: Report) -> dict[str, str | None]:
    """What was bought beside the model."""
    found: dict[str, str | None] = {}
    if report.losses is not None and report.losses.points:
        last = report.losses.points[-1]
        found["training loss at the end, noisy"] = f"{last.loss:.3f} ± {1.96 * last.noise:.3f}"
    for one in report.evaluations:
        if one.shares:
            whole = one.shares[0]
            low, high = 100 * whole.lower, 100 * whole.upper
            found[f"accuracy on {one.records}, noisy"] = f"{100 * whole.accuracy:.1f} % ({low:.1f} to {high:.1f} %)"
    return found


def _column(report: Report) -> dict[str, str | None]:
    guarantee, found, risk = report.guarantee, report.mechanism, report.risk
    calibration = report.utility.calibration
    bare = report.accounting.without_amplification
    return {
        "ε": epsilon_words(guarantee.epsilon),
        "δ": f"{guarantee.delta:g}",
        "protected unit": guarantee.unit.words,
        "neighbouring data sets": guarantee.relation.words,
        "release": f"not for release: {report.not_for_release}" if report.not_for_release else "may be released",
        "ε without amplification": None if bare is None else epsilon_words(bare),
        "right guesses of an attacker, at most": None if risk is None else f"{round_up(100 * risk.right_guesses, 1)} %",
        **{f"accuracy: {item.name}": f"{100 * item.value:.1f} %" for item in report.utility.accuracy},
        "calibration error (ECE)": None if calibration is None else f"{100 * calibration.expected_error:.1f} %",
        **_bought(report),
        "batches": found.sampler_charged,
        "noise multiplier σ": _setting(found.noise_multiplier),
        "clipping norm C": _setting(found.max_grad_norm),
        "sample rate q": _setting(found.sample_rate),
        "steps charged": f"{found.steps_charged:,}",
        "accountant": report.accounting.accountant.replace("_", " "),
        **{f"training: {name}": value for name, value in report.training},
        "violated": "; ".join(item.title for item in report.pitfalls if item.status == "violated") or "nothing",
        "not stated": ", ".join(report.missing) or "nothing",
    }


def _setting(value: float | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else shown(value)


def _width(width: float) -> str:
    return "0, exact" if width == 0 else "∞" if math.isinf(width) else f"{width:.1e}"
