import math

import numpy as np
import pytest
import torch

from sordino.errors import InvalidArgument
from sordino.transfer import Scattering, scattering_features


def wave(u, v, *, scale, angle, slant):
    """The wave and its envelope at one point of the plane, from the formula."""
    sigma, frequency = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale
    along = u * math.cos(angle) + v * math.sin(angle)
    across = -u * math.sin(angle) + v * math.cos(angle)
    envelope = math.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    height = slant / (2 * math.pi * sigma**2)
    return height * envelope * complex(math.cos(frequency * along), math.sin(frequency * along)), height * envelope


def filters(side, *, scale, angle, slant):
    """A Morlet wavelet at every whole offset, far beyond the picture: {(dy, dx): value}."""
    reach = 2 * side
    points = [(dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1)]
    values = {point: wave(point[1], point[0], scale=scale, angle=angle, slant=slant) for point in points}
    constant = sum(value for value, _ in values.values()) / sum(envelope for _, envelope in values.values())
    return {point: value - constant * envelope for point, (value, envelope) in values.items() if envelope > 1e-12}


def blur(side, scales):
    sigma = 0.8 * 2 ** (scales - 1)
    reach = 2 * side
    values = {
        (dy, dx): math.exp(-(dy**2 + dx**2) / (2 * sigma**2))
        for dy in range(-reach, reach + 1)
        for dx in range(-reach, reach + 1)
    }
    total = sum(values.values())
    return {point: value / total for point, value in values.items() if value / total > 1e-12}


