"""Attacks on clients' updates: they succeed on bare ones; with privacy they find no more than is known without."""

import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from sordino import data
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.federated import LocalTraining
from sordino.randomness import KeyedRNG
from sordino.research import gradient_of_update, psnr, shared_gradient

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "federated_attacks.py"))


def digits():
    found = load_digits()
    return torch.tensor(found.images[:, None] / 16, dtype=torch.float32), torch.tensor(found.target)


def test_one_step_of_a_client_sends_its_gradient():
    x, y = digits()
    torch.manual_seed(0)
    model = EXAMPLE["sigmoid_network"](side=8)
    expected = shared_gradient(model, x[:5], y[:5])
    order = KeyedRNG().stream("order", step=0)
    update = LocalTraining(learning_rate=0.25).update(model, EXAMPLE["losses"], (x[:5], y[:5]), order=order)
    found = gradient_of_update(model, update, learning_rate=0.25)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    with pytest.raises(InvalidArgument, match="every trained parameter"):
        gradient_of_update(nn.Linear(2, 1), update, learning_rate=0.25)


@pytest.mark.parametrize("place", [3, 17])
def test_a_digit_comes_out_of_a_bare_update_and_not_out_of_a_private_one(place):
    x, y = digits()
    torch.manual_seed(1)
    model, truth = EXAMPLE["sigmoid_network"](side=8), x[place : place + 1]
    prior = psnr(x[100:].mean(0, keepdim=True), truth)
    found = {
        arm: psnr(EXAMPLE["inverted"](arm, model, truth, y[place : place + 1], seed=2, steps=120), truth)
        for arm in ("none", "local", "server")
    }
    assert found["none"] > prior + 15
    assert found["local"] < prior
    assert found["server"] < prior


def quarters(count, seed):
    """8 × 8 pictures: class k is bright in one quarter, records differ by noise."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(4, 1, 8, 8)
    masks[0, :, :4, :4], masks[1, :, :4, 4:], masks[2, :, 4:, :4], masks[3, :, 4:, 4:] = 1, 1, 1, 1
    labels = torch.arange(count) % 4
    return (0.8 * masks[labels] + 0.2 * torch.rand(count, 1, 8, 8, generator=generator)), labels, masks


@cache
def brightness_of_the_quarter(arm, with_target):
    """How much brighter than the whole picture the attacker paints the quarter of the victim's class."""
    x, y, masks = quarters(600, 0)
    honest = EXAMPLE["dealt"](x, y, target=1, with_target=with_target, each=128)
    attacker = (x[y > 1][:128], y[y > 1][:128])
    pictures, _ = EXAMPLE["painted"](arm, honest, attacker, target=1, classes=4, rounds=15, seed=3, generator_steps=10)
    mean = pictures.mean(0)
    return float(mean[masks[1] == 1].mean() - mean.mean())


def test_a_malicious_client_paints_a_class_that_only_another_one_has():
    assert brightness_of_the_quarter("none", True) > brightness_of_the_quarter("none", False) + 0.2


@pytest.mark.parametrize("arm", ["local", "server"])
def test_with_privacy_for_clients_it_paints_what_it_paints_when_nobody_has_the_class(arm):
    gain = brightness_of_the_quarter("none", True) - brightness_of_the_quarter("none", False)
    assert brightness_of_the_quarter(arm, True) - brightness_of_the_quarter(arm, False) < gain / 3


@pytest.mark.slow
def test_the_pictures_of_the_page_show_what_it_says(tmp_path):
    try:
        data.load_dataset("mnist")
    except DataUnavailable:
        pytest.skip("mnist is not on this machine")
    found = EXAMPLE["main"](["--out", str(tmp_path), "--show", "record", "class", "--digits", "1"])
    assert found["none 0"] > found["prior 0"] + 15
    assert max(found["local 0"], found["server 0"]) < found["prior 0"]
    assert found["no protection"] > found["nobody has it"] + 0.3
    assert max(found["local"], found["server"]) < 0.3
