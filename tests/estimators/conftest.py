"""What the estimator tests share: fixed seeds, hostile records, neighbors, a two-armed test of noise."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sordino.randomness import KeyedRNG


@pytest.fixture
def seeded() -> Callable[[int], KeyedRNG]:
    return lambda seed=0: KeyedRNG(seed=seed, reproducible=True)


@pytest.fixture
def two_armed() -> Callable[..., None]:
    """The estimated deviation is the declared one; 5 % more and 5 % less are not."""

    def check(noise: np.ndarray, stddev: float) -> None:
        estimate = float(np.sqrt(np.mean(np.square(noise))))
        assert estimate == pytest.approx(stddev, rel=0.025)
        assert estimate != pytest.approx(stddev * 1.05, rel=0.025)
        assert estimate != pytest.approx(stddev / 1.05, rel=0.025)

    return check


@pytest.fixture
def unit_neighbors() -> Callable[..., Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, float]]]:
    """(rows, targets, new row, new target) with rows in the unit ball, random and extreme; targets from a list."""

    def pairs(columns: int, targets: tuple[float, ...], trials: int = 60, most: int = 8) -> Iterator:
        generator = np.random.default_rng(3)

        def row() -> np.ndarray:
            direction = generator.normal(size=columns)
            direction /= np.linalg.norm(direction)
            kind = generator.integers(0, 4)
            if kind == 0:
                return np.eye(columns)[generator.integers(0, columns)] * generator.choice([-1.0, 1.0])
            return direction * (1.0 if kind == 1 else generator.random() if kind == 2 else 1e-9)

        for _ in range(trials):
            count = int(generator.integers(0, most))
            rows = np.array([row() for _ in range(count)]).reshape(-1, columns)
            yield rows, generator.choice(targets, size=count), row(), float(generator.choice(targets))

    return pairs