def convolved(plane, filter_, every):
    """Σ f(d)·x(p − d) at every `every`-th pixel p of a torus."""
    side = len(plane)
    found = np.zeros((side // every, side // every), dtype=complex)
    rows = np.arange(0, side, every)
    for (dy, dx), value in filter_.items():
        found += value * plane[np.ix_((rows - dy) % side, (rows - dx) % side)]
    return found


def sampled(filter_, every):
    """A filter on the coarse grid: every `every`-th value, weighted by the pixels that it stands for."""
    return {(y // every, x // every): v * every**2 for (y, x), v in filter_.items() if y % every == 0 == x % every}


def oracle(image, *, scales, angles, subsampled=True):
    """Coefficients by direct convolution, path by path."""
    border, side = 2**scales, len(image) + 2 ** (scales + 1)
    x = np.pad(image, border, mode="reflect")
    slant, turns = 4 / angles, [math.pi * k / angles for k in range(angles)]
    window = blur(side, scales)

    def coefficient(plane, level):
        mean = convolved(plane, sampled(window, 2**level), 2 ** (scales - level)).real
        return mean[1 : 1 + len(image) // 2**scales, 1 : 1 + len(image) // 2**scales]

    def modulus(plane, level, scale, angle):
        made = sampled(filters(side, scale=scale, angle=angle, slant=slant), 2**level)
        to = scale if subsampled else 0
        return abs(convolved(plane, made, 2 ** (to - level))), to

    first, second = [], []
    for scale in range(scales):
        for angle in turns:
            plane, level = modulus(x, 0, scale, angle)
            first.append(coefficient(plane, level))
            for other in range(scale + 1, scales):
                for turn in turns:
                    second.append(coefficient(*modulus(plane, level, other, turn)))
    return np.stack([coefficient(x, 0), *first, *second])


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(3).random((16, 16))


@pytest.mark.parametrize(("scales", "angles"), [(1, 3), (2, 3), (3, 1)])
def test_coefficients_are_those_of_direct_convolutions(image, scales, angles):
    mine = Scattering((16, 16), scales, angles)(torch.from_numpy(image)[None, None].float())
    expected = oracle(image, scales=scales, angles=angles)
    assert mine.shape == (1, *expected.shape)
    assert np.abs(mine[0].numpy() - expected).max() < 2e-6 * np.abs(expected).max()
    # Every path is there by itself: none of them is another one's copy.
    assert len(np.unique(expected.reshape(len(expected), -1).round(7), axis=0)) == len(expected)


def test_sampling_on_the_way_changes_little(image):
    smooth = sum(np.roll(image, (dy, dx), (0, 1)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)) / 9
    exact = oracle(smooth, scales=2, angles=2, subsampled=False)
    mine = Scattering((16, 16), 2, 2)(torch.from_numpy(smooth)[None, None].float())[0].numpy()
    for of_order in (slice(1, 5), slice(5, 9)):
        difference = np.linalg.norm(mine[of_order] - exact[of_order])
        assert 1e-6 < difference / np.linalg.norm(exact[of_order]) < 0.08


def test_a_wrong_filter_would_be_seen(image):
    mine = Scattering((16, 16), 2, 3)(torch.from_numpy(image)[None, None].float())[0].numpy()
    for turned in (oracle(image.T, scales=2, angles=3), oracle(image[:, ::-1], scales=2, angles=3)):
        assert np.abs(mine - turned).max() > 1e-2 * np.abs(mine).max()


@pytest.mark.parametrize(("shape", "colors"), [((28, 28), 1), ((32, 32), 3), ((16, 24), 2)])
def test_shapes_follow_from_scales_angles_and_colors(shape, colors):
    features = Scattering(shape)
    assert features.planes == 81
    assert features(torch.rand(3, colors, *shape)).shape == (3, 81 * colors, shape[0] // 4, shape[1] // 4)
    assert features(torch.rand(0, colors, *shape)).shape == (0, 81 * colors, shape[0] // 4, shape[1] // 4)
    assert Scattering(shape, scales=2, angles=4, order=1).planes == 9
    assert Scattering((64, 64), scales=3, angles=8).planes == 217


def test_nothing_is_trained_and_nothing_is_kept_in_checkpoints():
    features = scattering_features((28, 28))
    assert not list(features.parameters())
    assert not features.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_type_of_the_images_is_kept(dtype):
    images = torch.rand(2, 1, 16, 16)
    features = Scattering((16, 16))
    found = features(images.to(dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.float(), features(images.to(dtype).float()), rtol=0.01)


def test_records_are_not_mixed_not_even_in_the_last_bit():
    features = scattering_features((28, 28), 3)
    images = torch.rand(40, 3, 28, 28)
    before = features(images)
    for place in (0, 17, 39):
        others = 100 * torch.rand(40, 3, 28, 28)
        others[place] = images[place]
        assert torch.equal(features(others)[place], before[place])
    broken = images.clone()
    broken[5] = math.nan
    after = features(broken)
    kept = [place for place in range(40) if place != 5]
    assert torch.equal(after[kept], before[kept])
    assert torch.allclose(features(images[7:8])[0], before[7], atol=1e-5)


def test_colors_are_transformed_each_by_itself():
    features, images = Scattering((16, 16)), torch.rand(2, 3, 16, 16)
    together = features(images).unflatten(1, (3, 81))
    for color in range(3):
        assert torch.allclose(together[:, color], features(images[:, color : color + 1]), atol=1e-6)


def test_a_constant_picture_has_no_waves_and_brightness_scales():
    features = Scattering((16, 16))
    flat = features(torch.full((1, 1, 16, 16), 0.7))[0]
    assert torch.allclose(flat[0], torch.tensor(0.7))
    assert flat[1:].abs().max() < 1e-6
    images = torch.rand(1, 1, 16, 16)
    assert torch.allclose(features(3 * images), 3 * features(images), rtol=1e-4, atol=1e-6)


def test_normalised_groups_have_mean_zero_and_variance_one_for_each_record():
    rows = scattering_features((28, 28), groups=27)(torch.rand(4, 1, 28, 28))
    groups = rows.reshape(4, 27, -1)
    assert torch.allclose(groups.mean(2), torch.zeros(4, 27), atol=1e-4)
    # Quiet groups are kept quiet by the small number under the root.
    assert (groups.var(2, unbiased=False) < 1 + 1e-4).all()
    assert (groups.var(2, unbiased=False)[:, 0] > 0.99).all()


def test_gradients_pass_through():
    images = torch.rand(1, 1, 16, 16, requires_grad=True)
    Scattering((16, 16))(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scattering((28, 30)), "multiples of 4"),
        (lambda: Scattering((4, 4)), "at least 8"),
        (lambda: Scattering((28,)), "height, width"),
        (lambda: Scattering(order=3), "order"),
        (lambda: Scattering(scales=0), "scales"),
        (lambda: scattering_features(groups=26), "divisor of the 81 planes"),
        (lambda: Scattering()(torch.rand(2, 28, 28)), "records, channels, 28, 28"),
        (lambda: Scattering()(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)), "floats"),
    ],
)
def test_what_does_not_fit_is_refused_with_words(make, words):
    with pytest.raises(InvalidArgument, match=words):
        make()
