"""Secure noise: whole-number sums and noise, checked against slow loops over single records, and attacked."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from oracles import clipped_sum, per_record_gradients, relative_error
from sordino.audit import replay
from sordino.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    QuantileClipping,
)
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.events import Gaussian
from sordino.gradients import GradientCapture
from sordino.mechanisms.base import observe_releases
from sordino.mechanisms.integer_noise import GridSumMechanism
from sordino.randomness import KeyedRNG
from sordino.report import build_report
from sordino.runs import RunFolder
from sordino.sampling import split_into_microbatches
from sordino.training.fit import fit
from sordino.training.plan import Plan
from sordino.training.step import PrivateStep

C = 0.7


def plan(**changes):
    chosen = {
        "noise_multiplier": 0.0,
        "max_grad_norm": C,
        "sample_rate": 0.5,
        "steps": 1,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
        "secure_mode": True,
    }
    return Plan(**(chosen | changes))


def squares(model, batch):
    return model(batch[0]).square().sum()


def grid_of(model, chosen):
    return chosen.step_plan(0).grid_mechanism(sum(p.numel() for p in model.parameters()))


def released(model, x, chosen, microbatch_size=None, seed=None, number=0):
    """What a step writes, times the divisor: the noisy sum, all parameters in one row, in double precision."""
    capture = GradientCapture(model)
    rng = KeyedRNG() if seed is None else KeyedRNG(seed=seed, reproducible=True)
    step = PrivateStep(capture, chosen, rng)
    for chunk in split_into_microbatches(np.arange(len(x)), step=number, microbatch_size=microbatch_size):
        with step.capturing(chunk):
            squares(model, (x[torch.from_numpy(chunk.indices)],)).backward()
        step.add(chunk)
    step.finish()
    capture.detach()
    row = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    return row * chosen.expected_batch_size


def integers(model, x, chosen, **options):
    """The same in grid steps; 8 divides exactly."""
    return released(model, x, chosen, **options) / grid_of(model, chosen).grid.step


def one_hidden_layer(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def records(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=generator, dtype=dtype)


# --- the sum -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_the_sum_is_the_clipped_sum_on_the_grid(microbatch_size):
    model, x = one_hidden_layer(), records(7)
    found = integers(model, x, plan(), microbatch_size=microbatch_size)
    assert torch.equal(found, found.round())
    expected = torch.cat([part.flatten() for part in clipped_sum(per_record_gradients(model, squares, (x,)), C)])
    assert relative_error(found * grid_of(model, plan()).grid.step, expected) < 5e-6


def test_the_integers_are_those_of_a_loop_over_single_records():
    model, x = one_hidden_layer(), records(6)
    step = grid_of(model, plan()).grid.step
    total = np.zeros(sum(p.numel() for p in model.parameters()), dtype=object)
    for row in x:
        model.zero_grad()
        squares(model, (row[None],)).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        factor = FlatClipping().clip_factors(gradient.square().sum(), max_grad_norm=C)
        total += np.array([round(float(value)) for value in gradient * factor / step], dtype=object)
    found = integers(model, x, plan(), microbatch_size=1)
    # Another order of products may move an entry of a record by a unit in the last place of the gradient.
    assert max(abs(int(a) - int(b)) for a, b in zip(found, total, strict=True)) <= len(x)


class Convolutional(nn.Module):
    """Layers of every kind that rules read, one used twice, and one that only the fallback reads."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.conv = nn.Conv1d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.twice = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.own = nn.Bilinear(4, 4, 2)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, ids):
        h = self.norm(self.conv(self.table(ids).transpose(1, 2))).transpose(1, 2)
        h = self.twice(torch.tanh(self.twice(h)))
        h = self.attention(h, h, h, need_weights=False)[0].mean(1)
        return self.own(h, h) * self.scale


