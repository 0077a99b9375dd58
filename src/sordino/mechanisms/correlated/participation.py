"""Participation: in which steps one record can take part (floor 1).

The sensitivity of a strategy depends on it, and so does the event. A participation is a promise about the batches:
the sampler must keep it.
"""

from dataclasses import dataclass

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["CyclicPoisson", "EveryEpoch", "MinSeparation", "Participation", "SingleParticipation"]


@dataclass(frozen=True, kw_only=True)
class SingleParticipation:
    """Each record takes part in at most one step: one pass over the data."""

    @property
    def separation(self) -> int:
        """Nothing is promised between participations, as there is one."""
        return 1

    def most(self, steps: int) -> int:  # noqa: ARG002
        """Once."""
        return 1


@dataclass(frozen=True, kw_only=True)
class MinSeparation:
    """Participations of a record are at least `separation` steps apart: steps i < j with j − i ≥ separation.

    Args:
        separation: ≥ 1.
        participations: how often a record takes part at most; None is as often as the steps allow.
    """

    separation: int
    participations: int | None = None

    def __post_init__(self) -> None:
        checks.integer(1, separation=self.separation)
        if self.participations is not None:
            checks.integer(1, participations=self.participations)

    def most(self, steps: int) -> int:
        """The most participations in `steps` steps."""
        fits = -(-steps // self.separation)
        return fits if self.participations is None else min(fits, self.participations)


@dataclass(frozen=True, kw_only=True)
class EveryEpoch:
    """Batches are dealt once and come in the same order every epoch: a record is in steps j, j + e, j + 2e, ….

    Which batch a record is in must depend on that record alone, or the neighbouring relation must keep the others where
    they are (replace-one, zero-out).

    Args:
        steps_per_epoch: e ≥ 1.
    """

    steps_per_epoch: int

    def __post_init__(self) -> None:
        checks.integer(1, steps_per_epoch=self.steps_per_epoch)

    @property
    def separation(self) -> int:
        """One epoch."""
        return self.steps_per_epoch

    def most(self, steps: int) -> int:
        """Once an epoch."""
        return -(-steps // self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Records are in `groups` fixed groups; step t draws from group t mod groups alone, each record by its own coin.

    Which group a record belongs to must depend on that record alone (or on chance of its own), never on how many others
    there are.

    Args:
        groups: ≥ 1; 1 is ordinary Poisson sampling.
        sample_rate: the part of *all* records in an expected batch, in (0, 1/groups]. A member of the group
            whose turn it is joins with probability groups · sample_rate.

    References:
        Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", algorithm 2 and theorem 4.
    """

    groups: int
    sample_rate: float

    def __post_init__(self) -> None:
        checks.integer(1, groups=self.groups)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        if self.groups * self.sample_rate > 1 + 1e-9:
            raise InvalidArgument(
                f"sample_rate must be at most 1/groups ({1 / self.groups:.6g}), got {self.sample_rate!r}. A batch "
                "comes from one group: use fewer groups or smaller batches."
            )

    @property
    def separation(self) -> int:
        """One cycle."""
        return self.groups

    @property
    def group_rate(self) -> float:
        """The probability that a member of the group whose turn it is joins the batch."""
        return min(1.0, self.groups * self.sample_rate)

    def most(self, steps: int) -> int:
        """Once a cycle."""
        return -(-steps // self.groups)


Participation = SingleParticipation | MinSeparation | EveryEpoch | CyclicPoisson
