"""Attacks on models and gradients (floor 4): what an attacker finds, beside what the guarantee lets through at most.

    membership_report                 every membership attack on one model, with the ceiling of its claim
    loss_scores, lira_online, …       the attacks' scores, one a record; `roc` says what scores are worth
    invert_by_matching, …             from a shared gradient back to the record
    class_prototype                   what a model holds for typical of a class
    impersonate                       a malicious participant paints another one's class (federated learning)
    reconstruct_bits, difference      from exact sums back to records

Attacks are plain functions with a frozen result. None of them promises anything, and none that fails is a proof.

Example:
    >>> from sordino.audit.attacks import ceiling_of_epsilon
    >>> f"{ceiling_of_epsilon(epsilon=1.0, delta=1e-5).true_positive_rate(0.01):.4f}"
    '0.0272'
"""

from sordino.audit.attacks.ceiling import Ceiling, ceiling, ceiling_of_epsilon
from sordino.audit.attacks.gan import Federation, Impersonation, Impersonator, Protection, impersonate
from sordino.audit.attacks.gradient_inversion import (
    Inversion,
    invert_by_direction,
    invert_by_matching,
    label_from_sign,
    read_linear_layer,
)
from sordino.audit.attacks.likeness import psnr, ssim
from sordino.audit.attacks.linear_release import Reconstruction, difference, reconstruct_bits, solve_release
from sordino.audit.attacks.lira import gaussian_log_ratio, lira_offline, lira_online
from sordino.audit.attacks.membership import NO_PROOF, MembershipAttack, MembershipReport, membership_report
from sordino.audit.attacks.prototype import ClassPrototype, class_prototype
from sordino.audit.attacks.quantile import quantile_scores
from sordino.audit.attacks.references import (
    Confidence,
    References,
    TrainReference,
    confidence,
    plain_training,
    train_references,
)
from sordino.audit.attacks.rmia import rmia_average, rmia_offset, rmia_scores
from sordino.audit.attacks.roc import Rate, Roc, fewest_for, roc
from sordino.audit.attacks.roc_picture import draw_roc
from sordino.audit.attacks.shadow import shadow_scores
from sordino.audit.attacks.shared_gradient import gradient_of_update, privatized_gradient, shared_gradient
from sordino.audit.attacks.slices import Slice, slices
from sordino.audit.attacks.threshold import loss_scores

__all__ = [
    "Ceiling",
    "ClassPrototype",
    "Confidence",
    "Federation",
    "Impersonation",
    "Impersonator",
    "Inversion",
    "MembershipAttack",
    "MembershipReport",
    "NO_PROOF",
    "Protection",
    "Rate",
    "Reconstruction",
    "References",
    "Roc",
    "Slice",
    "TrainReference",
    "ceiling",
    "ceiling_of_epsilon",
    "class_prototype",
    "confidence",
    "difference",
    "draw_roc",
    "fewest_for",
    "gaussian_log_ratio",
    "gradient_of_update",
    "impersonate",
    "invert_by_direction",
    "invert_by_matching",
    "label_from_sign",
    "lira_offline",
    "lira_online",
    "loss_scores",
    "membership_report",
    "plain_training",
    "privatized_gradient",
    "psnr",
    "quantile_scores",
    "read_linear_layer",
    "reconstruct_bits",
    "rmia_average",
    "rmia_offset",
    "rmia_scores",
    "roc",
    "shadow_scores",
    "shared_gradient",
    "slices",
    "solve_release",
    "ssim",
    "train_references",
]
