"""The one message form, and the exception tree."""

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

from sordino import checks, errors

SHARP_EDGES = Path(__file__).parents[2] / "docs" / "limitations.md"

ERROR_CLASSES = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__
]


def test_every_exception_is_public_and_a_sordino_error():
    assert sorted(cls.__name__ for cls in ERROR_CLASSES) == errors.__all__
    assert all(issubclass(cls, errors.SordinoError) for cls in ERROR_CLASSES)


def test_every_exception_stands_in_the_drawn_tree():
    for cls in ERROR_CLASSES:
        assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", [cls for cls in ERROR_CLASSES if cls.section], ids=lambda cls: cls.__name__)
def test_every_refusal_links_a_section_that_exists(cls):
    headings = re.findall(r"^#+ (.*)$", SHARP_EDGES.read_text(), flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert cls.section in anchors
    assert f"limitations/#{cls.section}" in str(cls("message"))


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (checks.positive, [1, 1e-30, 0.5], [0, -1, math.inf, math.nan, "1", None, True, 1j]),
        (checks.non_negative, [0, 0.0, 3], [-1e-9, math.inf, math.nan, "0", None, False]),
        (checks.probability, [0, 1, 0.5], [-0.1, 1.1, math.nan, math.inf, "0.5", None, True]),
        (checks.integer, [-3, 0, 10**20], [1.0, math.nan, "1", None, True]),
    ],
)
def test_checks_return_good_values_and_name_the_argument_in_refusals(check, good, bad):
    for value in good:
        assert check(some_name=value) == value
    for value in bad:
        with pytest.raises(errors.InvalidArgument, match=r"^some_name must be .*, got .*\. Try another\.$"):
            check(some_name=value, hint="Try another.")


def test_open_ends_and_ranges_are_kept():
    for value, arguments in ((0, {"zero": False}), (1, {"one": False})):
        with pytest.raises(errors.InvalidArgument):
            checks.probability(p=value, **arguments)
    assert checks.in_range(-1, 1, x=-1) == -1
    with pytest.raises(errors.InvalidArgument, match=r"x must be a number in \[-1, 1\], got 1.5\."):
        checks.in_range(-1, 1, x=1.5)
    with pytest.raises(errors.InvalidArgument, match="n must be an integer ≥ 2, got 1"):
        checks.integer(2, n=1)
    assert checks.one_of(("a", "b"), mode="a") == "a"
    with pytest.raises(errors.InvalidArgument, match="mode must be one of a, b, got 'c'"):
        checks.one_of(("a", "b"), mode="c")


def test_a_check_takes_exactly_one_argument():
    with pytest.raises(TypeError):
        checks.positive(a=1, b=2)


@pytest.mark.parametrize("good", [[1, 2], (1.0,), [], np.array([0.5]), range(2), iter([3])])
def test_several_values_are_a_list(good):
    assert isinstance(checks.several(thresholds=good), list)


@pytest.mark.parametrize("bad", [1.0, None, "12", b"1", np.float64(1.0), np.array(1.0)])
def test_one_value_where_several_belong_is_refused_by_name(bad):
    with pytest.raises(errors.InvalidArgument, match="thresholds must be a list of values"):
        checks.several(thresholds=bad)
