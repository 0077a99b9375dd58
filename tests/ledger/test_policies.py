"""The rules are theorems: adversaries who choose by what they see stay within the budget, and one who would not."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from sordino import accounting
from sordino.accounting.base import add_costs
from sordino.errors import BudgetExceeded
from sordino.events import ApproximateDP, Composed, Gaussian, Laplace, PoissonSampled, RandomizedResponse, SelfComposed
from sordino.ledger.account import AccountBudget, make_filter

BUDGET = AccountBudget(epsilon=1.0, delta=1e-5)


def test_gaussian_prices_are_the_textbook_moments():
    rule = make_filter(BUDGET)
    *moments, loss, own = rule.costs(Gaussian(noise_multiplier=3.0))
    for lam, moment in zip(BUDGET.orders, moments, strict=True):
        assert moment == pytest.approx(lam * (lam + 1) / 18, rel=1e-12)
    assert (loss, own) == (math.inf, 0.0)


def test_prices_of_laplace_and_of_samples_bound_the_moments_by_quadrature():
    rule = make_filter(BUDGET)
    scale, sigma, rate = 2.0, 1.5, 0.05

    def worst(p, q, lam):
        sides = []
        for one, other in ((p, q), (q, p)):
            value, _ = integrate.quad(
                lambda x, one=one, other=other: math.exp((lam + 1) * one(x) - lam * other(x)),
                -60, 60, points=[0, 1], limit=2000,
            )  # fmt: skip
            sides.append(math.log(value))
        return max(sides)

    def laplace(mean):
        return lambda x: -abs(x - mean) / scale - math.log(2 * scale)

    def base(x):
        return stats.norm.logpdf(x, scale=sigma)

    def mixed(x):
        return np.logaddexp(math.log1p(-rate) + base(x), math.log(rate) + base(x - 1))

    pairs = [
        (Laplace(noise_multiplier=scale), laplace(0.0), laplace(1.0)),
        (PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), base, mixed),
    ]
    for event, p, q in pairs:
        price = rule.costs(event)
        for lam, moment in list(zip(BUDGET.orders, price, strict=False))[:2]:
            truth = worst(p, q, lam)
            assert truth * (1 - 1e-7) <= moment <= truth * (1 + 1e-4) + 1e-12


def test_limits_are_the_conversion_of_the_orders_share():
    # At the limit of an order, the Rényi bound at that order gives exactly the budget's ε at the order's share of δ.
    rule = make_filter(BUDGET)
    shares = [1 / 2, 1 / 4, 1 / 16, 1 / 16]
    assert sum(shares) + 1 / 8 == 1
    for lam, share, room in zip(BUDGET.orders, shares, rule.moment_limits, strict=True):
        log_delta = math.log(share * 1e-5)
        epsilon = (room - log_delta + lam * math.log(lam) - (lam + 1) * math.log(lam + 1)) / lam
        assert epsilon == pytest.approx(1.0, abs=1e-12)


def largest(rule, total, make, high):
    """The largest scale for which make(scale) still fits."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rule.fits(add_costs(total, rule.costs(make(middle)))) else (low, middle)
    return low


def test_an_adversary_who_picks_the_order_by_what_was_seen_stays_within_the_budget():
    # First a Gaussian. Where its loss came out high, all that is left goes to randomized response (best at large
    # orders); where low, to a Gaussian (best at small ones). δ(ε) of the whole, by quadrature over the first output.
    rule = make_filter(BUDGET)
    mu = 0.13
    start = rule.costs(Gaussian(noise_multiplier=1 / mu))
    pure = largest(rule, start, lambda a: RandomizedResponse(epsilon=a, categories=2), 2.0)
    second = largest(rule, start, lambda m: Gaussian(noise_multiplier=1 / max(m, 1e-9)), 2.0)
    assert pure > 0.05
    assert second > 0.05

    def after_pure(left):
        p = math.exp(pure) / (1 + math.exp(pure))
        return p * max(0.0, -math.expm1(left - pure)) + (1 - p) * max(0.0, -math.expm1(left + pure))

    def after_gaussian(left):
        return stats.norm.cdf(-left / second + second / 2) - math.exp(left) * stats.norm.cdf(
            -left / second - second / 2
        )

    def delta(threshold):
        def slice_of(loss):
            left = BUDGET.epsilon - loss
            density = stats.norm.pdf(loss, loc=mu**2 / 2, scale=mu)
            return density * (after_pure(left) if loss > threshold else after_gaussian(left))

        return integrate.quad(slice_of, -1.0, 1.6, points=[threshold], limit=500)[0]

    found = [delta(threshold) for threshold in np.linspace(-0.2, 1.0, 25)]
    assert max(found) <= BUDGET.delta
    # The bound is of the right size, not a trivial one.
    assert max(found) > BUDGET.delta / 50


