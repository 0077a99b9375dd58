from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino import data
from sordino.data import DatasetSplits, Records
from sordino.errors import InvalidArgument
from sordino.mechanisms import make_budget
from sordino.randomness import KeyedRNG
from sordino.recipes import get_recipe
from sordino.recipes.scattering_recipes import scattered


def images(count, shape=(1, 16, 16), classes=2, seed=0):
    """Upright or lying bars: told apart by one wave."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    pictures = 0.2 * generator.random((count, *shape)).astype(np.float32)
    for picture, label in zip(pictures, labels, strict=True):
        place = generator.integers(3, 12)
        if label:
            picture[:, place : place + 2] += 0.7
        else:
            picture[:, :, place : place + 2] += 0.7
    return Records(pictures, labels.astype(np.int64))


def bars(count=2000, **given):
    return DatasetSplits(
        name="bars",
        train=images(count, **given),
        test=images(200, seed=1, **given),
        labels=("lying", "upright"),
        public=True,
        source="made up",
        license="none",
        schema=None,
    )


@pytest.mark.parametrize("name", ["scatter", "scatter-sgd"])
def test_bars_are_told_apart_and_the_bill_is_the_target(name):
    dataset = bars()
    fitted = get_recipe(name).fit(dataset, epsilon=2.0, delta=1e-5)
    assert dataset.test is not None
    assert fitted.accuracy(dataset.test) > 0.9
    assert 1.99 < fitted.guarantee.epsilon <= 2.0
    assert fitted.complete


def test_the_bill_of_scatter_is_the_one_gaussian_of_its_budget():
    prepared, stated = get_recipe("scatter").plan(bars(300), epsilon=1.0, delta=1e-5)
    whole = make_budget(epsilon=1.0, delta=1e-5).noise_multiplier
    assert sum(charge.noise_multiplier**-2 for charge in prepared.charges) == pytest.approx(whole**-2, rel=1e-6)
    assert stated.epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.slow
def test_color_pictures_and_other_sizes_fit():
    dataset = bars(300, shape=(3, 16, 24))
    fitted = get_recipe("scatter").fit(dataset, epsilon=4.0, delta=1e-5)
    assert dataset.test is not None
    assert fitted.predict_proba(dataset.test).shape == (200, 2)


def test_rows_depend_on_their_record_alone_and_a_broken_record_is_a_row_of_zeros():
    pictures = torch.from_numpy(images(30).features)
    directions = torch.from_numpy(np.random.default_rng(2).normal(size=(81 * 16, 50))).float()
    for mirror in (False, True):
        before = scattered(pictures, mirror=mirror, directions=directions)
        assert np.allclose(np.linalg.norm(before, axis=1), 1.0, atol=1e-5)
        changed = pictures.clone()
        changed[3], changed[4] = torch.nan, 0.0
        after = scattered(changed, mirror=mirror, directions=directions)
        assert (after[3] == 0).all()
        assert np.isfinite(after).all()
        kept = [place for place in range(30) if place not in (3, 4)]
        assert np.array_equal(after[kept], before[kept])
    flipped = scattered(pictures.flip(-1), mirror=True, directions=directions)
    assert np.allclose(flipped, before, atol=1e-5)


def test_sides_that_are_no_multiples_of_four_are_refused():
    with pytest.raises(InvalidArgument, match="multiples of 4"):
        get_recipe("scatter").plan(bars(100, shape=(1, 18, 18)), epsilon=1.0, delta=1e-5)


def test_the_setting_of_the_source_fixes_the_noise():
    prepared, stated = get_recipe("scatter-sgd").plan(bars(60000), setting="source", delta=1e-5)
    assert len(prepared.charges) == 293
    # Published as ε = 3 by Rényi accounting; 2.44 by privacy-loss distributions.
    assert stated.epsilon == pytest.approx(2.44, abs=0.01)


def test_a_slice_of_fashion_mnist_is_learned():
    try:
        whole = data.load_dataset("fashion-mnist")
    except Exception as problem:
        pytest.skip(str(problem))
    assert whole.test is not None
    few = replace(
        whole,
        train=Records(whole.train.features[:4000], whole.train.labels[:4000]),
        test=Records(whole.test.features[:1000], whole.test.labels[:1000]),
    )
    fitted = get_recipe("scatter").fit(few, epsilon=8.0, delta=1e-5, rng=KeyedRNG(seed=1, reproducible=True))
    assert few.test is not None
    assert fitted.accuracy(few.test) > 0.7
