"""How much the noise of each step costs at the end, and the schedule that makes the least of it (floor 1, schedules).

Full-batch noisy gradient descent on a loss that is M-smooth and satisfies the Polyak–Łojasiewicz condition with μ:
the noise of step t (from 0, of T) reaches the end damped by γ^(T−1−t), γ = 1 − μ/M. With Σ σ_t⁻² = R fixed, which is a
zCDP budget of R/2, the bound on the excess risk is

    EER / (f₁ − f*) ≤ γ^T + R Σ_t q_t σ_t²        q_t = γ^(T−1−t) α      (theorem 3.2)

and the least of it is (Σ √q_t)² at σ_t² = (1/R) Σ_i √(q_i / q_t)             (lemma 3.1).

References:
    Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
    gradient descent".
"""

import math
from collections.abc import Sequence

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.schedules.schedule import Listed

__all__ = [
    "excess_risk_bound",
    "influence",
    "least_noise",
    "momentum_influence",
    "noise_to_signal",
    "optimal_steps",
    "uniform_noise",
]


def noise_to_signal(
    *, dimensions: int, lipschitz: float, budget: float, smoothness: float, records: float, excess: float
) -> float:
    """α = D G² / (2 R M N² (f₁ − f*)): how large noise is beside what there is to gain.

    Args:
        dimensions: D, number of parameters.
        lipschitz: G, bound on a record's gradient norm (the clipping norm).
        budget: R = Σ σ_t⁻² > 0; the run is (R/2)-zCDP.
        smoothness: M > 0.
        records: public number N of records.
        excess: f₁ − f* > 0, loss above the optimum at the start.

    Example:
        >>> noise_to_signal(dimensions=10, lipschitz=1.0, budget=0.5, smoothness=1.0, records=100.0, excess=1.0)
        0.001
    """
    squares = checks.positive(lipschitz=lipschitz) ** 2
    below = 2 * checks.positive(budget=budget) * checks.positive(smoothness=smoothness)
    below *= checks.positive(records=records) ** 2 * checks.positive(excess=excess)
    return checks.integer(1, dimensions=dimensions) * squares / below


def influence(steps: int, *, condition_number: float, alpha: float = 1.0) -> tuple[float, ...]:
    """q_t = γ^(T−1−t) α for t = 0, …, T−1, with γ = 1 − 1/κ: late noise counts most.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        alpha: `noise_to_signal`, > 0; a factor common to all steps does not move the best schedule.

    Example:
        >>> influence(3, condition_number=2.0)
        (0.25, 0.5, 1.0)
    """
    gamma = _gamma(condition_number)
    alpha = checks.positive(alpha=alpha)
    return tuple(alpha * gamma ** (steps - 1 - step) for step in range(checks.integer(1, steps=steps)))


def momentum_influence(
    steps: int, *, condition_number: float, momentum: float, learning_rate: float = 1.0
) -> tuple[float, ...]:
    """q_t = (β^(2(T−t)) − γ^(T−t)) / (β² − γ) with debiased momentum β, γ = 1 − η₀/κ: a hump before the end.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        momentum: β in (0, 1).
        learning_rate: η₀ in units of 1/M, in (0, 1].

    References:
        Hong, Wang, Zhou 2022, theorem 3.4.
    """
    beta = checks.probability(zero=False, one=False, momentum=momentum)
    rate = checks.probability(zero=False, learning_rate=learning_rate)
    gamma = 1 - rate / checks.in_range(1.0, math.inf, condition_number=condition_number)
    # The quotient is Σ_k β^(2k) γ^(n−1−k), added up so that nothing cancels where β² is near γ.
    found = [1.0]
    for count in range(1, checks.integer(1, steps=steps)):
        found.append(gamma * found[-1] + beta ** (2 * count))
    return tuple(reversed(found))


def uniform_noise(steps: int, *, budget: float) -> Listed:
    """σ_t² = T/R at every step: the same zCDP budget R/2, spent evenly."""
    return Listed(values=(math.sqrt(steps / checks.positive(budget=budget)),) * checks.integer(1, steps=steps))


