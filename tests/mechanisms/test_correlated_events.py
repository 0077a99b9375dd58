"""What correlated noise costs, and which number of bands is chosen."""

import itertools
import math

import numpy as np
import pytest
import torch

from sordino import accounting
from sordino.errors import InvalidArgument
from sordino.events import Composed, Gaussian, MatrixGaussian, NoOp, PoissonSampled, SelfComposed
from sordino.mechanisms.correlated import (
    BandedToeplitz,
    BinaryTree,
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    choose_correlated_noise,
    matrix_sensitivity,
    optimize_banded,
    optimize_buffered,
    sensitivity,
    square_root_coefficients,
)
from sordino.randomness import KeyedRNG


def mechanism(strategy, participation, noise_multiplier=2.0):
    return CorrelatedGaussianMechanism(
        strategy=strategy, participation=participation, noise_multiplier=noise_multiplier, l2_sensitivity=0.5
    )


@pytest.mark.parametrize(
    "participation",
    [SingleParticipation(), MinSeparation(min_separation=5), FixedEpochOrder(steps_per_epoch=10)],
    ids=repr,
)
@pytest.mark.parametrize("strategy", [optimize_banded(5, steps=40), BinaryTree(steps=40)], ids=lambda s: str(s.bands))
def test_the_whole_run_costs_one_gaussian(strategy, participation):
    event = mechanism(strategy, participation).event()
    assert isinstance(event, MatrixGaussian)
    assert event.sensitivity == pytest.approx(sensitivity(strategy, participation))
    run, one = (accounting.epsilon(e, 1e-6) for e in (event, Gaussian(noise_multiplier=2.0)))
    assert run.upper == pytest.approx(one.upper, rel=1e-9)


def test_independent_noise_costs_what_its_participations_cost():
    # 8 participations of independent Gaussian releases are one Gaussian of √8 times the sensitivity.
    run = mechanism(IndependentNoise(steps=40), MinSeparation(min_separation=5), noise_multiplier=1.0)
    white = run.stddev / run.l2_sensitivity
    assert white == pytest.approx(math.sqrt(8))
    steps = accounting.epsilon(SelfComposed(event=Gaussian(noise_multiplier=white), count=8), 1e-6)
    assert accounting.epsilon(run.event(), 1e-6).upper == pytest.approx(steps.upper, rel=1e-9)


def test_one_group_is_ordinary_poisson_sampling():
    run = mechanism(IndependentNoise(steps=40), CyclicPoisson(groups=1, sample_rate=0.05))
    one = PoissonSampled(sample_rate=0.05, event=Gaussian(noise_multiplier=2.0))
    assert run.event() == SelfComposed(event=one, count=40)
    assert run.stddev == 2.0 * 0.5


def test_cycles_cost_one_sampled_gaussian_each():
    run = mechanism(optimize_banded(7, steps=40), CyclicPoisson(groups=8, sample_rate=0.05))
    one = PoissonSampled(sample_rate=0.4, event=Gaussian(noise_multiplier=2.0))
    assert run.event() == SelfComposed(event=one, count=5)
    assert run.event(33) == SelfComposed(event=one, count=5)
    assert run.event(32) == SelfComposed(event=one, count=4)
    whole = mechanism(optimize_banded(7, steps=40), CyclicPoisson(groups=20, sample_rate=0.05))
    assert whole.event() == SelfComposed(event=Gaussian(noise_multiplier=2.0), count=2)


@pytest.mark.parametrize(
    "strategy",
    [optimize_banded(6, steps=24), optimize_buffered(2, steps=24), BandedToeplitz(coefficients=(1.0, 0.6), steps=24)],
    ids=lambda s: type(s).__name__,
)
def test_the_best_attack_on_the_worst_record_has_the_power_that_the_event_states(strategy):
    # A record of one dimension in steps 0, 6, 12, 18, against 40 000 runs side by side. Its best test statistic is
    # the noisy release, whitened, along what the record adds to it; power is shift over deviation.
    run, runs = mechanism(strategy, MinSeparation(min_separation=6)), 40_000
    stream, rng, released = run.start(), KeyedRNG(), []
    for step in range(24):
        released.append(torch.zeros(runs, dtype=torch.float64))
        stream.add_noise_(released[-1:], rng=rng, step=step)
    added = strategy.matrix()[:, ::6].sum(axis=1) * run.l2_sensitivity
    statistic = added @ strategy.matrix() @ torch.stack(released).numpy()
    power = float(added @ added) / float(statistic.std())
    event = run.event()
    assert isinstance(event, MatrixGaussian)
    stated = event.sensitivity / event.noise_multiplier
    # The deviation of 40 000 draws is known to 0.35 %.
    assert power == pytest.approx(stated, rel=0.02)
    assert power != pytest.approx(stated * 1.05, rel=0.02)
    assert power != pytest.approx(stated * 0.95, rel=0.02)


def test_more_bands_than_groups_are_refused_before_anything_is_drawn():
    with pytest.raises(InvalidArgument, match="at most groups"):
        mechanism(optimize_banded(9, steps=40), CyclicPoisson(groups=8, sample_rate=0.05))


