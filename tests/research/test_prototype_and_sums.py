"""Class prototypes, and records from linear statistics."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.audit.attacks import standard_training
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.research import class_prototype, difference_attack, least_squares_reconstruction, reconstruct_bits


def test_the_prototype_is_what_the_class_looks_like_and_no_record():
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(3, 1, 6, 6)
    masks[0, :, :2], masks[1, :, 2:4], masks[2, :, 4:] = 1, 1, 1
    labels = torch.randint(0, 3, (300,), generator=generator)
    features = (masks[labels] * 0.8 + 0.2 * torch.rand(300, 1, 6, 6, generator=generator)).clamp(0, 1)
    torch.manual_seed(1)
    train = standard_training(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        steps=200,
        learning_rate=0.02,
        rng=KeyedRNG(seed=1, reproducible=True),
    )
    model = train(features, labels).train()
    for label in range(3):
        found = class_prototype(model, label, shape=(1, 6, 6), smoothness=0.01)
        assert found.confidence > 0.95
        inside, outside = found.features[masks[label] == 1].mean(), found.features[masks[label] == 0].mean()
        assert inside > outside + 0.3
    assert model.training


def test_two_sums_give_one_person_away():
    salaries = [52_500.0, 61_000.0, 48_250.0]
    assert difference_attack(sum(salaries), sum(salaries[1:])) == 52_500.0


def test_only_records_in_the_span_of_the_queries_are_determined():
    queries = np.array([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 2]])
    truth = np.array([0.3, 0.9, 0.1, 0.7])
    found = least_squares_reconstruction(queries, queries @ truth)
    assert found.determined.tolist() == [True, False, False, True]
    assert found.values[[0, 3]] == pytest.approx(truth[[0, 3]])
    assert found.residual < 1e-12


@pytest.mark.parametrize(("noise", "share"), [(0.0, 1.0), (1.0, 0.9)])
def test_counting_queries_with_little_noise_give_nearly_all_bits_away(noise, share):
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2, 100)
    queries = generator.integers(0, 2, (800, 100))
    answers = queries @ bits + generator.normal(0, noise, 800) if noise else queries @ bits
    assert (reconstruct_bits(queries, answers) == bits).mean() >= share


def test_noise_beyond_the_square_root_of_the_records_protects():
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 2, 100)
    queries = generator.integers(0, 2, (200, 100))
    answers = queries @ bits + generator.normal(0, 50, 200)
    assert (reconstruct_bits(queries, answers) == bits).mean() < 0.75


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgument, match="one row of weights"):
        least_squares_reconstruction([[1.0]], [1.0, 2.0])
    with pytest.raises(InvalidArgument, match="low must be below high"):
        least_squares_reconstruction([[1.0]], [1.0], low=1.0, high=0.0)
