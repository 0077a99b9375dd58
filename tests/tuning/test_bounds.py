"""What a search is said to cost, against published tables and against exact laws of small searches."""

import functools
import math

import numpy as np
import pytest
from scipy.stats import norm

from sordino.accounting import delta, epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    Composed,
    Event,
    Gaussian,
    PoissonSampled,
    PureDP,
    RepeatAndSelect,
    SelfComposed,
)
from sordino.tuning import PoissonStopping, RandomStopping, ThresholdStopping


def sgd(rate, noise, steps):
    return SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise)), count=steps)


# Papernot and Steinke 2022, theorems 2 and 6, as dp_accounting 0.6 evaluates them on a grid of orders, at δ = 1e-5.
LAWS = (
    PoissonStopping(mean=10),
    RandomStopping(mean=10, shape=1.0),
    RandomStopping(mean=10, shape=0.5),
    RandomStopping(mean=10, shape=0.0),
    PoissonStopping(mean=100),
    RandomStopping(mean=100, shape=1.0),
    RandomStopping(mean=100, shape=0.5),
    RandomStopping(mean=100, shape=0.0),
)
TABLE = {
    "gaussian": (Gaussian(noise_multiplier=4.0), (2.3538, 2.1537, 1.9794, 1.7841, 8.3872, 2.7162, 2.4268, 2.1299)),
    "sgd": (sgd(0.01, 1.0, 1000), (4.3295, 4.1033, 3.8306, 3.5226, 16.397, 5.2700, 4.7909, 4.3012)),
    "mnist": (sgd(256 / 60000, 1.1, 14040), (5.7439, 5.0450, 4.6921, 4.2910, 24.069, 6.3689, 5.7484, 5.1097)),
}


@pytest.mark.parametrize("name", TABLE)
def test_renyi_bounds_reproduce_the_published_table_and_profiles_are_tighter(name):
    run, row = TABLE[name]
    for law, told in zip(LAWS, row, strict=True):
        found = epsilon(law.event(run), 1e-5, accountant="rdp").upper
        # Real orders are a little better than a grid where few orders are near; never worse than the last digit.
        assert found <= told + 1e-3
        assert found >= told - (1e-3 if told < 10 else 4e-3)
        assert epsilon(law.event(run), 1e-5).upper <= found


def test_profiles_of_poisson_many_runs_have_the_values_worked_out_by_hand():
    run = Gaussian(noise_multiplier=4.0)
    assert epsilon(PoissonStopping(mean=10).event(run), 1e-5).upper == pytest.approx(2.0555, abs=1e-4)
    assert epsilon(PoissonStopping(mean=2).event(run), 1e-5).upper == pytest.approx(1.1674, abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "gamma", "first"),
    [(1.0, 0.1, 0.1), (0.5, 0.0625, 0.15625), (0.0, 0.02691826, 0.269183), (-0.5, 0.00277008, 0.526316)],
)
def test_the_law_of_the_number_of_runs_has_its_published_constants(shape, gamma, first):
    law = RandomStopping(mean=10, shape=shape)
    assert law.gamma == pytest.approx(gamma, rel=2e-6)
    assert law.probability(1) == pytest.approx(first, abs=1e-6)
    masses = [law.probability(k) for k in range(1, 12_000)] if shape > -0.5 else []
    if masses:
        assert math.fsum(masses) == pytest.approx(1.0, abs=1e-9)
        assert math.fsum(k * mass for k, mass in enumerate(masses, 1)) == pytest.approx(10.0, abs=1e-6)


def test_random_stopping_costs_two_and_a_shape_and_a_threshold_two_of_pure_runs():
    run = PureDP(epsilon=0.4)
    for shape in (-0.5, 0.0, 0.5, 1.0):
        event = RandomStopping(mean=30, shape=shape).event(run)
        assert epsilon(event, 0.0).upper == pytest.approx((2 + shape) * 0.4)
        assert epsilon(event, 1e-9).upper <= (2 + shape) * 0.4 + 1e-9
    threshold = ThresholdStopping(threshold=0.5, stop_probability=0.05).event(run)
    assert epsilon(threshold, 0.0).upper == pytest.approx(0.8)
    with pytest.raises(UnsupportedEvent):
        epsilon(PoissonStopping(mean=3).event(run), 1e-6, accountant="basic")


