"""Gaussian noise correlated over the steps of a run: its scale and its events (floor 1)."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Composed, Event, Gaussian, MatrixGaussian, Nothing, PoissonSampled, SelfComposed
from sordino.mechanisms.correlated.participation import CyclicPoisson, Participation
from sordino.mechanisms.correlated.sensitivity import sensitivity
from sordino.mechanisms.correlated.strategies import Strategy, fingerprint

if TYPE_CHECKING:
    from sordino.mechanisms.correlated.noise import CorrelatedNoise

__all__ = ["CorrelatedGaussianMechanism"]


@dataclass(frozen=True, kw_only=True)
class CorrelatedGaussianMechanism:
    """Adds C⁻¹Z to the gradients of a run, Z white with standard deviation noise_multiplier · sensitivity(C) · Δ.

    Guarantee: all steps together are `event()`, when one privacy unit moves the value of every step that it takes
    part in by at most `l2_sensitivity` in ℓ2 norm under the declared relation, and takes part only as `participation`
    says; later gradients may depend on earlier noisy ones.

    Args:
        strategy: C.
        participation: in which steps one unit can take part; the sampler must keep it.
        noise_multiplier: standard deviation of Z over the sensitivity of CG, ≥ 0. Under `CyclicPoisson` it is over the
            sensitivity of one participation. Zero is for debugging: ε is ∞.
        l2_sensitivity: Δ > 0 of one step's value.

    Raises:
        InvalidArgument: the strategy has no known sensitivity under the participation.

    Example:
        >>> from sordino.mechanisms.correlated import EveryEpoch, optimal_banded
        >>> mechanism = CorrelatedGaussianMechanism(
        ...     strategy=optimal_banded(16, steps=64), participation=EveryEpoch(steps_per_epoch=16),
        ...     noise_multiplier=3.0, l2_sensitivity=1.0)
        >>> round(mechanism.sensitivity, 6), round(mechanism.stddev, 6)
        (2.0, 6.0)

    References:
        Denisov et al. 2022, theorem 2.1 (adaptive gradients). Choquette-Choo et al. 2023, theorem 4 (cycles).
    """

    strategy: Strategy
    participation: Participation
    noise_multiplier: float
    l2_sensitivity: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)
        assert self.sensitivity > 0

    @cached_property
    def sensitivity(self) -> float:
        """Sensitivity of C under the participation (of one participation under `CyclicPoisson`)."""
        return sensitivity(self.strategy, self.participation)

    @property
    def stddev(self) -> float:
        """Standard deviation of Z."""
        return self.noise_multiplier * self.sensitivity * self.l2_sensitivity

    @property
    def fingerprint(self) -> str:
        """A hash of all that a saved stream depends on."""
        return f"{fingerprint(self.strategy)} {self.participation!r} {self.noise_multiplier!r} {self.l2_sensitivity!r}"

    def event(self, steps: int | None = None) -> Event:
        """The event of the whole run, or of its first `steps` steps when it ended there.

        There is none for single steps: charge the run before its first step.
        """
        steps = self.strategy.steps if steps is None else checks.integer(0, steps=steps)
        if steps > self.strategy.steps:
            raise InvalidArgument(f"steps must be at most {self.strategy.steps}, got {steps}. Use a longer strategy.")
        if steps == 0:
            return Nothing()
        if isinstance(self.participation, CyclicPoisson):
            return SelfComposed(event=self._cycle(), count=self.participation.most(steps))
        part = self.sensitivity
        if steps < self.strategy.steps:
            part = min(part, sensitivity(self.strategy.leading(steps), self.participation))
        return MatrixGaussian(noise_multiplier=self.noise_multiplier * self.sensitivity, sensitivity=part)

    def branch_event(self, step: int) -> Event:
        """What one more continuation from a state saved before `step` costs, on top of what is charged already.

        A saved state that is continued once costs nothing of its own. When it is continued again, or when steps after
        the state were carried out and then lost, the later rows of CG are released twice, with fresh draws.
        """
        steps = self.strategy.steps
        if checks.integer(0, step=step) >= steps:
            return Nothing()
        if not isinstance(self.participation, CyclicPoisson):
            return self.event()
        # The participation whose column reaches over the cut has had its coin tossed: it counts without sampling.
        rest = SelfComposed(event=self._cycle(), count=self.participation.most(steps - step))
        return Composed(events=(Gaussian(noise_multiplier=self.noise_multiplier), rest))

    def _cycle(self) -> Event:
        assert isinstance(self.participation, CyclicPoisson)
        one = Gaussian(noise_multiplier=self.noise_multiplier)
        rate = self.participation.group_rate
        return one if rate == 1 else PoissonSampled(sample_rate=rate, event=one)

    def start(self) -> "CorrelatedNoise":
        """The stream of a run's noise, from step 0; it holds buffers, so every run needs its own."""
        from sordino.mechanisms.correlated.noise import CorrelatedNoise

        return CorrelatedNoise(self)
