import numpy as np
import torch

from sordino.transfer import Scattering, scattering_features, synthetic_images, synthetic_second_moments


def test_pictures_are_in_range_and_the_same_every_time():
    for colours in (1, 3):
        pictures = synthetic_images(510, (16, 20), colours)
        assert pictures.shape == (510, colours, 16, 20)
        assert pictures.dtype == torch.float32
        assert 0 <= pictures.min() <= pictures.max() <= 1
        assert torch.equal(pictures[:20], synthetic_images(510, (16, 20), colours)[:20])
        assert not torch.equal(pictures, synthetic_images(510, (16, 20), colours, seed=1))
        assert len(torch.unique(pictures.flatten(1), dim=0)) > 500


def test_grey_pictures_are_objects_on_black_and_coloured_ones_have_no_background():
    grey, coloured = synthetic_images(300, (28, 28)), synthetic_images(300, (28, 28), 3)
    corner = (slice(None), slice(None), slice(0, 3), slice(0, 3))
    assert grey[corner].mean() < 0.1 < grey[:, :, 12:16, 12:16].mean()
    assert coloured[corner].mean() > 0.3
    # The spectrum falls: neighbours are alike.
    assert np.corrcoef(coloured[:, 0, 10, 10], coloured[:, 0, 10, 11])[0, 1] > 0.5


def test_moments_are_the_mean_of_products_of_unit_rows():
    features = scattering_features((16, 16), groups=3)
    found = synthetic_second_moments(features, (16, 16), count=600, seed=3)
    expected = torch.zeros(1296, 1296, dtype=torch.float64)
    for picture in synthetic_images(600, (16, 16), seed=3):
        row = features(picture[None])[0].double()
        row = row / row.norm() if row.norm() > 0 else row
        expected += torch.outer(row, row) / 600
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.allclose(found, found.T, atol=1e-7)
    assert 0.99 < found.trace() <= 1.0 + 1e-5


def test_waves_of_all_directions_are_in_the_pictures():
    moduli = Scattering((28, 28))(synthetic_images(300, (28, 28)))[:, 1:17].mean(dim=(0, 2, 3))
    assert moduli.min() > 0.2 * moduli.max()
