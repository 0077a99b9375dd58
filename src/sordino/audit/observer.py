"""What an audit sees of a training, step by step (room `audit`, floor 4): released gradients, and nothing else."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sordino.audit.canaries import GradientCanaries, RecordCanaries
from sordino.clipping import FlatClipping
from sordino.training.plan import Plan

__all__ = ["Check", "Watcher"]

# Of a normal law: a sound training fails one of three checks in two million.
_DEVIATIONS = 5.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """A statistic whose law is known when the training does what its plan says.

    Args:
        name: what is checked.
        expected: the statistic's mean.
        measured: the statistic.
        tolerance: how far it may be off.
        passed: whether it is not.
    """

    name: str
    expected: float
    measured: float
    tolerance: float
    passed: bool


class Watcher:
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
        now = self._plan.at(self._step)
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

        Empty where the plan's clipping, noise or batches have other laws than these.
        """
        plan = self._plan
        standard = (
            type(plan.clipping) is FlatClipping
            and plan.noise is None
            and plan.is_private
            and plan.neighboring_relation.sensitivity_factor == 1
        )
        if not isinstance(self._canaries, GradientCanaries) or not standard or not self._pairs:
            return ()
        entries = self._step * int(self._present.sum())
        steps = [plan.at(step) for step in range(self._step)]
        # A present canary's entry, over its mean q: variance z²/q² of the noise and (1 − q)/q of the sampling.
        variance = max((one.noise_multiplier**2 + 1) / one.sample_rate**2 for one in steps)
        spread = math.sqrt(variance / max(entries, 1))
        return (
            _check("noise has the declared variance", 1.0, self._noise / self._noises, math.sqrt(2 / self._noises)),
            _check("noise is new in every step", 0.0, self._repeats / self._pairs, 1 / math.sqrt(self._pairs)),
            _check("a canary weighs what clipping allows", 1.0, self._weight / max(entries, 1), spread),
        )


def _check(name: str, expected: float, measured: float, deviation: float) -> Check:
    tolerance = _DEVIATIONS * deviation
    return Check(
        name=name,
        expected=expected,
        measured=measured,
        tolerance=tolerance,
        passed=bool(abs(measured - expected) <= tolerance),
    )
