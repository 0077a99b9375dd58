"""Accounting: events in, certified ε, δ and noise multipliers out. numpy and scipy only.

    epsilon, delta, epsilons          the front door: an interval that contains the truth; its upper end is reported
    calibrate_…                       from a target to noise, sample rate, steps, batch size or δ, on the safe side
    true_positive_rate, advantage, …  what the guarantee means for an attacker
    ZCDPFilter, …             budgets for adaptively chosen noise

Example:
    >>> from sordino.accounting import epsilon
    >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed
    >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
    >>> answer = epsilon(SelfComposed(event=step, count=10_000), delta=1e-5)
    >>> f"{answer.upper:.5f} by {answer.accountant}"
    '0.94687 by contour'
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.accounting.api import ACCOUNTANTS, delta, epsilon, epsilon_by_accountant
    from sordino.accounting.base import Accountant, Interval
    from sordino.accounting.calibration import (
        calibrate_batch_size,
        calibrate_delta,
        calibrate_noise_multiplier,
        calibrate_sample_rate,
        calibrate_steps,
        group_privacy_event,
        marginal_epsilon,
        without_amplification,
    )
    from sordino.accounting.dp_accounting_interop import from_dp_event, to_dp_event
    from sordino.accounting.filters import GDPFilter, RDPFilter, ZCDPFilter, ZCDPOdometer
    from sordino.accounting.historical import (
        HeuristicEstimate,
        asymptotic_log_moment,
        asymptotic_moments_epsilon,
        central_limit_epsilon,
        published_advanced_composition,
    )
    from sordino.accounting.rdp import max_rho, renyi_divergence, rho_to_epsilon, zcdp_rho
    from sordino.accounting.tradeoff import (
        GaussianFit,
        fit_gaussian_trade_off,
        membership_advantage,
        privacy_loss_tail,
        privacy_profile,
        reconstruction_bound,
        shuffle_lower_bound,
        trade_off_curve,
        true_positive_rate,
    )

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "GDPFilter",
    "GaussianFit",
    "HeuristicEstimate",
    "Interval",
    "RDPFilter",
    "ZCDPFilter",
    "ZCDPOdometer",
    "asymptotic_log_moment",
    "asymptotic_moments_epsilon",
    "calibrate_batch_size",
    "calibrate_delta",
    "calibrate_noise_multiplier",
    "calibrate_sample_rate",
    "calibrate_steps",
    "central_limit_epsilon",
    "delta",
    "epsilon",
    "epsilon_by_accountant",
    "fit_gaussian_trade_off",
    "from_dp_event",
    "group_privacy_event",
    "marginal_epsilon",
    "max_rho",
    "membership_advantage",
    "privacy_loss_tail",
    "privacy_profile",
    "published_advanced_composition",
    "reconstruction_bound",
    "renyi_divergence",
    "rho_to_epsilon",
    "shuffle_lower_bound",
    "to_dp_event",
    "trade_off_curve",
    "true_positive_rate",
    "without_amplification",
    "zcdp_rho",
]

__getattr__, __dir__ = lazy_names(__name__)
