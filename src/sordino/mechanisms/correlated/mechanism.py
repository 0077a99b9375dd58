"""Gaussian noise correlated over the steps of a run: its scale and its events."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Composed, Event, Gaussian, MatrixGaussian, NoOp, PoissonSampled, SelfComposed
from sordino.mechanisms.correlated.sensitivity import (
    CyclicPoisson,
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    sensitivity,
)
from sordino.mechanisms.correlated.strategies import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    DenseStrategy,
    IndependentNoise,
    Strategy,
    strategy_digest,
)

if TYPE_CHECKING:
    from sordino.mechanisms.correlated.noise_stream import CorrelatedNoiseStream


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
        >>> from sordino.mechanisms.correlated import FixedEpochOrder, optimize_banded
        >>> mechanism = CorrelatedGaussianMechanism(
        ...     strategy=optimize_banded(16, steps=64), participation=FixedEpochOrder(steps_per_epoch=16),
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
        return (
            f"{strategy_digest(self.strategy)} {self.participation!r} {self.noise_multiplier!r} {self.l2_sensitivity!r}"
        )

    def event(self, steps: int | None = None) -> Event:
        """The event of the whole run, or of its first `steps` steps when it ended there.

        There is none for single steps: charge the run before its first step.
        """
        steps = self.strategy.steps if steps is None else checks.integer(0, steps=steps)
        if steps > self.strategy.steps:
            raise InvalidArgument(f"steps must be at most {self.strategy.steps}, got {steps}. Use a longer strategy.")
        if steps == 0:
            return NoOp()
        if isinstance(self.participation, CyclicPoisson):
            return SelfComposed(event=self._cycle(), count=self.participation.max_participations(steps))
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
            return NoOp()
        if not isinstance(self.participation, CyclicPoisson):
            return self.event()
        # The participation whose column reaches over the cut has had its coin tossed: it counts without sampling.
        rest = SelfComposed(event=self._cycle(), count=self.participation.max_participations(steps - step))
        return Composed(events=(Gaussian(noise_multiplier=self.noise_multiplier), rest))

    def _cycle(self) -> Event:
        assert isinstance(self.participation, CyclicPoisson)
        one = Gaussian(noise_multiplier=self.noise_multiplier)
        rate = self.participation.group_rate
        return one if rate == 1 else PoissonSampled(sample_rate=rate, event=one)

    def start(self) -> "CorrelatedNoiseStream":
        """The stream of a run's noise, from step 0; it holds buffers, so every run needs its own."""
        from sordino.mechanisms.correlated.noise_stream import CorrelatedNoiseStream

        return CorrelatedNoiseStream(self)


# ----------------------------------------------------------------------------------------------------------------------
# Strategies and participations as plain JSON types, for plans that are written down.
# ----------------------------------------------------------------------------------------------------------------------


_STRATEGIES: dict[str, type] = {
    "independent": IndependentNoise,
    "banded": BandedToeplitz,
    "banded_inverse": BandedInverse,
    "buffered": BufferedToeplitz,
    "tree": BinaryTree,
    "dense": DenseStrategy,
}
_PARTICIPATIONS: dict[str, type] = {
    "single": SingleParticipation,
    "min_separation": MinSeparation,
    "every_epoch": FixedEpochOrder,
    "cyclic_poisson": CyclicPoisson,
}


def strategy_to_dict(strategy: Strategy) -> dict[str, object]:
    """The strategy with its kind; numbers keep all their digits.

    Example:
        >>> strategy_to_dict(BandedToeplitz(coefficients=(1.0, 0.5), steps=9))
        {'kind': 'banded', 'coefficients': [1.0, 0.5], 'steps': 9}
    """
    return _to_dict(strategy, _STRATEGIES)


def strategy_from_dict(body: object) -> Strategy:
    """What `strategy_to_dict` wrote. Unknown kinds, missing and surplus fields raise `InvalidArgument`."""
    return cast("Strategy", _from_dict(body, _STRATEGIES, "strategy"))


def participation_to_dict(participation: Participation) -> dict[str, object]:
    """The participation with its kind.

    Example:
        >>> participation_to_dict(CyclicPoisson(groups=8, sample_rate=0.01))
        {'kind': 'cyclic_poisson', 'groups': 8, 'sample_rate': 0.01}
    """
    return _to_dict(participation, _PARTICIPATIONS)


def participation_from_dict(body: object) -> Participation:
    """What `participation_to_dict` wrote. Unknown kinds, missing and surplus fields raise `InvalidArgument`."""
    return cast("Participation", _from_dict(body, _PARTICIPATIONS, "participation"))


def _to_dict(value: object, kinds: dict[str, type]) -> dict[str, object]:
    kind = next(name for name, member in kinds.items() if type(value) is member)
    body: dict[str, object] = {"kind": kind}
    for item in fields(kinds[kind]):
        entry = getattr(value, item.name)
        body[item.name] = entry.tolist() if isinstance(entry, np.ndarray) else entry
        if isinstance(entry, tuple):
            body[item.name] = list(entry)
    return body


def _from_dict(body: object, kinds: dict[str, type], what: str) -> object:
    member = kinds.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if member is None or not isinstance(body, dict):
        raise InvalidArgument(f"{what} must be one of {', '.join(kinds)} with its fields, got another. Check the file.")
    given = {name: value for name, value in body.items() if name != "kind"}
    expected = {item.name for item in fields(member)}
    if set(given) != expected:
        raise InvalidArgument(
            f"fields of {what} {body['kind']} must be {sorted(expected)}, got {sorted(given)}. Check the file."
        )
    return cast("Callable[..., object]", member)(
        **{name: _numbers(value, member) if isinstance(value, list) else value for name, value in given.items()}
    )


def _numbers(value: list[object], member: type) -> object:
    return np.asarray(value, dtype=np.float64) if member is DenseStrategy else tuple(value)