# ── exact laws ──────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def masses(law):
    """P(K = k) from the first k on, until they no longer count."""
    first = 0 if isinstance(law, PoissonStopping) else 1
    found = []
    for k in range(first, 12_000):
        found.append(law.probability(k))
        if k > 50 and found[-1] < 1e-17:
            break
    return first, np.array(found)


def generating(law, x):
    """E[x^K] from the probabilities of the numbers of runs alone."""
    first, found = masses(law)
    return np.array([found @ (one ** np.arange(first, first + len(found))) for one in x])


def best_of(law, q):
    """The law of the best of K outcomes with probabilities q, worst first; one more entry for K = 0."""
    below = np.concatenate([[0.0], np.cumsum(q)])
    below[-1] = 1.0
    steps = np.diff(generating(law, below))
    return np.append(steps, law.probability(0)) if isinstance(law, PoissonStopping) else steps


def first_above(law, q, good):
    """The law of the first outcome from place `good` on, and of nothing."""
    gamma = law.stop_probability
    success = q[good:].sum()
    whole = success + gamma * (1 - success)
    return np.append(q[good:], gamma * (1 - success)) / whole


def exact_delta(p, q, at):
    return max(float(np.maximum(a - math.exp(at) * b, 0).sum()) for a, b in ((p, q), (q, p)))


def pairs(epsilon, extra, seed):
    """Two laws of a run that is (epsilon, extra)-private, among them randomized response in its worst place."""
    generator = np.random.default_rng(seed)
    top = math.exp(epsilon) / (1 + math.exp(epsilon))
    yield np.array([1 - top, top]), np.array([top, 1 - top])
    for _ in range(30):
        size = int(generator.integers(2, 7))
        q = generator.dirichlet(np.full(size, 0.4))
        high = generator.random(size) < 0.5
        lift = np.where(high, math.exp(epsilon), 1.0)
        p = q * lift / (q * lift).sum()
        if extra:
            # With probability δ the run shows all: at a place that the other law never reaches.
            one, other = sorted(generator.integers(0, size + 1, 2))
            p, q = (1 - extra) * p, (1 - extra) * q
            p = np.insert(np.insert(p, other, extra), one, 0.0)
            q = np.insert(np.insert(q, other, 0.0), one, extra)
        yield p, q


RUNS = [
    RandomStopping(mean=3, shape=1.0),
    RandomStopping(mean=20, shape=1.0),
    RandomStopping(mean=10, shape=0.0),
    RandomStopping(mean=10, shape=-0.5),
    PoissonStopping(mean=2),
]


@pytest.mark.parametrize("law", RUNS, ids=repr)
@pytest.mark.parametrize(("run", "extra"), [(0.3, 0.0), (1.0, 0.0), (0.5, 1e-3)])
def test_no_search_over_small_private_runs_exceeds_its_bound(law, run, extra):
    base: Event = ApproximateDP(epsilon=run, delta=extra) if extra else PureDP(epsilon=run)
    said = {at: delta(law.event(base), at).upper for at in (0.0, 0.2, 0.7, 1.5, 2.9)}
    for p, q in pairs(run, extra, seed=7):
        assert exact_delta(p, q, run) <= extra + 1e-12
        laws = best_of(law, p), best_of(law, q)
        for at, bound in said.items():
            assert exact_delta(*laws, at) <= bound + 1e-9


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
def test_the_pure_bound_is_nearly_reached_so_a_smaller_one_would_be_false(shape):
    law, run = RandomStopping(mean=400, shape=shape), 0.2
    # The worst pair: a rare best outcome whose odds move against those of a rare second best.
    rare = 0.02
    q = np.array([1 - rare - rare / 100, rare / 100, rare])
    p = np.array([0.0, rare / 100 * math.exp(run), rare * math.exp(-run)])
    p[0] = 1 - p.sum()
    ratio = float(np.max(np.abs(np.log(best_of(law, p) / best_of(law, q)))))
    assert ratio <= (2 + shape) * run
    assert ratio >= (1.8 + shape * 0.8) * run


