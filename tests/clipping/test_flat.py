import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino.clipping import FlatClipping
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument


@given(norm=st.floats(min_value=0, max_value=1e150), bound=st.floats(min_value=1e-6, max_value=1e6))
def test_factor_times_norm_never_exceeds_the_bound(norm, bound):
    squared = torch.tensor([norm**2], dtype=torch.float64)
    factor = float(FlatClipping().clip_factors(squared, max_grad_norm=bound)[0])
    assert 0 <= factor <= 1
    assert factor * norm <= bound
    assert factor == 1 or factor * norm >= bound * (1 - 5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_below_the_bound_is_left_alone_and_zero_has_factor_one(dtype):
    factors = FlatClipping().clip_factors(torch.tensor([0.0, 1e-30, 3.9], dtype=dtype), max_grad_norm=2.0)
    assert factors.dtype == dtype
    assert factors.tolist() == [1.0, 1.0, 1.0]


def test_a_record_with_a_non_finite_norm_gets_factor_zero():
    squared = torch.tensor([math.inf, math.nan, -math.inf, 4.0], dtype=torch.float64)
    assert FlatClipping().clip_factors(squared, max_grad_norm=1.0).tolist()[:3] == [0.0, 0.0, 0.0]


def test_no_records_give_no_factors():
    assert FlatClipping().clip_factors(torch.zeros(0), max_grad_norm=1.0).shape == (0,)


def test_sensitivity_doubles_under_replace_one():
    clipping, bound = FlatClipping(), 1.5
    assert clipping.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE, max_grad_norm=bound) == 1.5
    assert clipping.sensitivity(NeighboringRelation.REPLACE_SPECIAL, max_grad_norm=bound) == 1.5
    assert clipping.sensitivity(NeighboringRelation.REPLACE_ONE, max_grad_norm=bound) == 3.0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_the_bound_must_be_finite_and_positive(bound):
    with pytest.raises(InvalidArgument, match="max_grad_norm"):
        FlatClipping().clip_factors(torch.ones(1), max_grad_norm=bound)
