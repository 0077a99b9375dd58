"""What one run of a search may spend, and the score it is judged by (floor 5)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import ApproximateDP, Event, Gaussian, PoissonSampled, compose
from sordino.mechanisms.continuous import laplace, normal
from sordino.randomness import Randomness, Stream

__all__ = ["Budget", "PrivateScore", "Share"]

RunEvent = Callable[[float], Event]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one run may spend on the records, without its score, which the search pays itself.

    Args:
        event: what the training of one run does at most. Every run must, whatever its settings are.
        epsilon: ε of the training, or None when `noise_multiplier` says what to do.
        delta: δ of the training, or None.
        noise_multiplier: of the training, when the search was given ``run=``; otherwise None.
        seed: None, or in a repeatable search a number of this run's own.
        sample_rate: of the records that this run may read; 1 for all.
    """

    event: Event
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    seed: int | None = None
    sample_rate: float = 1.0
    _mask: Callable[[], Stream] = field(default=lambda: Randomness().fresh("subset"), repr=False, compare=False)

    def subset(self, records: int) -> npt.NDArray[np.bool_]:
        """Which of so many records this run may read, each by a coin of its own; the same for every call of a run."""
        checks.integer(0, records=records)
        if self.sample_rate == 1:
            return np.ones(records, dtype=np.bool_)
        return self._mask().uniform(records) < self.sample_rate


@dataclass(frozen=True, kw_only=True)
class PrivateScore:
    """A score that is computed on the private records: the search adds noise to it, and pays for that in every run.

    The noise's scale is `noise_multiplier` × `sensitivity`: Laplace beside runs with an (ε, δ) of their own, Gaussian
    beside runs with a noise multiplier.

    Guarantee: the noisy score of one run is private as ``event(…)`` says when one privacy unit moves the score by at
    most `sensitivity`, for every model that a run may give. A number of right answers moves by 1.

    Args:
        noise_multiplier: > 0; for right answers, the noise in records. 30 is little for thousands of records.
        sensitivity: > 0.
    """

    noise_multiplier: float = 30.0
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(sensitivity=self.sensitivity)

    def noisy(self, score: float, stream: Stream, *, gaussian: bool) -> float:
        """The score with its noise."""
        draw = normal if gaussian else laplace
        return score + self.noise_multiplier * self.sensitivity * float(draw(1, stream)[0])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How a search spends: the event of one run at a noise level z, and the largest budget a run can have.

    Args:
        epsilon: of everything, > 0.
        delta: of everything, in (0, 1).
        divides: by how much δ is divided between runs.
        run: None when a run is only known by its (ε, δ); otherwise noise multiplier ↦ the event of its training.
        score: None for scores on public records.
        subsample: probability that a record may be read by a run.
        relation: the neighbouring relation.
        accountant: a name, or ``auto``.
    """

    epsilon: float
    delta: float
    divides: float
    run: RunEvent | None
    score: PrivateScore | None
    subsample: float
    relation: NeighboringRelation
    accountant: str = "auto"

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.probability(zero=False, subsample=self.subsample)
        if self.subsample < 1 and self.relation is NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                "subsample must be 1 under replace-one, got less: no amplification of a whole training is known there. "
                "Use add-or-remove-one."
            )

    @property
    def run_delta(self) -> float:
        """δ of one run that is known by (ε, δ): all runs' together fit what a Rényi account keeps for such events."""
        return self.delta / (9 * self.divides)

    def training(self, noise: float) -> Event:
        """What one run's training does at noise level z; without ``run=`` z is 1/ε of training and score together."""
        if self.run is not None:
            return self.run(noise)
        return ApproximateDP(epsilon=1 / noise - self._score_epsilon, delta=self.run_delta)

    @property
    def _score_epsilon(self) -> float:
        return 0.0 if self.score is None else 1 / self.score.noise_multiplier

    def whole(self, noise: float) -> Event:
        """What one run does at noise level z: training and score, on its sample."""
        if self.run is None:
            event: Event = ApproximateDP(epsilon=1 / noise, delta=self.run_delta)
        elif self.score is None:
            event = self.run(noise)
        else:
            event = compose([self.run(noise), Gaussian(noise_multiplier=self.score.noise_multiplier)])
        return PoissonSampled(sample_rate=self.subsample, event=event) if self.subsample < 1 else event

    def least_noise(self, everything: Callable[[Event], Event]) -> float:
        """The least z with which everything that the runs do stays within the budget.

        Raises:
            InvalidArgument: the score alone takes all that one run may spend.
            AccountingError: no amount of noise is enough.
        """
        noise = accounting.calibrate_noise_multiplier(
            lambda z: everything(self.whole(z)),
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            relation=self.relation,
            accountant=self.accountant,
        )
        if self.run is None and 1 / noise <= self._score_epsilon * (1 + 1e-9):
            raise InvalidArgument(
                f"score must leave something of a run's ε, got noise multiplier {1 / self._score_epsilon:g}, which "
                "takes all. Add noise to the score, or raise target_epsilon."
            )
        return noise

    def share(self, noise: float, *, seed: int | None = None, mask: Callable[[], Stream] | None = None) -> Share:
        """What a run at noise level z is given."""
        event = self.training(noise)
        known = event if isinstance(event, ApproximateDP) and self.run is None else None
        parts = {} if mask is None else {"_mask": mask}
        return Share(
            event=event,
            epsilon=None if known is None else known.epsilon,
            delta=None if known is None else known.delta,
            noise_multiplier=noise if known is None else None,
            seed=seed,
            sample_rate=self.subsample,
            **parts,
        )


def declared_budget(target_epsilon: float | None, delta: float | None) -> tuple[float, float]:
    """(ε, δ) of everything, which must be said."""
    if target_epsilon is None or delta is None:
        raise MissingDeclaration("target_epsilon and delta must be declared, of everything together. Give both.")
    return checks.positive(target_epsilon=target_epsilon), checks.probability(zero=False, one=False, delta=delta)
