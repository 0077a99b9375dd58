"""Losses of linear models with the constants that privacy proofs need.

A loss is a convex function of the scores s = A·W, one row of A a record with ‖a‖₂ ≤ 1, W of shape [p, k]. So a record's
gradient is a·gᵀ for its score gradient g, of norm at most `lipschitz`, and its Hessian aaᵀ ⊗ S with S's largest
eigenvalue at most `curvature`.

Each loss has these constants:

- `outputs`: number of scores a record, k.
- `lipschitz`: the largest ℓ2 norm of a score gradient.
- `curvature`, `trace`, `rank`: the largest eigenvalue, trace and rank of a score Hessian.
- `corners`: given the target, score gradients lie in the hull of 0 and this many points of norm ≤ `lipschitz`.
- `flat_at_corners`: whether a gradient g = −q·corner goes with a curvature of at most q(1 − q): the logistic loss.

and, for scores [n, k] and targets [n], `values` [n], `gradients` [n, k] and `hessians` [n, k, k] of the records.

A weight of a record in [0, 1] multiplies its loss. All constants hold then too: gradients and Hessians only shrink. A
loss that is flat at its corners stays so: a gradient −w·q·corner goes with a curvature of w·q(1 − q) ≤ wq(1 − wq).

References:
    Chaudhuri, Monteleoni, Sarwate 2011, section 3.4 (logistic and Huber losses).
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import expit, softmax

from sordino import checks
from sordino.mechanisms.base import FloatArray


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """log(1 + e^{−y·s}) for y = ±1.

    Example:
        >>> float(Logistic().values(np.zeros((1, 1)), np.ones(1))[0].round(6))
        0.693147
    """

    outputs: int = 1
    lipschitz: float = 1.0
    curvature: float = 0.25
    trace: float = 0.25
    rank: int = 1
    corners: int = 1
    flat_at_corners: bool = True

    def values(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The loss of each record [n]."""
        return np.logaddexp(0.0, -targets * scores[:, 0])

    def gradients(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """−y·q with q = 1/(1 + e^{y·s}) [n, 1]."""
        return (-targets * expit(-targets * scores[:, 0]))[:, None]

    def hessians(self, scores: FloatArray, targets: FloatArray) -> FloatArray:  # noqa: ARG002 (the same for both labels)
        """q(1 − q) [n, 1, 1]."""
        return (expit(scores) * expit(-scores))[:, :, None]


@dataclass(frozen=True, kw_only=True)
class HuberHinge:
    """The hinge loss max(0, 1 − y·s) with its kink rounded to a parabola of half-width `width`, for y = ±1.

    Args:
        width: h > 0; the curvature is 1/(2h).
    """

    width: float = 0.5
    outputs: int = 1
    lipschitz: float = 1.0
    rank: int = 1
    corners: int = 1
    flat_at_corners: bool = False

    def __post_init__(self) -> None:
        checks.positive(width=self.width)

    @property
    def curvature(self) -> float:
        """1/(2h)."""
        return 1.0 / (2.0 * self.width)

    @property
    def trace(self) -> float:
        """1/(2h)."""
        return self.curvature

    def _short(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        return 1.0 - targets * scores[:, 0]

    def values(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The loss of each record [n]."""
        short, h = self._short(scores, targets), self.width
        inside = (np.clip(short, -h, h) + h) ** 2 / (4 * h)
        return inside + np.maximum(short - h, 0.0)

    def gradients(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """−y times a number in [0, 1] [n, 1]."""
        short, h = self._short(scores, targets), self.width
        slopes = (np.clip(short, -h, h) + h) / (2 * h)
        return np.asarray(-targets * slopes, dtype=np.float64)[:, None]

    def hessians(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """1/(2h) on the parabola, 0 outside it [n, 1, 1]."""
        inside = np.abs(self._short(scores, targets)) < self.width
        return np.asarray(inside * self.curvature, dtype=np.float64)[:, None, None]


@dataclass(frozen=True, kw_only=True)
class HuberResidual:
    """½r² for residuals |r| ≤ threshold, linear beyond: squared loss with a gradient bounded for all weights.

    Args:
        threshold: > 0.
    """

    threshold: float = 1.0
    outputs: int = 1
    curvature: float = 1.0
    trace: float = 1.0
    rank: int = 1
    corners: int = 2
    flat_at_corners: bool = False

    def __post_init__(self) -> None:
        checks.positive(threshold=self.threshold)

    @property
    def lipschitz(self) -> float:
        """The threshold."""
        return self.threshold

    def values(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The loss of each record [n]."""
        residuals = np.abs(scores[:, 0] - targets)
        inside = np.minimum(residuals, self.threshold)
        return inside**2 / 2 + self.threshold * (residuals - inside)

    def gradients(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The clipped residual [n, 1]."""
        return np.clip(scores[:, 0] - targets, -self.threshold, self.threshold)[:, None]

    def hessians(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """1 where the residual is inside the threshold, else 0 [n, 1, 1]."""
        return (np.abs(scores[:, 0] - targets) < self.threshold).astype(np.float64)[:, None, None]


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """Cross entropy of K classes; targets are indices of classes.

    Args:
        outputs: number of classes K ≥ 2.
    """

    outputs: int
    lipschitz: float = math.sqrt(2.0)
    flat_at_corners: bool = False

    def __post_init__(self) -> None:
        checks.integer(2, outputs=self.outputs)

    @property
    def curvature(self) -> float:
        """½."""
        return 0.5

    @property
    def rank(self) -> int:
        """K − 1: probabilities sum to 1."""
        return self.outputs - 1

    @property
    def corners(self) -> int:
        """The gradient p − e_y is a mean of 0 and the K − 1 vectors e_k − e_y."""
        return self.outputs - 1

    @property
    def trace(self) -> float:
        """1 − Σp² ≤ 1 − 1/K."""
        return 1.0 - 1.0 / self.outputs

    def values(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The loss of each record [n]."""
        largest = scores.max(axis=1, keepdims=True)
        total = np.log(np.exp(scores - largest).sum(axis=1)) + largest[:, 0]
        return total - scores[np.arange(len(scores)), targets.astype(np.int64)]

    def gradients(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """P − e_y [n, K]."""
        probabilities = softmax(scores, axis=1)
        probabilities[np.arange(len(scores)), targets.astype(np.int64)] -= 1.0
        return probabilities

    def hessians(self, scores: FloatArray, targets: FloatArray) -> FloatArray:  # noqa: ARG002 (the same for all labels)
        """diag(p) − ppᵀ [n, K, K]."""
        probabilities = softmax(scores, axis=1)
        return probabilities[:, :, None] * (np.eye(self.outputs) - probabilities[:, None, :])


@dataclass(frozen=True, kw_only=True)
class SmoothMargin(Softmax):
    """The multi-class hinge loss max over k of (1 if k ≠ y) + s_k − s_y, its maximum rounded; targets are indices.

    h·log Σₖ exp(·/h) in place of the maximum: at most h·log K above it. With scores moved by the margin it is h times
    the cross entropy of scores/h, so a gradient is p − e_y again.

    Args:
        outputs: number of classes K ≥ 2.
        width: h > 0; the largest eigenvalue of a Hessian is 1/(2h).

    Example:
        >>> loss = SmoothMargin(outputs=3, width=0.01)
        >>> loss.values(np.array([[0.0, 0.4, -2.0], [3.0, 0.0, 0.0]]), np.zeros(2)).round(2).tolist()
        [1.4, 0.0]

    References:
        Crammer, Singer 2001, "On the algorithmic implementation of multiclass kernel-based vector machines", eq. 1.
    """

    width: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(width=self.width)

    @property
    def curvature(self) -> float:
        """1/(2h)."""
        return super().curvature / self.width

    @property
    def trace(self) -> float:
        """(1 − 1/K)/h."""
        return super().trace / self.width

    def _moved(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        moved = scores + 1.0
        moved[np.arange(len(scores)), targets.astype(np.int64)] -= 1.0
        return moved / self.width

    def values(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """The loss of each record [n]."""
        return self.width * super().values(self._moved(scores, targets), targets)

    def gradients(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """P − e_y [n, K]."""
        return super().gradients(self._moved(scores, targets), targets)

    def hessians(self, scores: FloatArray, targets: FloatArray) -> FloatArray:
        """(diag(p) − ppᵀ)/h [n, K, K]."""
        return super().hessians(self._moved(scores, targets), targets) / self.width


Loss: TypeAlias = Logistic | HuberHinge | HuberResidual | Softmax
"""Any of the losses; `SmoothMargin` is a `Softmax`."""
