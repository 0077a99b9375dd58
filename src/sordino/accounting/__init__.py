"""Accounting (floor 1): events in, certified ε, δ and noise multipliers out. numpy and scipy only.

Example:
    >>> from sordino.accounting import epsilon
    >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed
    >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
    >>> answer = epsilon(SelfComposed(event=step, count=10_000), delta=1e-5)
    >>> f"{answer.upper:.5f} by {answer.accountant}"
    '0.94687 by contour'
"""

from sordino.accounting.accountant import Accountant
from sordino.accounting.calibration import calibrate_noise_multiplier
from sordino.accounting.front import delta, epsilon, epsilons
from sordino.accounting.interval import Interval
from sordino.accounting.renyi import renyi_divergence

__all__ = [
    "Accountant",
    "Interval",
    "calibrate_noise_multiplier",
    "delta",
    "epsilon",
    "epsilons",
    "renyi_divergence",
]
