"""How a report writes its numbers."""

import math
from collections.abc import Mapping

from sordino.definitions import PrivacyUnit, format_upper_bound
from sordino.errors import SordinoError
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    CyclicPoisson,
    DenseStrategy,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    participation_from_dict,
    strategy_from_dict,
)
from sordino.report.schema import Report

# What a limitation of each severity means, in words.
SEVERITY_WORDS = {
    "critical": "the guarantee can be false, or does not cover what was shown",
    "theoretical": "no practical attack is known",
    "negligible": "the guarantee is not affected",
}

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scientific(value: float) -> tuple[str, str]:
    """A small probability as the part before the power of ten, and the exponent (empty when there is none).

    Example:
        >>> scientific(1e-5), scientific(3.2e-6), scientific(0.25)
        (('10', '-5'), ('3.2 × 10', '-6'), ('0.25', ''))
    """
    if value >= 0.01 or value == 0:
        return f"{value:g}", ""
    mantissa, exponent = f"{value:.2e}".split("e")
    head = f"{float(mantissa):g}"
    return ("10" if head == "1" else f"{head} × 10"), str(int(exponent))


def power_of_ten(value: float) -> str:
    """The same as one text.

    Example:
        >>> power_of_ten(1e-5), power_of_ten(3.2e-6)
        ('10⁻⁵', '3.2 × 10⁻⁶')
    """
    head, exponent = scientific(value)
    return head + exponent.translate(SUPERSCRIPTS)


def percent_up(value: float) -> str:
    """A share in percent, never rounded below itself: what an attacker may reach must not be understated.

    Example:
        >>> percent_up(0.02719), percent_up(0.00238), percent_up(0.001), percent_up(1.0)
        ('2.8 %', '0.24 %', '0.1 %', '100 %')
    """
    share = round(100 * value, 9)
    text = format_upper_bound(share, 1 if share >= 1 else 2)
    return f"{text.rstrip('0').removesuffix('.')} %"