def test_layers_of_every_kind_give_the_clipped_sum():
    torch.manual_seed(2)
    model, ids = Convolutional(), torch.randint(0, 6, (5, 7))
    chosen = plan()
    found = released(model, ids, chosen)
    expected = torch.cat([part.flatten() for part in clipped_sum(per_record_gradients(model, squares, (ids,)), C)])
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize(
    "clipping", [AutomaticClipping(), GlobalClipping(threshold=4.0), GroupedClipping(by="layer")], ids=lambda c: c.kind
)
def test_every_fixed_way_of_clipping_gives_the_sum_that_floats_give(clipping):
    model, x = one_hidden_layer(), records(7)
    chosen = plan(clipping=clipping)
    floats = released(model, x, replace(chosen, secure_mode=False))
    assert relative_error(released(model, x, chosen), floats) < 5e-6


# --- sensitivity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e6, 1e30, math.inf, math.nan])
def test_one_record_moves_the_integers_by_its_own_checked_vector_and_nothing_else(factor):
    model, x = one_hidden_layer(), records(6)
    x[2] *= factor
    others = torch.cat([x[:2], x[3:]])
    mechanism = grid_of(model, plan())
    moved = integers(model, x, plan(), microbatch_size=1) - integers(model, others, plan(), microbatch_size=1)
    alone = integers(model, x[2:3], plan(), microbatch_size=1)
    assert torch.equal(moved, alone)  # bit for bit: no other record is rounded in another way
    assert sum(int(value) ** 2 for value in moved) <= mechanism.largest_norm**2


def test_the_order_of_the_records_does_not_matter():
    # In single precision 2²³ followed by a thousand halves loses every half; whole numbers lose nothing.
    model, x = one_hidden_layer(torch.float32), records(40, torch.float32)
    x[0] *= 1e6
    chosen = plan()
    forward = integers(model, x, chosen, microbatch_size=1)
    assert torch.equal(forward, integers(model, x.flip(0), chosen, microbatch_size=1))


@dataclass(frozen=True)
class Overlong(Clipping):
    """A broken clipping that lets records of an even number through at 1.01 times the bound."""

    kind: ClassVar[str] = "overlong"

    def describe(self):
        return "overlong"

    def clip_factors(self, squared_norms, *, max_grad_norm):
        factors = max_grad_norm / squared_norms.sqrt()
        factors[::2] *= 1.01
        return factors


def test_integers_that_are_too_long_count_nothing():
    model, x = one_hidden_layer(), records(3)
    honest = plan(clipping=AutomaticClipping(stability=0.0))
    second = integers(model, x[1:2], honest)
    found = integers(model, x, plan(clipping=Overlong()))
    assert relative_error(found, second) < 1e-5
    assert float(integers(model, x[:1], plan(clipping=Overlong())).abs().max()) == 0


def test_a_record_exactly_at_the_bound_of_the_integers_counts_and_one_step_above_does_not():
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    mechanism = grid_of(model, plan())
    for above, kept in ((0, True), (1, False)):
        length = mechanism.largest_norm + above

        @dataclass(frozen=True)
        class Exactly(Clipping):
            kind: ClassVar[str] = "exactly"

            def describe(self):
                return "exactly"

            def clip_factors(self, squared_norms, *, max_grad_norm, length=length):
                return length * mechanism.grid.step / squared_norms.sqrt()

        found = integers_of_a_line(model, torch.tensor([[1.0, 0.0]], dtype=torch.float64), plan(clipping=Exactly()))
        # The check allows for its own rounding, a few parts in 2⁵², so the very bound may count as too long.
        assert float(found.norm()) in ((length, 0.0) if kept else (0.0,))


def integers_of_a_line(model, x, chosen):
    capture = GradientCapture(model)
    step = PrivateStep(capture, chosen, KeyedRNG())
    (chunk,) = split_into_microbatches(np.arange(len(x)), step=0)
    with step.capturing(chunk):
        model(x).sum().backward()
    step.add(chunk)
    step.finish()
    capture.detach()
    return model.weight.grad.flatten() * chosen.expected_batch_size / grid_of(model, chosen).grid.step


