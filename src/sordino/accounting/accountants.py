"""The contour, closed-form and Rényi accountants (floor 1): events in, intervals out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sordino.accounting.composition import Steps, flatten
from sordino.accounting.contour import Step, at_most, contour_delta, contour_epsilon
from sordino.accounting.directions import directions
from sordino.accounting.equal_steps import equal_steps_epsilon
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.accounting.hit_counts import HitCounts
from sordino.accounting.interval import Interval
from sordino.accounting.samples import gaussian_pairs
from sordino.accounting.single_step import sampled_gaussian_delta, sampled_gaussian_epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled

__all__ = ["ClosedForm", "Contour"]


def worst(name: str, bounds: Sequence[tuple[float, float]]) -> Interval:
    """The larger of several directions: both ends are maxima."""
    return Interval(lower=max(low for low, _ in bounds), upper=max(high for _, high in bounds), accountant=name)


def _equal_steps(flat: Steps, delta: float, relation: NeighboringRelation) -> tuple[float, float] | None:
    """The short way for one kind of Poisson-sampled Gaussian step, where it holds."""
    if len(flat.counts) != 1 or relation is NeighboringRelation.REPLACE_ONE:
        return None
    event, count = flat.counts[0]
    if not isinstance(event, PoissonSampled) or not isinstance(event.event, Gaussian):
        return None
    return equal_steps_epsilon(event.sample_rate, 1 / event.event.noise_multiplier, count, delta)


@dataclass(frozen=True)
class Contour:
    """Contour inversion of the composed loss's moment generating function: certified, tight, the default.

    Guarantee:
        The interval contains the exact ε (δ) of the dominating pair, worst direction; see `contour`.
    """

    name: str = "contour"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Sampled and unsampled Gaussians in any number, beside any steps with atoms."""
        try:
            return all(
                any(step.transform.decays for step in steps) for steps in directions(flatten(event, relation), relation)
            )
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """Certified interval for ε at δ: removing, and adding where a rough check doesn't show that it costs less."""
        flat = flatten(event, relation)
        bounds = _equal_steps(flat, delta, relation)
        if bounds is not None:
            return worst(self.name, [bounds])
        first, *others = directions(flat, relation)
        found = [contour_epsilon(first, delta)]
        found += [contour_epsilon(steps, delta) for steps in others if not at_most(steps, found[0][0], delta)]
        return worst(self.name, found)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """Certified interval for δ at ε."""
        return self._answer(event, relation, lambda steps: contour_delta(steps, epsilon))

    def _answer(
        self,
        event: Event,
        relation: NeighboringRelation,
        solve: Callable[[Sequence[Step]], tuple[float, float]],
    ) -> Interval:
        return worst(self.name, [solve(steps) for steps in directions(flatten(event, relation), relation)])


@dataclass(frozen=True)
class ClosedForm:
    """Exact formulas: Gaussians without sampling, one sampled Gaussian step, equal ones with hardly any noise.

    Guarantee:
        The interval is the formula's value with its rounding error.

    References:
        Balle and Wang 2018, theorem 8; Balle, Barthe and Gaboardi 2018, theorem 8 (one sampled step).
    """

    name: str = "closed_form"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """One Gaussian after merging, one Poisson-sampled Gaussian step (not under replace-one), or `HitCounts`."""
        try:
            steps = flatten(event, relation)
            return self._form(steps, relation) is not None or self._hit_counts(steps, relation) is not None
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """ε by inverting the closed form."""
        counts = self._hit_counts(flatten(event, relation), relation)
        if counts is not None:
            return worst(self.name, [counts.epsilon(delta)])
        rate, mu = self._require(event, relation)
        bounds = gaussian_epsilon(delta, mu) if rate == 1 else sampled_gaussian_epsilon(delta, rate, mu)
        return worst(self.name, [bounds])

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """δ by the closed form."""
        counts = self._hit_counts(flatten(event, relation), relation)
        if counts is not None:
            return worst(self.name, [counts.delta(epsilon)])
        rate, mu = self._require(event, relation)
        bounds = gaussian_delta(epsilon, mu) if rate == 1 else sampled_gaussian_delta(epsilon, rate, mu)
        return worst(self.name, [bounds])

    def _require(self, event: Event, relation: NeighboringRelation) -> tuple[float, float]:
        form = self._form(flatten(event, relation), relation)
        if form is None:
            raise UnsupportedEvent(
                f"event must be Gaussians without sampling or one sampled Gaussian step, got {event.kind}. "
                "Use the contour accountant."
            )
        return form

    @staticmethod
    def _hit_counts(steps: Steps, relation: NeighboringRelation) -> HitCounts | None:
        """Several equal sampled steps whose noise is hardly any."""
        if len(steps.counts) != 1 or steps.counts[0][1] == 1:
            return None
        event, count = steps.counts[0]
        pairs = gaussian_pairs(event, relation)
        return None if pairs is None else HitCounts.of(pairs, count)

    @staticmethod
    def _form(steps: Steps, relation: NeighboringRelation) -> tuple[float, float] | None:
        """Sampling rate and μ, when a closed form exists."""
        if len(steps.counts) != 1 or steps.counts[0][1] != 1:
            return None
        event = steps.counts[0][0]
        if isinstance(event, Gaussian):
            return 1.0, 1 / event.noise_multiplier
        if (
            isinstance(event, PoissonSampled)
            and isinstance(event.event, Gaussian)
            and relation is not NeighboringRelation.REPLACE_ONE
        ):
            return event.sample_rate, 1 / event.event.noise_multiplier
        return None
