"""Histograms over categories that nobody declared: the threshold, its tail, and what is never shown."""

import math
from decimal import Decimal

import numpy as np
import pytest

from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import ApproximateDP
from sordino.mechanisms import ThresholdedHistogram


def tail(mechanism, reach):
    """P(noise ≥ reach) by adding up the law of the noise."""
    q = math.exp(-1 / mechanism._scale)
    whole = np.arange(reach, reach + 20_000)
    return float(((1 - q) / (1 + q) * q ** np.abs(whole)).sum())


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2, 0.4])
@pytest.mark.parametrize("neighboring_relation", list(NeighboringRelation))
def test_p15_delta_pays_for_the_tail_that_includes_the_threshold(epsilon, delta, neighboring_relation):
    mechanism = ThresholdedHistogram(epsilon=epsilon, delta=delta, neighboring_relation=neighboring_relation)
    moved = 2 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 1
    # A category of one record is shown when 1 + noise ≥ threshold.
    assert tail(mechanism, mechanism.threshold - 1) * moved <= delta * (1 + 1e-9)
    assert tail(mechanism, mechanism.threshold - 2) * moved > delta or mechanism.threshold == 2
    assert isinstance(mechanism.threshold, int)
    assert mechanism.event() == ApproximateDP(epsilon=epsilon, delta=delta)


def test_single_records_are_shown_as_rarely_as_delta_says(seeded):
    mechanism = ThresholdedHistogram(epsilon=1.0, delta=0.05, rng=seeded(1))
    shown = len(mechanism.release([f"key {i}" for i in range(20_000)])) / 20_000
    exact = tail(mechanism, mechanism.threshold - 1)
    assert exact <= 0.05
    assert shown == pytest.approx(exact, rel=0.15)
    assert shown != pytest.approx(tail(mechanism, mechanism.threshold - 2), rel=0.15)


def test_frequent_categories_are_shown_with_noisy_counts_largest_first(seeded):
    mechanism = ThresholdedHistogram(epsilon=2.0, delta=1e-6, rng=seeded(2))
    values = ["a"] * 300 + [7] * 500 + ["rare"] + [1.5] * 200
    released = mechanism.release(values)
    assert list(released) == [7, "a", 1.5]
    assert released["a"] == pytest.approx(300, abs=10)


def test_the_order_of_records_and_odd_values_leave_no_trace(seeded):
    values = ["b", "a"] * 100
    first = ThresholdedHistogram(epsilon=500.0, delta=1e-6, rng=seeded(3)).release(values)
    second = ThresholdedHistogram(epsilon=500.0, delta=1e-6, rng=seeded(3)).release(values[::-1])
    assert list(first.items()) == list(second.items())
    odd = ThresholdedHistogram(epsilon=1.0, delta=0.5, rng=seeded(4))
    assert odd.release([[1], {}, math.nan, np.nan, math.inf, None, ([1],)] * 50) == {}
    assert [repr(key) for key in odd.release([True] + [1.0] * 30 + [Decimal(1)])] == ["1"]
    assert odd.release([]) == {}
    assert set(odd.release(np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))) == {1}


@pytest.mark.parametrize("change", [{"epsilon": 0.0}, {"delta": 0.0}, {"delta": 1.0}])
def test_wrong_budgets_are_refused(change):
    with pytest.raises(InvalidArgument, match="must be"):
        ThresholdedHistogram(**({"epsilon": 1.0, "delta": 1e-6} | change))
