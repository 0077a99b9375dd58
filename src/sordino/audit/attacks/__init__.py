"""Membership attacks on models: what an attacker finds, compared with the largest success that the guarantee allows.

    membership_report                 every membership attack on one model, with the ceiling of its claim
    loss_scores, lira_online, …       the attacks' scores, one a record; `roc` says what scores are worth

Attacks are plain functions with a frozen result. None of them promises anything, and none that fails is a proof.
`sordino.research` has attacks on gradients, updates and sums.

Example:
    >>> from sordino.audit.attacks import membership_bound_of_epsilon
    >>> f"{membership_bound_of_epsilon(epsilon=1.0, delta=1e-5).true_positive_rate(0.01):.4f}"
    '0.0272'
"""

from sordino.audit.attacks.membership import (
    NO_PROOF,
    MembershipAttack,
    MembershipReport,
    SubgroupResult,
    membership_report,
    plot_roc,
    subgroup_results,
)
from sordino.audit.attacks.membership_scores import (
    Confidence,
    ReferenceModels,
    TrainReference,
    confidence,
    gaussian_log_ratio,
    lira_offline,
    lira_online,
    loss_scores,
    quantile_scores,
    rmia_average,
    rmia_offset,
    rmia_scores,
    shadow_scores,
    standard_training,
    train_references,
)
from sordino.audit.attacks.roc import (
    MembershipBound,
    RateInterval,
    RocCurve,
    membership_bound,
    membership_bound_of_epsilon,
    min_non_members,
    roc_curve,
)

__all__ = [
    "Confidence",
    "MembershipAttack",
    "MembershipBound",
    "MembershipReport",
    "NO_PROOF",
    "RateInterval",
    "ReferenceModels",
    "RocCurve",
    "SubgroupResult",
    "TrainReference",
    "confidence",
    "gaussian_log_ratio",
    "lira_offline",
    "lira_online",
    "loss_scores",
    "membership_bound",
    "membership_bound_of_epsilon",
    "membership_report",
    "min_non_members",
    "plot_roc",
    "quantile_scores",
    "rmia_average",
    "rmia_offset",
    "rmia_scores",
    "roc_curve",
    "shadow_scores",
    "standard_training",
    "subgroup_results",
    "train_references",
]
