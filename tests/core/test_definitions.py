"""A guarantee says everything needed to read it, and a printed ε never understates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import InvalidArgument


@given(st.floats(0, 1e6), st.integers(0, 8))
def test_a_printed_epsilon_is_never_below_the_value_and_close_to_it(value, digits):
    shown = float(format_upper_bound(value, digits))
    assert value <= shown <= value + 1.001 * 10.0**-digits


def test_infinity_is_printed_as_such():
    assert format_upper_bound(math.inf) == "∞"


def test_the_sentence_names_everything():
    claim = Guarantee(
        epsilon=0.9991,
        delta=1e-6,
        accountant="contour",
        sampler="Poisson sampling",
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        privacy_unit=PrivacyUnit.USER,
        caveats=("fixed seed: not for release",),
    )
    sentence = claim.describe()
    for part in ("ε = 1.00", "δ = 1e-06", "one user", "replace one", "Poisson", "contour", "not for release"):
        assert part in sentence
    assert claim.is_private


def test_infinite_epsilon_is_called_not_private():
    claim = Guarantee(epsilon=math.inf, delta=1e-5, accountant="none", sampler="full batches")
    assert not claim.is_private
    assert "NOT private" in claim.describe()


@pytest.mark.parametrize(("epsilon", "delta"), [(-1e-9, 1e-5), (math.nan, 1e-5), (1.0, -0.1), (1.0, math.nan)])
def test_impossible_guarantees_are_refused(epsilon, delta):
    with pytest.raises(InvalidArgument):
        Guarantee(epsilon=epsilon, delta=delta, accountant="x", sampler="y")


def test_only_replace_one_doubles_the_sensitivity():
    factors = {
        neighboring_relation: neighboring_relation.sensitivity_factor for neighboring_relation in NeighboringRelation
    }
    assert factors.pop(NeighboringRelation.REPLACE_ONE) == 2
    assert set(factors.values()) == {1}


def test_example_is_accepted_as_a_word_for_a_record():
    assert PrivacyUnit("example") is PrivacyUnit.RECORD
    assert PrivacyUnit.RECORD.value == "record"
    with pytest.raises(ValueError, match="household"):
        PrivacyUnit("household")