@pytest.mark.parametrize(
    ("neighboring_relation", "moved"), [("add_or_remove_one", 1), ("replace_special", 1), ("replace_one", 2)]
)
@pytest.mark.parametrize("dimension", [1, 2, 5, 1000])
def test_the_noise_is_that_of_the_sensitivity_of_the_integers(neighboring_relation, moved, dimension):
    mechanism = (
        plan(noise_multiplier=1.3, neighboring_relation=neighboring_relation).step_plan(0).grid_mechanism(dimension)
    )
    exact = Fraction(C) / Fraction(mechanism.grid.step)
    # By the definition, with the root squared away: K is the least integer with K ≥ ⌊C/step⌋ + √d/2, or one more.
    rest = mechanism.largest_norm - math.floor(exact)
    assert 4 * rest**2 >= dimension > 4 * (rest - 2) ** 2 * (rest > 1)
    assert mechanism.grid_stddev >= Fraction(1.3) * moved * mechanism.largest_norm > mechanism.grid_stddev - 1
    assert mechanism.event() == Gaussian(noise_multiplier=1.3)


@pytest.mark.parametrize("bound", [1e-8, 0.1, 0.7, 1.0, 3.0, 1e6])
@pytest.mark.parametrize("dimension", [1, 10**4, 10**9, 10**12])
def test_the_grid_costs_less_than_a_thousandth_of_the_noise(bound, dimension):
    mechanism = GridSumMechanism(noise_multiplier=1.0, record_norm=bound, dimension=dimension)
    assert 2**29 <= bound / mechanism.grid.step < 2**30
    assert 0 <= mechanism.stddev / bound - 1 < 1e-3
    rounding = 1 / math.sqrt(12)
    assert math.hypot(mechanism.grid_stddev, rounding) / mechanism.grid_stddev - 1 < 1e-15


def test_noise_beyond_the_integers_is_refused():
    with pytest.raises(InvalidArgument, match="grid_stddev"):
        GridSumMechanism(noise_multiplier=1e7, record_norm=1.0, dimension=10)


# --- the noise ---------------------------------------------------------------------------------------------------