def format_value(value: object) -> str:
    """A value from a run folder as text: yes and no, whole numbers with separators, few digits.

    Example:
        >>> format_value(True), format_value(30162), format_value(0.0625), format_value([1, 2.5])
        ('yes', '30,162', '0.0625', '1, 2.5')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return str(value)


def format_epsilon(value: float) -> str:
    """An ε for people, rounded up; four digits are enough for large ones.

    Example:
        >>> format_epsilon(0.99999), format_epsilon(1189.7767), format_epsilon(0.00012)
        ('1.00', '1,190', '0.00012')
    """
    if value == float("inf"):
        return "∞"
    if value >= 1000:
        return f"{int(-(-value // 1)):,}"
    if 0 < value < 0.01:
        return format_upper_bound(value, 5)
    return format_upper_bound(value)


# ----------------------------------------------------------------------------------------------------------------------
# Clipping, schedules and the correlation of the noise as plan.json names them, in words. No torch.
# ----------------------------------------------------------------------------------------------------------------------


_MANY = 4
_FILTERS = {"gaussian": "a Gaussian filter", "zcdp": "a zCDP filter", "renyi": "a Rényi filter"}


def describe_clipping(body: object) -> str | None:
    """A clipping method; None when the plan names none.

    Example:
        >>> describe_clipping({"kind": "quantile", "quantile": 0.5, "inner": {"kind": "flat"}})
        'flat clipping at the private 0.5 quantile'
    """
    if not isinstance(body, Mapping):
        return format_value(body) if isinstance(body, str) else None
    inner = describe_clipping(body.get("inner")) or "flat clipping"
    match body.get("kind"):
        case "flat":
            return "flat clipping"
        case "automatic":
            stability = body.get("stability")
            return f"automatic clipping, stability {format_value(stability)}" if stability else "normalized gradients"
        case "psac":
            return f"per-sample adaptive clipping, stability {format_value(body.get('stability'))}"
        case "global":
            return f"global clipping, threshold {format_value(body.get('threshold'))} times the bound"
        case "grouped":
            by = body.get("by")
            of = f"each {by}" if isinstance(by, str) else f"{len(by) if isinstance(by, list) else 'some'} named groups"
            weights = body.get("weights")
            return f"{inner} of {of}, {weights if isinstance(weights, str) else 'given'} bounds"
        case "quantile":
            return f"{inner} at the private {format_value(body.get('quantile'))} quantile"
        case "adaclip":
            return "AdaClip"
        case "projected":
            return f"flat clipping by norms estimated from {format_value(body.get('projections'))} projections"
        case _:
            kind = format_value(body.get("kind", ""))
            rest = ", ".join(f"{name} {format_value(part)}" for name, part in body.items() if name != "kind")
            return ": ".join(filter(None, (kind, rest))).replace("_", " ") or None


def describe_schedule(body: Mapping[str, object]) -> str:
    """A schedule; a list of many values by its ends.

    Example:
        >>> describe_schedule({"schedule": "exponential", "start": 6.0, "end": 3.0, "over": None})
        'schedule exponential: start 6, end 3'
    """
    kind = body.get("kind", body.get("schedule", ""))
    values = body.get("values")
    if isinstance(values, list) and len(values) > _MANY:
        return f"schedule {kind}: {len(values):,} values, from {format_value(values[0])} to {format_value(values[-1])}"
    parts = {name: part for name, part in body.items() if name not in ("kind", "schedule") and part is not None}
    rest = ", ".join(f"{name} {format_value(part)}" for name, part in parts.items())
    return " ".join(f"schedule {kind}: {rest}".split())


def describe_noise(plan: Mapping[str, object], meta: Mapping[str, object]) -> str | None:
    """How the noises of the steps hang together: by the plan's strategy, by a budget, or not at all.

    Example:
        >>> describe_noise({"correlated_noise": None}, {})
        'independent from step to step'
    """
    if isinstance(budget := meta.get("budget"), Mapping):
        kept = _FILTERS.get(str(budget.get("filter")), "a filter")
        return f"independent from step to step, its scale chosen on the way under a budget that {kept} keeps"
    if "correlated_noise" not in plan:
        return None
    body = plan["correlated_noise"]
    if not isinstance(body, Mapping):
        return "independent from step to step"
    try:
        return f"correlated, {_strategy(body.get('strategy'))}; {_participation(body.get('participation'))}"
    except SordinoError:
        return "correlated, in a way that plan.json garbles"


def _strategy(body: object) -> str:
    strategy = strategy_from_dict(body)
    match strategy:
        case IndependentNoise():
            return "by the identity"
        case BandedToeplitz():
            return f"banded Toeplitz, {_count(strategy.bands, 'band')}"
        case BandedInverse():
            return f"banded inverse, {_count(len(strategy.coefficients), 'band')}"
        case BufferedToeplitz():
            return f"buffered Toeplitz, {_count(strategy.buffers, 'buffer')}"
        case BinaryTree():
            return "binary tree, refined from below"
        case DenseStrategy():
            return "dense matrix"
        case _:
            return type(strategy).__name__


def _participation(body: object) -> str:
    participation = participation_from_dict(body)
    match participation:
        case CyclicPoisson():
            return f"a record is in at most one step of each cycle of {participation.groups}"
        case FixedEpochOrder():
            return f"a record is in one step of each epoch of {participation.steps_per_epoch}, always the same"
        case MinSeparation():
            most = participation.participations
            times = "a record's steps are" if most is None else f"a record is in at most {_count(most, 'step')},"
            return f"{times} at least {participation.min_separation} apart"
        case _:
            return "a record is in at most one step"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# ----------------------------------------------------------------------------------------------------------------------
# The tables of a report as names and values in words; None is shown as "not stated".
# ----------------------------------------------------------------------------------------------------------------------


Rows = list[tuple[str, str | None]]


def delta_text(report: Report) -> str:
    """δ of the run, in the one form that a report uses."""
    return power_of_ten(report.guarantee.delta)


def headline_scope(report: Report) -> str:
    """What the ε at the top of a report counts; empty when it counts the training alone."""
    count = len(report.evaluations)
    if not count:
        return ""
    noun = "1 private evaluation" if count == 1 else f"{count:,} private evaluations"
    alone = f"training alone: ε = {format_epsilon(report.guarantee.epsilon)}"
    if report.epsilon_together is None:
        each = ", ".join(f"ε = {format_epsilon(one.epsilon)}" for one in report.evaluations)
        return f"Training alone. No accountant composes it with {noun}, which cost {each} more."
    return f"Training and {noun} together ({alone})."


def epsilon_sentences(report: Report) -> tuple[str, ...]:
    """What ε means for one person, in sentences that need no mathematics; the numbers are the attack bounds."""
    bounds, unit = report.attack_bounds, report.guarantee.privacy_unit
    if bounds is None:
        return (
            "This run gives no privacy guarantee.",
            "Anyone who sees the results may learn everything about a record in the data.",
        )
    whose = {
        PrivacyUnit.RECORD: "one person who has one record in the data",
        PrivacyUnit.USER: "one person with all of their records in the data",
        PrivacyUnit.CLIENT: "one client with all of its records",
    }[unit]
    is_model = "model" in (report.released or "") or "parameters" in (report.released or "")
    results = "the model" if is_model and not report.evaluations else "the results"
    sentences = [
        f"Consider {whose}.",
        f"Somebody knows all other records, sees {results}, and guesses {bounds.question}.",
        f"The guess is correct in at most {percent_up(bounds.right_guesses)} of cases. Without {results}, a guess is "
        "correct in 50 % of cases.",
    ]
    if unit is PrivacyUnit.RECORD:
        larger = ", ".join(f"{one.size} records: ε = {format_epsilon(one.epsilon)}" for one in report.user_level)
        sentences.append(
            "A person with several records is protected less"
            + (f" ({larger})." if larger and not report.evaluations else ".")
        )
    return tuple(sentences)


DECLARED = {
    "purpose": ("purpose", "--purpose"),
    "owner": ("owner of the data", "--owner"),
    "contact": ("contact", "--contact"),
    "legal_basis": ("legal basis", "--legal-basis"),
    "approved_by": ("approved by", "--approved-by"),
}
"""What people declare for a report: its name and the option of `sordino report` that writes it."""


def formal_statement(report: Report) -> str:
    """The guarantee of training on one line, as `Guarantee.describe` states it, with δ in the report's form."""
    guarantee = report.guarantee
    return guarantee.description.replace(f"δ = {guarantee.delta:g})", f"δ = {power_of_ten(guarantee.delta)})", 1)


