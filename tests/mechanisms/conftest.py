"""What the mechanism tests share: fixed seeds, a chi-square test, a stream that says what it's told."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from sordino.randomness import KeyedRNG, RandomStream


@pytest.fixture
def seeded() -> Callable[[int], KeyedRNG]:
    """Fixed randomness: a test that passes once passes always."""
    return lambda seed=0: KeyedRNG(seed=seed, reproducible=True)


@pytest.fixture
def fits() -> Callable[..., float]:
    """p-value of integer draws under a probability mass function; rare values are pooled in the two tails."""

    def p_value(draws: np.ndarray, mass: Callable[[np.ndarray], np.ndarray], reach: int) -> float:
        values = np.arange(-reach, reach + 1)
        expected = mass(values) * len(draws)
        keep = np.flatnonzero(expected >= 10)
        low, high = values[keep[0]], values[keep[-1]]
        inner = expected[keep[0] : keep[-1] + 1]
        observed = np.bincount(np.clip(draws, low, high) - low, minlength=len(inner)).astype(float)
        inner = inner.copy()
        inner[0] += expected[: keep[0]].sum()
        inner[-1] += expected[keep[-1] + 1 :].sum()
        inner *= len(draws) / inner.sum()
        if len(inner) == 1:
            return 1.0
        return float(stats.chisquare(observed, inner).pvalue)

    return p_value


class ScriptedStream(RandomStream):
    """A stream whose 64-bit words are given."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words = list(words)

    def integers64(self, count: int) -> np.ndarray:
        taken, self.words = self.words[:count], self.words[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


@pytest.fixture
def scripted() -> type[ScriptedStream]:
    return ScriptedStream
