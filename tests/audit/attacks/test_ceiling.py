"""Ceilings: golden values of Gaussian and pure differential privacy, and what the curve promises between points."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.audit.attacks import membership_bound, membership_bound_of_epsilon
from sordino.events import Gaussian, NonPrivate, PoissonSampled, SelfComposed

# mu, advantage, TPR at 1 %, TPR at 0.1 %, AUC: 2Φ(μ/2) − 1, Φ(Φ⁻¹(x) + μ), Φ(μ/√2)
GAUSSIAN = [
    (0.25, 0.0995, 0.0189, 0.0023, 0.5702),
    (0.5, 0.1974, 0.0339, 0.0048, 0.6382),
    (1, 0.3829, 0.0924, 0.0183, 0.7602),
    (2, 0.6827, 0.3721, 0.1378, 0.9214),
]
# ε, accuracy, TPR at 1 %
PURE = [(0.5, 0.6225, 0.0165), (1, 0.7311, 0.0272), (2, 0.8808, 0.0739), (4, 0.9820, 0.546), (8, 0.9997, 0.9997)]


@pytest.mark.parametrize(("mu", "advantage", "at_one", "at_tenth", "auc"), GAUSSIAN)
def test_gaussian_ceilings_have_their_golden_values(mu, advantage, at_one, at_tenth, auc):
    found = membership_bound(Gaussian(noise_multiplier=1 / mu))
    assert found.advantage == pytest.approx(advantage, abs=1e-4)
    assert found.true_positive_rate(0.01) == pytest.approx(at_one, abs=1e-4)
    assert found.true_positive_rate(0.001) == pytest.approx(at_tenth, abs=1e-4)
    assert auc - 1e-4 <= found.auc <= auc + 0.012


@pytest.mark.parametrize(("epsilon", "accuracy", "at_one"), PURE)
def test_pure_ceilings_have_their_golden_values(epsilon, accuracy, at_one):
    # The golden values have δ = 1e-5 in the rates.
    assert membership_bound_of_epsilon(epsilon=epsilon, delta=0).accuracy == pytest.approx(accuracy, abs=1e-4)
    assert membership_bound_of_epsilon(epsilon=epsilon, delta=1e-5).true_positive_rate(0.01) == pytest.approx(
        at_one, abs=1e-4
    )


def test_between_its_points_the_curve_is_never_below_the_truth():
    found = membership_bound(Gaussian(noise_multiplier=0.8))
    for rate in np.geomspace(1e-6, 0.999, 400):
        truth = stats.norm.cdf(stats.norm.ppf(rate) + 1.25)
        assert found.true_positive_rate(rate) >= truth - 1e-9


def test_the_mechanism_says_more_than_its_epsilon():
    event = SelfComposed(event=PoissonSampled(event=Gaussian(noise_multiplier=1.0), sample_rate=0.02), count=100)
    own, known = membership_bound(event), membership_bound_of_epsilon(epsilon=2.0, delta=1e-5)
    assert own.true_positive_rate(0.01) < known.true_positive_rate(0.01)
    assert own.auc < known.auc


def test_no_privacy_has_no_ceiling():
    for found in (
        membership_bound(NonPrivate(reason="no noise")),
        membership_bound_of_epsilon(epsilon=math.inf, delta=0.0),
    ):
        assert (found.advantage, found.auc, found.true_positive_rate(0.001)) == (1.0, 1.0, 1.0)