def summary_rows(report: Report) -> list[tuple[str, str | None, str]]:
    """Whose data, which model, and what is declared: (name, text or None, the option that writes it)."""
    data, training = dict(report.data), dict(report.training)
    name = data.get("name")
    records = data.get("records")
    described = [
        *([name] if name else []),
        *([f"{records} records"] if records else []),
        *([source] if (source := data.get("source")) and source != "not public" else []),
        *({"yes": ["public records"], "no": ["private records"]}.get(data.get("public", ""), [])),
    ]
    model = training.get("model") or report.mechanism.method
    method = report.mechanism.method
    if model and method and method not in model:
        model = f"{model} ({method})"
    declared = report.declarations.model_dump()
    return [
        ("data", "; ".join(described) or None, ""),
        ("model", model, ""),
        ("released", report.released, ""),
        ("protected", protected(report), ""),
        *((words, declared[key], option) for key, (words, option) in DECLARED.items()),
    ]


def protected(report: Report) -> str:
    """What the guarantee protects as a whole."""
    unit = report.guarantee.privacy_unit
    return {
        PrivacyUnit.RECORD: "each record: everything that one record contributed",
        PrivacyUnit.USER: "each user: everything that all records of one user contributed",
        PrivacyUnit.CLIENT: "each client: everything that all records of one client contributed",
    }[unit]


def attack_rows(report: Report) -> Rows:
    """Membership attacks that were carried out, each with the largest AUC that the claim allows."""
    found = report.attacks
    if found is None:
        return []
    rows: Rows = [
        (one.name, f"AUC {one.auc:.3f} ({one.lower:.3f} to {one.upper:.3f}). Attacker knows: {one.knowledge}")
        for one in found.attacks
    ]
    rows.append(("largest AUC that the claim allows", format_upper_bound(found.bound, 3)))
    rows.append(("records attacked", f"{found.members:,} members, {found.non_members:,} others"))
    return rows


