"""Attacks on models and gradients: what an attacker finds, beside what the guarantee lets through at most.

    membership_report                 every membership attack on one model, with the ceiling of its claim
    loss_scores, lira_online, …       the attacks' scores, one a record; `roc` says what scores are worth
    invert_by_matching, …             from a shared gradient back to the record
    class_prototype                   what a model holds for typical of a class
    impersonate                       a malicious participant paints another one's class (federated learning)
    reconstruct_bits, difference      from exact sums back to records

Attacks are plain functions with a frozen result. None of them promises anything, and none that fails is a proof.

Example:
    >>> from sordino.audit.attacks import membership_bound_of_epsilon
    >>> f"{membership_bound_of_epsilon(epsilon=1.0, delta=1e-5).true_positive_rate(0.01):.4f}"
    '0.0272'
"""

from sordino.audit.attacks.gan import Federation, Impersonation, Impersonator, Protection, impersonate
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
from sordino.audit.attacks.reconstruction import (
    ClassPrototype,
    Inversion,
    Reconstruction,
    class_prototype,
    difference_attack,
    gradient_of_update,
    invert_by_direction,
    invert_by_matching,
    label_from_sign,
    least_squares_reconstruction,
    privatized_gradient,
    psnr,
    read_linear_layer,
    reconstruct_bits,
    shared_gradient,
    ssim,
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
    "ClassPrototype",
    "Confidence",
    "Federation",
    "Impersonation",
    "Impersonator",
    "Inversion",
    "MembershipAttack",
    "MembershipBound",
    "MembershipReport",
    "NO_PROOF",
    "Protection",
    "RateInterval",
    "Reconstruction",
    "ReferenceModels",
    "RocCurve",
    "SubgroupResult",
    "TrainReference",
    "class_prototype",
    "confidence",
    "difference_attack",
    "gaussian_log_ratio",
    "gradient_of_update",
    "impersonate",
    "invert_by_direction",
    "invert_by_matching",
    "label_from_sign",
    "least_squares_reconstruction",
    "lira_offline",
    "lira_online",
    "loss_scores",
    "membership_bound",
    "membership_bound_of_epsilon",
    "membership_report",
    "min_non_members",
    "plot_roc",
    "privatized_gradient",
    "psnr",
    "quantile_scores",
    "read_linear_layer",
    "reconstruct_bits",
    "rmia_average",
    "rmia_offset",
    "rmia_scores",
    "roc_curve",
    "shadow_scores",
    "shared_gradient",
    "ssim",
    "standard_training",
    "subgroup_results",
    "train_references",
]
