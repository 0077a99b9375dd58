import numpy as np
import torch

from sordino.transfer import Scattering, scattering_features, synthetic_images, synthetic_second_moments


def test_pictures_are_in_range_and_the_same_every_time():
    for colors in (1, 3):
        pictures = synthetic_images(510, (16, 20), colors)
        assert pictures.shape == (510, colors, 16, 20)
        assert pictures.dtype == torch.float32
        assert 0 <= pictures.min() <= pictures.max() <= 1
        assert torch.equal(pictures[:20], synthetic_images(510, (16, 20), colors)[:20])
        assert not torch.equal(pictures, synthetic_images(510, (16, 20), colors, seed=1))
        assert len(torch.unique(pictures.flatten(1), dim=0)) > 500


def test_grey_pictures_are_objects_on_black_and_colored_ones_have_no_background():
    gray, colored = synthetic_images(300, (28, 28)), synthetic_images(300, (28, 28), 3)
    corner = (slice(None), slice(None), slice(0, 3), slice(0, 3))
    assert gray[corner].mean() < 0.1 < gray[:, :, 12:16, 12:16].mean()
    assert colored[corner].mean() > 0.3
    # The spectrum falls: neighbors are alike.
    assert np.corrcoef(colored[:, 0, 10, 10], colored[:, 0, 10, 11])[0, 1] > 0.5


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