def hazards_line(report: Report) -> str:
    """All privacy hazards in one sentence: how many are met, which are limitations, how many are not stated."""
    counts = {status: report.count_hazards(status) for status in ("met", "limitation", "not applicable", "not stated")}
    critical, limitations = len(report.critical_limitations), counts["limitation"]
    rest = "" if not limitations else " (none critical)" if not critical else f" ({critical} critical)"
    parts = [
        f"{counts['met']} met",
        f"{limitations or 'no'} limitation{'' if limitations == 1 else 's'}{rest}",
        *([f"{counts['not applicable']} not applicable"] if counts["not applicable"] else []),
        f"{counts['not stated'] or 'none'} not stated",
    ]
    return f"{len(report.privacy_hazards)} checks: {', '.join(parts)}."


def accounting_rows(report: Report) -> Rows:
    """ε, its interval, and ε without amplification."""
    found, claim = report.accounting, report.accounting.claimed_epsilon
    interval = found.interval
    bare = found.without_amplification
    if not report.accounting.sampled:
        plain: str | None = "the same: batches are not sampled"
    else:
        plain = None if bare is None else f"ε = {format_epsilon(bare)}"
    mu, regret = report.curves.gaussian_mu, report.curves.gaussian_regret
    summary = None
    if mu is not None and math.isfinite(mu):
        summary = f"μ = {format_upper_bound(mu, 3)}"
        if regret is not None:
            # Below a millionth the curve is the run's own, up to rounding.
            summary += ", exact" if regret < 1e-6 else f", overstates an attack by up to {100 * regret:.1f} points"
    return [
        ("ε as the run claims it", "the run did not end" if claim is None else format_epsilon(claim)),
        ("ε computed from the transcript", format_epsilon(interval.upper)),
        ("certified: the true ε is lower by at most", _width(interval.width)),
        ("accountant", f"{found.accountant.replace('_', ' ')}, sordino {found.version}"),
        ("ε without amplification by sampling", plain),
        ("Gaussian summary (μ-GDP)", summary),
        ("target ε", None if report.target_epsilon is None else f"{report.target_epsilon:g}"),
    ]


def user_rows(report: Report) -> Rows:
    """ε for users with several records."""
    return [(f"{level.size} records each", f"ε = {format_epsilon(level.epsilon)}") for level in report.user_level]


def mechanism_rows(report: Report) -> Rows:
    """What was planned and what was charged."""
    found = report.mechanism
    public, planned = found.dataset_size_is_public, found.steps_planned
    if found.method is None:
        settings: Rows = [
            ("noise multiplier σ", _setting(found.noise_multiplier)),
            ("clipping norm C", _setting(found.max_grad_norm)),
            ("clipping", found.clipping),
            ("noise of the steps", found.noise),
            ("sample rate q", _setting(found.sample_rate)),
            ("expected batch size (public divisor)", _setting(found.expected_batch_size)),
            ("steps planned", None if planned is None else format_value(planned)),
        ]
    else:
        # The method sets noise, clipping and steps itself; what it was given stands in the plan.
        settings = [("method", found.method), *((name, value) for name, value in found.parameters)]
    return [
        *settings,
        ("steps charged", f"{found.steps_charged:,}"),
        ("sampling, as claimed", found.sampler_claimed),
        ("sampling, as charged by each step", found.sampler_charged),
        *([("steps that commit to their batch", f"{found.committed_steps:,}")] if found.method is None else []),
        *_loss_rows(report),
        ("size of the dataset is public", None if public is None else format_value(public)),
        ("privacy unit", report.guarantee.privacy_unit.describe()),
        ("neighboring relation", report.guarantee.neighboring_relation.describe()),
        ("δ", power_of_ten(report.guarantee.delta)),
    ]


def _loss_rows(report: Report) -> Rows:
    curve = report.losses
    if curve is None:
        return []
    words = f"losses up to {curve.max_loss:g}, for {100 * curve.budget_fraction:g} % of each step's budget"
    return [("loss curve", f"{words}: {100 * (curve.noise_factor - 1):.1f} % more noise on the gradient")]


