"""The interfaces of accountants and of privacy filters, which the files of this package implement."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, BudgetExceeded, SordinoError, UnsupportedEvent
from sordino.events import (
    BoundedRange,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    NonPrivate,
    NoOp,
    ParallelComposed,
    PoissonSampled,
    ProjectedGaussian,
    RandomAllocation,
    RepeatAndSelect,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    ShuffledEpochs,
    TruncatedPoissonSampled,
)

_Prepared = TypeVar("_Prepared")
_Loss = TypeVar("_Loss")


# ----------------------------------------------------------------------------------------------------------------------
# The answer of every accountant: an interval that contains the truth.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range that contains the true ε (or δ) of an event; `upper` is the number to report.

    An accountant that proves an upper bound only, such as Rényi accounting, gives `lower` = 0.

    Args:
        lower: nothing smaller than this can be the truth, ≥ 0.
        upper: nothing larger than this can be the truth; ∞ when there is no guarantee.
        accountant: name of the accountant that proved both ends.

    Raises:
        AccountingError: an end is NaN or negative, or the ends are in the wrong order.

    Example:
        >>> Interval(lower=0.9, upper=1.0, accountant="contour").width < 0.11
        True
    """

    lower: float
    upper: float
    accountant: str

    def __post_init__(self) -> None:
        if math.isnan(self.lower) or math.isnan(self.upper) or not 0 <= self.lower <= self.upper:
            raise AccountingError(
                f"interval of {self.accountant} must have 0 ≤ lower ≤ upper, got [{self.lower!r}, {self.upper!r}]. "
                "Use another accountant and report the event."
            )

    @property
    def width(self) -> float:
        """`upper` − `lower`, the certified error."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower


# ----------------------------------------------------------------------------------------------------------------------
# What an accountant is: the one interface, which the files of this package implement.
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def double_precision(what: str) -> Iterator[None]:
    """Report arithmetic that leaves the doubles as `AccountingError`: an accountant that can't compute has no answer.

    Floating-point warnings are off inside: tails underflow, and errors are bounded, not signalled.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except SordinoError:
        raise
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise AccountingError(
            f"{what} must be computable in double precision, got an intermediate result beyond it. Ask another "
            "accountant, or for less extreme values."
        ) from error


class Accountant(ABC, Generic[_Prepared]):
    """Turns an event into ε or δ, soundly, or refuses.

    A subclass says what it needs of the steps, and bounds ε and δ from that.

    Guarantee:
        The true ε (δ) of every mechanism that the event describes lies in the returned interval, under the
        relation given. An event that the accountant can't bound raises `UnsupportedEvent`; an input where its
        own numerical error can't be bounded raises `AccountingError`.
    """

    name: ClassVar[str]
    """The name under which the accountant is chosen and reported."""
    automatic: ClassVar[bool] = True
    """Whether ``auto`` may use it: sound, and not dominated by another accountant everywhere."""

    @abstractmethod
    def prepare(self, steps: "EventCounts", neighboring_relation: NeighboringRelation) -> _Prepared | None:
        """What both bounds are computed from; None where there is no sound answer.

        Raises:
            UnsupportedEvent: there is none for a step.
        """

    @abstractmethod
    def epsilon_bounds(self, prepared: _Prepared, delta: float) -> tuple[float, float]:
        """[lower, upper] on ε at δ."""

    @abstractmethod
    def delta_bounds(self, prepared: _Prepared, epsilon: float) -> tuple[float, float]:
        """[lower, upper] on δ at ε."""

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Whether this accountant has a sound answer for the event under the relation."""
        try:
            return _prepared(self, event, neighboring_relation) is not None
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The smallest ε for which the event is (ε, `delta`)-private, as an interval."""
        return self._interval(event, neighboring_relation, lambda prepared: self.epsilon_bounds(prepared, delta))

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The smallest δ for which the event is (`epsilon`, δ)-private, as an interval."""
        return self._interval(event, neighboring_relation, lambda prepared: self.delta_bounds(prepared, epsilon))

    def refusal(self, event: Event, neighboring_relation: NeighboringRelation) -> UnsupportedEvent:
        """What is raised where there is no sound answer."""
        return UnsupportedEvent(
            f"event must be supported by the {self.name} accountant under {neighboring_relation.describe()}, got "
            f"{event.kind}. Choose accountant='auto'."
        )

    def _interval(
        self,
        event: Event,
        neighboring_relation: NeighboringRelation,
        bounds: Callable[[_Prepared], tuple[float, float]],
    ) -> Interval:
        prepared = _prepared(self, event, neighboring_relation)
        if prepared is None:
            raise self.refusal(event, neighboring_relation)
        lower, upper = bounds(prepared)
        return Interval(lower=lower, upper=upper, accountant=self.name)


@lru_cache(maxsize=16)  # one answer asks whether an event is supported, and then for its bounds
def _prepared(accountant: Accountant[_Prepared], event: Event, relation: NeighboringRelation) -> _Prepared | None:
    return accountant.prepare(flatten(event, relation), relation)


def worst_direction(bounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The larger of several directions: both ends are maxima."""
    return max(low for low, _ in bounds), max(high for _, high in bounds)


