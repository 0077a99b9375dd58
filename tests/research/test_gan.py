"""The malicious participant: it paints the victim's class unless whole participants are protected."""

import runpy
from pathlib import Path

import pytest
import torch

from sordino import data
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.research import Federation, Protection, impersonate

EXAMPLE = Path(__file__).parents[2] / "examples" / "attack_pictures.py"


def quarters(count, seed):
    """8 × 8 pictures: class k is bright in one quarter, records differ by noise."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(4, 1, 8, 8)
    masks[0, :, :4, :4], masks[1, :, :4, 4:], masks[2, :, 4:, :4], masks[3, :, 4:, 4:] = 1, 1, 1, 1
    labels = torch.arange(count) % 4
    return (0.8 * masks[labels] + 0.2 * torch.rand(count, 1, 8, 8, generator=generator)), labels, masks


def painted(protection, **settings):
    x, y, masks = quarters(400, 0)
    torch.manual_seed(2)
    found = impersonate(
        (x[y < 2], y[y < 2]),
        (x[y >= 2], y[y >= 2]),
        target=1,
        classes=4,
        federation=Federation(rounds=12, local_steps=5, batch_size=32, protection=protection, **settings),
        generator_steps=15,
        rng=KeyedRNG(seed=1, reproducible=True),
    )
    mean = found.pictures.mean(dim=0)
    return found, [mean[mask == 1].mean().item() for mask in masks]


def test_the_victims_class_is_painted_without_having_been_seen():
    found, brightness = painted(Protection.NONE)
    assert found.pictures.shape == (32, 1, 8, 8)
    assert max(range(4), key=brightness.__getitem__) == 1
    assert brightness[1] > sum(brightness) / 4 + 0.15


def test_noise_for_single_records_leaves_the_attack_alive():
    _, brightness = painted(Protection.RECORD, max_grad_norm=1.0, noise_multiplier=0.5)
    assert max(range(4), key=brightness.__getitem__) == 1


def test_noise_for_whole_participants_hides_the_class():
    spread = []
    for protection, settings in ((Protection.NONE, {}), (Protection.CLIENT, {"max_grad_norm": 0.5})):
        _, brightness = painted(protection, **settings)
        spread.append(brightness[1] - sum(brightness) / 4)
    assert spread[1] < spread[0] / 2


def test_what_does_not_fit_is_refused():
    x, y, _ = quarters(40, 0)
    with pytest.raises(InvalidArgument, match="target must be a class of the victim's"):
        impersonate((x[y < 2], y[y < 2]), (x, y), target=1, classes=4, federation=Federation(rounds=1))
    with pytest.raises(InvalidArgument, match="multiples of 4"):
        impersonate(
            (x[y < 2][..., :7], y[y < 2]), (x[y >= 2], y[y >= 2]), target=1, classes=4, federation=Federation(rounds=1)
        )
    with pytest.raises(InvalidArgument, match="rounds"):
        Federation(rounds=0)


@pytest.fixture
def example():
    try:
        data.load_dataset("mnist")
    except DataUnavailable:
        pytest.skip("mnist is not on this machine")
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
def test_a_digit_is_painted_without_protection_and_not_in_the_control_or_under_noise_for_participants(
    example, tmp_path, monkeypatch
):
    # With noise for records the outcome hangs on the seed, so nothing is asked of it.
    arms = {name: arm for name, arm in example["ARMS"].items() if name != "record"}
    monkeypatch.setitem(example["federated"].__globals__, "ARMS", arms)
    found = example["federated"](tmp_path, 60, seeds=1)
    # A judge has to name some digit, of noise too: two of three must agree.
    shares = {
        arm: sorted(found[f"{arm}, {judge}"][0] for judge in ("network", "convolutions", "nearest five"))[1]
        for arm in arms
    }
    assert shares["none"] > 0.5
    assert max(shares["control"], shares["client"]) < 0.25


@pytest.mark.slow
def test_the_command_paints_the_same_with_any_number_of_threads(example, tmp_path, monkeypatch):
    names, seen = example["main"].__globals__, []
    monkeypatch.setitem(names, "ARMS", {"none": Federation()})

    def judges(x, y):
        def judge(pictures):
            seen.append(pictures.clone())
            return torch.zeros(len(pictures), dtype=torch.long)

        return {"recorder": judge}

    monkeypatch.setitem(names, "judges", judges)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            example["main"](["--show", "federated", "--rounds", "3", "--seeds", "1", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(before)
    real, first, _, second = seen
    assert first.shape == second.shape != real.shape
    assert torch.equal(first, second)
