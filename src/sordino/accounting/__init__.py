"""Accounting (floor 1): events in, certified ε, δ and noise multipliers out. numpy and scipy only.

    epsilon, delta, epsilons          the front door: an interval that contains the truth; its upper end is reported
    calibrate_…                       from a target to noise, sample rate, steps, batch size or δ, on the safe side
    true_positive_rate, advantage, …  what the guarantee means for an attacker
    ConcentratedFilter, …             budgets for adaptively chosen noise

Example:
    >>> from sordino.accounting import epsilon
    >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed
    >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
    >>> answer = epsilon(SelfComposed(event=step, count=10_000), delta=1e-5)
    >>> f"{answer.upper:.5f} by {answer.accountant}"
    '0.94687 by contour'
"""

from sordino.accounting.accountant import Accountant
from sordino.accounting.attacks import (
    GaussianFit,
    advantage,
    best_gaussian,
    privacy_profile,
    reconstruction_bound,
    trade_off,
    true_positive_rate,
)
from sordino.accounting.calibration import calibrate_noise_multiplier
from sordino.accounting.concentrated import concentrated_rho, largest_rho, rho_epsilon
from sordino.accounting.filters import ConcentratedFilter, ConcentratedOdometer, GaussianFilter, RenyiFilter
from sordino.accounting.front import delta, epsilon, epsilons
from sordino.accounting.gdp import Heuristic, central_limit_epsilon
from sordino.accounting.interchange import from_dp_event, to_dp_event
from sordino.accounting.interval import Interval
from sordino.accounting.planning import (
    calibrate_batch_size,
    calibrate_delta,
    calibrate_sample_rate,
    calibrate_steps,
    for_group,
    marginal_epsilon,
    without_amplification,
)
from sordino.accounting.registry import ACCOUNTANTS
from sordino.accounting.renyi import renyi_divergence
from sordino.accounting.strong import published_strong_composition
from sordino.accounting.structure import (
    shuffle_lower_bound,
)

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "ConcentratedFilter",
    "ConcentratedOdometer",
    "GaussianFilter",
    "GaussianFit",
    "Heuristic",
    "Interval",
    "RenyiFilter",
    "advantage",
    "best_gaussian",
    "calibrate_batch_size",
    "calibrate_delta",
    "calibrate_noise_multiplier",
    "calibrate_sample_rate",
    "calibrate_steps",
    "central_limit_epsilon",
    "concentrated_rho",
    "delta",
    "epsilon",
    "epsilons",
    "for_group",
    "from_dp_event",
    "largest_rho",
    "marginal_epsilon",
    "privacy_profile",
    "published_strong_composition",
    "reconstruction_bound",
    "renyi_divergence",
    "rho_epsilon",
    "shuffle_lower_bound",
    "to_dp_event",
    "trade_off",
    "true_positive_rate",
    "without_amplification",
]