# ----------------------------------------------------------------------------------------------------------------------
# From a tree of events to a flat list of distinct steps with counts.
#
# Composition of independent steps, adaptively chosen results included, is the sum of their losses, so the order and the
# nesting of `Composed` and `SelfComposed` don't matter. Sampling does not distribute over composition: several
# mechanisms on *one* sample are one step.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_INVERSE_NOISE = 1e150
# More noise than this is counted as this much, from above: squares of what is left must be doubles.
_LARGEST_NOISE = 1e100
_LARGEST_COUNT = 10**300
_LARGEST_ALTERNATIVES = 256


@dataclass(frozen=True, kw_only=True)
class EventCounts:
    """Distinct steps and how often each happened.

    Args:
        counts: each base event with its count ≥ 1. Samples have 0 < rate < 1 and one mechanism inside.
        non_private: whether some step had no protection at all, so that ε = ∞.
        upper_bound_only: whether the steps only bound the event from above, so that no lower end may be claimed.
    """

    counts: tuple[tuple[Event, int], ...]
    non_private: bool = False
    upper_bound_only: bool = False

    @property
    def total(self) -> int:
        """Number of steps."""
        return sum(count for _, count in self.counts)

    @property
    def empty(self) -> bool:
        """Whether no data were touched."""
        return not self.counts and not self.non_private


class Repeated(NamedTuple, Generic[_Loss]):
    """One step's loss, as its distribution or its moment generating function, `count` times."""

    loss: _Loss
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] (hides a method of tuples)


