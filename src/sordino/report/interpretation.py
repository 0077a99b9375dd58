"""The numbers of a report that follow from the transcript: ε and its interval, curves, attack bounds, users."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy.special import ndtr, ndtri

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    Event,
    Gaussian,
    NonPrivate,
    NoOp,
    PoissonSampled,
    RandomAllocation,
    SampledWithoutReplacement,
    SampledWithReplacement,
    ShuffledEpochs,
    compose,
    event_counts,
)
from sordino.report.formatting import power_of_ten
from sordino.report.schema import (
    Accounting,
    AttackBounds,
    AttackResults,
    Audit,
    Composition,
    Curves,
    DataAccess,
    EpsilonInterval,
    EpsilonPoint,
    GuaranteeSection,
    Measurements,
    PrivacyHazard,
    Process,
    Remark,
    UserLevel,
)
from sordino.runs import TranscriptLine

# ----------------------------------------------------------------------------------------------------------------------
# What the guarantee means and where it ends, in plain words and in an attacker's numbers.
# ----------------------------------------------------------------------------------------------------------------------


AUDIT_HAZARD = "No audit or attack contradicts the claim"
"""The hazard that is not stated without an audit; a release needs none."""


def max_true_positive_rate(*, epsilon: float, delta: float, false_positive_rate: float) -> float:
    """The greatest true positive rate of any membership test with this false positive rate.

    Args:
        epsilon: ≥ 0, may be ∞.
        delta: in [0, 1].
        false_positive_rate: in [0, 1].

    Returns:
        min(1, e^ε·FPR + δ, 1 − e^−ε·(1 − δ − FPR)), in [0, 1].

    References:
        Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", theorem 2.1.
    """
    checks.probability(delta=delta)
    if math.isinf(epsilon):
        return 1.0
    checks.non_negative(epsilon=epsilon)
    rate = checks.probability(false_positive_rate=false_positive_rate)
    # e^ε overflows a double beyond 709; by then the bound is 1 for every rate that isn't zero.
    growth = math.exp(min(epsilon, 709.0))
    upper = 1 - math.exp(-epsilon) * (1 - delta - rate)
    return min(1.0, growth * rate + delta, upper)


def advantage_bound(*, epsilon: float, delta: float) -> float:
    """The greatest difference between true and false positive rate of any membership test.

    Returns:
        (e^ε − 1 + 2δ) / (e^ε + 1), in [0, 1].
    """
    if math.isinf(epsilon):
        return 1.0
    # tanh keeps it finite for large ε.
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 709.0))))


def question(neighboring_relation: NeighboringRelation, privacy_unit: PrivacyUnit) -> str:
    """What the attacker wants to know, in words."""
    return {
        NeighboringRelation.ADD_OR_REMOVE_ONE: f"whether one given {privacy_unit.value} was in the training data",
        NeighboringRelation.REPLACE_ONE: f"which of two given {privacy_unit.value}s was in the training data",
        NeighboringRelation.REPLACE_SPECIAL: f"whether one given {privacy_unit.value} contributed to the training",
    }[neighboring_relation]


def list_covered(
    guarantee: GuaranteeSection, *, released: str | None = None, losses: bool = False, by_steps: bool = True
) -> tuple[Remark, ...]:
    """What the guarantee covers: what is `released`, noisy `losses` and training steps where the plan has some."""
    unit, results = guarantee.privacy_unit.value, (released or "the released results").rstrip(".")
    shown = ", except for the noisy losses that are shown; ε covers them. " if losses else ". "
    remarks = {
        "What is released": f"{results[:1].upper()}{results[1:]}, and everything that anyone computes from it, now or "
        "later, with any other knowledge.",
        **(
            {"Every step of training": "ε counts every step as if each intermediate model were released too."}
            if by_steps
            else {"Every charge": "ε counts all noisy results of the run, whether or not they are released."}
        ),
        f"Each {unit} as a whole": f"Everything that one {unit} contributed, features and labels.",
        "This run folder": "The plan, the transcript and this report hold no batch sizes, losses or gradient norms"
        f"{shown}The report shows no measurement on private records without noise.",
    }
    return tuple(Remark(title=title, text=text) for title, text in remarks.items()) if guarantee.is_private else ()


def list_not_covered(
    guarantee: GuaranteeSection,
    *,
    meta: Mapping[str, object],
    plan: Mapping[str, object],
    measured: bool,
    evaluated: bool = False,
    seeded: bool = False,
    exact: bool = False,
) -> tuple[Remark, ...]:
    """What the guarantee does not cover, the most weighty first."""
    settings = str(meta.get("settings", "The settings were given from outside")).rstrip(".")
    test = "None were measured for this report. A measurement on private records is a separate release."
    if measured:
        test = "Accuracy was measured on public test records without noise. ε does not cover these records."
        if meta.get("tuned_on_these_data"):
            test += " The recipe was chosen on this dataset: accuracy on other records can be lower."
    remarks = [
        (
            not guarantee.is_private,
            "Everything",
            "The run added no noise, or its ε is infinite. It gives no guarantee.",
        ),
        (
            seeded,
            "Anyone who knows the seed",
            "The noise came from a chosen seed. Anyone who knows or guesses the seed can subtract the noise. "
            "Use this model for tests only.",
        ),
        (
            True,
            "The choice of settings",
            f"{settings}. If somebody chose them from results on these records, ε does not cover that choice.",
        ),
        (True, "The test records", test),
        (
            evaluated,
            "The evaluations on private records",
            "Each has its own ε, which the ε at the top does not include.",
        ),
        (
            plan.get("dataset_size_is_public"),
            "The size of the dataset",
            "The sample rate and the divisor were computed from it, so it is treated as public.",
        ),
        # What no (ε, δ) of a single run speaks about.
        (
            True,
            "Other uses of the same records",
            "Every other run, statistic or model on the same records adds to the total privacy loss. This report "
            "covers this run only.",
        ),
        (
            True,
            "Patterns of the whole population",
            "A model can reveal a pattern that holds for most people, and so something about a person who was never in "
            f"the data. The guarantee covers what the presence of one {guarantee.privacy_unit.value} adds.",
        ),
        (
            not exact,
            "The lowest bits of the noise",
            "The noise is drawn in floating point from a cryptographic generator. The proof is about real numbers; it "
            "does not cover attacks on rounding (Mironov 2012).",
        ),
        (True, "Side channels", "The running time of the training, and other effects on the machine."),
    ]
    return tuple(Remark(title=title, text=text) for applies, title, text in remarks if applies)


# ----------------------------------------------------------------------------------------------------------------------
# Every number of a report that follows from the transcript's event: ε and its interval, curves, attack bounds.
# ----------------------------------------------------------------------------------------------------------------------


FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
_PRIORS = (0.001, 0.01, 0.1)
_GROUPS = (2, 5, 10)
_MOST_POINTS = 240
_FEWEST_POINTS = 24
_PROFILE_POINTS = 48
# False positive rates of the drawn trade-off curve: evenly spaced, and evenly spaced in their logarithm.
_RATES = tuple(sorted({*(k / 40 for k in range(1, 40)), *(10 ** (-4 + k / 10) for k in range(31)), 0.001, 0.01, 0.1}))
# Accountants whose curve answers in a millisecond; for the others no Gaussian curve is fitted.
_QUICK = ("exact", "closed_form", "contour")
_SAMPLED = PoissonSampled | SampledWithoutReplacement | RandomAllocation


def accounted(
    event: Event, delta: float, *, neighboring_relation: NeighboringRelation, claimed: float | None, version: str
) -> Accounting:
    """ε of the event with the interval that contains the true one, and ε without amplification."""
    answer = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
    bare = accounting.without_amplification(event)
    plain: float | None = answer.upper
    if bare != event:
        try:
            plain = accounting.epsilon(bare, delta, neighboring_relation=neighboring_relation).upper
        except (AccountingError, UnsupportedEvent):
            plain = None
    return Accounting(
        accountant=answer.accountant,
        version=version,
        interval=EpsilonInterval(lower=min(answer.lower, answer.upper), upper=answer.upper),
        claimed_epsilon=claimed,
        without_amplification=plain,
        sampled=bare != event or any(isinstance(leaf, _SAMPLED) for leaf in event_counts(event)),
    )


def user_level(
    event: Event, delta: float, *, neighboring_relation: NeighboringRelation, privacy_unit: PrivacyUnit
) -> tuple[UserLevel, ...]:
    """ε for users who own several records each; empty when the unit is no record, or no rule is known."""
    if privacy_unit is not PrivacyUnit.RECORD:
        return ()
    found = []
    for size in _GROUPS:
        try:
            group = accounting.group_privacy_event(event, size)
            found.append(
                UserLevel(
                    size=size, epsilon=accounting.epsilon(group, delta, neighboring_relation=neighboring_relation).upper
                )
            )
        except (AccountingError, UnsupportedEvent):
            continue
    return tuple(found)


def curves(
    lines: list[TranscriptLine],
    event: Event,
    delta: float,
    *,
    neighboring_relation: NeighboringRelation,
    answer: Accounting,
) -> Curves:
    """ε over the steps, δ(ε), and the trade-off curve."""
    spent = _spent(lines, delta=delta, neighboring_relation=neighboring_relation)
    if math.isinf(answer.interval.upper):
        return Curves(spent=spent)
    fit = None
    try:
        if answer.accountant in _QUICK:
            # How loose the fit is, is read off the curve below; one rate is the least that the search takes.
            fit = accounting.fit_gaussian_trade_off(event, neighboring_relation=neighboring_relation, rates=(0.1,))
        found = accounting.trade_off_curve(event, list(_RATES), neighboring_relation=neighboring_relation)
        points = [k * 2 * max(answer.interval.upper, 0.1) / _PROFILE_POINTS for k in range(_PROFILE_POINTS + 1)]
        deltas = accounting.privacy_profile(event, points, neighboring_relation=neighboring_relation)
    except (AccountingError, UnsupportedEvent):
        # Only ε at one δ is known; what that says of an attacker is drawn from it.
        found, points, deltas = [], [], []
    # Both are lower bounds on the false negative rate; the larger one holds.
    least = [missed for _, missed in bounds_from_epsilon(answer.interval.upper, delta).trade_off]
    least = [max(pair) for pair in zip(least, found or least, strict=True)]
    return Curves(
        spent=spent,
        profile=tuple(zip(points, deltas, strict=True)),
        trade_off=tuple(zip(_RATES, least, strict=True)),
        gaussian_mu=fit.mu if fit else None,
        gaussian_regret=_regret(fit.mu, least) if fit else None,
    )


def attack_bounds(
    drawn: Curves, epsilon: float, delta: float, *, neighboring_relation: NeighboringRelation, privacy_unit: PrivacyUnit
) -> AttackBounds | None:
    """What an attacker can at most do, read off the curves; None when nothing is promised."""
    if math.isinf(epsilon) or delta >= 1 or not drawn.trade_off:
        return None
    missed = dict(drawn.trade_off)
    best = advantage_bound(epsilon=epsilon, delta=delta)
    if drawn.profile:
        best = min(best, drawn.profile[0][1])
    return AttackBounds(
        question=question(neighboring_relation, privacy_unit),
        found=tuple((rate, 1 - missed[rate]) for rate in FALSE_POSITIVE_RATES),
        advantage=best,
        right_guesses=min(1.0, (1 + best) / 2),
        # Hayes, Mahloujifar and Balle 2023, theorem 2: the prior in the place of the false positive rate.
        reconstruction=tuple((prior, 1 - missed[prior]) for prior in _PRIORS),
        from_mechanism=bool(drawn.profile),
    )


def bounds_from_epsilon(epsilon: float, delta: float) -> Curves:
    """The trade-off curve of which only ε and δ are known."""
    least = [1 - max_true_positive_rate(epsilon=epsilon, delta=delta, false_positive_rate=rate) for rate in _RATES]
    trade_off = () if math.isinf(epsilon) else tuple(zip(_RATES, least, strict=True))
    return Curves(trade_off=trade_off)


def worst_case(alternatives: Sequence[Curves]) -> Curves:
    """Curves that bound each of several mechanisms, of which one applies to a unit: pointwise the worst."""
    trade_offs = [dict(found.trade_off) for found in alternatives]
    if not all(trade_offs):
        return Curves()
    profiles = [found.profile[0][1] for found in alternatives if found.profile]
    return Curves(
        profile=((0.0, max(profiles)),) if len(profiles) == len(alternatives) else (),
        trade_off=tuple((rate, min(found[rate] for found in trade_offs)) for rate in _RATES),
    )


def _regret(mu: float, least: list[float]) -> float:
    """How much μ-GDP overstates the true positive rate at most: Φ(μ + Φ⁻¹(FPR)) less the run's own bound."""
    if math.isinf(mu):
        return 0.0
    gaps = [ndtr(mu + ndtri(rate)) - (1 - beta) for rate, beta in zip(_RATES, least, strict=True)]
    return max(0.0, *map(float, gaps))


