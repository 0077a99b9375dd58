"""What `account` and `plan` say of an event: ε by whom, what it means, what it would be without sampling."""

import contextlib

from sordino import checks
from sordino.cli.output import finite, rounded
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, NoPrivacy, Nothing, PoissonSampled, SelfComposed, to_dict
from sordino.wording import sampling_words

__all__ = ["FALSE_POSITIVE_RATES", "quick_epsilons", "statement", "subsampled_gaussian"]

FALSE_POSITIVE_RATES = (1e-2, 1e-3)
"""Where a membership attack's true positive rate is bounded."""

_QUICK = ("closed_form", "contour", "rdp")
"""Accountants that answer in a fraction of a second."""


def statement(
    event: Event, *, delta: float, relation: NeighboringRelation, unit: PrivacyUnit, everyone: bool = False
) -> dict[str, object]:
    """ε by the quick accountants, or by everyone, with all that is needed to read it, as JSON types."""
    from sordino import accounting

    checks.probability(zero=False, one=False, delta=delta)
    best = accounting.epsilon(event, delta, relation=relation)
    ask = accounting.epsilons if everyone else quick_epsilons
    by_accountant = ask(event, delta, relation=relation)
    guarantee = Guarantee(
        epsilon=best.upper,
        delta=delta,
        accountant=best.accountant,
        sampler=sampling_words(event),
        relation=relation,
        unit=unit,
    )
    return {
        "epsilon": rounded(best.upper),
        "accountants": {name: rounded(value) for name, value in by_accountant.items()},
        "accountant": best.accountant,
        "interval": {"lower": finite(best.lower), "upper": finite(best.upper)},
        "delta": delta,
        "epsilon_without_amplification": _without_amplification(event, delta, relation),
        "attack": _attack(event, relation),
        "relation": relation.value,
        "unit": unit.value,
        "sampler": guarantee.sampler,
        "sentence": guarantee.sentence(),
        "event": to_dict(event),
    }


def _without_amplification(event: Event, delta: float, relation: NeighboringRelation) -> float | str | None:
    """ε if every record took part in every step: what is left when the sampling can't be trusted or is known."""
    from sordino import accounting

    try:
        return rounded(accounting.epsilon(accounting.without_amplification(event), delta, relation=relation).upper)
    except (AccountingError, UnsupportedEvent):
        return None


def _attack(event: Event, relation: NeighboringRelation) -> dict[str, object] | None:
    """What any membership attack on one record can at most reach; None when no curve is known for the event."""
    from sordino import accounting

    try:
        found = {
            f"{rate:g}": accounting.true_positive_rate(event, rate, relation=relation) for rate in FALSE_POSITIVE_RATES
        }
        advantage = accounting.advantage(event, relation=relation).upper
    except (AccountingError, UnsupportedEvent):
        return None
    return {
        "advantage": rounded(advantage),
        "true_positive_rate": {rate: min(1.0, float(rounded(value, 6))) for rate, value in found.items()},
    }


def quick_epsilons(event: Event, delta: float, *, relation: NeighboringRelation) -> dict[str, float]:
    """ε by each quick accountant that has a sound answer."""
    from sordino import accounting

    answers: dict[str, float] = {}
    for name in _QUICK:
        with contextlib.suppress(UnsupportedEvent, AccountingError):
            answers[name] = accounting.epsilon(event, delta, relation=relation, accountant=name).upper
    return answers


def subsampled_gaussian(*, sample_rate: float, noise_multiplier: float, steps: int) -> Event:
    """The event of DP-SGD with Poisson sampling."""
    checks.probability(zero=False, sample_rate=sample_rate)
    checks.non_negative(noise_multiplier=noise_multiplier)
    if not checks.integer(0, steps=steps):
        return Nothing()
    if noise_multiplier == 0:
        return NoPrivacy(reason="noise_multiplier is 0")
    step: Event = Gaussian(noise_multiplier=noise_multiplier)
    if sample_rate < 1:
        step = PoissonSampled(sample_rate=sample_rate, event=step)
    return SelfComposed(event=step, count=steps)
