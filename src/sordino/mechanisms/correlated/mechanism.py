"""Gaussian noise correlated over the steps of a run: who takes part when, its scale and its events."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Composed, Event, Gaussian, MatrixGaussian, NoOp, PoissonSampled, SelfComposed
from sordino.mechanisms.correlated.strategies import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    DenseStrategy,
    FloatArray,
    IndependentNoise,
    Strategy,
    strategy_digest,
    tree_sensitivity,
)

if TYPE_CHECKING:
    from sordino.mechanisms.correlated.noise_stream import CorrelatedNoiseStream


# ----------------------------------------------------------------------------------------------------------------------
# Participation: in which steps one record can take part.
#
# The sensitivity of a strategy depends on it, and so does the event. A participation is a promise about the batches:
# the sampler must keep it.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SingleParticipation:
    """Each record takes part in at most one step: one pass over the data."""

    @property
    def min_separation(self) -> int:
        """Nothing is promised between participations, as there is one."""
        return 1

    def max_participations(self, steps: int) -> int:  # noqa: ARG002
        """Once."""
        return 1


@dataclass(frozen=True, kw_only=True)
class MinSeparation:
    """Participations of a record are at least `min_separation` steps apart: steps i < j with j − i ≥ separation.

    Args:
        min_separation: ≥ 1.
        participations: how often a record takes part at most; None is as often as the steps allow.
    """

    min_separation: int
    participations: int | None = None

    def __post_init__(self) -> None:
        checks.integer(1, min_separation=self.min_separation)
        if self.participations is not None:
            checks.integer(1, participations=self.participations)

    def max_participations(self, steps: int) -> int:
        """The most participations in `steps` steps."""
        fits = -(-steps // self.min_separation)
        return fits if self.participations is None else min(fits, self.participations)


@dataclass(frozen=True, kw_only=True)
class FixedEpochOrder:
    """Batches are dealt once and come in the same order every epoch: a record is in steps j, j + e, j + 2e, ….

    Which batch a record is in must depend on that record alone, or the neighboring relation must keep the others where
    they are (replace-one, zero-out).

    Args:
        steps_per_epoch: e ≥ 1.
    """

    steps_per_epoch: int

    def __post_init__(self) -> None:
        checks.integer(1, steps_per_epoch=self.steps_per_epoch)

    @property
    def min_separation(self) -> int:
        """One epoch."""
        return self.steps_per_epoch

    def max_participations(self, steps: int) -> int:
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
    def min_separation(self) -> int:
        """One cycle."""
        return self.groups

    @property
    def group_rate(self) -> float:
        """The probability that a member of the group whose turn it is joins the batch."""
        return min(1.0, self.groups * self.sample_rate)

    def max_participations(self, steps: int) -> int:
        """Once a cycle."""
        return -(-steps // self.groups)


Participation = SingleParticipation | MinSeparation | FixedEpochOrder | CyclicPoisson


# ----------------------------------------------------------------------------------------------------------------------
# Sensitivity of a strategy under a participation, from the matrix that is really used.
#
# A record moves row i of the gradients by at most 1 (times the clipping norm) in every step i of its participation π.
# The change of CG has squared norm Σ_{i,j∈π} X_ij ⟨u_i, u_j⟩ ≤ Σ_{i,j∈π} |X_ij| with X = CᵀC. Closed forms of the
# maximum are used only where their conditions hold in the numbers at hand; otherwise the sum is maximized or bounded
# from above.
#
# References:
#     Choquette-Choo et al. 2023, section 4 (bands; the bound by two nested searches). Kalinin, Lampert 2024, theorem 2
#     (non-increasing Toeplitz columns).
# ----------------------------------------------------------------------------------------------------------------------


LARGEST_MATRIX = 4096
"""Steps up to which strategies without a closed form are written out as matrices."""


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    """How far one record moves CG in ℓ2 norm when it moves each gradient it takes part in by 1.

    Under `CyclicPoisson` it is that of one participation: the largest column's norm, which the amplified event needs.

    Returns:
        The exact value for one participation, for at most as many bands as there are steps between participations,
        for Toeplitz strategies with a non-negative, non-increasing first column, and for `FixedEpochOrder` when CᵀC ≥
        0;
        otherwise an upper bound.

    Raises:
        InvalidArgument: more bands than groups under `CyclicPoisson`; more than 4096 steps without a closed form
            (a tree then has the bound of its nodes).

    Example:
        >>> from sordino.mechanisms.correlated.strategies import BandedToeplitz
        >>> from sordino.mechanisms.correlated.mechanism import MinSeparation
        >>> strategy = BandedToeplitz(coefficients=(0.8, 0.6), steps=8)
        >>> round(sensitivity(strategy, MinSeparation(min_separation=2)), 6)
        2.0
    """
    if isinstance(participation, CyclicPoisson):
        if strategy.bands > participation.groups:
            raise InvalidArgument(
                f"bands must be at most groups ({participation.groups}), got {strategy.bands}: columns that one record "
                "reaches would overlap. Use fewer bands or more groups."
            )
        participation = SingleParticipation()
    column = strategy.column()
    if column is not None:
        closed = _toeplitz(column, strategy.bands, participation)
        if closed is not None:
            return closed
    nodes = _tree(strategy, participation) if isinstance(strategy, BinaryTree) else math.inf
    if strategy.steps > LARGEST_MATRIX and nodes < math.inf:
        return nodes
    if strategy.steps > LARGEST_MATRIX:
        raise InvalidArgument(
            f"steps must be at most {LARGEST_MATRIX} for a strategy without a closed-form sensitivity, got "
            f"{strategy.steps}. Use a banded strategy or one with a non-increasing first column."
        )
    return min(nodes, matrix_sensitivity(strategy.matrix(), participation))


def _toeplitz(column: FloatArray, bands: int, participation: Participation) -> float | None:
    """Closed forms: the record that starts in step 0 is the worst case. None where no theorem speaks."""
    steps = len(column)
    apart, most = participation.min_separation, participation.max_participations(steps)
    monotone = bool((column >= 0).all()) and bool((np.diff(column) <= 0).all())
    if most > 1 and bands > apart and not monotone:
        return None
    total = np.zeros(steps)
    for start in range(0, apart * most, apart):
        total[start:] += column[: steps - start]
    # Where columns don't overlap their signs don't matter, and the earlier ones are the longer ones.
    return math.sqrt(math.fsum((total**2).tolist()))


def _tree(strategy: BinaryTree, participation: Participation) -> float:
    """The bound from the tree's nodes, where the search is affordable."""
    most = participation.max_participations(strategy.steps)
    try:
        return tree_sensitivity(strategy.steps, separation=participation.min_separation, participations=most)
    except InvalidArgument:
        return math.inf


