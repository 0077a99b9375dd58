"""Filters and optimizers on private gradients: against hand computation, long obvious loops, and statistics."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from sordino import PrivacyEngine, fit
from sordino.errors import InvalidArgument
from sordino.optimizers import AdamBC
from sordino.research import DebiasedMomentum, Kalman, LowPass, restore_parameters
from sordino.training import Plan

GRADIENTS = [1.0, -2.0, 0.5, 4.0, 0.0, 3.0]


def outputs(rule, gradients):
    memory = {}
    return [float(rule.filter_gradient(torch.tensor([value], dtype=torch.float64), memory)) for value in gradients]


def slow_low_pass(forward, back, signal):
    """The difference equation written out, for a signal that was 0 before its start."""
    found = []
    for t in range(len(signal)):
        value = sum(b * signal[t - k] for k, b in enumerate(forward) if t >= k)
        value -= sum(a * found[t - k] for k, a in enumerate(back, start=1) if t >= k)
        found.append(value)
    return found


@pytest.mark.parametrize(
    ("forward", "back"),
    [((0.1,), (-0.9,)), ((0.5, 0.5), ()), ((0.2, 0.1), (-0.5, -0.2)), ((0.05, 0.1, 0.05), (-1.2, 0.4))],
)
def test_low_pass_is_the_difference_equation_over_its_answer_to_a_constant(forward, back):
    found = outputs(LowPass(feedforward=forward, feedback=back), GRADIENTS)
    raw, gain = slow_low_pass(forward, back, GRADIENTS), slow_low_pass(forward, back, [1.0] * len(GRADIENTS))
    assert found == pytest.approx([m / c for m, c in zip(raw, gain, strict=True)], rel=1e-6)


def test_debiased_momentum_by_hand_and_as_a_low_pass():
    found = outputs(DebiasedMomentum(momentum=0.5), [3.0, 0.0, 1.0])
    # v = 1.5, 0.75, 0.875 over 1/2, 3/4, 7/8.
    assert found == pytest.approx([3.0, 1.0, 1.0])
    same = outputs(LowPass(feedforward=(0.5,), feedback=(-0.5,)), [3.0, 0.0, 1.0])
    assert same == pytest.approx(found)


def test_momentum_leaves_the_share_of_the_noise_that_its_weights_say():
    beta, generator = 0.8, torch.Generator().manual_seed(0)
    noise = torch.randn(60, 20_000, generator=generator, dtype=torch.float64)
    memory = {}
    for row in noise:
        found = DebiasedMomentum(momentum=beta).filter_gradient(row, memory)
    expected = (1 - beta) / (1 + beta)
    assert float(found.var()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("back", [(-1.0,), (-1.1,), (0.0, -1.01)])
def test_unstable_filters_are_refused(back):
    with pytest.raises(InvalidArgument, match="stable"):
        LowPass(feedback=back)


@pytest.mark.parametrize("forward", [(), (0.0, 1.0), (1.0, -1.0), (float("nan"),)])
def test_filters_that_block_a_constant_are_refused(forward):
    with pytest.raises(InvalidArgument, match="feedforward"):
        LowPass(feedforward=forward)


def quadratic(weight):
    return weight.detach() * torch.tensor([1.0, 3.0])


def test_kalman_steps_from_where_it_was_by_a_gradient_taken_ahead():
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    Kalman(gain=0.4).attach(optimizer)
    for _ in range(6):
        weight.grad = quadratic(weight)
        optimizer.step()
    restore_parameters(optimizer)
    place, before, estimate = np.array([1.0, 1.0]), np.array([1.0, 1.0]), None
    curvature, gain = np.array([1.0, 3.0]), 0.4
    for _ in range(6):
        noisy = curvature * (place + (1 - gain) / gain * (place - before))
        estimate = noisy if estimate is None else (1 - gain) * estimate + gain * noisy
        before, place = place, place - 0.1 * estimate
    assert weight.detach().numpy() == pytest.approx(place, rel=1e-5)
    restore_parameters(optimizer)
    assert weight.detach().numpy() == pytest.approx(place, rel=1e-5)


def test_kalman_without_noise_tracks_the_gradient_exactly_on_a_quadratic():
    # The prediction is exact there, so that the estimate is the gradient and the run is plain descent.
    runs = []
    for gain in (1.0, 0.3):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.2)
        Kalman(gain=gain).attach(optimizer)
        for _ in range(10):
            weight.grad = weight.detach() * torch.tensor([1.0, 3.0], dtype=torch.float64)
            optimizer.step()
        restore_parameters(optimizer)
        runs.append(weight.detach().clone())
    assert torch.allclose(runs[0], runs[1], rtol=1e-6)


def test_adam_by_hand():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = AdamBC([weight], lr=0.1, noise_stddev=lambda step: (0.5, 1.0)[step], betas=(0.5, 0.8), floor=0.01)
    for gradient in ([1.0, 0.2], [2.0, -0.2]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    # Step 1: m̂ = g, v̂ − Φ̂ = 1 − 0.25 = 0.75 and 0.04 − 0.25 < floor.
    first = np.array([-0.1 * 1.0 / np.sqrt(0.75), -0.1 * 0.2 / 0.1])
    # Step 2: m̂ = (0.25·g₁ + 0.5·g₂)/0.75; v̂ − Φ̂ = (0.16·(1 − 0.25) + 0.2·(4 − 1))/0.36 = 2.
    second = np.array([-0.1 * (0.25 + 1.0) / 0.75 / np.sqrt(2.0), -0.1 * (0.05 - 0.1) / 0.75 / 0.1])
    assert weight.detach().numpy() == pytest.approx(first + second, rel=1e-12)


def test_adam_without_noise_is_adam_beside_the_place_of_its_floor():
    ours, theirs = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    first, second = AdamBC([ours], lr=0.01, noise_stddev=0.0, floor=1e-30), torch.optim.Adam([theirs], lr=0.01, eps=0)
    for scale in (1.0, -0.5, 2.0):
        for weight in (ours, theirs):
            weight.grad = scale * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        first.step()
        second.step()
    assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize(("told", "removed"), [(1.0, True), (1.05, False), (0.95, False)])
def test_the_bias_of_the_second_moment_is_gone_with_the_right_noise_only(told, removed):
    count, stddev, signal = 40_000, 1.0, 0.2
    weight = nn.Parameter(torch.zeros(count))
    optimizer = AdamBC([weight], lr=1e-3, noise_stddev=told * stddev, betas=(0.9, 0.99), floor=1e-12)
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        weight.grad = signal + stddev * torch.randn(count, generator=generator)
        optimizer.step()
    state = optimizer.state[weight]
    estimate = (state["exp_avg_sq"] - state["noise_sq"]) / (1 - 0.99**100)
    error = abs(float(estimate.mean()) - signal**2)
    # Standard error: √2·σ²·√((1−β)/(1+β)/N) ≈ 5e-4.
    assert (error < 5 * 5e-4) == removed


def data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, generator=generator)
    return features, (features[:, 0] > 0).long()


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def quiet_plan(steps):
    return Plan(
        noise_multiplier=1e-4, max_grad_norm=1.0, sample_rate=1.0, steps=steps, expected_batch_size=40.0, delta=1e-5
    )


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("rule", [LowPass(), Kalman(gain=0.5)], ids=["low pass", "kalman"])
def test_fit_and_a_loop_of_ones_own_filter_alike(inner, rule):
    found = []
    for way in ("fit", "loop"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = inner(model.parameters(), lr=0.1)
        features, labels = data()
        if way == "fit":
            rule.attach(optimizer)
            fit(model, loss, (features, labels), quiet_plan(4), optimizer=optimizer, progress=False)
        else:
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=40)
            engine = PrivacyEngine()
            model, optimizer, loader = engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1e-4, max_grad_norm=1.0
            )
            rule.attach(optimizer)
            for _ in range(4):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
            engine.detach()
        restore_parameters(optimizer)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(found[0], found[1], atol=1e-3)


def test_a_filter_before_the_engine_is_refused():
    features, labels = data()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LowPass().attach(optimizer)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=40)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    before = model.weight.detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(InvalidArgument, match="after make_private"):
            optimizer.step()
    assert torch.equal(before, model.weight)


def test_two_filters_of_one_kind_are_refused_and_two_kinds_run_in_turn():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    LowPass(feedforward=(0.5, 0.5), feedback=()).attach(optimizer)
    with pytest.raises(InvalidArgument, match="one LowPass"):
        LowPass().attach(optimizer)
    DebiasedMomentum(momentum=0.5).attach(optimizer)
    place = 0.0
    for gradient in (1.0, 3.0):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    # Low pass: 1, 2. Momentum of those: 1, (0.25 + 1)/0.75.
    place -= 1.0 + 1.25 / 0.75
    assert float(weight.detach()) == pytest.approx(place)


def test_the_memory_is_in_the_optimizers_state_and_comes_back_with_it():
    def steps(optimizer, weight, gradients):
        for gradient in gradients:
            weight.grad = torch.full((2,), gradient)
            optimizer.step()

    made = []
    for _ in range(2):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        LowPass().attach(optimizer)
        made.append((optimizer, weight))
    steps(*made[0], GRADIENTS[:3])
    made[1][0].load_state_dict(copy.deepcopy(made[0][0].state_dict()))
    with torch.no_grad():
        made[1][1].copy_(made[0][1])
    for optimizer, weight in made:
        steps(optimizer, weight, GRADIENTS[3:])
    assert torch.allclose(made[0][1], made[1][1])


def test_a_checkpoint_of_a_filtered_run_is_read_back(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    Kalman().attach(optimizer)
    fit(
        model,
        loss,
        data(),
        quiet_plan(3),
        optimizer=optimizer,
        run_folder=tmp_path / "run",
        checkpoint_every=1,
        progress=False,
    )
    assert any((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0}, {"noise_stddev": -1.0}, {"betas": (1.0, 0.9)}, {"floor": 0.0}, {"weight_decay": -1.0}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        AdamBC([nn.Parameter(torch.zeros(1))], **{"noise_stddev": 1.0, **wrong})
