"""Record a pipeline on one dataset, replay it on its neighbors.

On D every release is recorded: the mechanism, what it was given, what it answered. On each neighbor D′ the mechanisms
answer what they answered on D. Then the executions may differ in what the mechanisms were *given*, by at most the
declared sensitivities, and in nothing else: not in which releases there are, nor in their scales, nor in the result.

References:
    Cebere et al. 2026, "Re:cord-play" (the idea). docs/proofs/audit-replay.md.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from sordino.mechanisms import (
    AboveThreshold,
    AboveThresholdSession,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    ExponentialMechanism,
    GaussianMechanism,
    GeometricMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    LaplaceMechanism,
    PermuteAndFlip,
    PrivateCount,
    PrivateHistogram,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
    ReportNoisyMax,
    TensorGaussianMechanism,
)
from sordino.mechanisms.base import FloatArray, Numbers, Release, observe_releases
from sordino.mechanisms.categorical import clean_scores
from sordino.mechanisms.correlated.noise_stream import CorrelatedNoiseStream
from sordino.mechanisms.integer_noise import GridSumMechanism

# ----------------------------------------------------------------------------------------------------------------------
# How far one unit moved what a mechanism was given, in units of its declared sensitivity.
# ----------------------------------------------------------------------------------------------------------------------


def exact(release: Release) -> FloatArray | None:
    """What the mechanism adds its noise to, flat and in float64; None where it adds none."""
    mechanism, value = release.mechanism, release.value
    match mechanism:
        case TensorGaussianMechanism() | CorrelatedNoiseStream():
            parts = [tensor.detach().cpu().double().flatten() for tensor in cast("Sequence[Tensor]", value)]
            return torch.cat(parts).numpy() if parts else np.empty(0)
        case PrivateCount():
            where = release.named.get("where")
            counted = len(cast("Sequence[object]", value)) if where is None else np.sum(np.asarray(where))
            return np.array([float(counted)])
        case PrivateSum() | PrivateHistogram():
            return np.asarray(mechanism.exact_value(value), dtype=np.float64).ravel()  # pyright: ignore[reportArgumentType]
        case PrivateSecondMoment():
            return mechanism.exact_value(cast("Numbers", value)).astype(np.float64).ravel() * mechanism.unit
        case ExponentialMechanism() | ReportNoisyMax() | PermuteAndFlip():
            return clean_scores(cast("Numbers", value), bounds=mechanism.score_bounds)
        case (
            GaussianMechanism()
            | GridGaussianMechanism()
            | DiscreteGaussianMechanism()
            | GridSumMechanism()
            | LaplaceMechanism()
            | DiscreteLaplaceMechanism()
            | GeometricMechanism()
            | KNormMechanism()
            | AboveThreshold()
            | AboveThresholdSession()
        ):
            return np.array(value, dtype=np.float64).ravel()
        case _:
            return None


def sensitivity_ratio(release: Release, before: FloatArray, after: FloatArray) -> float:
    """The distance of two exact values over the sensitivity that `release`'s mechanism declares.

    At most 1 for neighbors; NaN where a difference is none; ∞ where the shapes differ.
    """
    if before.shape != after.shape:
        return math.inf
    mechanism = release.mechanism
    with np.errstate(all="ignore"):
        change = after - before
        match mechanism:
            case PrivateCount():
                return float(np.abs(change).sum())
            case PrivateHistogram():
                moved = mechanism.noise.moved
                return max(float(np.abs(change).sum()) / moved, float(np.abs(change).max(initial=0.0)))
            case PrivateSum():
                return float(np.max(np.abs(change) / np.array(mechanism.noise.sensitivities), initial=0.0))
            case PrivateSecondMoment():
                return _moments(mechanism, change)
            case LaplaceMechanism() | DiscreteLaplaceMechanism() | GeometricMechanism():
                return float(np.abs(change).sum()) / mechanism.l1_sensitivity
            case GridSumMechanism():
                return float(np.linalg.norm(change)) / mechanism.sensitivity
            case KNormMechanism():
                return float(np.linalg.norm(change, ord=mechanism.norm)) / mechanism.sensitivity
            case ExponentialMechanism() | ReportNoisyMax() | PermuteAndFlip() | AboveThreshold():
                return float(np.abs(change).max(initial=0.0)) / mechanism.sensitivity
            case AboveThresholdSession():
                return float(np.abs(change).max(initial=0.0)) / mechanism.mechanism.sensitivity
            case CorrelatedNoiseStream():
                return float(np.linalg.norm(change)) / mechanism.mechanism.l2_sensitivity
            case (
                TensorGaussianMechanism() | GaussianMechanism() | GridGaussianMechanism() | DiscreteGaussianMechanism()
            ):
                return float(np.linalg.norm(change)) / mechanism.l2_sensitivity
            case _:
                return math.nan


def _moments(mechanism: PrivateSecondMoment, change: FloatArray) -> float:
    matrix = change.reshape(mechanism.columns, mechanism.columns)
    pure = isinstance(mechanism.budget, PureBudget)
    size = np.abs(matrix[np.triu_indices(len(matrix))]).sum() if pure else np.linalg.norm(matrix)
    return float(size) / mechanism.sensitivity


def noise_deviation(release: Release) -> float | None:
    """Standard deviation of the Gaussian noise on each entry, where that is one number; otherwise None."""
    match release.mechanism:
        case TensorGaussianMechanism() | GaussianMechanism() | GridGaussianMechanism():
            return release.mechanism.stddev
        case GridSumMechanism():
            return float(release.mechanism.grid_stddev)
        case _:
            return None


# ----------------------------------------------------------------------------------------------------------------------
# Whether two results of a pipeline are one and the same.
# ----------------------------------------------------------------------------------------------------------------------


_DEEPEST = 12


def results_equal(one: object, other: object, *, depth: int = 0) -> bool:
    """Whether two results are equal to the last bit: tensors, arrays, modules, estimators, and nestings of them.

    Of an object that is none of these the public attributes are compared, and private ones are not: what a caller may
    rely on is what would be released. NaN equals NaN.
    """
    if depth > _DEEPEST or type(one) is not type(other):
        return type(one) is type(other)
    match one, other:
        case (Tensor(), Tensor()):
            return results_equal(one.detach().cpu().numpy(), other.detach().cpu().numpy(), depth=depth + 1)
        case (np.ndarray(), np.ndarray()):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if one.dtype == object:
                return all(results_equal(a, b, depth=depth + 1) for a, b in zip(one.flat, other.flat, strict=True))
            return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        case (nn.Module(), nn.Module()):
            return results_equal(dict(one.state_dict()), dict(other.state_dict()), depth=depth + 1)
        case (Mapping(), Mapping()):
            return list(one) == list(other) and all(results_equal(one[key], other[key], depth=depth + 1) for key in one)
        case (str() | bytes() | int() | bool() | None, _):
            return one == other
        case (float() | np.generic(), _):
            return bool(one == other or (one != one and other != other))
        case (Sequence(), Sequence()):
            return len(one) == len(other) and all(
                results_equal(a, b, depth=depth + 1) for a, b in zip(one, other, strict=True)
            )
        case _:
            return _same_attributes(one, other, depth)


def _same_attributes(one: object, other: object, depth: int) -> bool:
    if not hasattr(one, "__dict__") or callable(one):
        return True
    names = [name for name in vars(one) if not name.startswith("_") and name not in {"rng", "seconds"}]
    if names != [name for name in vars(other) if not name.startswith("_") and name not in {"rng", "seconds"}]:
        return False
    return all(results_equal(getattr(one, name), getattr(other, name), depth=depth + 1) for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# Record a pipeline on one dataset, replay it on its neighbors.
# ----------------------------------------------------------------------------------------------------------------------


_Data = TypeVar("_Data")
# Sums of float32 in another order differ by this much.
_ROUNDING = 1e-5
_DEVIATIONS = 6.0
_FEWEST_ENTRIES = 100


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One way in which a pipeline is not what its mechanisms say.

    Args:
        kind: "control flow", "parameters", "sensitivity", "not a number", "no noise", "noise scale" or
            "un-noised result".
        release: number of the release, from 0, or None for the whole.
        what: in words, without any value.
    """

    kind: str
    release: int | None
    what: str


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """What replays have shown.

    Args:
        releases: how many there are in one run.
        neighbors: how many were tried.
        largest_share: of a declared sensitivity, by which a release's value moved; at most 1 is right.
        unmeasured: releases for whose mechanism there is no distance, by name.
        violations: empty when nothing was found. That proves nothing about other neighbors.
    """

    releases: int
    neighbors: int
    largest_share: float
    unmeasured: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.violations


