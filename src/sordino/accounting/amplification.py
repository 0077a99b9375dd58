"""What a Poisson sample does to an ε (floor 1)."""

import math

__all__ = ["sampled_epsilon"]


def sampled_epsilon(epsilon: float, sample_rate: float) -> float:
    """Log(1 + q(e^ε − 1)) for every ε ≥ 0, ∞ among them, without overflow.

    References:
        Balle, Barthe and Gaboardi 2018, theorem 8. Not under replace-one.

    Example:
        >>> sampled_epsilon(1000.0, 0.01) == 1000.0 + math.log(0.01), sampled_epsilon(math.inf, 0.01)
        (True, inf)
    """
    if sample_rate == 0:
        return 0.0
    if epsilon > 30:
        return epsilon + math.log(sample_rate) + math.log1p((1 - sample_rate) / sample_rate * math.exp(-epsilon))
    return math.log1p(sample_rate * math.expm1(epsilon))
