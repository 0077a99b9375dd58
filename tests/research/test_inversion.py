"""From gradients back to records: exact where algebra says so, by search elsewhere; not through clipping and noise."""

import math

import pytest
import torch
from torch import nn

from sordino import data
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.research import (
    invert_by_direction,
    invert_by_matching,
    label_from_sign,
    privatized_gradient,
    psnr,
    read_linear_layer,
    shared_gradient,
    ssim,
)


def fixed():
    return KeyedRNG(seed=7, reproducible=True)


def sigmoid_network():
    """The network of the paper on 28 × 28 pixels: three convolutions, sigmoids, wide initial weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(588, 10),
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def digit():
    try:
        features, labels = data.load_dataset("mnist").test.tensors()
    except DataUnavailable:
        pytest.skip("mnist is not on this machine")
    return features[:1], labels[:1]


def test_a_linear_layer_gives_its_input_away_exactly_and_the_sign_its_label():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    for label in range(4):
        x = torch.randn(1, 20, dtype=torch.float64)
        weight, bias, _, last = shared_gradient(model, x, torch.tensor([label]))
        assert (read_linear_layer(weight, bias) - x[0]).abs().max() < 1e-12
        assert label_from_sign(last) == label


def test_noise_hides_the_input_of_a_linear_layer():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 4))
    x = torch.rand(1, 20)
    weight, bias, *_ = privatized_gradient(
        model, x, torch.tensor([2]), max_grad_norm=1.0, noise_multiplier=1.0, rng=fixed()
    )
    assert (read_linear_layer(weight, bias) - x[0]).abs().max() > 0.5


def test_a_digit_comes_out_of_an_unprotected_gradient_and_not_out_of_a_private_one():
    model, (features, labels) = sigmoid_network(), digit()
    gradient = shared_gradient(model, features, labels)
    found = invert_by_matching(model, gradient, shape=(1, 28, 28), classes=10, steps=120, rng=fixed(), restarts=2)
    assert psnr(found.features, features) > 20
    assert ssim(found.features[0].clamp(0, 1), features[0]) > 0.8
    assert found.labels.tolist() == labels.tolist()
    private = privatized_gradient(model, features, labels, max_grad_norm=1.0, noise_multiplier=0.5, rng=fixed())
    kept = invert_by_matching(
        model, private, shape=(1, 28, 28), classes=10, labels=labels, steps=60, restarts=1, rng=fixed()
    )
    assert psnr(kept.features.clamp(0, 1), features) < 10
    assert ssim(kept.features[0].clamp(0, 1), features[0]) < 0.2


@pytest.mark.slow
def test_direction_matching_works_behind_relu_and_not_through_noise():
    features, labels = digit()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(2352, 10))
    gradient = shared_gradient(model, features, labels)
    settings = {"shape": (1, 28, 28), "labels": labels, "steps": 400, "rng": fixed()}
    found = invert_by_direction(model, gradient, **settings)
    private = privatized_gradient(model, features, labels, max_grad_norm=1.0, noise_multiplier=0.5, rng=fixed())
    kept = invert_by_direction(model, private, **settings)
    assert psnr(found.features, features) > 17
    assert psnr(kept.features, features) < 10


def test_direction_matching_comes_close_to_a_small_picture():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 3))
    features = torch.linspace(0, 1, 36).reshape(1, 1, 6, 6)
    gradient = shared_gradient(model, features, torch.tensor([1]))
    found = invert_by_direction(
        model, gradient, shape=(1, 6, 6), labels=torch.tensor([1]), steps=200, total_variation=1e-4, rng=fixed()
    )
    assert psnr(found.features, features) > 20


def test_a_private_gradient_is_the_clipped_sum_plus_noise_of_the_stated_size():
    torch.manual_seed(5)
    model = nn.Linear(50, 40)
    features, labels = torch.randn(3, 50), torch.tensor([0, 5, 9])
    exact = privatized_gradient(model, features, labels, max_grad_norm=0.2, noise_multiplier=0.0)
    slow = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for row in range(3):
        own = shared_gradient(model, features[row : row + 1], labels[row : row + 1])
        norm = math.sqrt(sum(float((part**2).sum()) for part in own))
        slow = [total + min(1.0, 0.2 / norm) * part / 3 for total, part in zip(slow, own, strict=True)]
    for a, b in zip(exact, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-4)
    noisy = privatized_gradient(model, features, labels, max_grad_norm=0.2, noise_multiplier=2.0, rng=fixed())
    spread = (noisy[0] - exact[0]).std().item() * 3
    assert spread == pytest.approx(0.4, rel=0.06)


def test_likeness_agrees_with_slow_loops():
    torch.manual_seed(6)
    a, b = torch.rand(2, 13, 12, dtype=torch.float64), torch.rand(2, 13, 12, dtype=torch.float64)
    window = torch.tensor(
        [[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for j in range(11)] for i in range(11)], dtype=torch.float64
    )
    window /= window.sum()
    values = []
    for channel in range(2):
        for row in range(3):
            for column in range(2):
                x = a[channel, row : row + 11, column : column + 11]
                y = b[channel, row : row + 11, column : column + 11]
                mx, my = (window * x).sum(), (window * y).sum()
                vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
                cov = (window * (x - mx) * (y - my)).sum()
                values.append((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert ssim(a, b) == pytest.approx(float(torch.stack(values).mean()))
    assert ssim(a, a) == pytest.approx(1.0)
    assert psnr(a, a) == 200
    assert psnr(a, b) == pytest.approx(-10 * math.log10(float(((a - b) ** 2).mean())))


def test_what_does_not_fit_is_refused():
    model = nn.Linear(4, 2)
    with pytest.raises(InvalidArgument, match="one tensor for each trained parameter"):
        invert_by_matching(model, [torch.zeros(2)], shape=(4,), classes=2)
    with pytest.raises(InvalidArgument, match="bias_gradient"):
        read_linear_layer(torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="one shape"):
        psnr(torch.zeros(3), torch.zeros(4))
