"""What the guarantee means and where it ends, in plain words and in an attacker's numbers."""

import math
from collections.abc import Mapping

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.report.parts import Remark, Statement

__all__ = ["advantage_bound", "attack_bound", "covered", "not_covered", "question"]


_LOWEST_BITS = "The lowest bits of the noise"


def attack_bound(*, epsilon: float, delta: float, false_positive_rate: float) -> float:
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


def question(relation: NeighboringRelation, unit: PrivacyUnit) -> str:
    """What the attacker wants to know, in words."""
    return {
        NeighboringRelation.ADD_OR_REMOVE_ONE: f"whether one given {unit.value} was in the training data",
        NeighboringRelation.REPLACE_ONE: f"which of two given {unit.value}s was in the training data",
        NeighboringRelation.REPLACE_SPECIAL: f"whether one given {unit.value} contributed to the training",
    }[relation]


def covered(guarantee: Statement, *, losses: bool = False) -> tuple[Remark, ...]:
    """What the guarantee covers; `losses` says that the plan bought noisy ones."""
    if not guarantee.is_private:
        return ()
    unit = guarantee.unit.value
    return (
        Remark(
            title="The model",
            text="Every parameter in model.safetensors, and everything anyone computes from it, on any input, "
            "now or later, whatever else they know.",
        ),
        Remark(
            title="The whole course of training",
            text="ε counts every step as if each intermediate model had been published too.",
        ),
        Remark(title=f"Each {unit}, wholly", text=f"All that one {unit} contributed, features and label alike."),
        Remark(
            title="This run folder",
            text="The plan, the transcript and this report hold no batch sizes, losses or gradient norms"
            + (", except for the noisy losses that are shown: ε covers them. " if losses else ". ")
            + "Values measured on private records are never shown here without noise.",
        ),
    )


def not_covered(
    guarantee: Statement,
    *,
    meta: Mapping[str, object],
    plan: Mapping[str, object],
    measured: bool,
    evaluated: bool = False,
    seeded: bool = False,
    exact: bool = False,
) -> tuple[Remark, ...]:
    """What the guarantee does not cover, the most weighty first."""
    remarks: list[Remark] = []
    if not guarantee.is_private:
        remarks.append(
            Remark(title="Anything at all", text="The run added no noise, or its ε is infinite. Nothing is promised.")
        )
    if seeded:
        remarks.append(
            Remark(
                title="Anyone who knows the seed",
                text="The noise came from a chosen seed. Whoever knows or guesses it can subtract the noise. "
                "Use this model for tests only.",
            )
        )
    settings = meta.get("settings", "The settings were given from outside")
    remarks.append(
        Remark(
            title="The choice of settings",
            text=f"{settings}. If anyone picked them by looking at results on these records, that choice is not "
            "counted in ε.",
        )
    )
    remarks.append(Remark(title="The test records", text=_about_test_records(meta, measured=measured)))
    if evaluated:
        remarks.append(
            Remark(
                title="The evaluations on private records",
                text="Each has an ε of its own, which the headline does not hold. Together with training they come to "
                "the ε that is shown beside them.",
            )
        )
    if plan.get("dataset_size_is_public"):
        remarks.append(
            Remark(
                title="The size of the data set",
                text="The sample rate and the divisor were computed from it, so it is treated as public.",
            )
        )
    outside = _always_outside(guarantee.unit.value)
    return (*remarks, *(remark for remark in outside if not (exact and remark.title == _LOWEST_BITS)))


def _about_test_records(meta: Mapping[str, object], *, measured: bool) -> str:
    if not measured:
        return "None were measured for this report. Measuring on private records would be a release of its own."
    words = "Accuracy was measured on them without noise. They are public, and ε says nothing about them."
    if meta.get("tuned_on_these_data"):
        words += " The recipe was chosen with a view to them: expect a little less elsewhere."
    return words


def _always_outside(unit: str) -> tuple[Remark, ...]:
    """What no (ε, δ) of a single run speaks about."""
    return (
        Remark(
            title="Other uses of the same records",
            text="Every further run, statistic or model on them adds to the bill. This report counts this run alone.",
        ),
        Remark(
            title="What is true of everyone",
            text="A model may reveal a pattern of the whole population, and that may concern a person who was never in "
            f"the data. The guarantee is about what one {unit}'s own presence adds.",
        ),
        Remark(
            title=_LOWEST_BITS,
            text="Noise is drawn in floating point from a cryptographic generator. The proof is about real numbers; "
            "attacks on rounding (Mironov 2012) are outside it.",
        ),
        Remark(title="Side channels", text="How long the run took, and what the machine did meanwhile."),
    )
