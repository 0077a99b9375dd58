import numpy as np
import pytest
import torch

from sordino.errors import InvalidArgument
from sordino.transfer.scattering import PatchFeatures


def pictures(count, size=(12, 15), seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random((count, 3, *size)).astype(np.float32))


def slow(features, picture, threshold, grid):
    """One patch after the other, from the formula."""
    filters = features.get_buffer("_filters").double()
    side = filters.shape[-1]
    height, width = (length - side + 1 for length in picture.shape[1:])
    alike = np.empty((len(filters), height, width))
    for row in range(height):
        for column in range(width):
            patch = picture[:, row : row + side, column : column + side].double()
            patch = (patch - patch.mean()) / torch.sqrt(patch.var(correction=0) + 1.5e-3)
            alike[:, row, column] = (filters * patch).sum((1, 2, 3)).numpy()
    found = []
    for sign in (1, -1):
        for plane in np.maximum(sign * alike - threshold, 0):
            for row in range(grid):
                for column in range(grid):
                    rows = slice(row * height // grid, -(-(row + 1) * height // grid))
                    columns = slice(column * width // grid, -(-(column + 1) * width // grid))
                    found.append(plane[rows, columns].mean())
    return np.array(found)


@pytest.mark.parametrize(("side", "grid", "threshold"), [(6, 2, 0.5), (4, 3, 0.0)])
def test_features_are_those_of_the_formula(side, grid, threshold):
    features = PatchFeatures(3, patches=5, side=side, threshold=threshold, grid=grid)
    images = pictures(2)
    found = features(images)
    assert found.shape == (2, features.columns)
    for row, picture in zip(found, images, strict=True):
        np.testing.assert_allclose(row.numpy(), slow(features, picture, threshold, grid), atol=1e-4)


def test_filters_see_neither_brightness_nor_contrast_and_are_the_same_every_time():
    features = PatchFeatures(3, patches=7)
    assert features.get_buffer("_filters").mean((1, 2, 3)).abs().max() < 1e-7
    images = pictures(2)
    torch.testing.assert_close(features(images * 0.5 + 0.3), features(images), rtol=0.1, atol=0.02)
    assert torch.equal(PatchFeatures(3, patches=7)(images), features(images))
    assert not torch.equal(PatchFeatures(3, patches=7, seed=1)(images), features(images))


def test_a_flat_picture_is_like_nothing_and_a_broken_one_changes_no_other():
    features = PatchFeatures(3, patches=7)
    images = pictures(4)
    before = features(images)
    images[1], images[2] = torch.nan, 0.3
    after = features(images)
    assert torch.equal(after[[0, 3]], before[[0, 3]])
    assert after[2].abs().max() < 1e-3


def test_other_shapes_are_refused():
    with pytest.raises(InvalidArgument, match="records, 3, height, width"):
        PatchFeatures(3, patches=2)(torch.zeros(2, 1, 12, 12))
    with pytest.raises(InvalidArgument, match="at least 7"):
        PatchFeatures(3, patches=2)(torch.zeros(2, 3, 6, 12))
