import numpy as np
import pytest
import torch

from recipes.test_scatter import images
from sordino.data import DatasetSplits
from sordino.errors import InvalidArgument
from sordino.mechanisms import make_budget
from sordino.recipes import get_recipe, scattering_recipes
from sordino.recipes.scattering_recipes import SyntheticWhitening, principal_components


def bars(count, shape=(3, 16, 16), seed=0):
    """Upright or lying bars in color."""
    return images(count, shape, seed=seed)


def a_set(records, test=None):
    return DatasetSplits(
        name="bars",
        train=records,
        test=test,
        labels=("lying", "upright"),
        public=True,
        source="made up",
        license="none",
        schema=None,
    )


@pytest.fixture
def few(monkeypatch):
    """Fewer patches and made pictures, so that it is quick."""
    monkeypatch.setattr(scattering_recipes, "_PATCHES", 20)
    monkeypatch.setattr(scattering_recipes, "_PICTURES", 100)
    for made in (scattering_recipes._features, scattering_recipes._whitening):
        made.cache_clear()
    yield
    for made in (scattering_recipes._features, scattering_recipes._whitening):
        made.cache_clear()


@pytest.mark.usefixtures("few")
def test_bars_are_told_apart_and_the_bill_is_the_target():
    fitted = get_recipe("patches").fit(a_set(bars(1000)), epsilon=2.0, delta=1e-5)
    assert fitted.accuracy(bars(200, seed=1)) > 0.9
    assert 1.99 < fitted.guarantee.epsilon <= 2.0
    assert fitted.complete


def test_the_bill_is_the_one_gaussian_of_its_budget():
    prepared, stated = get_recipe("patches").plan(a_set(bars(300)), epsilon=1.0, delta=1e-5)
    whole = make_budget(epsilon=1.0, delta=1e-5).noise_multiplier
    assert sum(charge.noise_multiplier**-2 for charge in prepared.charges) == pytest.approx(whole**-2, rel=1e-6)
    assert stated.epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.usefixtures("few")
def test_features_are_those_of_a_picture_and_of_its_mirror_image_alone():
    pictures = torch.from_numpy(bars(20).features)
    before = scattering_recipes.patched(pictures)
    torch.testing.assert_close(scattering_recipes.patched(pictures.flip(-1)), before)
    changed = pictures.clone()
    changed[3] = torch.nan
    after = scattering_recipes.patched(changed)
    assert torch.equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("shape", [(40, 12), (9, 30)])
def test_whitening_makes_all_directions_of_made_rows_alike(shape):
    made = torch.from_numpy(np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1)).float() + 5
    centered = torch.nn.functional.normalize(made - made.mean(0), dim=1)
    axes = principal_components(centered, count=5, ridge=1e-6)
    products = (centered @ axes).T @ (centered @ axes) / len(made)
    torch.testing.assert_close(products, torch.eye(5), rtol=1e-3, atol=1e-3)
    rows = SyntheticWhitening.of(made, count=5, ridge=1e-6)(made)
    torch.testing.assert_close(rows, torch.nn.functional.normalize(centered @ axes, dim=1))


def test_whitening_takes_each_row_by_itself_and_a_broken_one_is_zero():
    generator = np.random.default_rng(1)
    whitening = SyntheticWhitening.of(torch.from_numpy(generator.random((30, 8))).float(), count=6, ridge=1.0)
    rows = torch.from_numpy(generator.random((10, 8))).float()
    before = whitening(rows)
    rows[2], rows[5] = torch.nan, torch.inf
    after = whitening(rows)
    kept = [0, 1, 3, 4, 6, 7, 8, 9]
    assert torch.equal(after[kept], before[kept])
    assert not after[[2, 5]].any()
    torch.testing.assert_close(after[kept].norm(dim=1), torch.ones(8))


def test_pictures_in_grey_are_refused():
    with pytest.raises(InvalidArgument, match="3 channels"):
        get_recipe("patches").plan(a_set(bars(100, shape=(1, 16, 16))), epsilon=1.0, delta=1e-5)
