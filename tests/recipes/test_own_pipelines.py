"""The recipes of networks and pixels: each learns a slice of synthetic or real records, and an absurd ε destroys it."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from patterned import DELTA, made_up, seeded
from sordino import accounting
from sordino.data import Records, load_dataset
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed, compose
from sordino.randomness import KeyedRNG
from sordino.recipes import get_recipe, network_recipes
from sordino.recipes.models import Block, StandardizedConv, wide_resnet
from sordino.recipes.network_recipes import cropped_and_flipped
from sordino.recipes.recipe import RecipeTask
from sordino.recipes.stages import network_recipe
from sordino.recipes.training_config import noise_limited
from sordino.training import Plan
from sordino.verification import verify


def image_task(**changes):
    facts = {
        "shape": (1, 28, 28),
        "classes": 10,
        "dataset_size": 60_000,
        "schema": None,
        "epsilon": 2.0,
        "delta": DELTA,
    }
    return RecipeTask(data="images", **{**facts, **changes})


@pytest.fixture(scope="module")
def patterns():
    return made_up((1, 16, 16), n=1000, classes=4)


@pytest.mark.parametrize("name", ["logistic-pixels", "pca-mlp", "tanh-cnn"])
def test_images_are_learned_and_an_absurd_epsilon_destroys_it(name, patterns, tmp_path):
    pipeline = shortened(name)
    fitted = pipeline.fit(patterns, epsilon=8.0, delta=DELTA, rng=seeded(), run_folder=tmp_path / "run")
    assert fitted.accuracy(patterns.test) > 0.8
    assert 0.9 * 8.0 < fitted.guarantee.epsilon <= 8.0
    assert verify(tmp_path / "run").passed
    noise = pipeline.fit(patterns, epsilon=1e-3, delta=DELTA, rng=seeded())
    assert noise.accuracy(patterns.test) < 0.6


def shortened(name):
    """The recipe as it is; the CNN with fewer steps, which a thousand records don't need."""
    pipeline = get_recipe(name)
    if name != "tanh-cnn":
        return pipeline
    few = replace(network_recipes.NETWORK, batch_size=500, steps=40)
    return replace(pipeline, prepare=lambda task: network_recipe(task, few))


def test_adult_is_learned_by_both_recipes_of_tables():
    adult = load_dataset("adult")
    assert adult.test is not None
    part = replace(adult, train=Records(adult.train.features[:8000], adult.train.labels[:8000]))
    most = float(np.bincount(adult.test.labels).max()) / len(adult.test)
    for name in ("adult-logistic", "adult-mlp"):
        pipeline = get_recipe(name)
        fitted = pipeline.fit(part, epsilon=2.0, delta=DELTA, rng=seeded())
        assert fitted.accuracy(adult.test) > most + 0.06
        assert np.allclose(fitted.predict_proba(adult.test).sum(axis=1), 1)
    with pytest.raises(InvalidArgument, match="table with a declared schema"):
        pipeline.fit(made_up(), epsilon=1.0, delta=DELTA)


# --- components and a perceptron --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "noise", "components"), [("large-noise", 8, 16), ("medium-noise", 4, 7)])
def test_named_settings_have_the_noise_of_the_source(setting, noise, components):
    stages = get_recipe("pca-mlp").prepare(image_task(epsilon=None, setting=setting)).stages
    assert stages[0].charges == (Gaussian(noise_multiplier=components),)
    assert set(stages[1].charges) == {PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=noise))}


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_components_and_training_are_paid_from_one_budget(epsilon):
    prepared = get_recipe("pca-mlp").prepare(image_task(epsilon=epsilon))
    first, *steps = prepared.charges
    together = compose([first, SelfComposed(event=steps[0], count=len(steps))])
    spent = accounting.epsilon(together, DELTA).upper
    assert 0.999 * epsilon < spent <= epsilon
    # Without the components there is budget left: both stages are on the bill.
    assert accounting.epsilon(SelfComposed(event=steps[0], count=len(steps)), DELTA).upper < spent


