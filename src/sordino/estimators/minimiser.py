"""The minimiser of a strongly convex sum of losses, to a gradient norm that is fixed in advance (floor 4).

J(W) = Σᵢ ℓ(aᵢ·W; yᵢ) + ⟨B, W⟩ + (λ/2)‖W‖², all of W penalised, the intercept's weight too: without that J would not be
strongly convex in every direction, which every proof here needs.

References:
    Deuflhard 2004, "Newton methods for nonlinear problems", section 3.1 (residual-based damping).
"""

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from sordino.estimators.losses import Loss
from sordino.mechanisms.values import FloatArray

__all__ = ["minimiser"]

_MOST_STEPS = 300
_DENSE = 1200
_BLOCK = 4096


def minimiser(
    loss: Loss, rows: FloatArray, targets: FloatArray, *, linear: FloatArray, regularization: float, tolerance: float
) -> FloatArray:
    """W [p, k] with ‖∇J(W)‖ ≤ tolerance.

    Newton steps are shortened until the gradient's norm falls; since J is λ-strongly convex such a step always exists,
    so only rounding can stand in the way. Should it do so, the answer is 0 whatever the data: nothing is raised, and
    nothing that wasn't accounted for is returned.

    Args:
        loss: of scores.
        rows: [n, p], each of norm ≤ 1.
        targets: [n].
        linear: B [p, k].
        regularization: λ > 0.
        tolerance: > 0.
    """
    weights = -linear / (regularization + loss.curvature * len(rows))

    def gradient(at: FloatArray) -> FloatArray:
        return rows.T @ loss.gradients(rows @ at, targets) + linear + regularization * at

    slope = gradient(weights)
    for _ in range(_MOST_STEPS):
        size = float(np.linalg.norm(slope))
        # Half of the tolerance is left to the rounding of the gradient itself.
        if size <= tolerance / 2:
            return weights
        direction = _newton_direction(loss, rows, targets, weights, slope, regularization)
        length = 1.0
        while length > 1e-6:
            tried = weights + length * direction
            slope_there = gradient(tried)
            if float(np.linalg.norm(slope_there)) <= (1 - 0.1 * length) * size:
                break
            length /= 2
        else:
            # Where the loss has kinks in its slope a Newton step may fail; a short step downhill does not.
            tried = weights - slope / (regularization + loss.curvature * len(rows))
            slope_there = gradient(tried)
        weights, slope = tried, slope_there
    return np.zeros_like(weights)


def _newton_direction(
    loss: Loss, rows: FloatArray, targets: FloatArray, weights: FloatArray, slope: FloatArray, regularization: float
) -> FloatArray:
    curvatures = loss.hessians(rows @ weights, targets)
    if weights.size > _DENSE:
        return -_conjugate_gradients(rows, curvatures, slope, regularization)
    p, k = weights.shape
    hessian = np.zeros((p, k, p, k))
    for start in range(0, len(rows), _BLOCK):
        part, bent = rows[start : start + _BLOCK], curvatures[start : start + _BLOCK]
        for i in range(k):
            for j in range(i, k):
                block = part.T @ (part * bent[:, i, j, None])
                hessian[:, i, :, j] += block
                if i != j:
                    hessian[:, j, :, i] += block
    square = hessian.reshape(p * k, p * k)
    square[np.diag_indices(p * k)] += regularization
    return -cho_solve(cho_factor(square, lower=True), slope.ravel()).reshape(p, k)


def _conjugate_gradients(
    rows: FloatArray, curvatures: FloatArray, slope: FloatArray, regularization: float
) -> FloatArray:
    """(H + λ)⁻¹·slope to a tenth of a thousandth, without forming H."""

    def product(direction: FloatArray) -> FloatArray:
        bent = np.einsum("nij,nj->ni", curvatures, rows @ direction)
        return rows.T @ bent + regularization * direction

    solution = np.zeros_like(slope)
    residual, step = slope.copy(), slope.copy()
    size = float((residual * residual).sum())
    goal = 1e-8 * size
    for _ in range(1000):
        if size <= goal:
            break
        image = product(step)
        rate = size / float((step * image).sum())
        solution += rate * step
        residual -= rate * image
        smaller = float((residual * residual).sum())
        step = residual + smaller / size * step
        size = smaller
    return solution
