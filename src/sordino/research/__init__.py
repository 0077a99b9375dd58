"""Studies: methods and attacks of the literature that plug into sordino as a user's own would.

    projections        JL clipping: norms estimated from random projections; a clipping method with an event of its own
    noise_schedules    noise and learning rates that change from step to step, in closed form or learned: schedules
    learned_policies   all settings of a run and its update rule, learned together on public tasks
    gradient_filters   Kalman, low-pass and debiased-momentum filters of private gradients
    bolt_on            permutation descent with noise on its last weights alone
    smooth_sensitivity the median with noise that follows the data
    diagnostics        tangent kernels, noise and clipping apart, accuracy by subgroup
    attacks            from gradients, updates, models and sums back to records; a participant of federated learning
                       that paints another one's class

Nothing outside this package, its commands and its tests imports it. Import it before a plan file with one of its
clipping methods is read.

Example:
    >>> from sordino.research import noise_influence, optimal_noise_schedule
    >>> noise = optimal_noise_schedule(noise_influence(2, condition_number=4 / 3), budget=1.0)
    >>> [round(value**2, 6) for value in noise.values]
    [3.0, 1.5]
"""

from sordino.research.attacks import (
    ClassPrototype,
    Federation,
    Impersonation,
    Impersonator,
    Inversion,
    Protection,
    Reconstruction,
    class_prototype,
    difference_attack,
    gradient_of_update,
    impersonate,
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
from sordino.research.bolt_on import BoltOnDescent
from sordino.research.diagnostics import (
    PUBLISHED,
    Convergence,
    KernelRow,
    Kernels,
    RecordLoss,
    SubgroupGap,
    TangentKernel,
    compute_kernels,
    cross_entropy,
    measure_convergence,
    measure_tangent_kernel,
    subgroup_gaps,
)
from sordino.research.gradient_filters import (
    DebiasedMomentum,
    Kalman,
    LowPass,
    restore_parameters,
)
from sordino.research.learned_policies import LearnedPolicy, LearnedUpdate, learn_policy
from sordino.research.noise_schedules import (
    LearnedSchedule,
    constant_noise_schedule,
    estimate_influence,
    excess_risk_bound,
    exponential_influence,
    learn_schedule,
    max_momentum_learning_rate,
    momentum_effect,
    momentum_influence,
    noise_influence,
    noise_to_signal,
    optimal_noise_schedule,
    optimal_steps,
)
from sordino.research.projections import (
    ProjectedAccumulator,
    ProjectedClipping,
)
from sordino.research.smooth_sensitivity import (
    SmoothMedian,
    local_sensitivity_of_median,
    smooth_sensitivity_of_median,
)

__all__ = [
    "BoltOnDescent",
    "ClassPrototype",
    "Convergence",
    "DebiasedMomentum",
    "Federation",
    "Impersonation",
    "Impersonator",
    "Inversion",
    "Kalman",
    "KernelRow",
    "Kernels",
    "LearnedPolicy",
    "LearnedSchedule",
    "LearnedUpdate",
    "LowPass",
    "PUBLISHED",
    "ProjectedAccumulator",
    "ProjectedClipping",
    "Protection",
    "Reconstruction",
    "RecordLoss",
    "SmoothMedian",
    "SubgroupGap",
    "TangentKernel",
    "class_prototype",
    "compute_kernels",
    "constant_noise_schedule",
    "cross_entropy",
    "difference_attack",
    "estimate_influence",
    "excess_risk_bound",
    "exponential_influence",
    "gradient_of_update",
    "impersonate",
    "invert_by_direction",
    "invert_by_matching",
    "label_from_sign",
    "learn_policy",
    "learn_schedule",
    "least_squares_reconstruction",
    "local_sensitivity_of_median",
    "max_momentum_learning_rate",
    "measure_convergence",
    "measure_tangent_kernel",
    "momentum_effect",
    "momentum_influence",
    "noise_influence",
    "noise_to_signal",
    "optimal_noise_schedule",
    "optimal_steps",
    "privatized_gradient",
    "psnr",
    "read_linear_layer",
    "reconstruct_bits",
    "restore_parameters",
    "shared_gradient",
    "smooth_sensitivity_of_median",
    "ssim",
    "subgroup_gaps",
]