def test_the_components_get_the_noise_that_is_charged(patterns, monkeypatch):
    """Two arms: the spread of the noisy second moments is that of the charged event, and not 5 % beside it."""
    from sordino.recipes import network_recipes

    noise, columns = 16.0, 40
    draws = [
        network_recipes.second_moments(columns, noise, KeyedRNG()).release(np.zeros((5, columns))) for _ in range(12)
    ]
    diagonal = np.concatenate([matrix.diagonal() for matrix in draws])
    beside = np.concatenate([matrix[np.triu_indices(columns, 1)] for matrix in draws])
    for values, expected in ((diagonal, noise), (beside, noise / math.sqrt(2))):
        ratio, room = float(np.mean(np.square(values))) / expected**2, 4 * math.sqrt(2 / len(values))
        assert abs(ratio - 1) < room
    assert 4 * math.sqrt(2 / len(beside)) < 1.05**2 - 1


# --- logistic regression ----------------------------------------------------------------------------------------------


def test_every_clipping_norm_of_the_classical_run_costs_the_same_and_less_than_two():
    pipeline = get_recipe("logistic-sgd")
    spent = {
        accounting.epsilon(pipeline.prepare(image_task(epsilon=None, setting=setting)).event, DELTA).upper
        for setting in pipeline.settings
    }
    assert len(spent) == 1
    assert spent.pop() < 2
    assert len(pipeline.prepare(image_task(epsilon=None, setting="clip-1")).charges) == 10_000


def test_a_quiet_rate_keeps_the_noise_that_adds_up_below_its_bound():
    plan = Plan(
        noise_multiplier=2.0, max_grad_norm=0.5, sample_rate=0.1, steps=100, expected_batch_size=50.0, delta=DELTA
    )
    rate = noise_limited(largest=1e9, noise_per_weight=0.3)(plan)
    # Momentum 0.9 makes every draw count tenfold in the end; deviations of independent draws add up as a root.
    assert rate * 10 * (2.0 * 0.5 / 50.0) * math.sqrt(100) == pytest.approx(0.3)
    assert noise_limited(largest=0.01, noise_per_weight=0.3)(plan) == 0.01


# --- a small network on local contrasts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(16, 16), (19, 28)])
def test_a_contrast_is_the_deviation_from_the_pixels_around_over_their_spread(height, width):
    images = np.random.default_rng(0).random((2, 3, height, width)).astype(np.float32)
    found = network_recipes.local_contrasts(torch.from_numpy(images)).numpy()
    around = {}
    for place in np.ndindex(images.shape):
        around[place] = _window(images, place).mean()
    centered = images - np.reshape(list(around.values()), images.shape)
    for place in [(0, 0, 0, 0), (1, 2, height - 1, width - 1), (0, 1, 7, 8), (1, 0, 3, 2)]:
        spread = math.sqrt(np.square(_window(centered, place)).mean())
        assert found[place] == pytest.approx(centered[place] / (spread + 0.2), rel=1e-4, abs=1e-5)


def _window(images, place):
    """The 7 × 7 pixels around a place, 0 outside the picture."""
    image, channel, row, column = place
    padded = np.pad(images[image, channel].astype(np.float64), 3)
    return padded[row : row + 7, column : column + 7]


def test_a_contrast_is_made_from_its_own_picture_alone():
    images = torch.rand(5000, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    other = torch.rand(5000, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    other[[0, 2345, 4999]] = images[[0, 2345, 4999]]
    found, beside = network_recipes.local_contrasts(images), network_recipes.local_contrasts(other)
    assert torch.equal(found[[0, 2345, 4999]], beside[[0, 2345, 4999]])
    assert torch.equal(found[2345:2346], network_recipes.local_contrasts(images[2345:2346]))
    assert torch.equal(network_recipes.local_contrasts(images[:0]), images[:0])


def test_contrasts_of_flat_and_of_bright_pictures_are_small():
    flat = network_recipes.local_contrasts(torch.ones(1, 1, 16, 16))
    assert flat[..., 6:-6, 6:-6].abs().max() < 1e-6
    assert network_recipes.local_contrasts(torch.rand(20, 1, 28, 28)).abs().max() < 7


@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 240), (2.0, 480), (8.0, 480)])
def test_the_cnn_takes_fewer_steps_where_noise_is_strong(epsilon, steps):
    assert len(get_recipe("tanh-cnn").prepare(image_task(epsilon=epsilon)).charges) == steps


