"""Diagnostics (floor 4): what clipping and noise do to a model's training, measured on public records.

    tangent_kernel      the neural tangent kernel and its clipped counterparts: symmetric? positive? does the loss fall?
    convergence         training with noise alone, clipping alone, both, neither
    subgroup_gaps       whom privacy costs most accuracy

Nothing here is private: give public records, or keep what you see to yourself.

Example:
    >>> from sordino.diagnostics import subgroup_gaps
    >>> sure, right = [[0.1, 0.9]] * 4, [1, 1, 0, 0]
    >>> [gap.gap for gap in subgroup_gaps(sure, sure, right, {"side": ["a", "a", "b", "b"]})]
    [0.0, 0.0]
"""

from sordino.diagnostics.convergence import Convergence, convergence
from sordino.diagnostics.kernel_table import PUBLISHED, KernelRow, TangentKernel, tangent_kernel
from sordino.diagnostics.kernels import Kernels, kernels
from sordino.diagnostics.subgroups import SubgroupGap, subgroup_gaps

__all__ = [
    "Convergence",
    "KernelRow",
    "Kernels",
    "PUBLISHED",
    "SubgroupGap",
    "TangentKernel",
    "convergence",
    "kernels",
    "subgroup_gaps",
    "tangent_kernel",
]
