"""What shuffling is known to cost at least (floor 1)."""

import numpy as np

from sordino import checks

__all__ = ["shuffle_lower_bound"]


def shuffle_lower_bound(noise_multiplier: float, *, steps_per_epoch: int, delta: float, epochs: int = 1) -> float:
    """A *lower* bound on ε of shuffled Gaussian batches: the event that some noisy sum of an epoch exceeds C.

    Under zero-out with the other records opposite, P has one coordinate at shift 2 and the rest at 0 against Q's
    one at shift 1 (Chua et al. 2024, "How private are DP-SGD implementations?", theorem 4.3). Never use it as a
    guarantee: it shows how far a Poisson accountant's number would understate.

    Returns:
        A lower bound on ε, 0 when the event shows nothing.
    """
    checks.positive(noise_multiplier=noise_multiplier)
    checks.integer(1, steps_per_epoch=steps_per_epoch)
    checks.integer(1, epochs=epochs)
    checks.probability(delta=delta, zero=False, one=False)
    if epochs > 1:
        return _composed_maxima(noise_multiplier, steps_per_epoch, delta, epochs)
    from scipy.special import log_ndtr

    thresholds = np.linspace(0.0, 2.0 + 45.0 * noise_multiplier, 20_001)
    rest = (steps_per_epoch - 1) * log_ndtr(thresholds / noise_multiplier)
    hit_p, hit_q = (-np.expm1(log_ndtr((thresholds - shift) / noise_multiplier) + rest) for shift in (2.0, 1.0))
    useful = (hit_p > delta) & (hit_q > 0)
    return max(0.0, float(np.max(np.log((hit_p[useful] - delta) / hit_q[useful]), initial=0.0)))


def _composed_maxima(noise_multiplier: float, steps: int, delta: float, epochs: int) -> float:
    """Several epochs: the largest noisy sum of each, in bins (post-processing), composed by the lower lattice."""
    from scipy.special import log_ndtr

    from sordino.accounting.law_directions import LawStep
    from sordino.accounting.laws import AtomicLaw
    from sordino.accounting.pld import pld_epsilon

    edges = np.append(np.linspace(0.0, 2.0 + 9.0 * noise_multiplier, 800), np.inf)
    rest = (steps - 1) * log_ndtr(edges / noise_multiplier)
    masses = []
    for shift in (2.0, 1.0):
        below = np.exp(log_ndtr((edges - shift) / noise_multiplier) + rest)
        masses.append(np.append(below[0], np.diff(below)))
    solid = (masses[0] > 1e-13) & (masses[1] > 1e-13)
    p, q = (np.where(solid, mass, 0.0)[solid] for mass in masses)
    losses = np.log(p / q)
    order = np.argsort(losses)
    law = AtomicLaw(losses=tuple(losses[order].tolist()), masses=tuple(p[order].tolist()))
    return pld_epsilon([LawStep(law=law, count=epochs)], delta)[0]
