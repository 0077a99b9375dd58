"""Training (floor 3): couples sampling, gradients, clipping, noise and accounting for anything with a gradient."""

from sordino.training.adaptive import AdaptiveBudget, Released, StepChoice
from sordino.training.augmentation import augmented
from sordino.training.noise import CorrelatedNoise
from sordino.training.plan import Performance, Plan
from sordino.training.step import PrivateStep
from sordino.training.units import Units, microbatches

__all__ = [
    "AdaptiveBudget",
    "CorrelatedNoise",
    "Performance",
    "Plan",
    "PrivateStep",
    "Released",
    "StepChoice",
    "Units",
    "augmented",
    "microbatches",
]
