import doctest
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sordino.report
import sordino.report.charts
import sordino.report.formatting
import sordino.report.schema
import sordino.report.utility
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.report import max_true_positive_rate
from sordino.report.charts import accuracy_chart, attack_charts, profile_chart, spent_chart, ticks
from sordino.report.formatting import percent_up
from sordino.report.interpretation import advantage_bound, question
from sordino.report.schema import Curves, EpsilonPoint

EPSILONS = st.floats(0, 30)
DELTAS = st.floats(0, 1)
RATES = st.floats(0, 1)


MODULES = [
    sordino.report,
    sordino.report.charts,
    sordino.report.utility,
    sordino.report.formatting,
    sordino.report.schema,
]


@pytest.mark.parametrize("module", MODULES)
def test_the_module_examples_run(module):
    assert doctest.testmod(module).failed == 0


def slow_bound(epsilon, delta, rate):
    """Linear programming by hand: the four-point pair of distributions that dominates every (ε, δ)-private one.

    In: leak with probability δ, else "yes" with e^ε / (1 + e^ε). Out: the mirror image. The attacker accuses
    outcomes in falling order of likelihood ratio until the false positive rate is used up.
    """
    yes, no = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    inside = [delta, (1 - delta) * yes, (1 - delta) * no, 0.0]
    outside = [0.0, (1 - delta) * no, (1 - delta) * yes, delta]
    found, left = 0.0, rate
    for gain, price in zip(inside, outside, strict=True):
        share = 1.0 if price <= left else left / price
        found, left = found + share * gain, max(0.0, left - share * price)
    return found


@given(EPSILONS, DELTAS, RATES)
def test_the_bound_is_what_the_best_attack_on_the_worst_pair_achieves(epsilon, delta, rate):
    bound = max_true_positive_rate(epsilon=epsilon, delta=delta, false_positive_rate=rate)
    assert bound == pytest.approx(slow_bound(epsilon, delta, rate), rel=1e-9, abs=1e-9)
    assert bound >= rate - 1e-12


def test_the_bound_follows_the_formula_at_small_rates():
    assert max_true_positive_rate(epsilon=1.0, delta=1e-5, false_positive_rate=0.01) == pytest.approx(
        math.e * 0.01 + 1e-5
    )


def test_without_privacy_everything_is_found():
    assert max_true_positive_rate(epsilon=math.inf, delta=0.0, false_positive_rate=0.0) == 1.0
    assert max_true_positive_rate(epsilon=800.0, delta=0.0, false_positive_rate=0.001) == 1.0


def test_a_rate_outside_the_unit_interval_is_refused():
    with pytest.raises(InvalidArgument, match="false_positive_rate"):
        max_true_positive_rate(epsilon=1.0, delta=0.0, false_positive_rate=1.01)


@given(st.floats(0, 20), st.floats(0, 0.5))
def test_the_advantage_is_the_best_over_all_rates(epsilon, delta):
    rates = [k / 2000 for k in range(2001)] + [(1 - delta) / (1 + math.exp(epsilon))]
    best = max(max_true_positive_rate(epsilon=epsilon, delta=delta, false_positive_rate=r) - r for r in rates)
    assert advantage_bound(epsilon=epsilon, delta=delta) == pytest.approx(best, abs=2e-9)


@pytest.mark.parametrize(
    ("neighboring_relation", "words"),
    [
        (NeighboringRelation.ADD_OR_REMOVE_ONE, "whether one given user was in"),
        (NeighboringRelation.REPLACE_ONE, "which of two given users"),
        (NeighboringRelation.REPLACE_SPECIAL, "whether one given user contributed"),
    ],
)
def test_the_attackers_question_follows_unit_and_relation(neighboring_relation, words):
    assert words in question(neighboring_relation, PrivacyUnit.USER)


@given(st.floats(0, 1))
def test_printed_shares_never_understate(value):
    shown = float(percent_up(value).removesuffix(" %"))
    assert shown >= 100 * value - 1e-6
    assert shown <= 100 * value + 0.1 + 1e-6


@given(st.floats(1e-9, 1e9))
def test_ticks_reach_the_highest_value_in_even_steps(highest):
    marks = ticks(highest)
    assert marks[0] == 0
    assert marks[-1] >= highest * (1 - 1e-6)
    assert 2 <= len(marks) <= 6


def test_empty_charts_are_left_out():
    nothing = Curves(spent=(), profile=(), trade_off=(), gaussian_mu=None, gaussian_regret=None)
    assert spent_chart([EpsilonPoint(steps=0, epsilon=0.0)], target=None) == ""
    assert accuracy_chart([]) == ""
    assert profile_chart(nothing, epsilon=1.0, delta=1e-5) == ""
    assert attack_charts(nothing) == ("", "")


def test_charts_say_in_words_what_they_show():
    drawn = spent_chart([EpsilonPoint(steps=0, epsilon=0.0), EpsilonPoint(steps=9, epsilon=0.501)], target=1.0)
    assert 'aria-label="Privacy spent over 9 steps, ending at ε = 0.51"' in drawn
    assert "target 1" in drawn
    assert "after 9 steps: ε = 0.51" in drawn


@pytest.mark.parametrize(("highest", "steps"), [(1e-6, 1), (0.3, 7), (5000.0, 10**6)])
def test_every_point_and_every_mark_lies_inside_the_drawing(highest, steps):
    curve = [EpsilonPoint(steps=round(steps * k / 10), epsilon=highest * k / 10) for k in range(11)]
    drawn = spent_chart(curve, target=highest * 1.2)
    for x, y in re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r' points="([^"]*)"', drawn))):
        assert 0 <= float(x) <= 400
        assert 0 <= float(y) <= 256
    assert all(0 <= float(x) <= 400 for x in re.findall(r' x="([-\d.]+)"', drawn))
