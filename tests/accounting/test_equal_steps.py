"""The short way for equal steps, against the long one and the literature; random distances; pure selections."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import epsilon, from_dp_event, group_privacy_event, to_dp_event
from sordino.accounting.base import flatten
from sordino.accounting.contour import certifies_delta_bound, contour_epsilon
from sordino.accounting.contour_equal_steps import equal_steps_epsilon
from sordino.accounting.event_mgfs import mgf_directions
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    Composed,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    PoissonSampled,
    PureDP,
    RepeatAndSelect,
    SelfComposed,
)

ADD, REPLACE, _ = NeighboringRelation


def sampled(q: float, sigma: float, count: int) -> SelfComposed:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=count)


def long_way(q: float, sigma: float, count: int, delta: float) -> list[tuple[float, float]]:
    return [contour_epsilon(steps, delta) for steps in mgf_directions(flatten(sampled(q, sigma, count), ADD), ADD)]


@settings(max_examples=25, deadline=None)
@given(
    q=st.floats(1e-3, 0.4),
    sigma=st.floats(0.7, 30.0),
    count=st.integers(100, 20_000),
    exponent=st.floats(-12.0, -3.0),
)
def test_the_short_way_and_the_long_way_enclose_one_truth(q, sigma, count, exponent):
    short = equal_steps_epsilon(q, 1 / sigma, count, 10**exponent)
    if short is None:
        return
    ways = long_way(q, sigma, count, 10**exponent)
    low, high = max(one[0] for one in ways), max(one[1] for one in ways)
    assert short[0] <= high
    assert low <= short[1]
    assert 0 <= short[1] - short[0] <= 1e-6 * short[1]


@pytest.mark.parametrize(
    ("q", "sigma", "count", "delta", "truth"),
    [
        (0.01, 4.0, 10_000, 1e-5, 0.9468668007734883),
        (256 / 60000, 1.1, 14_062, 1e-5, 2.381596921461515),
        (4096 / 50000, 3.0, 2500, 1e-5, 6.578895851),
        (0.01, 100.0, 10_000, 1e-5, 0.02722423884),
        (1e-3, 2.0, 10_000_000, 1e-6, 8.96073744),
    ],
)
def test_typical_runs_take_the_short_way_and_five_percent_less_noise_is_another_answer(q, sigma, count, delta, truth):
    found = equal_steps_epsilon(q, 1 / sigma, count, delta)
    assert found is not None
    assert found[1] == pytest.approx(truth, rel=2e-9, abs=3e-9)
    noisier = equal_steps_epsilon(q, 1 / (0.95 * sigma), count, delta)
    assert noisier is not None
    assert noisier[0] > 1.03 * found[1]


def test_a_direction_is_passed_over_only_when_it_is_proved_to_cost_less():
    removing, adding = mgf_directions(flatten(sampled(0.01, 4.0, 10_000), ADD), ADD)
    truth = contour_epsilon(adding, 1e-5)
    assert certifies_delta_bound(adding, 1.001 * truth[1], 1e-5)
    assert not certifies_delta_bound(adding, 0.999 * truth[0], 1e-5)
    assert not certifies_delta_bound(removing, 0.999 * contour_epsilon(removing, 1e-5)[0], 1e-5)
    assert not certifies_delta_bound(adding, 0.0, 1e-5)


def test_a_list_is_as_good_as_a_tuple_of_events():
    noise = Gaussian(noise_multiplier=2.0)
    listed = Composed(events=[noise, PureDP(epsilon=0.1)])  # pyright: ignore[reportArgumentType]
    assert epsilon(listed, 1e-5) == epsilon(Composed(events=(noise, PureDP(epsilon=0.1))), 1e-5)


# ── random distances ────────────────────────────────────────────────────────────────────────────────────────


def binomial(size: int, rate: float, sigma: float) -> GaussianMixture:
    weights = [math.comb(size, j) * rate**j * (1 - rate) ** (size - j) for j in range(size + 1)]
    return GaussianMixture(
        noise_multiplier=sigma,
        sensitivities=tuple(float(j) for j in range(size + 1)),
        probabilities=tuple(weights),
    )


@pytest.mark.parametrize(("size", "truth"), [(1, 2.95524591), (2, 6.43259993), (4, 14.53497638)])
def test_a_binomial_distance_is_a_group_of_records(size, truth):
    # Ganesh 2024: q = .01, σ = 1, T = 2000, δ = 1e-6.
    mixture = epsilon(SelfComposed(event=binomial(size, 0.01, 1.0), count=2000), 1e-6)
    group = epsilon(group_privacy_event(sampled(0.01, 1.0, 2000), size), 1e-6)
    assert mixture.upper == pytest.approx(group.upper, rel=1e-8)
    assert mixture.upper == pytest.approx(truth, rel=1e-8)


def test_a_certain_distance_is_a_gaussian_and_no_distance_is_free():
    certain = GaussianMixture(noise_multiplier=3.0, sensitivities=(0.0, 2.0), probabilities=(0.0, 1.0))
    assert epsilon(certain, 1e-5).upper == pytest.approx(epsilon(Gaussian(noise_multiplier=1.5), 1e-5).upper, rel=1e-9)
    assert epsilon(GaussianMixture(noise_multiplier=3.0, sensitivities=(0.0,), probabilities=(1.0,)), 1e-5).upper == 0
    bare = GaussianMixture(noise_multiplier=0.0, sensitivities=(0.0, 1.0), probabilities=(0.5, 0.5))
    assert math.isinf(epsilon(bare, 1e-5).upper)


def test_a_random_distance_agrees_with_dp_accounting():
    from dp_accounting.pld import PLDAccountant

    event = GaussianMixture(noise_multiplier=2.0, sensitivities=(0.0, 0.5, 1.0), probabilities=(0.9, 0.07, 0.03))
    assert from_dp_event(to_dp_event(event)) == event
    peer = PLDAccountant(value_discretization_interval=1e-3)
    peer.compose(to_dp_event(SelfComposed(event=event, count=200)))  # pyright: ignore[reportArgumentType]
    answer = epsilon(SelfComposed(event=event, count=200), 1e-5)
    assert answer.upper == pytest.approx(peer.get_epsilon(1e-5), rel=1e-3)
    less_noise = GaussianMixture(
        noise_multiplier=1.9, sensitivities=event.sensitivities, probabilities=(0.9, 0.07, 0.03)
    )
    assert epsilon(SelfComposed(event=less_noise, count=200), 1e-5).lower > 1.04 * answer.upper


def test_a_random_distance_is_refused_under_replace_one_and_with_probabilities_that_do_not_sum():
    with pytest.raises(UnsupportedEvent):
        epsilon(binomial(2, 0.1, 2.0), 1e-5, neighboring_relation=REPLACE)
    with pytest.raises(InvalidArgument, match="sum to 1"):
        GaussianMixture(noise_multiplier=1.0, sensitivities=(1.0,), probabilities=(0.5,))
    with pytest.raises(InvalidArgument):
        GaussianMixture(noise_multiplier=1.0, sensitivities=(-1.0,), probabilities=(1.0,))


# ── selection ───────────────────────────────────────────────────────────────────────────────────────────────


def test_random_stopping_triples_a_pure_guarantee():
    # Liu and Talwar 2019, theorem 3.1: a geometric number of runs; Papernot and Steinke 2022: (2 + η)ε.
    def best(event: PureDP | ApproximateDP, shape: float) -> RepeatAndSelect:
        return RepeatAndSelect(event=event, distribution="negative_binomial", mean=100.0, shape=shape)

    assert epsilon(best(PureDP(epsilon=1.0), 1.0), 1e-9).upper <= 3.0 + 1e-12
    assert epsilon(best(PureDP(epsilon=1.0), 0.5), 1e-9).upper <= 2.5 + 1e-12
    assert epsilon(best(PureDP(epsilon=1.0), 1.0), 1e-9, accountant="basic").upper == pytest.approx(3.0)
    # A hundred runs on the average lose a hundred times δ.
    lossy = best(ApproximateDP(epsilon=1.0, delta=1e-6), 1.0)
    assert epsilon(lossy, 1.1e-4, accountant="basic").upper == pytest.approx(3.0)
    assert epsilon(lossy, 0.9e-4, accountant="basic").upper == float("inf")


# ── few rare steps ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("q", "sigma", "count", "delta"), [(1e-4, 2.0, 10, 1e-7), (1e-6, 1.0, 10, 1e-8), (1e-3, 0.5, 10, 1e-6)]
)
def test_few_rare_steps_are_known_to_a_thousandth_and_their_lower_end_by_two_hits_at_most(q, sigma, count, delta):
    answer = epsilon(sampled(q, sigma, count), delta)
    assert answer.width <= 1e-3 * answer.upper
    # From below: only the first step counts. From above: T first steps, by the union over which one is hit.
    one = epsilon(PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), delta)
    assert one.lower <= answer.upper
    assert (
        answer.lower
        <= count * epsilon(PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), delta / count).upper
    )


def test_groups_of_one_are_single_records():
    one = GroupPoissonSampled(sample_rate=0.01, group_size=1, event=Gaussian(noise_multiplier=1.0))
    assert epsilon(SelfComposed(event=one, count=100), 1e-6) == epsilon(sampled(0.01, 1.0, 100), 1e-6)


def test_delta_and_steps_move_epsilon_the_right_way_through_both_ways():
    # The short way starts at 50 steps: no seam there.
    values = [epsilon(sampled(0.05, 2.0, count), 1e-6) for count in (48, 49, 50, 51, 52)]
    assert bool(np.all(np.diff([value.upper for value in values]) > 0))
