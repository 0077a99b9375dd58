"""Record a pipeline on one data set, replay it on its neighbours (room `audit`, floor 4).

On D every release is recorded: the mechanism, what it was given, what it answered. On each neighbour D′ the mechanisms
answer what they answered on D. Then the executions may differ in what the mechanisms were *given*, by at most the
declared sensitivities, and in nothing else: not in which releases there are, nor in their scales, nor in the result.

References:
    Cebere et al. 2026, "Re:cord-play" (the idea). docs/proofs/audit-replay.md.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from torch import Tensor

from sordino.audit.distances import exact, noise_deviation, share_of_sensitivity
from sordino.audit.outcomes import same
from sordino.mechanisms.releases import Release, recording_releases
from sordino.mechanisms.values import FloatArray

__all__ = ["ReplayReport", "Violation", "replay"]

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
        neighbours: how many were tried.
        largest_share: of a declared sensitivity, by which a release's value moved; at most 1 is right.
        unmeasured: releases for whose mechanism there is no distance, by name.
        violations: empty when nothing was found. That proves nothing about other neighbours.
    """

    releases: int
    neighbours: int
    largest_share: float
    unmeasured: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.violations


def replay(
    pipeline: Callable[[_Data], object], data: _Data, neighbours: Iterable[_Data], *, zero_noise: bool = False
) -> ReplayReport:
    """Run `pipeline` on `data` and then on `neighbours` with every release forced to the recorded answer.

    Use it on data made for it: what it holds and tells is not private.

    Args:
        pipeline: data ↦ everything that would be released. It must repeat itself: give it a fixed seed
            (``Randomness(seed=…, reproducible=True)``, estimators with ``random_state``), so that batches and first
            weights are the same each time. Releases outside sordino's mechanisms are not forced, and show as leaks.
        data: D.
        neighbours: data sets that differ from D by one unit.
        zero_noise: whether a mechanism may add no noise, for debugging.

    Returns:
        The violations found, each once a release and neighbour.

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
    with recording_releases(recorder):
        result = pipeline(data)
    entries = recorder.entries
    violations = [] if zero_noise else _noise_violations(entries)
    shares, tried = [0.0], 0
    for neighbour in neighbours:
        tried += 1
        forced = _Forced(entries)
        try:
            with recording_releases(forced):
                other = pipeline(neighbour)
        except Exception as error:
            violations.append(_flow(forced.place, f"a neighbour raises {type(error).__name__}"))
            continue
        if forced.place < len(entries):
            violations.append(_flow(forced.place, "a neighbour makes fewer releases"))
        violations += forced.violations
        shares += forced.shares
        if not forced.violations and not same(result, other):
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
        neighbours=tried,
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
        self.place = 0
        self.shares: list[float] = []
        self.violations: list[Violation] = []

    def released(self, release: Release, draw: Callable[[], object]) -> object:
        value = exact(release)
        # Drawn all the same: what is drawn later for other purposes then comes from the same place of the streams.
        own = draw()
        if self.place >= len(self._entries):
            self.violations.append(_flow(self.place, "a neighbour makes more releases"))
            self.place += 1
            return own
        entry, number = self._entries[self.place], self.place
        self.place += 1
        if not self._fits(number, entry, release):
            return own
        if value is not None and entry.value is not None:
            self._compare(number, entry, release, value)
        return _force(release, entry.answer)

    def _fits(self, number: int, entry: _Entry, release: Release) -> bool:
        if type(release.mechanism) is not type(entry.release.mechanism) or release.operation != entry.release.operation:
            self.violations.append(_flow(number, "a neighbour asks another mechanism"))
            return False
        if _parameters(release) != _parameters(entry.release):
            what = "sensitivity, scale or another parameter depends on the record"
            self.violations.append(Violation(kind="parameters", release=number, what=what))
        return True

    def _compare(self, number: int, entry: _Entry, release: Release, value: FloatArray) -> None:
        assert entry.value is not None
        share = share_of_sensitivity(release, entry.value, value)
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


def _flow(place: int, what: str) -> Violation:
    return Violation(kind="control flow", release=place, what=what)