def test_a_run_that_ends_early_costs_no_more():
    strategy = BandedToeplitz(coefficients=square_root_coefficients(40), steps=40)
    run = mechanism(strategy, MinSeparation(min_separation=10))
    costs = [accounting.epsilon(run.event(steps), 1e-6).upper for steps in (0, 1, 10, 11, 25, 40)]
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert run.event(0) == NoOp()
    assert run.event(40) == run.event()
    with pytest.raises(InvalidArgument, match="at most 40"):
        run.event(41)


def test_another_continuation_of_one_state_is_on_the_bill():
    run = mechanism(optimize_banded(8, steps=40), MinSeparation(min_separation=8))
    assert run.branch_event(10) == run.event()
    assert run.branch_event(40) == NoOp()
    cycles = mechanism(optimize_banded(8, steps=40), CyclicPoisson(groups=8, sample_rate=0.05))
    one = PoissonSampled(sample_rate=0.4, event=Gaussian(noise_multiplier=2.0))
    assert cycles.branch_event(24) == Composed(
        events=(Gaussian(noise_multiplier=2.0), SelfComposed(event=one, count=2))
    )


def test_two_continuations_cost_at_most_two_runs_by_their_joint_law():
    # All rows of one run and the later rows again: the joint release is a Gaussian with the stacked matrix.
    strategy, participation, cut = optimize_banded(6, steps=24), MinSeparation(min_separation=6), 10
    matrix = strategy.matrix()
    stacked = np.vstack([matrix, matrix[cut:]])
    whole = sensitivity(strategy, participation)
    assert matrix_sensitivity(stacked, participation) <= math.hypot(whole, whole) * (1 + 1e-12)


def bands_at(target_epsilon, **options):
    return choose_correlated_noise(
        calibrate=lambda event: accounting.calibrate_noise_multiplier(event, target_epsilon=target_epsilon, delta=1e-5),
        **options,
    )


def test_twenty_bands_cut_the_error_of_dp_sgd_by_44_percent():
    # 50 000 records, batches of 500, 2000 steps, ε = 8. Golden values of two public implementations.
    published = {1: (0.64336, 20.35), 4: (0.86361, 13.85), 10: (1.12981, 11.83)}
    published |= {20: (1.44467, 11.24), 50: (2.06402, 11.44), 100: (2.68512, 12.13)}
    choices = bands_at(8.0, steps=2000, sample_rate=0.01, bands=[4, 10, 20, 50, 100])
    found = {choice.bands: choice for choice in choices}
    assert choices[0].bands == 20
    assert found[20].error <= (1 - 0.44) * found[1].error
    for bands, (noise_multiplier, error) in published.items():
        choice = found[bands]
        # Their accountant rounds up on a grid; ours must not need more, nor suspiciously less.
        assert noise_multiplier * (1 - 1e-3) < choice.mechanism.noise_multiplier < noise_multiplier + 1e-5
        assert choice.error == pytest.approx(error, rel=2e-3)
        assert accounting.epsilon(choice.mechanism.event(), 1e-5).upper <= 8.0


def test_small_epsilon_and_many_epochs_choose_independent_noise():
    assert bands_at(0.5, steps=2000, sample_rate=0.05)[0].bands == 1
    assert bands_at(8.0, steps=500, sample_rate=0.01)[0].bands > 1


def test_candidates_are_powers_of_two_that_leave_a_batch_to_each_group():
    choices = choose_correlated_noise(steps=100, sample_rate=0.06, calibrate=lambda event: 1.0)
    assert sorted(choice.bands for choice in choices) == [1, 2, 4, 8, 16]
    for bands in ([0], [17], [101]):
        with pytest.raises(InvalidArgument, match="bands must be"):
            choose_correlated_noise(steps=100, sample_rate=0.06, calibrate=lambda event: 1.0, bands=bands)


def test_errors_of_choices_are_measured_on_the_clipped_sum():
    choices = choose_correlated_noise(
        steps=9, sample_rate=0.5, calibrate=lambda event: 3.0, l2_sensitivity=0.2, bands=[1]
    )
    assert choices[0].error == pytest.approx(3.0 * 0.2 * math.sqrt(5))


def losses(matrix, groups, rate, noise, *, first):
    """Log-likelihood ratios of the whole release, a record of group `first` in it or not: all its coins together."""
    columns = matrix[:, first::groups]
    total = np.zeros(noise.shape[1])
    for coins in itertools.product((0, 1), repeat=columns.shape[1]):
        shift = columns @ np.array(coins)
        chance = math.prod(rate if coin else 1 - rate for coin in coins)
        total += chance * np.exp(shift @ noise - shift @ shift / 2)
    return np.log(total)


def cycle_losses(matrix, groups, rate, noise, *, first):
    """The same as a composition: one sampled Gaussian for each cycle."""
    columns = matrix[:, first::groups].T
    return sum(np.log1p(rate * np.expm1(column @ noise - column @ column / 2)) for column in columns)


@pytest.mark.parametrize("first", [0, 2])
def test_cycles_compose_exactly_when_bands_fit_into_groups_and_not_otherwise(first):
    noise = np.random.default_rng(0).normal(size=(12, 500))
    fits, overlaps = optimize_banded(4, steps=12).matrix(), optimize_banded(6, steps=12).matrix()
    for matrix, agrees in ((fits, True), (overlaps, False)):
        whole, composed = (way(matrix, 4, 0.3, noise, first=first) for way in (losses, cycle_losses))
        assert np.allclose(whole, composed, atol=1e-10) == agrees
