"""The table of options that exclude each other, its messages, and its copy in the documentation."""

import itertools
from pathlib import Path

import pytest

from sordino.errors import InvalidArgument, UnknownSampler
from sordino.training import Plan
from sordino.training.exclusions import EXCLUSIONS, Option, check_exclusions, exclusions_table

PAGE = Path(__file__).parents[2] / "docs" / "training-options.md"
PAIRS = [(row, other) for row in EXCLUSIONS for other in row.others]


@pytest.mark.parametrize(("row", "other"), PAIRS, ids=lambda part: getattr(part, "name", None) or part.option.name)
def test_every_pair_of_the_table_is_refused_by_both_names(row, other):
    with pytest.raises(row.error) as caught:
        check_exclusions({row.option, other})
    message = str(caught.value)
    assert other.value in message
    assert row.option.value in message
    assert " must " in message


def test_no_other_pair_is_refused():
    refused = {frozenset((row.option, other)) for row, other in PAIRS}
    for pair in itertools.combinations(Option, 2):
        if frozenset(pair) not in refused:
            check_exclusions(set(pair))


def test_no_pair_has_two_reasons():
    pairs = [frozenset((row.option, other)) for row, other in PAIRS]
    assert len(set(pairs)) == len(pairs)


def test_every_option_is_in_the_table():
    assert set(Option) == {option for row in EXCLUSIONS for option in (row.option, *row.others)}


def test_the_page_shows_the_table():
    assert exclusions_table() in PAGE.read_text()


def test_a_plan_is_held_to_the_table():
    values = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "steps": 2, "expected_batch_size": 4.0}
    with pytest.raises(UnknownSampler, match="shuffled epochs"):
        Plan(**values, delta=1e-5, poisson_sampling=False)
    with pytest.raises(InvalidArgument, match="secure_mode must be one of"):
        Plan(**values, delta=1e-5, secure_mode="yes")
    assert Plan(**values, delta=1e-5).options() == {Option.ADD_OR_REMOVE_ONE, Option.UNGROUPED}
