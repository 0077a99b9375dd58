"""One training with canaries, and what it shows about ε (room `audit`, floor 4)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.audit.bounds import Guesses, LowerBound, guess, one_run, one_run_curve, rejects_curve
from sordino.audit.canaries import GradientCanaries, RecordCanaries, coins, made_up, mislabelled
from sordino.audit.families import EventFamily
from sordino.audit.observer import Check, Watcher
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.randomness import Randomness
from sordino.schedules.schedule import scaled
from sordino.training.averaging import Averaging
from sordino.training.fitting.stepping import OptimizerFactory, optimizer_for
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["AuditResult", "audit"]

_GUESSED = 0.2
_KINDS = ("gradients", "mislabelled", "random")
ATTACKERS = {
    "white-box": "sees every noisy gradient, and chose the canaries",
    "black-box": "sees the final model, and chose the canaries",
}


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit of one training has shown. A claim that is not rejected is not thereby proved.

    Args:
        claimed: the guarantee that was claimed.
        bound: what was shown, by the attacker named beforehand.
        others: the same guesses, or the other attacker's, by other methods; each holds alone with its confidence.
        attacker: what the attacker saw.
        canaries: their kind.
        claim_rejected: whether so many right guesses are too unlikely under the plan's own trade-off curve.
        checks: statistics of the released gradients with a known law.
        scores: [m] of the canaries, under `attacker`.
        present: [m], which were in.
        seconds: of the training.
    """

    claimed: Guarantee
    bound: LowerBound
    others: tuple[tuple[str, LowerBound], ...]
    attacker: str
    canaries: str
    claim_rejected: bool
    checks: tuple[Check, ...]
    scores: np.ndarray
    present: np.ndarray
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the claim."""
        return not self.claim_rejected and all(check.passed for check in self.checks)

    def report_entry(self) -> dict[str, object]:
        """The bound as a run folder's ``audit.json`` has it."""
        family = f", if the curve is {self.bound.family}" if self.bound.family else ""
        return {
            "method": self.bound.method + family,
            "canaries": self.bound.canaries,
            "guesses": self.bound.guesses,
            "correct": self.bound.correct,
            "alpha": round(1 - self.bound.confidence, 12),
            "epsilon_lower": self.bound.epsilon,
            "attacker": f"{self.attacker}: {ATTACKERS[self.attacker]}",
        }

    def to_dict(self) -> dict[str, object]:
        """The result as JSON types, without the single canaries."""
        return {
            "claimed_epsilon": self.claimed.epsilon,
            "delta": self.claimed.delta,
            "bound": self.bound.to_dict(),
            "others": [{"attacker": attacker, **bound.to_dict()} for attacker, bound in self.others],
            "attacker": self.attacker,
            "canaries": self.canaries,
            "claim_rejected": self.claim_rejected,
            "checks": [dict(vars(check)) for check in self.checks],
            "passed": self.passed,
            "seconds": self.seconds,
        }


