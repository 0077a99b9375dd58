"""Training (floor 3): couples sampling, gradients, clipping, noise and accounting for anything with a gradient."""

from sordino.training.augmentation import augmented
from sordino.training.noise import CorrelatedNoise
from sordino.training.plan import Performance, Plan
from sordino.training.step import PrivateStep

__all__ = ["CorrelatedNoise", "Performance", "Plan", "PrivateStep", "augmented"]
