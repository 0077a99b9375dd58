"""Four descents against slow ones, and the cost of privacy by group."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino.errors import InvalidArgument
from sordino.mechanisms import standard_normal
from sordino.randomness import KeyedRNG
from sordino.research import measure_convergence, subgroup_gaps


def records():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, generator=generator) * torch.linspace(0.2, 4, 40)[:, None]
    return features, (features[:, 0] > 0).long()


def run(sigma, seed=3, steps=12):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_convergence(
        model,
        *records(),
        steps=steps,
        learning_rate=1.0,
        max_grad_norm=0.3,
        noise_multiplier=sigma,
        rng=KeyedRNG(seed=seed, reproducible=True),
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return model, found


def test_without_noise_the_arms_are_plain_and_clipped_descent():
    model, found = run(0.0)
    features, labels = records()
    for name, clipped in (("neither", False), ("clipping alone", True)):
        parameters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        losses = []
        for _ in range(12):
            totals, mean = [torch.zeros_like(p) for p in parameters], 0.0
            for x, y in zip(features, labels, strict=True):
                out = F.linear(torch.tanh(F.linear(x[None], *parameters[:2])), *parameters[2:])
                loss = F.cross_entropy(out, y[None])
                mean += loss.item() / 40
                own = torch.autograd.grad(loss, parameters)
                norm = float(torch.cat([part.reshape(-1) for part in own]).norm())
                factor = min(1.0, 0.3 / norm) if clipped else 1.0
                totals = [total + factor * part for total, part in zip(totals, own, strict=True)]
            losses.append(mean)
            with torch.no_grad():
                for parameter, total in zip(parameters, totals, strict=True):
                    parameter -= total / 40
        assert found.losses[name][:-1] == pytest.approx(losses, rel=1e-3)
    assert found.losses["noise alone"] == found.losses["neither"]
    assert found.losses["both"] == found.losses["clipping alone"]


def test_all_arms_start_alike_and_clipping_slows_more_than_little_noise():
    _, found = run(1.0, steps=30)
    assert len({losses[0] for losses in found.losses.values()}) == 1
    assert all(len(losses) == 31 for losses in found.losses.values())
    last = {name: losses[-1] for name, losses in found.losses.items()}
    assert abs(last["noise alone"] - last["neither"]) < last["clipping alone"] - last["neither"]
    assert last["noise alone"] != last["neither"]


def test_noise_has_the_size_that_training_gives_it():
    features, labels = torch.zeros(10, 4), torch.zeros(10, dtype=torch.long)
    found = measure_convergence(
        nn.Linear(4, 2),
        features,
        labels,
        steps=1,
        learning_rate=2.0,
        max_grad_norm=0.5,
        noise_multiplier=4.0,
        loss=lambda outputs, _: outputs[:, 0],
        rng=KeyedRNG(seed=5, reproducible=True),
    )
    noise = standard_normal(2, KeyedRNG(seed=5, reproducible=True).stream("convergence", step=0, tensor=1))
    for noisy, plain in (("both", "clipping alone"), ("noise alone", "neither")):
        change = found.losses[noisy][1] - found.losses[plain][1]
        # learning rate · σC/n · the draw of the one bias that the loss reads
        assert change == pytest.approx(-2.0 * 4.0 * 0.5 / 10 * float(noise[0]), rel=1e-4)


def test_gaps_are_paired_counts_and_their_intervals_cover():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 400)
    groups = {"side": ["left" if k < 300 else "right" for k in range(400)]}

    def chances(right):
        own = np.where(right, 0.9, 0.1)
        return np.where(np.eye(2)[labels] == 1, own[:, None], 1 - own[:, None])

    private, plain = generator.uniform(size=400) < 0.7, generator.uniform(size=400) < 0.9
    found = {gap.value: gap for gap in subgroup_gaps(chances(private), chances(plain), labels, groups)}
    for name, part in (("left", slice(0, 300)), ("right", slice(300, 400))):
        gap = found[name]
        assert gap.private == pytest.approx(private[part].mean())
        assert gap.gap == pytest.approx(private[part].mean() - plain[part].mean())
        assert gap.lower < gap.gap < gap.upper
    covered = 0
    for _ in range(400):
        one, two = generator.uniform(size=60) < 0.7, generator.uniform(size=60) < 0.9
        labels = np.zeros(60, dtype=int)
        (gap,) = subgroup_gaps(chances(one), chances(two), labels, {"all": ["x"] * 60})
        covered += gap.lower <= -0.2 <= gap.upper
    assert 0.92 <= covered / 400 <= 0.985


def test_groups_of_another_length_are_refused():
    with pytest.raises(InvalidArgument, match="one value a record"):
        subgroup_gaps([[1.0, 0.0]], [[1.0, 0.0]], [0], {"side": ["a", "b"]})