def test_plain_composition_is_no_filter():
    # Randomized response, then by its answer one of two events that each would have been within (ε, δ) on its own path.
    first, epsilon, delta = 0.1, 1.0, 1e-5
    p = math.exp(first) / (1 + math.exp(first))
    low, high = epsilon - first, epsilon + first
    for _ in range(200):
        a = (low + high) / 2
        cost = p * math.exp(a) / (1 + math.exp(a)) * -math.expm1(epsilon - first - a)
        low, high = (a, high) if cost <= delta * (1 - 1e-9) else (low, a)
    unlucky = RandomizedResponse(epsilon=low, categories=2)
    lucky = ApproximateDP(epsilon=0.0, delta=delta * (1 - 1e-9))
    response = RandomizedResponse(epsilon=first, categories=2)
    for path in (unlucky, lucky):
        assert accounting.epsilon(Composed(events=(response, path)), delta).upper <= epsilon * (1 + 1e-6)
    truth = p * math.exp(low) / (1 + math.exp(low)) * -math.expm1(epsilon - first - low) + (1 - p) * delta * (1 - 1e-9)
    assert truth > 1.4 * delta


def test_pld_takes_nothing_new_after_the_first_charge(ledger):
    account = ledger.declare("planned", epsilon=1.0, delta=1e-5, policy="pld")
    event = Gaussian(noise_multiplier=10.0)
    first = account.reserve(SelfComposed(event=event, count=3), note="sums")
    second = account.reserve(SelfComposed(event=event, count=3), note="training")
    second.charge(event)
    for spend in (account.charge, account.reserve, account.check_charge):
        with pytest.raises(BudgetExceeded, match="before the first charge"):
            spend(event)
    first.charge(SelfComposed(event=event, count=3))
    first.close()
    second.close()
    assert account.spent().epsilon == pytest.approx(accounting.epsilon(Gaussian(noise_multiplier=5.0), 1e-5).upper)
    assert not account.spent().caveats


def test_pld_grants_more_than_a_filter_and_not_more_than_the_budget(ledger):
    # The Gaussian truth at (1, 1e-5) is μ = 0.268051: 7 steps of σ = 10, and 6 by zCDP.
    account = ledger.declare("planned", epsilon=1.0, delta=1e-5, policy="pld")
    event = Gaussian(noise_multiplier=10.0)
    with pytest.raises(BudgetExceeded):
        account.reserve(SelfComposed(event=event, count=8))
    account.reserve(SelfComposed(event=event, count=7))
    with pytest.raises(BudgetExceeded):
        account.reserve(event)


def test_random_sequences_of_all_kinds_never_pass_the_cap(ledger):
    rng = np.random.default_rng(5)
    for trial in range(4):
        account = ledger.declare(f"trial {trial}", epsilon=2.0, delta=1e-5)
        for _ in range(25):
            scale = float(np.exp(rng.uniform(0.5, 3.0)))
            event = [
                Gaussian(noise_multiplier=scale),
                Laplace(noise_multiplier=scale),
                SelfComposed(
                    event=PoissonSampled(sample_rate=0.05, event=Gaussian(noise_multiplier=scale)),
                    count=int(rng.integers(1, 50)),
                ),
                ApproximateDP(epsilon=1 / scale, delta=float(rng.choice([1e-8, 5e-7]))),
            ][rng.integers(4)]
            try:
                account.charge(event)
            except BudgetExceeded:
                continue
        assert account.spent().epsilon <= 2.0
        assert account.remaining().fraction < 0.6
    ledger.verify()