# --- the network for a GPU -------------------------------------------------------------------------------------------


def one_block(shape, classes):
    """One of the network's blocks between its first convolution and its head."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
    return nn.Sequential(StandardizedConv(shape[0], 4, 3), Block(4, 8, stride=2), *head)


@pytest.mark.parametrize(
    "build", [one_block, pytest.param(partial(wide_resnet, depth=10, width=1), marks=pytest.mark.slow)]
)
def test_small_networks_of_the_kind_take_private_steps_with_several_views(build):
    images = made_up((3, 8, 8), n=12, classes=3)
    assert images.test is not None
    few = replace(network_recipes.build_network(steps=2, views=2, microbatch=6), build=build)
    small = replace(get_recipe("wrn"), prepare=lambda task: network_recipe(task, few))
    fitted = small.fit(images, epsilon=3.0, delta=1e-3, rng=seeded())
    assert fitted.complete
    assert fitted.predict_proba(images.test).shape == (12, 3)
    assert len(fitted.events) == 2


def test_the_network_for_a_gpu_has_the_steps_of_its_source():
    task = image_task(shape=(3, 32, 32), dataset_size=50_000, epsilon=1.0)
    stages = get_recipe("wrn").prepare(task).stages
    assert len(stages[0].charges) == 875
    (step,) = set(stages[0].charges)
    assert isinstance(step, PoissonSampled)
    assert isinstance(step.event, Gaussian)
    assert step.sample_rate == 4096 / 50_000
    # The source states noise multiplier 10 at ε = 1; exact accounting needs about 9.13.
    assert step.event.noise_multiplier == pytest.approx(9.13, abs=0.02)
    assert len(get_recipe("wrn").prepare(replace(task, epsilon=8.0)).charges) == 2500


def test_standardised_weights_have_mean_zero_and_the_variance_of_their_fan_in():
    layer = next(wide_resnet((3, 8, 8), 2, depth=10, width=1).children())
    assert isinstance(layer, StandardizedConv)
    spike = torch.zeros(1, 3, 9, 9)
    with torch.no_grad():
        layer.weight.mul_(7).add_(3)
        kernel = torch.stack([layer(_impulse(spike, channel))[0, :, 3:6, 3:6] for channel in range(3)], dim=1)
    assert torch.allclose(kernel.mean((1, 2, 3)), torch.zeros(16), atol=1e-5)
    assert torch.allclose(kernel.square().mean((1, 2, 3)) * 27, torch.ones(16), rtol=1e-3)


def _impulse(zero, channel):
    found = zero.clone()
    found[0, channel, 4, 4] = 1
    return found


def test_views_are_moved_and_mirrored_and_nothing_else():
    images = torch.arange(1, 2 * 3 * 8 * 8 + 1).reshape(2, 3, 8, 8).float()
    padded = torch.nn.functional.pad(images, (4,) * 4)
    torch.manual_seed(0)
    seen = set()
    for _ in range(60):
        found, labels = cropped_and_flipped(images, torch.tensor([5, 6]))
        assert labels.tolist() == [5, 6]
        for record in range(2):
            places = [
                (top, left, mirrored)
                for top in range(9)
                for left in range(9)
                for mirrored in (False, True)
                if torch.equal(
                    found[record],
                    (lambda part, turn: part.flip(2) if turn else part)(
                        padded[record, :, top : top + 8, left : left + 8], mirrored
                    ),
                )
            ]
            assert places
            seen.update(places)
    assert {place[2] for place in seen} == {False, True}
    assert {place[0] for place in seen} == set(range(9)) == {place[1] for place in seen}