class _Collector:
    """Walks one event tree."""

    def __init__(self, neighboring_relation: NeighboringRelation) -> None:
        self.neighboring_relation = neighboring_relation
        self.counts: dict[Event, int] = {}
        self.non_private = False
        self.upper_bound_only = False

    def collect(self, event: Event, count: int) -> None:
        """Adds the event's steps `count` times."""
        if count == 0 or isinstance(event, NoOp):
            return
        if count > _LARGEST_COUNT:
            # No double holds that many steps: nothing is promised, and nothing is claimed from below.
            self.non_private = self.upper_bound_only = True
            return
        match event:
            case NonPrivate():
                self.non_private = True
            case SelfComposed():
                self.collect(event.event, count * event.count)
            case Composed():
                for part in event.events:
                    self.collect(part, count)
            case MatrixGaussian():
                if event.sensitivity > 0:
                    with np.errstate(over="ignore", under="ignore"):
                        ratio = float(np.float64(event.noise_multiplier) / event.sensitivity)
                    self.upper_bound_only = self.upper_bound_only or ratio > _LARGEST_NOISE
                    self.collect(Gaussian(noise_multiplier=min(ratio, _LARGEST_NOISE)), count)
            case ShuffledEpochs():
                self._shuffled(event, count)
            case GaussianMixture():
                self._mixture(event, count)
            case PoissonSampled() | GroupPoissonSampled() if event.sample_rate == 0:
                pass
            case SampledWithoutReplacement() | SampledWithReplacement() if event.sample_size == 0:
                pass
            case PoissonSampled():
                self._poisson(event, count)
            case SampledWithoutReplacement() | SampledWithReplacement() | GroupPoissonSampled() | RandomAllocation():
                self._sampled(event, count)
            case ParallelComposed() | TruncatedPoissonSampled():
                raise UnsupportedEvent(
                    f"{event.kind} must not be inside a sample, a selection or an allocation. "
                    "Put the sampling inside its parts."
                )
            case _:
                self._base(event, count)

    def _base(self, event: Event, count: int) -> None:
        noise = math.inf
        if isinstance(event, Gaussian | Laplace | ProjectedGaussian):
            noise = event.noise_multiplier
        elif isinstance(event, DiscreteGaussian):
            noise = event.stddev
        elif isinstance(event, DiscreteLaplace):
            noise = event.scale
        if noise * _LARGEST_INVERSE_NOISE < 1:
            self.non_private = True
            return
        if _LARGEST_NOISE < noise < math.inf:
            event, self.upper_bound_only = _capped(event), True
        if isinstance(event, RepeatAndSelect) and _unprotected(event.event, self.neighboring_relation):
            self.non_private = self.upper_bound_only = True
            return
        # A bounded range says more than its pure ε, so that the pairs and moments used for it are bounds only.
        self.upper_bound_only = self.upper_bound_only or isinstance(
            event, BoundedRange | ProjectedGaussian | RepeatAndSelect
        )
        self.counts[event] = self.counts.get(event, 0) + count

    def _mixture(self, event: GaussianMixture, count: int) -> None:
        hit = {m for m, p in zip(event.sensitivities, event.probabilities, strict=True) if m > 0 and p > 0}
        if not hit:
            return
        if event.noise_multiplier * _LARGEST_INVERSE_NOISE < max(hit):
            # As for a sample: the record may be missed, so nothing is claimed from below.
            self.non_private = self.upper_bound_only = True
            return
        if max(hit) < event.noise_multiplier / _LARGEST_NOISE:
            self.upper_bound_only = True
            self.collect(Gaussian(noise_multiplier=_LARGEST_NOISE), count)
            return
        self.counts[event] = self.counts.get(event, 0) + count

    def _shuffled(self, event: ShuffledEpochs, count: int) -> None:
        if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedEvent(
                "shuffled epochs must be accounted under replace-one or zero-out, because adding a record moves others "
                "between batches. Set the relation, or sample with Poisson."
            )
        self.upper_bound_only = True
        self.collect(event.event, count * event.epochs)

    def _single(self, event: Event) -> Event | None:
        """The one mechanism inside a sample; several Gaussians count as one. None when there is nothing."""
        steps = flatten(event, self.neighboring_relation)
        if steps.non_private:
            # A sample may miss the record: the truth can be finite at δ ≥ rate, so nothing is claimed from below.
            self.non_private = self.upper_bound_only = True
            return None
        if steps.empty:
            return None
        if steps.total > 1:
            raise UnsupportedEvent(
                f"a sample must be used by one mechanism (Gaussians count as one), got {steps.total}. "
                "Draw a fresh sample for each mechanism."
            )
        self.upper_bound_only = self.upper_bound_only or steps.upper_bound_only
        return steps.counts[0][0]

    def _poisson(self, event: PoissonSampled, count: int) -> None:
        rate, inner = event.sample_rate, event.event
        if isinstance(inner, PoissonSampled):
            # Two independent Poisson draws, one inside the other, are one draw at the product of the rates.
            merged = PoissonSampled(sample_rate=rate * inner.sample_rate, event=inner.event)
            self.collect(merged, count)
        elif rate == 1:
            self.collect(inner, count)
        else:
            base = self._single(inner)
            if base is not None:
                step = PoissonSampled(sample_rate=rate, event=base)
                self.counts[step] = self.counts.get(step, 0) + count

    def _sampled(
        self,
        event: SampledWithoutReplacement | SampledWithReplacement | GroupPoissonSampled | RandomAllocation,
        count: int,
    ) -> None:
        base = self._single(event.event)
        match event:
            case _ if base is None:
                pass
            case RandomAllocation():
                self._allocated(event, base, count)
            case GroupPoissonSampled(group_size=1):
                self.collect(PoissonSampled(sample_rate=event.sample_rate, event=base), count)
            case _:
                step = replace(event, event=base)
                self.counts[step] = self.counts.get(step, 0) + count

    def _allocated(self, event: RandomAllocation, base: Event, count: int) -> None:
        """K of t steps: a random division into k blocks, one step in each, of which the division may be known.

        Uniform k-subsets are what one uniform step in each block of a random division gives, whatever the blocks'
        sizes, and δ is convex in the pair, so that k independent allocations bound it (Feldman and Shenfeld 2025).
        """
        size, longer = divmod(event.steps, event.participations)
        amplified = isinstance(base, Gaussian) and self.neighboring_relation is not NeighboringRelation.REPLACE_ONE
        self.upper_bound_only = self.upper_bound_only or event.participations > 1 or (size > 1 and not amplified)
        for steps, blocks in ((size, event.participations - longer), (size + 1, longer)):
            uses = count * blocks * event.epochs
            if uses and (steps == 1 or not amplified):
                self.counts[base] = self.counts.get(base, 0) + uses
            elif uses:
                step = RandomAllocation(steps=steps, participations=1, epochs=1, event=base)
                self.counts[step] = self.counts.get(step, 0) + uses