@pytest.mark.parametrize("gamma", [0.02, 0.2, 1.0])
def test_no_search_up_to_a_threshold_exceeds_its_bound(gamma):
    law = ThresholdStopping(threshold=0.0, stop_probability=gamma)
    for at in (0.0, 0.3, 0.9, 1.9):
        said = delta(law.event(PureDP(epsilon=1.0)), at).upper
        for p, q in pairs(1.0, 0.0, seed=3):
            for good in range(1, len(p)):
                assert exact_delta(first_above(law, p, good), first_above(law, q, good), at) <= said + 1e-12


@pytest.mark.parametrize(
    "law", [*RUNS[1:], PoissonStopping(mean=10), ThresholdStopping(threshold=1.0, stop_probability=0.1)], ids=repr
)
def test_the_best_gaussian_score_is_within_the_bound_and_not_far_below(law):
    # The run's output is its score: N(0, σ²) against N(1, σ²), cut into many cells.
    noise, at_delta = 4.0, 1e-5
    edges = np.concatenate([[-np.inf], np.linspace(-40, 41, 6000), [np.inf]])
    p, q = (np.diff(norm.cdf(edges, loc=shift, scale=noise)) for shift in (0.0, 1.0))
    if isinstance(law, ThresholdStopping):
        laws = [first_above(law, one, good=3300) for one in (p, q)]
    else:
        laws = [best_of(law, one) for one in (p, q)]
    said = epsilon(law.event(Gaussian(noise_multiplier=noise)), at_delta).upper
    assert exact_delta(*laws, said) <= at_delta
    low, high = 0.0, said
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if exact_delta(*laws, middle) <= at_delta else (middle, high)
    assert 0.4 * said < high <= said
    if law == PoissonStopping(mean=10):
        # By another computation of the same pair.
        assert high == pytest.approx(1.061, abs=2e-3)


def test_a_search_beside_other_work_adds_up_and_a_sample_makes_its_runs_cheap():
    search = RandomStopping(mean=10).event(sgd(0.01, 1.0, 1000))
    alone, beside = epsilon(search, 5e-6).upper, epsilon(Gaussian(noise_multiplier=4.0), 5e-6).upper
    both = epsilon(Composed(events=(search, Gaussian(noise_multiplier=4.0))), 1e-5).upper
    assert max(alone, beside) < both <= alone + beside + 1e-9
    sampled = RandomStopping(mean=10).event(PoissonSampled(sample_rate=0.1, event=sgd(0.01, 1.0, 1000)))
    assert epsilon(sampled, 1e-5).upper < 0.5 * epsilon(search, 1e-5).upper
    with pytest.raises(UnsupportedEvent):
        epsilon(sampled, 1e-5, neighboring_relation=NeighboringRelation.REPLACE_ONE)


def test_a_run_on_a_sample_is_within_the_amplified_profile():
    # A run that tells whether the record is there, by randomized response, read with probability q.
    run, rate = 1.0, 0.2
    top = math.exp(run) / (1 + math.exp(run))
    q = np.array([top, 1 - top])
    p = rate * q[::-1] + (1 - rate) * q
    law = RandomStopping(mean=10, shape=1.0)
    event = law.event(PoissonSampled(sample_rate=rate, event=PureDP(epsilon=run)))
    for at in (0.0, 0.1, 0.4, 0.8):
        for order in (slice(None), slice(None, None, -1)):
            exact = exact_delta(best_of(law, p[order]), best_of(law, q[order]), at)
            assert exact <= delta(event, at).upper + 1e-12


def test_shapes_and_means_that_are_no_law_are_refused():
    for changes in ({"shape": -1.0}, {"mean": 1.0}, {"mean": 0.0}, {"shape": math.nan}):
        with pytest.raises(InvalidArgument):
            RandomStopping(**changes)
    for changes in ({"distribution": "fixed"}, {"shape": -1.5}, {"distribution": "threshold", "mean": 0.5}):
        with pytest.raises(InvalidArgument):
            RepeatAndSelect(
                **({"event": PureDP(epsilon=1.0), "distribution": "poisson", "mean": 2.0, "shape": 0.0} | changes)
            )
