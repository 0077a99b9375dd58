"""Chance driven to either end, and noticed."""

import random

import numpy as np
import pytest
import torch

from sordino.training.probing.snapshots import GENERATORS, SeededGenerators, generators_used

DRAWS = {"torch": lambda: float(torch.rand(())), "python": random.random, "numpy": np.random.rand}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("high", [False, True])
def test_the_first_draws_of_a_forced_generator_are_at_one_end_and_later_ones_are_not(name, high):
    SeededGenerators(seed=3, forced=name, high=high).start()
    first = [DRAWS[name]() for _ in range(8)]
    assert all(draw > 1 - 1e-6 if high else draw < 1e-6 for draw in first)
    assert all(draw < 1 for draw in first)
    later = [DRAWS[name]() for _ in range(200)][100:]
    assert 0.3 < sum(later) / len(later) < 0.7


@pytest.mark.parametrize("name", GENERATORS)
def test_other_generators_stay_as_the_seed_has_them(name):
    others = [other for other in GENERATORS if other != name]
    SeededGenerators(seed=3).start()
    plain = [DRAWS[other]() for other in others]
    SeededGenerators(seed=3, forced=name).start()
    assert [DRAWS[other]() for other in others] == plain


def test_draws_that_reject_come_to_an_end_under_every_force():
    for name in GENERATORS:
        for high in (False, True):
            SeededGenerators(forced=name, high=high).start()
            random.shuffle(list(range(10)))
            assert 0 <= random.betavariate(0.3, 0.3) <= 1
            # Of nothing but zeros numpy makes NaN.
            assert not abs(np.random.beta(0.3, 0.3)) > 1
            assert torch.distributions.Beta(0.1, 0.1).sample((3,)).shape == (3,)
            assert sorted(torch.randperm(7).tolist()) == list(range(7))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_generator_that_was_drawn_from_is_named(name):
    used = set()
    with generators_used(used):
        DRAWS[name]()
    assert used == {name}
