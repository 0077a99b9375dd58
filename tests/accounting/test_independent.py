"""Agreement with an independent implementation (dp-accounting) on random parameters."""

import math

import numpy as np
import pytest

from sordino.accounting import epsilon, renyi_divergence
from sordino.definitions import NeighboringRelation
from sordino.events import Event, Gaussian, Laplace, PoissonSampled, SelfComposed

dpa = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld")
rdp = pytest.importorskip("dp_accounting.rdp")

RELATIONS = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE: dpa.NeighboringRelation.REPLACE_ONE,
}


def theirs(
    event: object, steps: int, neighboring_relation: NeighboringRelation, delta: float, grid: float = 1e-4
) -> float:
    accountant = pld.PLDAccountant(RELATIONS[neighboring_relation], value_discretization_interval=grid)
    return accountant.compose(event, steps).get_epsilon(delta)


def draws(count: int) -> list[tuple[float, float, int, float]]:
    source = np.random.default_rng(20261127)
    return [
        (
            float(np.exp(source.uniform(math.log(3e-3), math.log(0.6)))),
            float(np.exp(source.uniform(math.log(0.8), math.log(6)))),
            int(np.exp(source.uniform(math.log(60), math.log(800)))),
            float(10 ** -source.uniform(3, 8)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), draws(6))
def test_poisson_sampled_gaussians_agree_with_a_discretised_loss_distribution(q, sigma, steps, delta):
    step: Event = PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma))
    ours = epsilon(SelfComposed(event=step, count=steps), delta)
    reference = theirs(
        dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)), steps, NeighboringRelation.ADD_OR_REMOVE_ONE, delta
    )
    # Their grid rounds up: the reference lies above, by at most about λTh²/12.
    assert ours.upper <= reference * (1 + 1e-7)
    assert reference - ours.upper <= 2e-3 + 1e-2 * reference


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), draws(3))
def test_replace_one_agrees_when_noise_is_halved_for_the_doubled_sensitivity(q, sigma, steps, delta):
    step = PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma / 2))
    ours = epsilon(SelfComposed(event=step, count=steps), delta, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    reference = theirs(
        dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)), steps, NeighboringRelation.REPLACE_ONE, delta
    )
    assert ours.upper <= reference * (1 + 1e-7)
    assert reference - ours.upper <= 2e-3 + 1e-2 * reference


@pytest.mark.parametrize(("q", "sigma", "order"), [(0.01, 1.0, 2), (0.3, 2.0, 7), (0.05, 0.9, 24)])
def test_renyi_divergences_agree_at_integer_orders(q, sigma, order):
    accountant = rdp.RdpAccountant([order])
    accountant.compose(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)))
    step = PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma))
    assert renyi_divergence(step, order) == pytest.approx(float(accountant._rdp[0]), rel=1e-6)


@pytest.mark.parametrize(("q", "sigma", "order"), [(0.05, 0.9, 3.5), (0.001, 1.5, 12.25), (0.4, 3.0, 1.7)])
def test_renyi_divergences_agree_with_quadrature_in_many_digits_at_fractional_orders(q, sigma, order):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(30):

        def integrand(x):
            return mpmath.npdf(x, 0, sigma) * (1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))) ** order

        exact = mpmath.log(mpmath.quad(integrand, [-40, -10, -3, 0, 3, 10, 40])) / (order - 1)
    step = PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma))
    assert renyi_divergence(step, order) == pytest.approx(float(exact), rel=1e-12)


def test_laplace_beside_gaussians_agrees():
    from sordino.events import Composed

    event = Composed(
        events=(
            SelfComposed(event=Laplace(noise_multiplier=5.0), count=10),
            SelfComposed(event=Gaussian(noise_multiplier=5.0), count=10),
        )
    )
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dpa.LaplaceDpEvent(5.0), 10).compose(dpa.GaussianDpEvent(5.0), 10)
    assert epsilon(event, 1e-6).upper == pytest.approx(accountant.get_epsilon(1e-6), abs=1e-4)


def test_a_mixed_schedule_agrees_with_the_same_integral_in_twenty_five_digits():
    mpmath = pytest.importorskip("mpmath")
    from sordino.accounting import delta
    from sordino.events import Composed

    parts = ((0.03, 1.3, 60), (0.2, 2.5, 20))
    event = Composed(
        events=tuple(
            SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=s)), count=count)
            for q, s, count in parts
        )
    )
    with mpmath.workdps(25):
        step, spacing, lam = mpmath.mpf(1) / 10, mpmath.mpf(1) / 3, mpmath.mpf(6)
        nodes = [step * k for k in range(-110, 230)]
        laws = []
        for q, s, count in parts:
            losses = [mpmath.log1p(q * mpmath.expm1(y / s - 1 / (2 * mpmath.mpf(s) ** 2))) for y in nodes]
            weights = [step * mpmath.npdf(y) * mpmath.exp((lam + 1) * x) for y, x in zip(nodes, losses, strict=True)]
            laws.append((weights, losses, count))

        def integrand(u):
            s = mpmath.mpc(lam, u)
            value = mpmath.exp(-s * 1) / (s * (s + 1))
            for weights, losses, count in laws:
                value *= mpmath.fsum(w * mpmath.expj(u * x) for w, x in zip(weights, losses, strict=True)) ** count
            return value.real

        total = integrand(0) / 2 + mpmath.fsum(integrand(spacing * n) for n in range(1, 150))
        exact = float(total * spacing / mpmath.pi)
    answer = delta(event, 1.0)
    assert answer.lower * (1 - 1e-12) <= exact <= answer.upper * (1 + 1e-12)
    assert answer.width <= 1e-9 * exact