def audit(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: Sequence[Tensor],
    plan: Plan,
    *,
    canaries: str | Sequence[Tensor] = "gradients",
    count: int = 1000,
    attacker: str = "white-box",
    guesses: int | None = None,
    confidence: float = 0.95,
    optimizer: OptimizerFactory | None = None,
    performance: Performance | None = None,
    averaging: Averaging | None = None,
    randomness: Randomness | None = None,
    progress: bool = True,
) -> AuditResult:
    """Train once under `plan` with canaries among the records, attack, and bound ε from below.

    Each canary is in with probability ½. The attacker guesses "in" for the highest scores and "out" for the lowest; how
    often is fixed beforehand. The trained model holds canaries: don't release it. The audit is for testing: what it
    returns is not private, unless the data are public.

    Guarantee: of the bound, not of the data: when the training is as private as the plan says, `bound` is above its ε
    with probability at most 1 − `confidence`, and `claim_rejected` is true with at most that probability.

    Args:
        model: as for `fit`.
        loss: as for `fit`.
        data: equally long tensors, records first.
        plan: what is audited; its noise multiplier must be > 0.
        canaries: "gradients" (one coordinate each, beside the model: the mechanism's worst case), "mislabelled" or
            "random" records, or tensors like `data` with records of your own.
        count: m, how many canaries there are, ≥ 20; for your own the number of their records.
        attacker: "white-box" sees every released gradient, "black-box" the final model only.
        guesses: r ≤ m; 20 % of m when None.
        confidence: in (0, 1).
        optimizer: a function that makes one from a list of parameters, as for `fit`.
        performance: as for `fit`.
        averaging: as for `fit`.
        randomness: as for `fit`; coins and canaries come from it too.
        progress: show step, ε so far and time left.

    Raises:
        InvalidArgument: an argument is unusable.

    Example:
        >>> import torch
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=50.0,
        ...             delta=1e-5)
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> found = audit(nn.Linear(2, 2), loss, (torch.ones(50, 2), torch.zeros(50).long()), plan, count=200,
        ...               progress=False)
        >>> found.bound.epsilon < found.claimed.epsilon < 4.4
        True

    References:
        Steinke, Nasr and Jagielski 2023, algorithms 1 and 2; Nasr et al. 2023, section 5 (gradient canaries).
    """
    if not plan.is_private:
        raise InvalidArgument("noise_multiplier must be > 0 for an audit, got 0. Nothing is claimed without noise.")
    checks.one_of(tuple(ATTACKERS), attacker=attacker)
    randomness = Randomness() if randomness is None else randomness
    m = checks.integer(20, count=len(canaries[0]) if not isinstance(canaries, str) else count)
    r = max(2, round(_GUESSED * m)) if guesses is None else checks.integer(2, guesses=guesses)
    checks.in_range(2, m, guesses=r)
    present = coins(m, randomness)
    planted = _planted(model, loss, tuple(data), plan, canaries, present, randomness)
    watcher = Watcher(plan, planted, present)
    stepper: Optimizer = optimizer_for(planted.model, optimizer, plan)
    watcher.follow(stepper)
    started = time.monotonic()
    result = fit(
        planted.model,
        planted.loss,
        planted.data,
        plan,
        optimizer=stepper,
        performance=performance,
        averaging=averaging,
        randomness=randomness,
        progress=progress,
    )
    seconds = time.monotonic() - started
    scores = {"white-box": watcher.scores.numpy(), "black-box": planted.final_scores().cpu().numpy()}
    found = {name: guess(one, present, above=r - r // 2, below=r // 2) for name, one in scores.items()}
    return AuditResult(
        claimed=result.guarantee,
        bound=one_run_curve(found[attacker], delta=plan.delta, confidence=confidence),
        others=_others(found, attacker, plan.delta, confidence),
        attacker=attacker,
        canaries=canaries if isinstance(canaries, str) else "your own",
        claim_rejected=_rejected(found[attacker], plan, confidence),
        checks=watcher.checks(),
        scores=scores[attacker],
        present=present,
        seconds=seconds,
    )


def _planted(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: tuple[Tensor, ...],
    plan: Plan,
    canaries: str | Sequence[Tensor],
    present: np.ndarray,
    randomness: Randomness,
) -> GradientCanaries | RecordCanaries:
    if not isinstance(canaries, str):
        return RecordCanaries(model, loss, data, plan, canaries, present)
    checks.one_of(_KINDS, canaries=canaries)
    if canaries == "gradients":
        return GradientCanaries(model, loss, data, plan, present)
    make = mislabelled if canaries == "mislabelled" else made_up
    return RecordCanaries(model, loss, data, plan, make(data, len(present), randomness), present)


def _others(
    found: dict[str, Guesses], attacker: str, delta: float, confidence: float
) -> tuple[tuple[str, LowerBound], ...]:
    other = next(name for name in found if name != attacker)
    return (
        (attacker, one_run(found[attacker], delta=delta, confidence=confidence)),
        (other, one_run_curve(found[other], delta=delta, confidence=confidence)),
        (other, one_run(found[other], delta=delta, confidence=confidence)),
    )


def plan_family(plan: Plan) -> EventFamily:
    """The trade-off curves of a plan with its noise scaled; strength 1 is the plan."""
    return EventFamily(
        event=lambda factor: replace(plan, noise_multiplier=scaled(plan.noise_multiplier, factor)).event(),
        name="the plan's, with other noise",
        relation=plan.neighboring_relation,
    )


def _rejected(found: Guesses, plan: Plan, confidence: float) -> bool:
    """Whether the plan's own curve makes so many right guesses too unlikely."""
    return rejects_curve(found, plan_family(plan).least_false_positive_rate(1.0), alpha=1 - confidence)