def replay(
    pipeline: Callable[[_Data], object], data: _Data, neighbors: Iterable[_Data], *, zero_noise: bool = False
) -> ReplayReport:
    """Run `pipeline` on `data` and then on `neighbors` with every release forced to the recorded answer.

    Use it on data made for it: what it holds and tells is not private.

    Args:
        pipeline: data ↦ everything that would be released. It must repeat itself: give it a fixed seed
            (``KeyedRNG(seed=…, reproducible=True)``, estimators with ``random_state``), so that batches and first
            weights are the same each time. Releases outside sordino's mechanisms are not forced, and show as leaks.
        data: D.
        neighbors: datasets that differ from D by one unit.
        zero_noise: whether a mechanism may add no noise, for debugging.

    Returns:
        The violations found, each once a release and neighbor.

    Example:
        >>> from sordino.mechanisms import LaplaceMechanism
        >>> def honest(numbers):
        ...     return LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(sum(numbers))
        >>> def leaky(numbers):
        ...     return LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0).release(sum(numbers)), max(numbers)
        >>> replay(honest, [0.0, 0.5], [[0.0, 0.5, 1.0]]).passed
        True
        >>> [violation.kind for violation in replay(leaky, [0.0, 0.5], [[0.0, 0.5, 1.0]]).violations]
        ['un-noised result']
    """
    recorder = _Recorder()
    with observe_releases(recorder):
        result = pipeline(data)
    entries = recorder.entries
    violations = [] if zero_noise else _noise_violations(entries)
    shares, tried = [0.0], 0
    for neighbor in neighbors:
        tried += 1
        forced = _Forced(entries)
        try:
            with observe_releases(forced):
                other = pipeline(neighbor)
        except Exception as error:
            violations.append(_flow(forced.position, f"a neighbor raises {type(error).__name__}"))
            continue
        if forced.position < len(entries):
            violations.append(_flow(forced.position, "a neighbor makes fewer releases"))
        violations += forced.violations
        shares += forced.shares
        if not forced.violations and not results_equal(result, other):
            violations.append(
                Violation(
                    kind="un-noised result",
                    release=None,
                    what="with every release forced, the result still depends on the record",
                )
            )
    unmeasured = {type(entry.release.mechanism).__name__ for entry in entries if entry.value is None}
    return ReplayReport(
        releases=len(entries),
        neighbors=tried,
        largest_share=max(shares),
        unmeasured=tuple(sorted(unmeasured)),
        violations=tuple(violations),
    )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    release: Release
    value: FloatArray | None
    answer: object