def _spent(
    lines: list[TranscriptLine], *, delta: float, neighboring_relation: NeighboringRelation
) -> tuple[EpsilonPoint, ...]:
    """ε over the steps charged: what the transcript says where it says it, otherwise computed at a few steps."""
    points = [
        EpsilonPoint(steps=number, epsilon=line.epsilon)
        for number, line in enumerate(lines, 1)
        if line.epsilon is not None
    ]
    # Where many steps share one upper bound it is tight at the last of them: only that one is drawn.
    written = [point for point, later in pairwise(points) if point.epsilon != later.epsilon] + points[-1:]
    if len(points) < min(_FEWEST_POINTS, len(lines)):
        wanted = sorted({math.ceil(len(lines) * k / _FEWEST_POINTS) for k in range(1, _FEWEST_POINTS + 1)})
        heads = [(count, compose([line.event for line in lines[:count]])) for count in wanted]
        written = [
            EpsilonPoint(
                steps=count, epsilon=accounting.epsilon(head, delta, neighboring_relation=neighboring_relation).upper
            )
            for count, head in heads
        ]
    if len(written) > _MOST_POINTS:
        last = len(written) - 1
        written = [written[round(last * k / (_MOST_POINTS - 1))] for k in range(_MOST_POINTS)]
    return (EpsilonPoint(steps=0, epsilon=0.0), *written)


