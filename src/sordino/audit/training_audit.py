"""One training with canaries, and what it shows about ε."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.audit.canaries import (
    GradientCanaries,
    RecordCanaries,
    draw_inclusion,
    mislabeled_canaries,
    synthetic_canaries,
)
from sordino.audit.lower_bounds import (
    EventTradeOffFamily,
    LowerBound,
    guess_canaries,
    one_run_lower_bound,
    one_run_trade_off_bound,
    rejects_curve,
)
from sordino.clipping import FlatClipping
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.schedules import scale_schedule
from sordino.training.averaging import Averaging
from sordino.training.fit import fit
from sordino.training.optimizer_checks import OptimizerFactory, optimizer_for
from sordino.training.plan import PerformanceOptions, Plan

# ----------------------------------------------------------------------------------------------------------------------
# What an audit sees of a training, step by step: released gradients, and nothing else.
# ----------------------------------------------------------------------------------------------------------------------


# Of a normal distribution: a sound training fails one of three checks in two million.
_DEVIATIONS = 5.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """A statistic whose distribution is known when the training does what its plan says.

    Args:
        name: what is checked.
        expected: the statistic's mean.
        measured: the statistic.
        tolerance: how far it may be off.
    """

    name: str
    expected: float
    measured: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether it is not further off."""
        return bool(abs(self.measured - self.expected) <= self.tolerance)


class GradientObserver:
    """Adds up every canary's score, and with canaries of gradients three statistics that cost nothing.

    Args:
        plan: what the training claims to do.
        canaries: of the training.
        present: [m], which of them are in.
    """

    def __init__(self, plan: Plan, canaries: GradientCanaries | RecordCanaries, present: np.ndarray) -> None:
        self._plan, self._canaries = plan, canaries
        self._present = torch.from_numpy(present)
        self._step = 0
        self.scores = torch.zeros(len(present), dtype=torch.float64)
        self._noise = self._repeats = self._weight = 0.0
        self._noises = self._pairs = 0
        self._last: Tensor | None = None

    def follow(self, optimizer: Optimizer) -> None:
        """See each gradient just before the optimizer uses it."""
        optimizer.register_step_pre_hook(lambda *_: self._see())

    def _see(self) -> None:
        now = self._plan.step_plan(self._step)
        products = self._canaries.inner_products().cpu()
        # In units of the deviation of the noise; where it changes, quiet steps count for more.
        unit = (now.noise_multiplier * now.sensitivity or 1.0) / now.expected_batch_size
        self.scores += products / unit * (now.max_grad_norm / (now.noise_multiplier or 1.0) / now.sensitivity)
        if isinstance(self._canaries, GradientCanaries):
            self._count(products / unit, now.sample_rate * now.max_grad_norm / (unit * now.expected_batch_size))
        self._step += 1

    def _count(self, noises: Tensor, expected: float) -> None:
        absent = noises[~self._present]
        self._noise += float(absent.square().sum())
        self._noises += len(absent)
        if self._last is not None:
            self._repeats += float((absent * self._last).sum())
            self._pairs += len(absent)
        self._last = absent
        self._weight += float(noises[self._present].sum()) / expected

    def checks(self) -> tuple[Check, ...]:
        """Noise of the declared scale, new in every step; canaries of at most the declared weight.

        Empty where the plan's clipping, noise or batches have other distributions than these.
        """
        plan = self._plan
        standard = (
            type(plan.clipping) is FlatClipping
            and plan.correlated_noise is None
            and plan.is_private
            and plan.neighboring_relation.sensitivity_factor == 1
        )
        if not isinstance(self._canaries, GradientCanaries) or not standard or not self._pairs:
            return ()
        entries = self._step * int(self._present.sum())
        steps = [plan.step_plan(step) for step in range(self._step)]
        # A present canary's entry, over its mean q: variance z²/q² of the noise and (1 − q)/q of the sampling.
        variance = max((one.noise_multiplier**2 + 1) / one.sample_rate**2 for one in steps)
        spread = math.sqrt(variance / max(entries, 1))
        return (
            _check("noise has the declared variance", 1.0, self._noise / self._noises, math.sqrt(2 / self._noises)),
            _check("noise is new in every step", 0.0, self._repeats / self._pairs, 1 / math.sqrt(self._pairs)),
            _check("a canary weighs what clipping allows", 1.0, self._weight / max(entries, 1), spread),
        )


def _check(name: str, expected: float, measured: float, deviation: float) -> Check:
    return Check(name=name, expected=expected, measured=measured, tolerance=_DEVIATIONS * deviation)


# ----------------------------------------------------------------------------------------------------------------------
# One training with canaries, and what it shows about ε.
# ----------------------------------------------------------------------------------------------------------------------


_GUESSED = 0.2
_KINDS = ("gradients", "mislabeled", "random")
ATTACKERS = {
    "white-box": "sees every noisy gradient, and chose the canaries",
    "black-box": "sees the final model, and chose the canaries",
}


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit of one training has shown. A claim that is not rejected is not thereby proved.

    Args:
        claimed: the guarantee that was claimed.
        bound: what was shown, by the attacker named in advance.
        others: the same guesses, or the other attacker's, by other methods; each holds alone with its confidence.
        attacker: what the attacker saw.
        canaries: their kind.
        claim_rejected: whether so many right guesses are too unlikely under the plan's own trade-off curve.
        checks: statistics of the released gradients with a known distribution.
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
            "checks": [vars(check) | {"passed": check.passed} for check in self.checks],
            "passed": self.passed,
            "seconds": self.seconds,
        }