@lru_cache(maxsize=8)  # one answer asks for the same steps several times
def flatten(
    event: Event, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> EventCounts:
    """The steps of an event, with equal ones counted together and all unsampled Gaussians as one.

    Raises:
        UnsupportedEvent: a sample holds several mechanisms, or shuffling is asked about under add-or-remove.

    Example:
        >>> from sordino.events import Gaussian, SelfComposed
        >>> flatten(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=100)).counts
        ((Gaussian(noise_multiplier=1.0), 1),)
    """
    collector = _Collector(neighboring_relation)
    collector.collect(event, 1)
    counts = collector.counts
    steps = [(base, count) for base, count in counts.items() if not isinstance(base, Gaussian)]
    together = [(1 / base.noise_multiplier, count) for base, count in counts.items() if isinstance(base, Gaussian)]
    if together:
        # Relative to the largest, so that no square leaves the doubles.
        top = max(inverse for inverse, _ in together)
        precision = top * math.sqrt(math.fsum(count * (inverse / top) ** 2 for inverse, count in together))
        if precision > _LARGEST_INVERSE_NOISE:
            return EventCounts(counts=tuple(steps), non_private=True, upper_bound_only=collector.upper_bound_only)
        steps.insert(0, (Gaussian(noise_multiplier=1 / precision), 1))
    return EventCounts(
        counts=tuple(steps), non_private=collector.non_private, upper_bound_only=collector.upper_bound_only
    )


def _capped(event: Event) -> Event:
    """The event with `_LARGEST_NOISE`, which costs more."""
    name = {DiscreteGaussian: "stddev", DiscreteLaplace: "scale"}.get(type(event), "noise_multiplier")
    return replace(event, **{name: _LARGEST_NOISE})


def _unprotected(event: Event, neighboring_relation: NeighboringRelation) -> bool:
    """Whether a step inside had no protection; what can't be flattened has a profile that says so."""
    try:
        return flatten(event, neighboring_relation).non_private
    except UnsupportedEvent:
        return False


# ── what is not a list of steps ─────────────────────────────────────────────────────────────────────────────


def bounding_events(
    event: Event, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> tuple[tuple[Event, ...], float]:
    """Events without `ParallelComposed` and truncation, one of which bounds the truth, and the truncations' total
    probability.

    A record lies in one part of a parallel event, so that ε is the largest over parts. A truncated Poisson sample
    differs from the Poisson one with probability at most P(Binomial(population + 1, rate) > largest).
    """
    if isinstance(event, ParallelComposed):
        if neighboring_relation is NeighboringRelation.REPLACE_ONE:
            raise UnsupportedEvent(
                "parallel events must be accounted under add-or-remove or zero-out: a replaced record may change its "
                "part. Set the relation."
            )
        parts = [bounding_events(part, neighboring_relation) for part in event.events]
        return tuple(choice for choices, _ in parts for choice in choices) or (NoOp(),), max(
            (extra for _, extra in parts), default=0.0
        )
    if isinstance(event, SelfComposed):
        choices, extra = bounding_events(event.event, neighboring_relation)
        return tuple(SelfComposed(event=choice, count=event.count) for choice in choices), extra * min(
            event.count, _LARGEST_COUNT
        )
    if isinstance(event, TruncatedPoissonSampled):
        from scipy.special import bdtrc

        beyond = float(bdtrc(event.max_batch_size, event.dataset_size + 1, event.sample_rate))
        if event.max_batch_size > event.dataset_size:
            beyond = 0.0
        return (PoissonSampled(sample_rate=event.sample_rate, event=event.event),), beyond * (1 + 1e-9)
    if isinstance(event, Composed):
        combined: list[tuple[Event, ...]] = [()]
        extra = 0.0
        for part in event.events:
            choices, more = bounding_events(part, neighboring_relation)
            extra += more
            combined = [(*before, choice) for before in combined for choice in choices]
            if len(combined) > _LARGEST_ALTERNATIVES:
                raise UnsupportedEvent(
                    f"parallel events must give ≤ {_LARGEST_ALTERNATIVES} combinations, got more. Compose inside the "
                    "parts."
                )
        return tuple(Composed(events=events) for events in combined), extra
    return (event,), 0.0


# ----------------------------------------------------------------------------------------------------------------------
# What a Poisson sample does to an ε.
# ----------------------------------------------------------------------------------------------------------------------


def sampled_epsilon(epsilon: float, sample_rate: float) -> float:
    """Log(1 + q(e^ε − 1)) for every ε ≥ 0, ∞ among them, without overflow.

    References:
        Balle, Barthe and Gaboardi 2018, theorem 8. Not under replace-one.

    Example:
        >>> sampled_epsilon(1000.0, 0.01) == 1000.0 + math.log(0.01), sampled_epsilon(math.inf, 0.01)
        (True, inf)
    """
    if sample_rate == 0:
        return 0.0
    if epsilon > 30:
        return epsilon + math.log(sample_rate) + math.log1p((1 - sample_rate) / sample_rate * math.exp(-epsilon))
    return math.log1p(sample_rate * math.expm1(epsilon))


# ----------------------------------------------------------------------------------------------------------------------
# What a privacy filter is: additive costs of events, and a rule for their totals.
# ----------------------------------------------------------------------------------------------------------------------


Costs = tuple[float, ...]
"""What an event, or all events so far, cost in each of a filter's measures."""


class RemainingAmount(NamedTuple):
    """An amount ≥ 0 in a currency, ``ε`` or ``ρ``, and its share of the whole in [0, 1]."""

    amount: float
    measure: str
    fraction: float


def add_costs(one: Sequence[float], other: Sequence[float], times: int = 1) -> Costs:
    """One + times · other, rounded up."""
    return tuple(
        a if b == 0 else math.nextafter(a + math.nextafter(b * times, math.inf), math.inf)
        for a, b in zip(one, other, strict=True)
    )


def round_down(value: float) -> float:
    """Three significant digits, never more than `value`; 0 for what is not above it."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return math.floor(value * scale * (1 + 1e-12)) / scale


class PrivacyFilter(ABC):
    """Additive costs for every event, and a rule for totals.

    Guarantee:
        Whatever was chosen from earlier results: events whose total fits are together (ε, δ)-private.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation.
    """

    num_measures = 1

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> None:
        self._epsilon = checks.positive(epsilon=epsilon)
        self._delta = checks.probability(delta=delta, one=False)
        self._relation = NeighboringRelation(neighboring_relation)
        self._charges: list[Costs] = []

    @abstractmethod
    def costs(self, event: Event) -> Costs:
        """Upper bounds that add up over events, ≥ 0 and possibly ∞.

        Raises:
            UnsupportedEvent: the filter has no cost for the event.
        """

    @abstractmethod
    def fits(self, total: Costs) -> bool:
        """Whether a total is within the budget."""

    @abstractmethod
    def remaining_beside(self, total: Costs) -> RemainingAmount:
        """What is left of the budget after a total."""

    def total_costs(self, counts: Mapping[Event, int]) -> Costs:
        """The costs of a bag of events, rounded up."""
        total: Costs = (0.0,) * self.num_measures
        for event, count in counts.items():
            total = add_costs(total, self.costs(event), count)
        return total

    @property
    def total(self) -> Costs:
        """All costs admitted so far; exact summands are kept, so that rounding never lets one step too many in."""
        return tuple(math.fsum(column) for column in zip((0.0,) * self.num_measures, *self._charges, strict=True))

    def admit(self, event: Event) -> bool:
        """Charge the event if it fits; False, and nothing charged, if not."""
        costs = self.costs(event)
        before = list(self._charges)
        self._charges.append(costs)
        if not self.fits(self.total):
            self._charges = before
            return False
        if len(self._charges) > 64:
            # Long runs: fold the summands, rounding up.
            self._charges = [tuple(math.nextafter(part, math.inf) for part in self.total)]
        return True

    def require(self, event: Event) -> None:
        """`admit`, or raise.

        Raises:
            BudgetExceeded: the event does not fit; nothing was charged.
        """
        if not self.admit(event):
            raise BudgetExceeded("the step must fit the remaining budget, got one that does not. Stop here.")
