"""Training (floor 3): couples sampling, gradients, clipping, noise and accounting for anything with a gradient."""

from sordino.training.augmentation import augmented
from sordino.training.bills.adaptive import AdaptiveBudget, Released, StepChoice
from sordino.training.estimate import estimate_influence, exponential_influence
from sordino.training.kept_memory import kept_memory
from sordino.training.learned import LearnedPolicy, learn_policy
from sordino.training.loss_curve import LossCurve
from sordino.training.noise import CorrelatedNoise
from sordino.training.plan import Performance, Plan
from sordino.training.records.units import Units, microbatches
from sordino.training.step import PrivateStep

__all__ = [
    "AdaptiveBudget",
    "CorrelatedNoise",
    "LearnedPolicy",
    "LossCurve",
    "Performance",
    "Plan",
    "PrivateStep",
    "Released",
    "StepChoice",
    "Units",
    "augmented",
    "estimate_influence",
    "exponential_influence",
    "kept_memory",
    "learn_policy",
    "microbatches",
]
