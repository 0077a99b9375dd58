"""Rates, intervals, areas: against slow counting, scikit-learn and normal theory."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from sordino.audit.attacks import min_non_members, roc_curve
from sordino.errors import InvalidArgument


def normal_scores(mu, members, others, seed):
    generator = np.random.default_rng(seed)
    return generator.normal(mu, 1, members), generator.normal(0, 1, others)


def test_the_rate_is_that_of_the_smallest_threshold_with_few_enough_false_positives():
    inside, outside = normal_scores(1.0, 700, 900, 0)
    inside, outside = inside.round(1), outside.round(1)
    for rate in roc_curve(inside, outside).rates:
        allowed = [
            t
            for t in [*np.unique(outside), math.inf]
            if sum(x > t for x in outside) <= rate.false_positive_rate * len(outside)
        ]
        assert rate.true_positives == sum(x > min(allowed) for x in inside)
        assert rate.false_positives == sum(x > min(allowed) for x in outside)


def test_area_and_its_error_agree_with_scikit_learn_and_with_resampling():
    inside, outside = normal_scores(0.7, 400, 500, 1)
    inside, outside = inside.round(1), outside.round(1)
    found = roc_curve(inside, outside)
    truth = [1] * len(inside) + [0] * len(outside)
    assert found.auc == pytest.approx(roc_auc_score(truth, np.concatenate([inside, outside])))
    generator = np.random.default_rng(2)
    again = [
        roc_curve(generator.choice(inside, len(inside)), generator.choice(outside, len(outside))).auc
        for _ in range(200)
    ]
    half = (found.auc_interval[1] - found.auc_interval[0]) / 2
    assert half / 1.96 == pytest.approx(np.std(again), rel=0.2)


def test_areas_and_advantages_of_normal_scores_are_those_of_theory():
    found = roc_curve(*normal_scores(1.0, 40_000, 40_000, 3))
    assert found.auc == pytest.approx(0.7602, abs=0.005)
    assert found.advantage == pytest.approx(0.3829, abs=0.01)
    assert found.true_positive_rate(0.01).value == pytest.approx(0.0924, abs=0.006)
    assert found.true_positive_rate(0.001).value == pytest.approx(0.0183, abs=0.003)
    low, high = found.advantage_interval
    assert low < 0.3829 < high


def test_rates_are_left_out_when_too_few_non_members_were_scored():
    found = roc_curve(*normal_scores(1.0, 4000, 4999, 4))
    assert [rate.false_positive_rate for rate in found.rates] == [0.01, 0.1]
    with pytest.raises(InvalidArgument, match="5,000 non-members"):
        found.true_positive_rate(0.001)
    assert min_non_members(0.001) == 5000


def test_scores_that_say_nothing_are_never_sure():
    caught = 0
    for seed in range(200):
        found = roc_curve(*normal_scores(0.0, 300, 600, seed), false_positive_rates=(0.01,))
        fpr, tpr = found.true_positive_rate(0.01).surely_above(alpha=0.05)
        caught += tpr > fpr
    assert caught <= 10


def test_scores_above_the_ceiling_are_caught():
    found = roc_curve(*normal_scores(1.5, 3000, 3000, 5), false_positive_rates=(0.01,))
    fpr, tpr = found.true_positive_rate(0.01).surely_above(alpha=0.05)
    assert tpr > stats.norm.sf(stats.norm.isf(fpr) - 1.0)


def test_equal_scores_accuse_nobody():
    found = roc_curve([0.5] * 600, [0.5] * 600)
    assert found.advantage == 0
    assert found.auc == 0.5
    assert all(rate.value == 0 for rate in found.rates)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(InvalidArgument, match="members must be scores"):
        roc_curve([math.nan], [0.0])
    with pytest.raises(InvalidArgument, match="non_members must be scores"):
        roc_curve([0.0], [])