# ----------------------------------------------------------------------------------------------------------------------
# Ways in which private training goes wrong, each held against what the run folder tells.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What privacy hazards are judged by: parts of the report, the transcript, the plan, the facts of the run."""

    guarantee: GuaranteeSection
    accounting: Accounting
    process: Process
    data_accesses: tuple[DataAccess, ...]
    composition: Composition
    audits: tuple[Audit, ...]
    attacks: AttackResults | None
    has_private_attack: bool
    utility: Measurements
    lines: list[TranscriptLine]
    plan: Mapping[str, object]
    meta: Mapping[str, object]


def privacy_hazards(evidence: Evidence) -> tuple[PrivacyHazard, ...]:
    """Every privacy hazard with its status: limitations first, then what is not stated."""
    order = {"limitation": 0, "not stated": 1, "met": 2, "not applicable": 3}
    weight = {"critical": 0, "theoretical": 1, "negligible": 2}
    found = [*_accounting(evidence), *_mechanism(evidence), *_randomness(evidence), *_surroundings(evidence)]
    return tuple(sorted(found, key=lambda item: (order[item.status], weight[item.severity])))


def _of(
    title: str, met: bool | None, severity: str, yes: str, no: str, silent: str = "", *, unfit: str = ""
) -> PrivacyHazard:
    """One hazard; `met` None is "not stated", or "not applicable" where `unfit` says why it does not apply."""
    status = ("not applicable" if unfit else "not stated") if met is None else "met" if met else "limitation"
    text = {"met": yes, "limitation": no}.get(status, unfit or silent)
    return PrivacyHazard.model_validate({"title": title, "status": status, "severity": severity, "text": text})


