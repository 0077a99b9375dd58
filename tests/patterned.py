"""Synthetic images for tests of pipelines: classes that differ in which pixels are bright."""

import numpy as np

from sordino.data import DatasetSplits, Records
from sordino.randomness import KeyedRNG

__all__ = ["DELTA", "made_up", "seeded"]

DELTA = 1e-5


def made_up(shape=(1, 4, 4), *, n=600, classes=3, seed=0):
    """Classes that differ in which pixels are bright."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, size=2 * n)
    patterns = generator.random((classes, *shape)) > 0.5
    features = 0.7 * patterns[labels] + 0.3 * generator.random((2 * n, *shape))
    parts = (slice(0, n), slice(n, None))
    train, test = (Records(features[rows].astype(np.float32), labels[rows].astype(np.int64)) for rows in parts)
    return DatasetSplits(
        name="patterns",
        train=train,
        test=test,
        labels=tuple("abcdefghij"[:classes]),
        public=True,
        source="made up",
        license="none",
        schema=None,
    )


def seeded(seed=0):
    return KeyedRNG(seed=seed, reproducible=True)
