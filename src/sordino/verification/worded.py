"""Whether a guarantee's words are those of its run: sampler, accountant and caveats (floor 6)."""

import re
from collections.abc import Mapping, Sequence

from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import SordinoError
from sordino.events import Event
from sordino.mechanisms.correlated import CyclicPoisson, participation_from_dict
from sordino.sampling import CyclicPoissonSampling, FixedEpochs, PoissonSampling
from sordino.verification.planned import is_plan
from sordino.wording import sampling_words

__all__ = ["wrong_budget_words", "wrong_words"]


def wrong_words(plans: Sequence[Mapping[str, object]], claim: Guarantee, event: Event, accountant: str) -> str | None:
    """What the guarantee says otherwise than plans and transcript; None when it agrees.

    Args:
        plans: plan.json, and what segments state in its place.
        claim: the guarantee as it was written.
        event: all that the transcript charges.
        accountant: which one answers for that event here.
    """
    charged = sampling_words(event)
    if not all(map(is_plan, plans)):
        # Stages, estimators and loops of one's own: no rate may be named that no step charged.
        named = set(re.findall(r"(?<!cyclic )Poisson sampling at rate [\d.e+-]*\d", claim.sampler))
        if any(words not in charged for words in named):
            return f"its sampler is not what the transcript charges: {charged}"
        return None
    try:
        planned = dict.fromkeys(map(_sampler, plans))
    except (SordinoError, KeyError, TypeError, ValueError):
        return "plan.json says nothing of how batches are drawn"
    if sorted(claim.sampler.split(", ")) != sorted(", ".join(planned).split(", ")):
        return f"its sampler is not the plan's: {', '.join(planned)}"
    if claim.accountant != accountant:
        return f"its accountant is not the one that answers for the transcript: {accountant}"
    missing = [caveat for plan in plans for caveat in _caveats(plan) if caveat not in claim.caveats]
    return f"it leaves out that {missing[0]}" if missing else None


def wrong_budget_words(plans: Sequence[Mapping[str, object]], claim: Guarantee, accountant: str) -> str | None:
    """What the guarantee of a run under a budget says otherwise than its plans; None when it agrees.

    Args:
        plans: plan.json, and what segments state in its place.
        claim: the guarantee as it was written.
        accountant: the budget's filter, in words.
    """
    is_full = plans[-1]["sample_rate"] == 1 and not any(isinstance(value, Mapping) for value in _planned(plans[-1]))
    sampler = "full batches" if is_full else "Poisson sampling at rates chosen under the filter"
    if claim.sampler != sampler:
        return f"its sampler is not the budget's: {sampler}"
    if claim.accountant != accountant:
        return f"its accountant is not the budget's: {accountant}"
    wanted = [*(caveat for plan in plans for caveat in _caveats(plan)), _KEPT]
    missing = [caveat for caveat in wanted if caveat not in claim.caveats]
    return f"it leaves out that {missing[0]}" if missing else None


def _planned(plan: Mapping[str, object]) -> list[object]:
    """What may change from step to step."""
    return [plan.get(name) for name in ("noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch_size")]


_KEPT = "ε is a budget that a filter kept: the noise of each step was chosen on the way"


def _sampler(plan: Mapping[str, object]) -> str:
    """How batches are drawn, worked out from plan.json without the training code."""
    rate = plan["sample_rate"]
    if not isinstance(rate, int | float):
        return "Poisson sampling at planned rates"
    noise = plan.get("noise")
    if isinstance(noise, Mapping):
        participation = participation_from_dict(noise["participation"])
        if isinstance(participation, CyclicPoisson):
            return CyclicPoissonSampling(groups=participation.groups, sample_rate=rate).words
        return FixedEpochs(steps_per_epoch=max(1, round(1 / rate))).words
    return PoissonSampling(sample_rate=rate).words if plan["poisson_sampling"] else _SHUFFLED


_SHUFFLED = "shuffled epochs without amplification"


def _caveats(plan: Mapping[str, object]) -> list[str]:
    """What every guarantee of this plan must say."""
    added = plan["neighboring_relation"] == NeighboringRelation.ADD_OR_REMOVE_ONE.value
    said = {
        "noise_multiplier is 0: for debugging only": plan["noise_multiplier"] == 0,
        "the size of the data set is treated as public": plan.get("dataset_size_is_public") is True,
        "records keep their numbers when one is added or removed": plan.get("noise") is not None and added,
        "secure noise holds to the last bit with microbatch_size=1": plan.get("secure_noise") is True,
    }
    return [caveat for caveat, applies in said.items() if applies]