def evaluation_rows(report: Report) -> Rows:
    """What evaluations on private records cost, one by one and with training."""
    rows: Rows = []
    for number, one in enumerate(report.evaluations, 1):
        name = "" if len(report.evaluations) == 1 else f"evaluation {number}: "
        rows.append((f"{name}records", one.records))
        rows.append((f"{name}cost", f"ε = {format_epsilon(one.epsilon)}, δ = {power_of_ten(one.delta)}"))
        rows.append((f"{name}noise on each count", f"± {one.noise:.1f} (standard deviation)"))
        rows.append((f"{name}charged to a ledger", format_value(one.charged)))
        whose = "no person is in both, as declared" if one.disjoint else "may be the same; costs add up"
        rows.append((f"{name}people in these and in the training records", whose))
    if report.evaluations:
        total = report.epsilon_together
        words = None if total is None else f"ε = {format_epsilon(total)}, δ = {power_of_ten(report.guarantee.delta)}"
        rows.append(("training and evaluations together", words))
    return rows


def process_rows(report: Report) -> Rows:
    """Randomness, resumes, and the anchor of the transcript."""
    found = report.process
    silent = None if report.mechanism.method is None else "not applicable"
    keys = {True: "yes", False: "no"}.get(found.fresh_keys) if found.fresh_keys is not None else silent
    return [
        ("random generator", found.rng),
        ("arithmetic of the noise", found.arithmetic),
        ("processes", silent if found.segments is None else f"{found.segments:,}"),
        ("resumes", silent if found.segments is None else f"{found.segments - 1:,}"),
        ("steps repeated and charged again", f"{found.repeated_steps:,}"),
        ("each process has a new random key", keys),
        ("head of the transcript (SHA-256)", found.head),
    ]


def composition_rows(report: Report) -> Rows:
    """What a ledger or the run knows of other uses."""
    known = report.composition
    rows: Rows = [("ledger account", known.account), ("as stated", known.text)]
    if known.spent is not None:
        rows.append(("ε of all charges together", format_epsilon(known.spent)))
    if known.budget is not None:
        rows.append(("ε that may be spent", format_epsilon(known.budget)))
        if known.spent is not None:
            rows.append(("ε that is left", f"{max(0.0, known.budget - known.spent):.2f}"))
    return rows


def comparison_rows(reports: list[Report]) -> list[tuple[str, list[str | None]]]:
    """Several runs, one column each; rows that no run states are left out."""
    evaluated = any(report.evaluations for report in reports)
    columns = [_column(report, alone=evaluated) for report in reports]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name) for column in columns]) for name in names]
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def _bought(report: Report) -> dict[str, str | None]:
    """What was released besides the model."""
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


def _column(report: Report, *, alone: bool) -> dict[str, str | None]:
    guarantee, found, bounds = report.guarantee, report.mechanism, report.attack_bounds
    calibration = report.utility.calibration
    bare = report.accounting.without_amplification
    return {
        "ε": format_epsilon(report.headline_epsilon),
        **({"ε of training alone": format_epsilon(guarantee.epsilon)} if alone else {}),
        "δ": power_of_ten(guarantee.delta),
        "privacy unit": guarantee.privacy_unit.describe(),
        "neighboring relation": guarantee.neighboring_relation.describe(),
        "may be released": report.release.text if report.not_for_release else report.release.verdict,
        "ε without amplification": None if bare is None else format_epsilon(bare),
        "correct membership guesses, at most": None
        if bounds is None
        else f"{format_upper_bound(100 * bounds.right_guesses, 1)} %",
        **{f"accuracy: {item.name}": f"{100 * item.value:.1f} %" for item in report.utility.accuracy},
        **dict(report.utility.figures),
        "calibration error (ECE)": None if calibration is None else f"{100 * calibration.expected_error:.1f} %",
        **_bought(report),
        "batches": found.sampler_charged,
        "noise multiplier σ": _setting(found.noise_multiplier),
        "clipping norm C": _setting(found.max_grad_norm),
        "sample rate q": _setting(found.sample_rate),
        "steps charged": f"{found.steps_charged:,}",
        "accountant": report.accounting.accountant.replace("_", " "),
        **{f"training: {name}": value for name, value in report.training},
        "limitations": "; ".join(item.title for item in report.privacy_hazards if item.status == "limitation")
        or "none",
        "not stated": ", ".join(report.missing) or "nothing",
    }


def _setting(value: float | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else format_value(value)


def _width(width: float) -> str:
    return "0, exact" if width == 0 else "∞" if math.isinf(width) else f"{width:.1e}"
