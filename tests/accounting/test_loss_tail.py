"""The tail of the privacy loss, against closed forms and against sums over a lattice."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.accounting import privacy_loss_tail, privacy_profile, trade_off_curve
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, Laplace, NonPrivate, NoOp, PoissonSampled, PureDP, SelfComposed

POINTS = [0.05, 0.5, 1.0, 2.0]


def encloses(answers, truths, width=2e-2):
    for answer, truth in zip(answers, truths, strict=True):
        assert answer.lower <= truth * (1 + 1e-9)
        assert answer.upper >= truth * (1 - 1e-9)
        assert answer.width <= width * truth + 1e-12


@pytest.mark.parametrize(("sigma", "count"), [(1.0, 1), (5.0, 25), (2.0, 3)])
def test_the_loss_of_gaussians_is_gaussian(sigma, count):
    mu = math.sqrt(count) / sigma
    event = SelfComposed(event=Gaussian(noise_multiplier=sigma), count=count)
    encloses(privacy_loss_tail(event, POINTS), [stats.norm.sf(t / mu - mu / 2) for t in POINTS], 1e-3)


def test_one_sampled_step_is_a_mixture_beyond_a_quantile():
    rate, sigma = 0.1, 1.0
    # Removing: L(y) = log(1 − q + q e^{y − 1/2}) grows with y ~ (1 − q) N(0, 1) + q N(1, 1).
    places = [math.log1p(math.expm1(t) / rate) + 0.5 for t in POINTS]
    removing = [(1 - rate) * stats.norm.sf(y) + rate * stats.norm.sf(y - 1) for y in places]
    # Adding: the loss is −log(1 − q + q e^{y − 1/2}) with y ~ N(0, 1), at most −log(1 − q).
    shares = [max(0.0, (math.exp(-t) - (1 - rate)) / rate) for t in POINTS]
    adding = [float(stats.norm.cdf(math.log(x) + 0.5)) if x > 0 else 0.0 for x in shares]
    truths = [max(pair) for pair in zip(removing, adding, strict=True)]
    encloses(
        privacy_loss_tail(PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), POINTS), truths
    )


def test_many_sampled_steps_against_samples_of_their_losses():
    source = np.random.default_rng(1)
    rate, sigma, count, runs = 0.1, 1.0, 20, 100_000
    noise = source.normal(size=(runs, count))
    hit = source.random((runs, count)) < rate
    removing = np.log(1 - rate + rate * np.exp(noise + hit - 0.5)).sum(axis=1)
    adding = -np.log(1 - rate + rate * np.exp(noise - 0.5)).sum(axis=1)
    event = SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), count=count)
    for answer, t in zip(privacy_loss_tail(event, POINTS), POINTS, strict=True):
        share = max(float((losses > t).mean()) for losses in (removing, adding))
        error = 5 * math.sqrt(share * (1 - share) / runs)
        assert answer.lower - error <= share <= answer.upper + error
        assert answer.width <= 0.03 * answer.upper


def test_atoms_and_what_has_no_loss_or_no_limit():
    scale = 2.0
    truths = [1 - math.exp((t - 1 / scale) / 2) / 2 for t in (0.1, 0.3)]
    encloses(privacy_loss_tail(Laplace(noise_multiplier=scale), [0.1, 0.3]), truths)
    (below, beyond) = privacy_loss_tail(PureDP(epsilon=1.0), [0.5, 1.5])
    assert below.lower <= math.e / (1 + math.e) <= below.upper
    assert beyond.upper <= 1e-9
    assert [tail.upper for tail in privacy_loss_tail(NoOp(), [1.0])] == [0.0]
    assert [tail.upper for tail in privacy_loss_tail(NonPrivate(reason="printed"), [1.0])] == [1.0]
    with pytest.raises(InvalidArgument, match="thresholds must be"):
        privacy_loss_tail(Gaussian(noise_multiplier=1.0), [0.0])


def test_the_tail_bounds_delta_and_falls():
    event = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=0.8)), count=500)
    for relation in NeighboringRelation:
        tails = privacy_loss_tail(event, POINTS, neighboring_relation=relation)
        deltas = privacy_profile(event, POINTS, neighboring_relation=relation)
        assert all(tail.upper >= small for tail, small in zip(tails, deltas, strict=True))
        assert [tail.upper for tail in tails] == sorted((tail.upper for tail in tails), reverse=True)


@pytest.mark.parametrize("function", [privacy_loss_tail, privacy_profile, trade_off_curve])
@pytest.mark.parametrize("points", [0.5, None, "0.5"])
def test_one_point_where_several_belong_is_refused_by_name(function, points):
    with pytest.raises(InvalidArgument, match="must be a list of values"):
        function(Gaussian(noise_multiplier=1.0), points)
