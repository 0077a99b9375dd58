"""Calibration, groups, marginal cost, no amplification, and the exchange with dp-accounting."""

import math

import pytest

from sordino.accounting import (
    calibrate_batch_size,
    calibrate_delta,
    calibrate_sample_rate,
    calibrate_steps,
    epsilon,
    from_dp_event,
    group_privacy_event,
    marginal_epsilon,
    to_dp_event,
    without_amplification,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    Composed,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    NoOp,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    SampledWithoutReplacement,
    SelfComposed,
    ShuffledEpochs,
    ZeroConcentratedDP,
)

GOAL = {"target_epsilon": 2.0, "delta": 1e-5}


def sampled(q: float, sigma: float, steps: int) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


def test_calibrated_steps_fit_and_one_more_does_not():
    steps = calibrate_steps(lambda t: sampled(0.02, 1.5, t), **GOAL)
    assert epsilon(sampled(0.02, 1.5, steps), 1e-5).upper <= 2.0
    assert epsilon(sampled(0.02, 1.5, steps + 1), 1e-5).upper > 2.0
    assert calibrate_steps(lambda t: SelfComposed(event=Gaussian(noise_multiplier=0.5), count=t), **GOAL) == 0
    with pytest.raises(AccountingError):
        calibrate_steps(lambda t: NoOp(), **GOAL)


def test_a_calibrated_sample_rate_fits_and_a_slightly_larger_one_does_not():
    rate = calibrate_sample_rate(lambda q: sampled(q, 1.2, 500), **GOAL)
    assert epsilon(sampled(rate, 1.2, 500), 1e-5).upper <= 2.0
    assert epsilon(sampled(rate * (1 + 1e-4), 1.2, 500), 1e-5).upper > 2.0
    assert calibrate_sample_rate(lambda q: sampled(q, 500.0, 10), **GOAL) == 1.0
    with pytest.raises(AccountingError):
        calibrate_sample_rate(lambda q: NonPrivate(reason="x"), **GOAL)


def test_a_calibrated_batch_size_is_the_rate_times_the_population():
    def event(size: int) -> Event:
        return sampled(size / 10_000, 1.2, 500)

    size = calibrate_batch_size(event, dataset_size=10_000, **GOAL)
    assert epsilon(event(size), 1e-5).upper <= 2.0 < epsilon(event(size + 1), 1e-5).upper


def test_a_calibrated_delta_can_be_stated():
    value = calibrate_delta(sampled(0.01, 1.0, 500), target_epsilon=1.0)
    assert epsilon(sampled(0.01, 1.0, 500), value).upper <= 1.0 + 1e-9


def test_one_more_epoch_costs_what_the_longer_run_costs_more():
    base, more = sampled(0.01, 1.0, 1000), sampled(0.01, 1.0, 100)
    cost = marginal_epsilon(base, more, 1e-5)
    assert cost == pytest.approx(epsilon(sampled(0.01, 1.0, 1100), 1e-5).upper - epsilon(base, 1e-5).upper)
    assert 0 < cost < epsilon(more, 1e-5).upper
    assert math.isinf(marginal_epsilon(base, NonPrivate(reason="x"), 1e-5))


def test_without_amplification_every_record_takes_part():
    event = Composed(
        events=(
            sampled(0.01, 4.0, 10),
            SampledWithoutReplacement(dataset_size=9, sample_size=3, event=PureDP(epsilon=1.0)),
        )
    )
    plain = without_amplification(event)
    assert plain == Composed(events=(SelfComposed(event=Gaussian(noise_multiplier=4.0), count=10), PureDP(epsilon=1.0)))


def test_groups_scale_sensitivity_and_refuse_what_has_no_rule():
    assert group_privacy_event(ZeroConcentratedDP(rho=0.1), 3) == ZeroConcentratedDP(rho=0.1 * 9)
    assert group_privacy_event(DiscreteLaplace(scale=4.0, sensitivity=1), 2) == DiscreteLaplace(
        scale=4.0, sensitivity=2
    )
    single, group = (
        epsilon(sampled(0.02, 2.0, 200), 1e-6),
        epsilon(group_privacy_event(sampled(0.02, 2.0, 200), 3), 1e-6),
    )
    assert group.lower > 2 * single.upper
    with pytest.raises(UnsupportedEvent):
        group_privacy_event(ShuffledEpochs(epochs=1, steps_per_epoch=2, event=Gaussian(noise_multiplier=1.0)), 2)


@pytest.mark.parametrize(
    "neighboring_relation", [NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE]
)
def test_events_survive_the_way_to_dp_accounting_and_back(neighboring_relation):
    pytest.importorskip("dp_accounting")
    event = Composed(
        events=(
            sampled(0.01, 2.0, 10),
            Laplace(noise_multiplier=3.0),
            SampledWithoutReplacement(dataset_size=100, sample_size=10, event=Gaussian(noise_multiplier=1.0)),
            NonPrivate(reason="NonPrivateDpEvent"),
            NoOp(),
            ZeroConcentratedDP(rho=0.25),
        )
    )
    assert (
        from_dp_event(
            to_dp_event(event, neighboring_relation=neighboring_relation), neighboring_relation=neighboring_relation
        )
        == event
    )


def test_replace_one_halves_the_noise_that_dp_accounting_counts_per_clipping_norm():
    dpa = pytest.importorskip("dp_accounting")
    read = from_dp_event(dpa.GaussianDpEvent(3.0), neighboring_relation=NeighboringRelation.REPLACE_ONE)
    assert read == Gaussian(noise_multiplier=1.5)


def test_what_has_no_counterpart_is_refused():
    dpa = pytest.importorskip("dp_accounting")
    with pytest.raises(UnsupportedEvent):
        to_dp_event(PureDP(epsilon=1.0))
    with pytest.raises(UnsupportedEvent):
        from_dp_event(dpa.UnsupportedDpEvent())
    answer = to_dp_event(RandomizedResponse(epsilon=1.0, categories=4))
    assert isinstance(answer, dpa.RandomizedResponseDpEvent)
    # Their parameter is the probability of a uniform answer: the truth comes with 1 − s + s/k = e^ε/(e^ε + k − 1).
    share = answer.noise_parameter
    assert 1 - share + share / 4 == pytest.approx(math.e / (math.e + 3))