def _answered(release: Release, draw: Callable[[], object]) -> object:
    """The answer; of noise that is added in place, copies of the noisy tensors."""
    answer = draw()
    if release.operation == "add_noise_":
        return tuple(tensor.detach().clone() for tensor in cast("Iterable[Tensor]", release.value))
    return answer


class _Recorder:
    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def released(self, release: Release, draw: Callable[[], object]) -> object:
        value = exact(release)
        answer = _answered(release, draw)
        self.entries.append(_Entry(release=release, value=value, answer=answer))
        return None if release.operation == "add_noise_" else answer


class _Forced:
    """Answers as recorded, and notes what differs."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self.position = 0
        self.shares: list[float] = []
        self.violations: list[Violation] = []

    def released(self, release: Release, draw: Callable[[], object]) -> object:
        value = exact(release)
        # Drawn all the same: what is drawn later for other purposes then comes from the same position of the streams.
        own = draw()
        if self.position >= len(self._entries):
            self.violations.append(_flow(self.position, "a neighbor makes more releases"))
            self.position += 1
            return own
        entry, number = self._entries[self.position], self.position
        self.position += 1
        if not self._fits(number, entry, release):
            return own
        if value is not None and entry.value is not None:
            self._compare(number, entry, release, value)
        return _force(release, entry.answer)

    def _fits(self, number: int, entry: _Entry, release: Release) -> bool:
        if type(release.mechanism) is not type(entry.release.mechanism) or release.operation != entry.release.operation:
            self.violations.append(_flow(number, "a neighbor asks another mechanism"))
            return False
        if _parameters(release) != _parameters(entry.release):
            what = "sensitivity, scale or another parameter depends on the record"
            self.violations.append(Violation(kind="parameters", release=number, what=what))
        return True

    def _compare(self, number: int, entry: _Entry, release: Release, value: FloatArray) -> None:
        assert entry.value is not None
        share = sensitivity_ratio(release, entry.value, value)
        if math.isnan(share):
            what = "the values' distance is no number"
            self.violations.append(Violation(kind="not a number", release=number, what=what))
        elif share > 1 + _ROUNDING:
            what = "a record moves the value by more than the declared sensitivity"
            self.violations.append(Violation(kind="sensitivity", release=number, what=what))
        if not math.isnan(share):
            self.shares.append(share)


def _force(release: Release, answer: object) -> object:
    if release.operation != "add_noise_":
        return answer
    given = list(cast("Iterable[Tensor]", release.value))
    for tensor, recorded in zip(given, cast("tuple[Tensor, ...]", answer), strict=True):
        tensor.data.copy_(recorded)
    return None


def _parameters(release: Release) -> tuple[str, tuple[object, ...]]:
    """Everything public about the call; randomness is not shown by a mechanism's text."""
    public = [repr(release.mechanism)] if "object at 0x" not in repr(release.mechanism) else []
    named = {key: value for key, value in release.named.items() if isinstance(value, int | float | str)}
    return type(release.mechanism).__name__, (*public, *sorted(named.items()))