def matrix_sensitivity(matrix: FloatArray, participation: Participation) -> float:
    """`sensitivity` of a matrix that is written out, of any shape with one column a step."""
    gram = np.abs(matrix.T @ matrix)
    steps = gram.shape[0]
    most, apart = participation.max_participations(steps), participation.min_separation
    if most == 1:
        return math.sqrt(float(np.diag(gram).max()))
    if isinstance(participation, FixedEpochOrder):
        return math.sqrt(max(float(gram[first::apart, first::apart].sum()) for first in range(min(apart, steps))))
    # Σ_{i∈π} Σ_{j∈π} |X_ij| ≤ max_π Σ_{i∈π} r_i, where r_i is the largest inner sum that any π with i in it can have.
    reach = _max_rows(gram, apart, most)
    return math.sqrt(_spaced(reach[:, None], apart, most)[-1][-1, 0])


def _spaced(values: FloatArray, apart: int, most: int) -> list[FloatArray]:
    """For every prefix length: the largest sums of ≤ 0, 1, …, `most` entries ≥ `apart` from each other.

    `values` has shape (steps, lanes), each lane a problem of its own, entries ≥ 0; results have (most + 1, lanes).
    """
    best = [np.zeros((most + 1, values.shape[1]))]
    for end in range(1, len(values) + 1):
        taken = best[max(end - apart, 0)][:-1] + values[end - 1]
        best.append(np.concatenate([best[-1][:1], np.maximum(best[-1][1:], taken)]))
    return best


def _max_rows(gram: FloatArray, apart: int, most: int) -> FloatArray:
    """r_i = |X_ii| + the best of m entries of row i to the left and most − 1 − m to the right."""
    steps = len(gram)
    left, right = _one_sided(gram, apart, most - 1), _one_sided(gram[::-1, ::-1], apart, most - 1)[:, ::-1]
    joined = np.max(left + right[::-1], axis=0)
    return np.diag(gram) + joined[:steps]


def _one_sided(gram: FloatArray, apart: int, most: int) -> FloatArray:
    """Shape (most + 1, steps): for every row i the best sums of ≤ m of its entries at least `apart` before i."""
    steps = len(gram)
    found = np.zeros((most + 1, steps))
    recent: list[FloatArray] = [np.zeros((most + 1, steps))]
    for end in range(1, steps - apart + 1):
        # A window of the last `apart` prefixes is all that the recursion looks back to.
        taken = recent[max(len(recent) - apart, 0)][:-1] + gram[end - 1]
        recent.append(np.concatenate([recent[-1][:1], np.maximum(recent[-1][1:], taken)]))
        recent = recent[-apart - 1 :]
        found[:, end + apart - 1] = recent[-1][:, end + apart - 1]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The mechanism: its scale and its events.
# ----------------------------------------------------------------------------------------------------------------------


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
