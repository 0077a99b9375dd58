"""Correlated noise in a plan: the correlation, when a record takes part, and the sampler that keeps it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import Event
from sordino.mechanisms.correlated import (
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    FixedEpochOrder,
    MinSeparation,
    NoiseCandidate,
    Participation,
    SingleParticipation,
    Strategy,
    choose_correlated_noise,
    participation_from_dict,
    participation_to_dict,
    strategy_from_dict,
    strategy_to_dict,
)
from sordino.mechanisms.correlated.strategies import strategy_digest
from sordino.sampling import CyclicPoissonSampling, FixedBatchSampling

# Each band but the first is a copy of the trained parameters in memory.
_MOST_BANDS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class CorrelatedNoise:
    """Noise that takes some of the earlier steps' noise back: less of it is left in the model for the same privacy.

    Guarantee: none of its own. A plan that holds it draws the batches that `participation` allows, adds the noise of
    `strategy`, and is charged for the run as a whole or cycle by cycle.

    Args:
        strategy: the correlation, for exactly the plan's number of steps.
        participation: in which steps one unit can be. `CyclicPoisson` draws from one group a step; the others take
            fixed batches and need ``poisson_sampling=False``.

    Example:
        >>> from sordino.mechanisms.correlated import CyclicPoisson, optimize_banded
        >>> noise = CorrelatedNoise(
        ...     strategy=optimize_banded(4, steps=20), participation=CyclicPoisson(groups=4, sample_rate=0.1))
        >>> CorrelatedNoise.from_dict(noise.to_dict()) == noise
        True

    References:
        Denisov et al. 2022, theorem 2.1; Choquette-Choo et al. 2023, algorithm 2 and theorem 4.
    """

    strategy: Strategy
    participation: Participation

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise InvalidArgument(
                f"strategy must be one of sordino.mechanisms.correlated, got {type(self.strategy).__name__}. "
                "Give optimize_banded(8, steps=…)."
            )
        if not isinstance(self.participation, Participation):
            raise InvalidArgument(
                f"participation must be one of sordino.mechanisms.correlated, got {type(self.participation).__name__}. "
                "Give CyclicPoisson(groups=8, sample_rate=…)."
            )

    @cached_property
    def _key(self) -> tuple[str, Participation]:
        return strategy_digest(self.strategy), self.participation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CorrelatedNoise) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def mechanism(self, *, noise_multiplier: float, l2_sensitivity: float) -> CorrelatedGaussianMechanism:
        """The noise of a whole run, which one unit moves by `l2_sensitivity` in each of its steps."""
        return CorrelatedGaussianMechanism(
            strategy=self.strategy,
            participation=self.participation,
            noise_multiplier=noise_multiplier,
            l2_sensitivity=l2_sensitivity,
        )

    def sampling(
        self, *, sample_rate: float, steps: int, poisson_sampling: bool
    ) -> CyclicPoissonSampling | FixedBatchSampling:
        """The sampler that keeps the participation.

        Raises:
            InvalidArgument: the strategy has another number of steps.
            UnknownSampler: these batches would break the participation.
        """
        if self.strategy.steps != steps:
            raise InvalidArgument(
                f"steps must be those of the noise's strategy, {self.strategy.steps}, got {steps}. Build the strategy "
                "for the plan's steps."
            )
        if isinstance(self.participation, CyclicPoisson):
            return self._cyclic(self.participation, sample_rate, poisson_sampling)
        if poisson_sampling and sample_rate < 1:
            raise UnknownSampler(
                f"participation must be CyclicPoisson with Poisson sampling, got {self.participation!r}: a record "
                "could be in any step. Pass poisson_sampling=False for fixed batches, or use CyclicPoisson."
            )
        epoch = max(1, round(1 / sample_rate))
        self._check_epochs(self.participation, epoch, steps)
        return FixedBatchSampling(steps_per_epoch=epoch)

    @staticmethod
    def _cyclic(participation: CyclicPoisson, sample_rate: float, poisson_sampling: bool) -> CyclicPoissonSampling:
        if not poisson_sampling:
            raise UnknownSampler(
                "participation must be FixedEpochOrder, MinSeparation or SingleParticipation without "
                "Poisson sampling, got "
                "CyclicPoisson. Pass poisson_sampling=True."
            )
        if participation.sample_rate != sample_rate:
            raise InvalidArgument(
                f"sample_rate must be that of the noise's participation, {participation.sample_rate!r}, got "
                f"{sample_rate!r}. Build CyclicPoisson with the plan's rate."
            )
        return CyclicPoissonSampling(groups=participation.groups, sample_rate=sample_rate)

    @staticmethod
    def _check_epochs(
        participation: SingleParticipation | MinSeparation | FixedEpochOrder, epoch: int, steps: int
    ) -> None:
        """Fixed batches: a record's steps are exactly `epoch` apart."""
        most = -(-steps // epoch)
        match participation:
            case FixedEpochOrder():
                kept = participation.steps_per_epoch == epoch
            case MinSeparation():
                allowed = most if participation.participations is None else participation.participations
                kept = participation.min_separation <= epoch and allowed >= most
            case SingleParticipation():
                kept = most <= 1
        if not kept:
            raise UnknownSampler(
                f"participation must allow {most} participations of a record, {epoch} steps apart (an epoch has "
                f"round(1/sample_rate) batches), got {participation!r}. Use FixedEpochOrder(steps_per_epoch={epoch})."
            )

    def to_dict(self) -> dict[str, object]:
        """The noise as plain JSON types."""
        return {
            "strategy": strategy_to_dict(self.strategy),
            "participation": participation_to_dict(self.participation),
        }

    @classmethod
    def from_dict(cls, body: object) -> "CorrelatedNoise":
        """What `to_dict` wrote; anything else raises `InvalidArgument`."""
        if not isinstance(body, dict) or set(body) != {"strategy", "participation"}:
            raise InvalidArgument(
                "correlated_noise must hold a strategy and a participation, got other fields. Check the file."
            )
        return cls(
            strategy=strategy_from_dict(body["strategy"]), participation=participation_from_dict(body["participation"])
        )


def choose_noise(
    *,
    steps: int,
    sample_rate: float,
    l2_sensitivity: float,
    calibrate: Callable[[Callable[[float], Event]], float],
    momentum: float = 0.0,
) -> tuple[CorrelatedNoise | None, float]:
    """Independent noise or the number of bands that leaves the least noise in the model, and its noise multiplier.

    Compared is the root mean square over the steps of the noise in the model's position, at learning rate 1. Powers of
    two up to 64 bands are tried. Nothing private is looked at.

    Args:
        steps: ≥ 1.
        sample_rate: in (0, 1].
        l2_sensitivity: of one step's clipped sum.
        calibrate: (noise multiplier ↦ event) ↦ the noise multiplier that meets the target.
        momentum: of the optimizer, in [0, 1).

    Returns:
        None for independent noise, otherwise the noise under `CyclicPoisson`; and the noise multiplier.
    """
    largest = min(steps, int(1 / sample_rate + 1e-9), _MOST_BANDS)
    bands = [2**power for power in range(largest.bit_length())]
    best: NoiseCandidate = choose_correlated_noise(
        steps=steps,
        sample_rate=sample_rate,
        calibrate=calibrate,
        l2_sensitivity=l2_sensitivity,
        momentum=momentum,
        bands=bands,
    )[0]
    if best.bands == 1:
        return None, best.mechanism.noise_multiplier
    noise = CorrelatedNoise(strategy=best.mechanism.strategy, participation=best.mechanism.participation)
    return noise, best.mechanism.noise_multiplier
