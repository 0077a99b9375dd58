"""Training: couples sampling, gradients, clipping, noise and accounting for anything with a gradient."""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.training.adaptive_budget import AdaptiveBudget, ReleasedStatistics, StepParameters
    from sordino.training.averaging import average_over_views
    from sordino.training.correlated_noise import CorrelatedNoise
    from sordino.training.noisy_releases import LossRelease
    from sordino.training.plan import PerformanceOptions, Plan, tuned_process
    from sordino.training.record_source import UnitAssignment, record_groups
    from sordino.training.step import PrivateStep

__all__ = [
    "AdaptiveBudget",
    "CorrelatedNoise",
    "LossRelease",
    "PerformanceOptions",
    "Plan",
    "PrivateStep",
    "ReleasedStatistics",
    "StepParameters",
    "UnitAssignment",
    "average_over_views",
    "record_groups",
    "tuned_process",
]

__getattr__, __dir__ = lazy_names(__name__)
