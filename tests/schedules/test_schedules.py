import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InvalidArgument
from sordino.schedules import (
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    ListSchedule,
    StepSchedule,
    scale_schedule,
    schedule_from_dict,
    schedule_to_dict,
    schedule_value,
)

SHAPES = [
    LinearSchedule(start=2.0, end=1.0),
    ExponentialSchedule(start=1.0, end=4.0, over=5),
    CosineSchedule(start=3.0, end=0.5),
    StepSchedule(start=1.0, factor=0.5, every=3),
    ListSchedule(values=tuple(1.0 + step / 7 for step in range(10))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
@given(factor=st.floats(min_value=1e-3, max_value=1e3), step=st.integers(0, 9))
def test_a_scaled_schedule_is_the_same_shape_times_the_factor(shape, factor, step):
    assert math.isclose(shape.scaled(factor).value(step, 10), factor * shape.value(step, 10), rel_tol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_a_schedule_survives_json(shape):
    assert schedule_from_dict(schedule_to_dict(shape)) == shape


def test_a_number_is_its_own_schedule():
    assert schedule_value(2.5, 7) == 2.5
    assert scale_schedule(2.5, 2.0) == 5.0
    assert schedule_from_dict(schedule_to_dict(2.5)) == 2.5


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: type(shape).__name__)
def test_a_way_begins_at_the_start_ends_at_the_end_and_stays_there(shape):
    assert shape.value(0, 10) == shape.start
    assert shape.value(9, 10) == shape.end
    assert shape.value(500, 10) == shape.end
    middle = sorted((shape.start, shape.end))
    assert all(middle[0] <= shape.value(step, 10) <= middle[1] for step in range(10))


def test_the_published_learning_rate_falls_from_a_tenth_to_52_thousandths_in_ten_epochs():
    rate = LinearSchedule(start=0.1, end=0.052, over=1000)
    assert math.isclose(rate.value(250), 0.088)
    assert rate.value(1000) == rate.value(10_000) == 0.052
    assert math.isclose(rate.relative()(1000), 0.52)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: LinearSchedule(start=0.0, end=1.0), "start"),
        (lambda: CosineSchedule(start=1.0, end=-1.0), "end"),
        (lambda: ExponentialSchedule(start=1.0, end=1.0, over=0), "over"),
        (lambda: StepSchedule(start=1.0, factor=0.0, every=1), "factor"),
        (lambda: ListSchedule(values=(1.0, math.nan)), "values"),
        (lambda: ListSchedule(values=(1.0,)).value(1), "values"),
        (lambda: LinearSchedule(start=1.0, end=2.0).value(0), "over"),
        (lambda: schedule_from_dict({"schedule": "linear", "start": 1.0}), "schedule"),
        (lambda: schedule_from_dict({"schedule": "spiral"}), "schedule"),
    ],
)
def test_bad_values_are_refused_by_name(make, name):
    with pytest.raises(InvalidArgument, match=name):
        make()