def noise_of(chosen, count=60_000, **options):
    model = nn.Linear(count // 100, 100, bias=False)
    return released(model, torch.zeros(0, count // 100), chosen, **options), grid_of(model, chosen)


@pytest.mark.parametrize("neighboring_relation", ["add_or_remove_one", "replace_one"])
def test_the_noise_has_the_declared_scale_and_shape(neighboring_relation):
    chosen = plan(noise_multiplier=1.5, neighboring_relation=neighboring_relation)
    noise, mechanism = noise_of(chosen)
    stddev = 1.5 * C * (2 if neighboring_relation == "replace_one" else 1)
    assert mechanism.stddev == pytest.approx(stddev, rel=1e-6)
    assert stats.kstest(noise.numpy() / stddev, "norm").pvalue > 1e-6

    def fits(scale):
        # 60,000 draws give the scale to 0.3 %: five of that.
        return abs(float(noise.square().mean().sqrt()) / scale - 1) < 0.015

    assert fits(stddev)
    assert not fits(1.05 * stddev)
    assert not fits(stddev / 1.05)


def test_the_whole_release_has_its_law_on_the_integers():
    # A coarse grid makes the law visible: 6 integers wide, against Φ((k + ½ − v)/σ) − Φ((k − ½ − v)/σ).
    coarse = GridSumMechanism(noise_multiplier=5.5 * 2.0**-29, record_norm=1.0, dimension=1)
    assert coarse.grid_stddev == 6
    draws = coarse.noise(60_000, KeyedRNG(seed=3, reproducible=True).new_stream("test")) + 4
    halves = np.arange(-12, 22) - 0.5
    edges = stats.norm.cdf((halves - 4) / 6)
    counts = np.histogram(draws, halves)[0]
    inside = counts.sum()
    mass = np.diff(edges) / (edges[-1] - edges[0])
    assert stats.chisquare(counts, inside * mass).pvalue > 1e-4
    wrong = np.diff(stats.norm.cdf((halves - 4) / 6.3))
    assert stats.chisquare(counts, inside * wrong / wrong.sum()).pvalue < 1e-6


def test_tensors_and_steps_have_noise_of_their_own_and_a_seed_repeats_it():
    chosen = plan(noise_multiplier=1.0)
    first, second = (noise_of(chosen, 20_000, seed=5, number=number)[0] for number in (0, 1))
    again, other = (noise_of(chosen, 20_000, seed=seed)[0] for seed in (5, None))
    assert torch.equal(first, again)
    rows = np.stack([first[:10_000], first[10_000:], second[:10_000], second[10_000:], other[:10_000]])
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 5 / 100
    torch.manual_seed(5)
    assert not torch.equal(noise_of(chosen, 200)[0], noise_of(chosen, 200)[0])


# --- attacks on the low bits -------------------------------------------------------------------------------------


def shares(values, spacing, window=(0.125, 0.25)):
    """How many of the values in the window are multiples of `spacing`."""
    inside = values[(values.abs() >= window[0]) & (values.abs() < window[1])]
    return float((inside.double() / spacing % 1 == 0).double().mean()), len(inside)


def outcomes(value, dtype, *, secure, count=40_000):
    """`count` releases of one number, `value` being 0 or 1: the noise is a thousandfold what privacy would need."""
    chosen = plan(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1.0, secure_mode=secure)
    if not secure:
        noisy = torch.full((count,), float(value), dtype=dtype)
        chosen.step_plan(0).mechanism.add_noise_([noisy], rng=KeyedRNG(), step=0)
        return noisy
    mechanism = chosen.step_plan(0).grid_mechanism(1)
    whole = mechanism.grid.integers(float(value)) + mechanism.noise(count, KeyedRNG().new_stream("test"))
    return torch.from_numpy(mechanism.grid.values(whole)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8)],
    ids=["float64", "float32", "bf16"],
)
def test_the_low_bits_tell_the_value_in_floating_point_and_nothing_on_the_grid(dtype, bits):
    spacing = 2.0**-bits
    # Floating point: noise of 1 in size that is added to 1 has lost the bits that noise added to 0 still has.
    with_zero, with_one = (shares(outcomes(value, dtype, secure=False), spacing)[0] for value in (0, 1))
    assert with_one == 1.0
    assert with_zero < 0.9
    with_zero, with_one = (shares(outcomes(value, dtype, secure=True), spacing) for value in (0, 1))
    spread = math.sqrt(0.25 / with_zero[1] + 0.25 / with_one[1])
    assert abs(with_zero[0] - with_one[0]) < 5 * spread
    assert with_zero[0] < 0.9 or dtype == torch.float64


@pytest.mark.parametrize("value", [0, 1])
def test_every_released_number_is_on_the_public_grid_whatever_the_value(value):
    mechanism = GridSumMechanism(noise_multiplier=1.0, record_norm=1.0, dimension=1)
    assert shares(outcomes(value, torch.float64, secure=True), mechanism.grid.step, window=(0, math.inf))[0] == 1.0
    assert shares(outcomes(value, torch.float64, secure=False), mechanism.grid.step, window=(0, math.inf))[0] < 0.01


def test_a_step_of_the_engine_releases_the_same_low_bits_for_either_value():
    # The one parameter's gradient is 0 or 1 exactly; the number of records is 1, so the divisor changes nothing.
    found = {}
    for value in (0.0, 1.0):
        model = nn.Linear(1, 4000, bias=False)
        chosen = plan(noise_multiplier=0.05, max_grad_norm=64.0, expected_batch_size=1.0)
        x = torch.full((1, 1), value)
        capture = GradientCapture(model)
        step = PrivateStep(capture, chosen, KeyedRNG())
        rows = []
        for number in range(4):
            (chunk,) = split_into_microbatches(np.arange(1), step=number)
            with step.capturing(chunk):
                model(x).sum().backward()
            step.add(chunk)
            step.finish()
            rows.append(model.weight.grad.flatten().clone())
        capture.detach()
        found[value] = shares(torch.cat(rows), 2.0**-26, window=(0.125, 0.25))
    assert min(inside for _, inside in found.values()) > 100
    spread = math.sqrt(sum(0.25 / inside for _, inside in found.values()))
    assert abs(found[0.0][0] - found[1.0][0]) < 5 * spread


# --- the plan ----------------------------------------------------------------------------------------------------


def test_a_plan_keeps_the_choice_through_json_and_says_the_same_guarantee():
    chosen = plan(noise_multiplier=2.0)
    assert Plan.from_json(chosen.to_json()) == chosen
    assert '"secure_mode": true' in chosen.to_json()
    floats = replace(chosen, secure_mode=False)
    said = chosen.guarantee()
    assert replace(said, caveats=floats.guarantee().caveats) == floats.guarantee()
    assert set(said.caveats) - set(floats.guarantee().caveats) == {
        "secure noise holds to the last bit with microbatch_size=1"
    }
    assert Plan.from_json(floats.to_json()) == floats


def test_what_is_carried_over_in_floats_is_refused():
    with pytest.raises(InvalidArgument, match="secure_mode must be False"):
        plan(clipping=QuantileClipping(count_noise=10.0))
    with pytest.raises(InvalidArgument, match="secure_mode"):
        plan(secure_mode="yes")


def test_freezing_a_parameter_within_a_batch_is_refused():
    model = one_hidden_layer()
    step = PrivateStep(GradientCapture(model), plan(), KeyedRNG())
    (chunk,) = split_into_microbatches(np.arange(2), step=0)
    with step.capturing(chunk):
        squares(model, (records(2),)).backward()
    step.add(chunk)
    model[0].requires_grad_(False)
    with pytest.raises(NonPrivateStep, match="stay the same"):
        step.finish()
    assert all(p.grad is None for p in model.parameters())


class Listener:
    """Keeps what was released."""

    def __init__(self):
        self.seen = []

    def released(self, release, draw):
        answer = draw()
        self.seen.append((release, answer))
        return answer


def test_a_step_releases_once_through_the_recordable_door():
    model, x, chosen = one_hidden_layer(), records(5), plan(noise_multiplier=1.0)
    listener = Listener()
    with observe_releases(listener):
        noisy = integers(model, x, chosen)
    ((release, answer),) = listener.seen
    assert release.mechanism == grid_of(model, chosen)
    assert np.array_equal(release.value, integers(one_hidden_layer(), x, plan()).numpy())
    assert np.array_equal(answer, noisy.numpy())
    assert np.abs(answer - release.value).max() < 10 * release.mechanism.grid_stddev


def test_a_replay_on_neighbors_finds_the_step_private_and_its_influence_close_to_the_bound():
    weights = nn.Linear(5, 60, bias=False).state_dict()

    def pipeline(numbers):
        model = nn.Linear(5, 60, bias=False)
        model.load_state_dict(weights)
        return released(model, torch.tensor(numbers).reshape(-1, 5), plan(noise_multiplier=1.0), microbatch_size=1)

    data = records(6, torch.float32).tolist()
    found = replay(pipeline, data, [data[1:], data[:-1], data[:3] + data[4:]])
    assert found.passed
    assert 0.9 < found.largest_share <= 1


# --- the trainer and the command line ----------------------------------------------------------------------------


def test_the_trainer_trains_and_reports_whole_numbers(tmp_path):
    x = records(64, torch.float32)
    y = (x[:, 0] > 0).long()

    def loss(model, features, labels):
        return nn.functional.cross_entropy(model(features), labels, reduction="none")

    chosen = plan(noise_multiplier=0.05, steps=30, sample_rate=0.5, expected_batch_size=32.0)
    optimizer = partial(torch.optim.SGD, lr=2.0)
    result = fit(
        nn.Linear(5, 2), loss, (x, y), chosen, optimizer=optimizer, run_folder=tmp_path / "run", progress=False
    )
    assert float((result.model(x).argmax(1) == y).double().mean()) > 0.9
    run = RunFolder.open(tmp_path / "run")
    (hazard,) = [one for one in build_report(run).privacy_hazards if one.title == "Noise is drawn exactly"]
    assert hazard.status == "met"