def own_method(plan: Mapping[str, object]) -> str | None:
    """The estimator, recipe or statistic that sets noise and clipping itself; None for a plan of gradient steps."""
    if "noise_multiplier" in plan or "sample_rate" in plan:
        return None
    names = (plan.get(key) for key in ("estimator", "method", "recipe"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _accounting(evidence: Evidence) -> Iterator[PrivacyHazard]:
    accounting = evidence.accounting
    yield _of(
        "The claim is borne out by the transcript",
        None if accounting.claimed_epsilon is None else accounting.agrees,
        "critical",
        "ε was computed again from what each step charged, and does not exceed the claim.",
        "The transcript gives a larger ε than the run claimed. The larger one is shown.",
        "The run did not end with a claim. ε is computed from the transcript.",
    )
    yield _of(
        "The transcript is whole",
        not any(line.torn for line in evidence.lines),
        "negligible",
        "Each line holds the hash of the one before it, and steps follow without gaps.",
        "The machine stopped while a line was written; it is counted as the most that a step can charge.",
    )
    unit, delta = evidence.guarantee.privacy_unit, evidence.guarantee.delta
    units = _units(evidence.meta, evidence.plan, unit)
    shown = power_of_ten(delta)
    yield _of(
        f"δ is below 1 / number of {unit.value}s",
        True if delta == 0 else None if units is None else delta * units < 1,
        "critical",
        "δ = 0." if delta == 0 else f"δ = {shown}, and the number of {unit.value}s is {units or 0:,}.",
        f"δ = {shown} allows the release of everything about one of {units or 0:,} {unit.value}s.",
        f"The number of {unit.value}s is not stated. δ = {shown} is small enough only for fewer than "
        f"{1 / delta if delta else 0:,.0f} {unit.value}s.",
    )
    bound = max((audit.epsilon_lower for audit in evidence.audits), default=None)
    attacks = evidence.attacks
    above = () if attacks is None else attacks.above_bound
    measured = bound is not None or attacks is not None
    against = []
    if bound is not None and bound > evidence.guarantee.epsilon:
        against.append(f"An audit measured ε ≥ {bound:.2f}, which exceeds the claim.")
    if above:
        against.append(f"Attacks that succeed more often than the claim allows: {', '.join(above)}.")
    yield _of(
        AUDIT_HAZARD,
        not against if measured else None,
        "critical",
        "Every measured lower bound and every attack is within the claim. A failed attack does not prove privacy.",
        f"{' '.join(against)} Either the claim or the measurement is wrong.",
        "The run folder holds no audit and no attack. The command sordino audit RUN measures a lower bound on ε.",
    )


def _mechanism(evidence: Evidence) -> Iterator[PrivacyHazard]:
    plan = evidence.plan
    method = own_method(plan)
    sets = "" if method is None else f"{method} sets {{}} itself. ε counts what was charged."
    yield _of(
        "Batches are drawn as they are accounted for",
        _sampling_fits(plan, evidence.lines),
        "critical",
        "Each step was charged for the sampling that drew its batch, at the planned rate.",
        "Some step was charged for another way of sampling than was planned.",
        "The plan names no single sample rate. ε counts what each step charged.",
        unfit=sets.format("its sampling"),
    )
    yield _of(
        "The noise is at least what was planned",
        _noise_fits(plan, evidence.lines),
        "critical",
        "Every step was charged with the noise multiplier of the plan or more.",
        "Some step was charged with less noise than was planned. ε counts what was charged.",
        "The plan names no single noise multiplier. ε counts what each step charged.",
        unfit=sets.format("its noise"),
    )
    planned = plan.get("steps")
    steps = len({line.step for line in evidence.lines})
    yield _of(
        "No more steps than planned",
        steps <= planned if isinstance(planned, int) and planned > 0 else None,
        "critical",
        "The steps taken are among those planned. ε counts the steps taken.",
        "The run took more steps than planned. ε counts them.",
        "The plan does not limit the steps.",
        unfit=sets.format("its number of steps"),
    )
    public = plan.get("dataset_size_is_public")
    yield _of(
        "The noise is not scaled by a secret number",
        True if isinstance(public, bool) else None,
        "theoretical",
        "The divisor of the noisy sum comes from the size of the dataset, which is treated as public."
        if public
        else "No divisor is computed from the size of the dataset.",
        "",
        "The plan does not state where the divisor comes from.",
    )


def _randomness(evidence: Evidence) -> Iterator[PrivacyHazard]:
    process, method = evidence.process, own_method(evidence.plan)
    yield _of(
        "The noise cannot be reproduced",
        None if process.seeded is None else not process.seeded,
        "critical",
        "Noise and sampling use a secret key from the operating system's entropy.",
        "The noise came from a chosen seed. Anyone who knows or guesses the seed can subtract the noise.",
        "The run does not state where its randomness comes from.",
    )
    yield _of(
        "Resuming reuses no noise and omits no step",
        process.fresh_keys if process.segments else None,
        "critical",
        "Each process of the run drew its own key, and repeated steps are charged again."
        if (process.segments or 0) > 1
        else "One process did the whole run.",
        "Two processes drew noise from the same key.",
        "The transcript does not state which processes worked on the run.",
        unfit="" if method is None else f"{method} is fitted in one process and cannot be resumed.",
    )
    yield _of(
        "Noise is drawn exactly",
        is_exact(process.arithmetic),
        "theoretical",
        "The noise is drawn exactly on integers, as in the proof.",
        "The noise is drawn in floating point; the proof is about real numbers. An attack on rounding (Mironov 2012) "
        "reads the lowest bits of released numbers. The option --secure-mode draws the noise exactly.",
        "The run does not state in which arithmetic the noise is drawn.",
    )


def is_exact(arithmetic: str | None) -> bool | None:
    """Whether the noise is drawn on whole numbers, as far as the run says."""
    return None if arithmetic is None else any(word in arithmetic.lower() for word in ("integer", "exact"))


def _surroundings(evidence: Evidence) -> Iterator[PrivacyHazard]:
    silent = [access.title.lower() for access in evidence.data_accesses if access.text is None]
    yield _of(
        "Other access to the records is stated",
        None if silent else True,
        "critical",
        "The report lists all of it, as the run states it. The statements are not checked.",
        "",
        f"Not stated: {', '.join(silent)}.",
    )
    logged = next(access.text for access in evidence.data_accesses if access.name == "logging")
    yield _of(
        "No result computed from the records was shown without noise",
        False if evidence.meta.get("diagnostics") is not None else None if logged is None else True,
        "critical",
        "The run states what was printed, logged and plotted. The statement is not checked.",
        "Losses and batch sizes were shown without noise during the run. ε does not cover them.",
        "The run does not state what was printed, logged or plotted.",
    )
    known = evidence.composition
    total, budget = known.spent, known.budget
    # A run that says that other uses are not counted has stated it, and has not counted them.
    stated = True if known.text and evidence.meta.get("other_uses_are_counted") is not False else None
    yield _of(
        "Other uses of the same records are counted",
        (budget is None or total <= budget) if total is not None else stated,
        "critical",
        f"All charges to the account together: ε = {format_upper_bound(total)}."
        if total is not None
        else (known.text or ""),
        "The charges to the account of the dataset exceed its privacy budget.",
        known.text or "No ledger was given with --ledger, and the run states no other uses.",
    )
    withheld, files = evidence.utility.withheld, []
    if withheld:
        files.append(f"{withheld} value{'s' if withheld != 1 else ''} in metrics.json")
    if evidence.has_private_attack:
        files.append("the results in attack.json")
    yield _of(
        "The folder holds no measurement on private records without noise",
        not files,
        "critical",
        "Every value in metrics.json is marked public.",
        f"Marked private: {' and '.join(files)}. Remove the file before the folder is published.",
    )


def _units(meta: Mapping[str, object], plan: Mapping[str, object], privacy_unit: PrivacyUnit) -> int | None:
    """The number of units, where it is public: stated, or the expected batch size divided by the sample rate."""
    data = meta.get("data")
    stated = data.get(f"{privacy_unit.value}s") if isinstance(data, Mapping) else None
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    size, rate = plan.get("expected_batch_size"), plan.get("sample_rate")
    if plan.get("dataset_size_is_public") is not True or isinstance(size, bool) or isinstance(rate, bool):
        return None
    if not isinstance(size, int | float) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        return None
    return math.ceil(size / rate - 1e-9)


def _sampling_fits(plan: Mapping[str, object], lines: list[TranscriptLine]) -> bool | None:
    rate, poisson, sampling = plan.get("sample_rate"), plan.get("poisson_sampling", True), plan.get("sampling")
    if not isinstance(rate, int | float):
        return None
    return all(
        _drawn_as_planned(event, float(rate), poisson=bool(poisson), sampling=sampling) for event in _distinct(lines)
    )


def _drawn_as_planned(event: Event, rate: float, *, poisson: bool, sampling: object) -> bool:
    match event:
        case PoissonSampled():
            return poisson and event.sample_rate <= rate
        case ShuffledEpochs():
            return not poisson and sampling is None
        case SampledWithoutReplacement() | SampledWithReplacement():
            return sampling is not None and event.sample_size <= rate * event.dataset_size + 1e-6
        case RandomAllocation():
            return sampling == "balls_in_bins" and event.steps <= max(1, round(1 / rate))
    # Charged as if every record took part: right for full batches, and on the safe side otherwise.
    return True


def _noise_fits(plan: Mapping[str, object], lines: list[TranscriptLine]) -> bool | None:
    planned = plan.get("noise_multiplier")
    if not isinstance(planned, int | float):
        return None
    found = [_noise(event) for event in _distinct(lines) if not isinstance(event, NoOp)]
    return None if None in found else all(noise >= planned * (1 - 1e-12) for noise in found if noise is not None)


def _noise(event: Event) -> float | None:
    inner = getattr(event, "event", event)
    if isinstance(inner, NonPrivate):
        return 0.0
    return inner.noise_multiplier if isinstance(inner, Gaussian) else None


def _distinct(lines: list[TranscriptLine]) -> list[Event]:
    return list(dict.fromkeys(line.event for line in lines))