def audit_training(
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
    performance: PerformanceOptions | None = None,
    averaging: Averaging | None = None,
    rng: KeyedRNG | None = None,
    progress: bool = True,
) -> AuditResult:
    """Train once under `plan` with canaries among the records, attack, and bound ε from below.

    Each canary is in with probability ½. The attacker guesses "in" for the highest scores and "out" for the lowest; how
    often is fixed in advance. The trained model holds canaries: don't release it. The audit is for testing: what it
    returns is not private, unless the data are public.

    Guarantee: of the bound, not of the data: when the training is as private as the plan says, `bound` is above its ε
    with probability at most 1 − `confidence`, and `claim_rejected` is true with at most that probability.

    Args:
        model: as for `fit`.
        loss: as for `fit`.
        data: equally long tensors, records first.
        plan: what is audited; its noise multiplier must be > 0.
        canaries: "gradients" (one coordinate each, next to the model: the mechanism's worst case), "mislabeled" or
            "random" records, or tensors like `data` with records of your own.
        count: m, how many canaries there are, ≥ 20; for your own the number of their records.
        attacker: "white-box" sees every released gradient, "black-box" the final model only.
        guesses: r ≤ m; 20 % of m when None.
        confidence: in (0, 1).
        optimizer: a function that makes one from a list of parameters, as for `fit`.
        performance: as for `fit`.
        averaging: as for `fit`.
        rng: as for `fit`; coins and canaries come from it too.
        progress: show step, ε so far and time left.

    Raises:
        InvalidArgument: an argument is unusable.

    Example:
        >>> import torch
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=50.0,
        ...             delta=1e-5)
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> data = torch.ones(50, 2), torch.zeros(50).long()
        >>> found = audit_training(nn.Linear(2, 2), loss, data, plan, count=200, confidence=1 - 1e-6, progress=False)
        >>> found.bound.epsilon < found.claimed.epsilon < 4.4
        True

    References:
        Steinke, Nasr and Jagielski 2023, algorithms 1 and 2; Nasr et al. 2023, section 5 (gradient canaries).
    """
    if not plan.is_private:
        raise InvalidArgument("noise_multiplier must be > 0 for an audit, got 0. Nothing is claimed without noise.")
    checks.one_of(tuple(ATTACKERS), attacker=attacker)
    if isinstance(canaries, str):
        checks.one_of(_KINDS, canaries=canaries)
    rng = KeyedRNG() if rng is None else rng
    m = checks.integer(20, count=len(canaries[0]) if not isinstance(canaries, str) else count)
    r = max(2, round(_GUESSED * m)) if guesses is None else checks.integer(2, guesses=guesses)
    checks.in_range(2, m, guesses=r)
    present = draw_inclusion(m, rng)
    planted: GradientCanaries | RecordCanaries
    if canaries == "gradients":
        planted = GradientCanaries(model, loss, data, plan, present)
    else:
        make = {"mislabeled": mislabeled_canaries, "random": synthetic_canaries}
        records = make[canaries](data, m, rng) if isinstance(canaries, str) else canaries
        planted = RecordCanaries(model, loss, data, plan, records, present)
    watcher = GradientObserver(plan, planted, present)
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
        rng=rng,
        progress=progress,
    )
    seconds = time.monotonic() - started
    scores = {"white-box": watcher.scores.numpy(), "black-box": planted.final_scores().cpu().numpy()}
    found = {name: guess_canaries(one, present, above=r - r // 2, below=r // 2) for name, one in scores.items()}
    other = next(name for name in found if name != attacker)
    terms: dict[str, Any] = {"delta": plan.delta, "confidence": confidence}
    return AuditResult(
        claimed=result.guarantee,
        bound=one_run_trade_off_bound(found[attacker], **terms),
        others=(
            (attacker, one_run_lower_bound(found[attacker], **terms)),
            (other, one_run_trade_off_bound(found[other], **terms)),
            (other, one_run_lower_bound(found[other], **terms)),
        ),
        attacker=attacker,
        canaries=canaries if isinstance(canaries, str) else "your own",
        # Whether the plan's own curve makes so many right guesses too unlikely.
        claim_rejected=rejects_curve(
            found[attacker], plan_family(plan).least_false_positive_rate(1.0), alpha=1 - confidence
        ),
        checks=watcher.checks(),
        scores=scores[attacker],
        present=present,
        seconds=seconds,
    )


def plan_family(plan: Plan) -> EventTradeOffFamily:
    """The trade-off curves of a plan with its noise scaled; strength 1 is the plan."""
    return EventTradeOffFamily(
        event=lambda factor: replace(plan, noise_multiplier=scale_schedule(plan.noise_multiplier, factor)).event(),
        name="the plan's, with other noise",
        neighboring_relation=plan.neighboring_relation,
    )
