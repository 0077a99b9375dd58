"""The front door: what holds for every question, whatever the accountant."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import (
    Interval,
    ZCDPFilter,
    calibrate_noise_multiplier,
    calibrate_steps,
    delta,
    epsilon,
    epsilon_by_accountant,
    renyi_divergence,
    to_dp_event,
    true_positive_rate,
    zcdp_rho,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import (
    Composed,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    NoOp,
    PoissonSampled,
    SampledWithoutReplacement,
    SelfComposed,
)

ADD, REPLACE, ZERO = NeighboringRelation


def sampled(q: float, sigma: float, steps: int = 1) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


log_uniform = lambda low, high: st.floats(math.log(low), math.log(high)).map(math.exp)  # noqa: E731
# Cheap parameters; the expensive corners have tests of their own.
PARAMETERS = {
    "q": log_uniform(5e-3, 0.9),
    "sigma": log_uniform(0.9, 20.0),
    "steps": log_uniform(300, 1e5).map(int),
    "target": log_uniform(1e-12, 0.1),
}


def test_the_headline_case_by_both_accountants():
    answers = epsilon_by_accountant(sampled(0.01, 4.0, 10_000), 1e-5)
    assert answers["contour"] == pytest.approx(0.94687, abs=5e-6)
    assert answers["rdp"] == pytest.approx(1.0355, abs=2e-4)


@settings(max_examples=20, deadline=None)
@given(**PARAMETERS)
def test_the_interval_is_ordered_narrow_and_below_renyi(q, sigma, steps, target):
    answer = epsilon(sampled(q, sigma, steps), target)
    assert 0 <= answer.lower <= answer.upper < math.inf
    assert answer.width <= 1e-5 * answer.upper + 1e-12
    assert answer.upper <= epsilon(sampled(q, sigma, steps), target, accountant="rdp").upper * (1 + 1e-9) + 1e-12


@settings(max_examples=6, deadline=None)
@given(**PARAMETERS)
def test_more_steps_a_larger_sample_less_noise_or_a_smaller_delta_never_cost_less(q, sigma, steps, target):
    base = epsilon(sampled(q, sigma, steps), target)
    for more in (
        epsilon(sampled(q, sigma, steps + max(1, steps // 50)), target),
        epsilon(sampled(min(1.0, q * 1.02), sigma, steps), target),
        epsilon(sampled(q, sigma / 1.02, steps), target),
        epsilon(sampled(q, sigma, steps), target / 1.5),
    ):
        assert more.upper >= base.lower


@settings(max_examples=6, deadline=None)
@given(**PARAMETERS)
def test_delta_and_epsilon_are_inverse(q, sigma, steps, target):
    answer = epsilon(sampled(q, sigma, steps), target)
    if answer.lower > 0:
        assert delta(sampled(q, sigma, steps), answer.upper).lower <= target * (1 + 1e-9)
        assert delta(sampled(q, sigma, steps), answer.lower).upper >= target * (1 - 1e-9)


@settings(max_examples=6, deadline=None)
@given(q=PARAMETERS["q"], sigma=PARAMETERS["sigma"], k=st.integers(2, 40))
def test_composition_is_counted_however_it_is_written(q, sigma, k):
    step = PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma))
    written = [
        SelfComposed(event=step, count=100 * k),
        Composed(events=(SelfComposed(event=step, count=100),) * k),
        SelfComposed(event=Composed(events=(step, NoOp(), SelfComposed(event=step, count=k - 1))), count=100),
    ]
    answers = {epsilon(event, 1e-6).upper for event in written}
    assert len(answers) == 1
    assert answers.pop() > epsilon(sampled(q, sigma, 100), 1e-6).lower


def test_splitting_a_schedule_into_equal_parts_changes_nothing_beyond_the_width():
    whole = epsilon(sampled(0.02, 1.3, 600), 1e-6)
    nearly = Composed(events=tuple(sampled(0.02, 1.3 * (1 + k * 1e-13), 100) for k in range(6)))
    parts = epsilon(nearly, 1e-6)
    assert parts.upper == pytest.approx(whole.upper, abs=1e-9)


@pytest.mark.parametrize("accountant", ["closed_form", "contour", "rdp"])
def test_k_gaussians_are_one_gaussian_with_root_k_less_noise(accountant):
    many = epsilon(SelfComposed(event=Gaussian(noise_multiplier=9.0), count=81), 1e-6, accountant=accountant)
    one = epsilon(Gaussian(noise_multiplier=1.0), 1e-6, accountant=accountant)
    assert many.upper == pytest.approx(one.upper, rel=1e-12)


@pytest.mark.parametrize("accountant", ["closed_form", "contour", "rdp"])
@pytest.mark.parametrize("z", [0.7, 2.0, 11.0])
def test_noise_is_relative_to_the_sensitivity_under_the_relation(accountant, z):
    # First reading: z is std / sensitivity under the relation, so that a Gaussian costs the same under all three.
    costs = {
        neighboring_relation: epsilon(
            Gaussian(noise_multiplier=z), 1e-5, neighboring_relation=neighboring_relation, accountant=accountant
        ).upper
        for neighboring_relation in NeighboringRelation
    }
    assert len(set(costs.values())) == 1
    # Second reading: a sum of terms with norm ≤ C and noise z·C has z/factor; replace-one costs what z/2 costs.
    replaced = Gaussian(noise_multiplier=z / REPLACE.sensitivity_factor)
    halved = epsilon(Gaussian(noise_multiplier=z / 2), 1e-5, neighboring_relation=ADD, accountant=accountant)
    assert (
        epsilon(replaced, 1e-5, neighboring_relation=REPLACE, accountant=accountant).upper == halved.upper > costs[ADD]
    )


def test_zero_out_on_a_poisson_sample_equals_add_or_remove():
    event = sampled(0.02, 1.1, 500)
    assert epsilon(event, 1e-6, neighboring_relation=ZERO).upper == epsilon(event, 1e-6, neighboring_relation=ADD).upper


def test_replace_one_on_a_poisson_sample_lies_between_half_and_full_shift():
    # Std 2 per clipping norm 1: sensitivity 2 under replace-one gives z = 1.
    replace = epsilon(sampled(0.01, 1.0, 1000), 1e-6, neighboring_relation=REPLACE).upper
    assert epsilon(sampled(0.01, 2.0, 1000), 1e-6).upper < replace < epsilon(sampled(0.01, 1.0, 1000), 1e-6).upper


def test_nothing_is_free_and_no_protection_is_infinite():
    assert epsilon(NoOp(), 1e-5) == Interval(lower=0.0, upper=0.0, accountant="exact")
    assert math.isinf(epsilon(NonPrivate(reason="printed"), 1e-5).lower)
    assert math.isinf(epsilon(Composed(events=(sampled(0.1, 1.0), NonPrivate(reason="printed"))), 1e-5).upper)
    assert math.isinf(epsilon(sampled(0.1, 0.0, 3), 1e-5).upper)
    assert delta(NonPrivate(reason="printed"), 5.0).upper == 1.0
    assert epsilon(SelfComposed(event=NonPrivate(reason="printed"), count=0), 1e-5).upper == 0
    assert epsilon(PoissonSampled(sample_rate=0.0, event=NonPrivate(reason="printed")), 1e-5).upper == 0


@pytest.mark.parametrize("target", [0.3, 0.5, 0.9, 0.999999, 1.0])
def test_a_large_delta_never_gives_a_negative_epsilon(target):
    for event in (sampled(0.001, 100.0, 1), sampled(0.01, 1.0, 1000), Gaussian(noise_multiplier=3.0)):
        for value in [epsilon(event, target).upper, *epsilon_by_accountant(event, target).values()]:
            assert value >= 0


def test_two_mechanisms_on_one_sample_are_not_two_samples():
    together = PoissonSampled(sample_rate=0.1, event=SelfComposed(event=Gaussian(noise_multiplier=2.0), count=4))
    merged = PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=1.0))
    assert epsilon(together, 1e-5).upper == epsilon(merged, 1e-5).upper
    mixed = Composed(events=(Gaussian(noise_multiplier=2.0), Laplace(noise_multiplier=2.0)))
    with pytest.raises(UnsupportedEvent):
        epsilon(PoissonSampled(sample_rate=0.1, event=mixed), 1e-5)


def test_a_sample_of_a_sample_is_a_smaller_sample():
    inner = PoissonSampled(sample_rate=0.5, event=Gaussian(noise_multiplier=1.0))
    assert epsilon(PoissonSampled(sample_rate=0.02, event=inner), 1e-5) == epsilon(sampled(0.01, 1.0), 1e-5)


def test_an_event_without_a_sound_answer_is_refused():
    unknown = PoissonSampled(
        sample_rate=0.1,
        event=SampledWithoutReplacement(dataset_size=10, sample_size=2, event=Gaussian(noise_multiplier=1.0)),
    )
    with pytest.raises(UnsupportedEvent):
        epsilon(unknown, 1e-5)
    with pytest.raises(UnsupportedEvent, match="contour"):
        epsilon(unknown, 1e-5, accountant="contour")
    with pytest.raises(InvalidArgument, match="accountant must be one of"):
        epsilon(sampled(0.1, 1.0), 1e-5, accountant="moment")


@pytest.mark.parametrize("answer", [(math.nan, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_an_interval_that_makes_no_sense_cannot_be_built(answer):
    with pytest.raises(AccountingError):
        Interval(lower=answer[0], upper=answer[1], accountant="contour")


@settings(max_examples=6, deadline=None)
@given(
    q=log_uniform(1e-3, 1.0), steps=st.integers(1, 3000), goal=log_uniform(0.1, 20.0), target=log_uniform(1e-9, 1e-4)
)
def test_calibrated_noise_never_exceeds_the_target_and_wastes_little(q, steps, goal, target):
    noise = calibrate_noise_multiplier(lambda z: sampled(q, z, steps), target_epsilon=goal, delta=target)
    assert epsilon(sampled(q, noise, steps), target).upper <= goal
    if noise > 1e-3:
        assert epsilon(sampled(q, noise * (1 - 2e-5), steps), target).upper > goal


def test_calibration_refuses_what_no_noise_can_reach():
    with pytest.raises(AccountingError):
        calibrate_noise_multiplier(lambda z: NonPrivate(reason="x"), target_epsilon=1.0, delta=1e-5)


def test_at_delta_zero_the_largest_losses_add_up_and_a_gaussian_makes_it_infinite():
    thin = PoissonSampled(sample_rate=0.1, event=Laplace(noise_multiplier=2.0))
    answer = epsilon(SelfComposed(event=thin, count=7), 0.0)
    assert answer.upper == pytest.approx(7 * math.log1p(0.1 * math.expm1(0.5)))
    assert math.isinf(epsilon(Composed(events=(thin, Gaussian(noise_multiplier=50.0))), 0.0).lower)


def test_a_sample_of_something_unprotected_claims_nothing_from_below():
    answer = epsilon(sampled(0.1, 0.0, 1), 0.2)
    assert answer.lower == 0
    assert math.isinf(answer.upper)


def test_a_record_that_may_take_part_in_hundreds_of_draws_is_refused_not_forgotten():
    from sordino.events import GroupPoissonSampled

    crowd = GroupPoissonSampled(sample_rate=0.9, group_size=2000, event=Gaussian(noise_multiplier=1000.0))
    with pytest.raises(UnsupportedEvent):
        epsilon(crowd, 1e-5)
    certain = GroupPoissonSampled(sample_rate=1.0, group_size=4, event=Gaussian(noise_multiplier=4.0))
    assert epsilon(certain, 1e-5).upper == pytest.approx(epsilon(Gaussian(noise_multiplier=1.0), 1e-5).upper, rel=1e-3)


@pytest.mark.parametrize("name", ["add_or_remove_one", "replace_one", "replace_special"])
def test_a_relation_given_by_name_is_that_relation(name):
    event, member = sampled(0.01, 1.0, 1000), NeighboringRelation(name)
    assert epsilon(event, 1e-6, neighboring_relation=name) == epsilon(event, 1e-6, neighboring_relation=member)
    assert delta(event, 1.0, neighboring_relation=name) == delta(event, 1.0, neighboring_relation=member)
    assert true_positive_rate(sampled(0.1, 1.0), 0.1, neighboring_relation=name) == true_positive_rate(
        sampled(0.1, 1.0), 0.1, neighboring_relation=member
    )
    assert renyi_divergence(event, 4.0, neighboring_relation=name) == renyi_divergence(
        event, 4.0, neighboring_relation=member
    )


@pytest.mark.parametrize(
    "question",
    [
        lambda one: epsilon(Gaussian(noise_multiplier=1.0), 1e-5, neighboring_relation=one),
        lambda one: epsilon_by_accountant(Gaussian(noise_multiplier=1.0), 1e-5, neighboring_relation=one),
        lambda one: delta(Gaussian(noise_multiplier=1.0), 1.0, neighboring_relation=one),
        lambda one: true_positive_rate(Gaussian(noise_multiplier=1.0), 0.1, neighboring_relation=one),
        lambda one: renyi_divergence(Gaussian(noise_multiplier=1.0), 2.0, neighboring_relation=one),
        lambda one: zcdp_rho(Gaussian(noise_multiplier=1.0), one),
        lambda one: to_dp_event(Gaussian(noise_multiplier=1.0), neighboring_relation=one),
        lambda one: ZCDPFilter(epsilon=1.0, delta=1e-5, neighboring_relation=one),
        lambda one: calibrate_steps(lambda _: NoOp(), target_epsilon=1.0, delta=1e-5, neighboring_relation=one),
    ],
)
def test_a_relation_that_does_not_exist_is_refused(question):
    with pytest.raises(InvalidArgument, match="neighboring_relation must be one of add_or_remove_one, replace_one"):
        question("replace")