def least_noise(influences: Sequence[float], *, budget: float) -> Listed:
    """The noise multipliers with Σ σ_t⁻² = R that make Σ q_t σ_t² least: σ_t² = (1/R) Σ_i √(q_i / q_t).

    Guarantee: fixed before the run from q alone; a run of plain Gaussian steps with these multipliers is (R/2)-zCDP.
    Subsampled steps cost what the accountant says of each.

    Args:
        influences: q_t > 0 of each step, in order.
        budget: R > 0.

    Example:
        >>> noise = least_noise(influence(2, condition_number=4 / 3), budget=1.0)
        >>> [round(value**2, 6) for value in noise.values]
        [3.0, 1.5]

    References:
        Hong, Wang, Zhou 2022, lemma 3.1.
    """
    roots = [math.sqrt(checks.positive(influences=value)) for value in influences]
    if not roots:
        raise InvalidArgument("influences must hold a number for every step, got none. Give at least one.")
    total = math.fsum(roots) / checks.positive(budget=budget)
    return Listed(values=tuple(math.sqrt(total / root) for root in roots))


def excess_risk_bound(
    noise: Sequence[float], *, condition_number: float, alpha: float, influences: Sequence[float] | None = None
) -> float:
    """γ^T + R Σ_t q_t σ_t², the bound on the final excess risk over that of the start, R = Σ σ_t⁻².

    Lay schedules of one budget side by side with it: the smaller bound promises more.

    Args:
        noise: σ_t of each step.
        condition_number: κ > 1.
        alpha: `noise_to_signal` for the budget R of this schedule, > 0.
        influences: q_t of each step; None takes those of plain gradient descent.

    Example:
        >>> noise = uniform_noise(10, budget=0.1)
        >>> round(excess_risk_bound(noise.values, condition_number=5.0, alpha=0.001), 4)
        0.152

    References:
        Hong, Wang, Zhou 2022, theorem 3.2.
    """
    steps = len(noise)
    weights = influence(steps, condition_number=condition_number, alpha=alpha) if influences is None else influences
    budget = math.fsum(checks.positive(noise=sigma) ** -2 for sigma in noise)
    spent = math.fsum(weight * sigma**2 for weight, sigma in zip(weights, noise, strict=True))
    return _gamma(condition_number) ** steps + budget * spent


def optimal_steps(*, condition_number: float, alpha: float, dynamic: bool) -> int:
    """The number of steps T* that makes the bound least, for uniform noise or the best dynamic noise.

    uniform: the T of least γ^T + α T (1 − γ^T)/(1 − γ); dynamic: of γ^T + α ((1 − γ^(T/2))/(1 − √γ))². The published
    closed forms, T* = ⌈log_γ(κα / ln(1/γ))⌉ and ⌈2 log_γ(α / (α + (1 − √γ)²))⌉, drop a term of the first and round up;
    here all whole numbers are compared. 0 says that any step adds more noise than it gains.

    Example:
        >>> optimal_steps(condition_number=10.0, alpha=1e-4, dynamic=True)
        63

    References:
        Hong, Wang, Zhou 2022, section 3.2.
    """
    gamma, alpha = _gamma(condition_number), checks.positive(alpha=alpha)

    def bound(steps: int) -> float:
        if dynamic:
            return gamma**steps + alpha * ((1 - gamma ** (steps / 2)) / (1 - math.sqrt(gamma))) ** 2
        return gamma**steps + alpha * steps * (1 - gamma**steps) / (1 - gamma)

    # At γ^T = α the noise alone is more than all that is left to gain.
    farthest = math.ceil(math.log(min(alpha, 0.5)) / math.log(gamma)) + 1
    return min(range(farthest + 1), key=bound)


def _gamma(condition_number: float) -> float:
    if not checks.positive(condition_number=condition_number) > 1:
        raise InvalidArgument(f"condition_number must be above 1, got {condition_number:g}.")
    return 1 - 1 / condition_number