def _noise_violations(entries: list[_Entry]) -> list[Violation]:
    """Answers that are no numbers, that are the value itself, or whose Gaussian noise has another scale."""
    found: list[Violation] = []
    squares: list[FloatArray] = []
    for number, entry in enumerate(entries):
        answer = _numbers(entry.answer)
        if answer is None or entry.value is None:
            continue
        if not np.isfinite(answer).all():
            found.append(Violation(kind="not a number", release=number, what="an answer is not finite"))
            continue
        if answer.shape != entry.value.shape or answer.dtype == bool:
            continue
        deviation = noise_deviation(entry.release)
        if deviation == 0 or (deviation is not None and answer.size and (answer == entry.value).all()):
            found.append(Violation(kind="no noise", release=number, what="an answer is the value itself"))
        elif deviation:
            squares.append(np.square((answer - np.nan_to_num(entry.value)) / deviation))
    entry_squares = np.concatenate(squares) if squares else np.empty(0)
    count = entry_squares.size
    if count >= _FEWEST_ENTRIES and abs(entry_squares.mean() - 1) > _DEVIATIONS * math.sqrt(2 / count):
        what = "the noise has not the declared variance, over all Gaussian releases together"
        found.append(Violation(kind="noise scale", release=None, what=what))
    return found


def _numbers(answer: object) -> FloatArray | None:
    if isinstance(answer, tuple) and answer and all(isinstance(part, Tensor) for part in answer):
        return np.concatenate([part.cpu().double().numpy().ravel() for part in cast("tuple[Tensor, ...]", answer)])
    if isinstance(answer, np.ndarray | np.generic | int | float) and np.asarray(answer).dtype.kind in "biuf":
        return np.asarray(answer, dtype=np.float64).ravel()
    return None


def _flow(position: int, what: str) -> Violation:
    return Violation(kind="control flow", release=position, what=what)
