"""AdaClip: against one record at a time, on neighbors, and its noise in the transformed space."""

import math

import pytest
import torch
from torch import nn

from sordino import PrivacyEngine, fit
from sordino.clipping import AdaClip, clipping_from_dict, clipping_to_dict
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.training import Plan, PrivateStep
from sordino.training.special_accumulators import AdaClipAccumulator

SIZE, CLASSES = 5, 3


def records(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([10.0, 1.0, 1.0, 0.1, 0.01])
    features = torch.randn(count, SIZE, generator=generator) * scales
    return features, torch.randint(CLASSES, (count,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Linear(SIZE, CLASSES)


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def plan_with(**given):
    body = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, "sample_rate": 1.0, "steps": 3}
    body |= {"expected_batch_size": 8.0, "delta": 1e-5, "clipping": AdaClip()}
    return Plan(**{**body, **given})


def sums_of(state, features, labels, *, chunks=(None,)):
    """Σ w̄ of the records, as it stands before the noise."""
    model = network()
    capture = GradientCapture(model)
    sums = AdaClipAccumulator(capture)
    plan = plan_with()
    sums.begin(plan.step_plan(0))
    sums._state = state
    sums.begin(plan.step_plan(0))
    for start in range(0, len(features), chunks[0] or max(1, len(features))):
        part = slice(start, start + (chunks[0] or len(features)))
        with capture.capturing(len(features[part])):
            loss(model, features[part], labels[part]).sum().backward()
        sums.add({}, records=len(features[part]))
    return torch.cat([total.flatten() for total in sums._sums])


def a_state():
    generator = torch.Generator().manual_seed(3)
    state = AdaClip().init_state([SIZE * CLASSES, CLASSES])
    for _ in range(5):
        released = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (SIZE * CLASSES, CLASSES)]
        state.update(released, [torch.full_like(part, 0.1) for part in released])
    return state


def slow_sum(state, features, labels):
    """One record at a time through autograd."""
    total = 0.0
    mean, scale = torch.cat(state.mean), torch.cat(state.scale(0.7))
    for x, y in zip(features, labels, strict=True):
        model = network()
        loss(model, x[None], y[None]).sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
        w = (gradient - mean) / scale
        total = total + w * min(1.0, 1.0 / float(w.norm()))
    return total


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_sum_is_that_of_one_record_at_a_time(chunk):
    state, (features, labels) = a_state(), records(8)
    assert torch.allclose(
        sums_of(state, features, labels, chunks=(chunk,)), slow_sum(state, features, labels), atol=1e-5
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_record_moves_the_sum_by_at_most_one(seed):
    state, (features, labels) = a_state(), records(8, seed)
    features[0] *= 1e4
    labels[0] = network()(features[:1]).argmin()
    moved = sums_of(state, features, labels) - sums_of(state, features[1:], labels[1:])
    assert 0.9 < float(moved.norm()) <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_that_is_not_finite_adds_nothing(bad):
    state, (features, labels) = a_state(), records(8)
    features[0] = bad
    assert torch.allclose(sums_of(state, features, labels), sums_of(state, features[1:], labels[1:]))


@pytest.mark.parametrize("neighboring_relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(("told", "right"), [(1.0, True), (1.05, False)])
def test_noise_over_sensitivity_is_the_accounted_multiplier_in_the_transformed_space(neighboring_relation, told, right):
    neighboring_relation = NeighboringRelation(neighboring_relation)
    z, size = 1.3, 120
    plan = plan_with(noise_multiplier=z, neighboring_relation=neighboring_relation, steps=1)
    assert plan.step_plan(0).event == Gaussian(noise_multiplier=z)
    model = nn.Linear(size, size)
    capture = GradientCapture(model)
    sums = AdaClipAccumulator(capture)
    sums.begin(plan.step_plan(0))
    sums._scale = [scale * torch.linspace(0.5, 2.0, scale.numel()) for scale in sums._scale]
    tensors = [torch.zeros_like(parameter) for parameter in model.parameters()]
    scales = torch.cat(sums._scale)
    sums.add_noise_(tensors, rng=KeyedRNG(), step=0)
    # An empty batch: what is released is a + b·noise/B, here with a = 0 and B taken out.
    noise = torch.cat([tensor.flatten() for tensor in tensors]).detach().double() / scales
    count = noise.numel()
    expected = told * z * neighboring_relation.sensitivity_factor
    statistic = (float(noise.square().mean()) / expected**2 - 1) * math.sqrt(count / 2)
    assert (abs(statistic) < 4.5) == right


def test_the_accounted_event_does_not_depend_on_how_the_method_splits_anything():
    events = {
        plan_with(sample_rate=0.1, clipping=clipping).step_event() for clipping in (AdaClip(), AdaClip(largest=2.0))
    }
    assert events == {PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=1.0))}


def test_the_transform_follows_from_released_gradients_alone():
    # Two runs on different records whose released gradients are forced to be equal learn the same transform.
    found = []
    for seed in (0, 1):
        features, labels = records(8, seed)
        model = network()
        capture = GradientCapture(model)
        sums = AdaClipAccumulator(capture)
        sums.begin(plan_with().step_plan(0))
        with capture.capturing(8):
            loss(model, features, labels).sum().backward()
        sums.add({}, records=8)
        sums._sums = [torch.ones_like(part) for part in sums._sums]
        tensors = [torch.zeros_like(parameter) for parameter in model.parameters()]
        sums.add_noise_(tensors, rng=KeyedRNG(seed=5, reproducible=True), step=0)
        found.append(torch.cat([*sums._state.mean, *sums._state.variance]))
    assert torch.equal(found[0], found[1])


def test_scales_begin_flat_keep_the_total_of_the_noise_and_follow_the_spread():
    state = AdaClip(variance_decay=0.0).init_state([4])
    assert state.scale(0.7)[0].tolist() == [0.7] * 4
    state.update([torch.tensor([2.0, 1.0, 1.0, 0.5]).double()], [torch.zeros(4).double()])
    scale = state.scale(0.7)[0]
    assert float(scale.square().sum()) == pytest.approx(4 * 0.7**2)
    # b² is in proportion to s.
    assert (scale.square() / scale[1].square()).tolist() == pytest.approx([2.0, 1.0, 1.0, 0.5])


def test_the_scale_is_the_best_of_its_total():
    # E‖w‖² = Σ s²/b² at fixed Σ b²: no random change of b does better.
    spread = torch.tensor([4.0, 1.0, 0.5, 0.25], dtype=torch.float64)
    state = AdaClip(variance_decay=0.0).init_state([4])
    state.update([spread], [torch.zeros(4).double()])
    best = float((spread.square() / state.scale(1.0)[0].square()).sum())
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = state.scale(1.0)[0].square() * (1 + 0.3 * torch.randn(4, generator=generator)).abs()
        other *= 4 / other.sum()
        assert float((spread.square() / other).sum()) >= best * (1 - 1e-12)


def test_without_noise_to_subtract_the_variance_has_no_bias():
    generator = torch.Generator().manual_seed(0)
    state = AdaClip(mean_decay=0.0, variance_decay=0.999).init_state([2000])
    for _ in range(400):
        gradient = torch.randn(2000, generator=generator, dtype=torch.float64) * 0.5
        state.mean = [torch.zeros(2000, dtype=torch.float64)]
        state.update([gradient], [torch.full((2000,), 0.3, dtype=torch.float64)])
    assert float(state.variance[0].mean()) / (1 - 0.999**400) == pytest.approx(0.25 - 0.09, rel=0.02)


def test_fit_learns_a_direction_of_small_gradients():
    features, _ = records(200)
    labels = (features[:, 3] > 0).long()
    plan = plan_with(noise_multiplier=0.3, expected_batch_size=200.0, steps=30)
    model = network()
    before = float(loss(model, features, labels).detach().mean())
    fit(model, loss, (features, labels), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), progress=False)
    assert float(loss(model, features, labels).detach().mean()) < before


def test_a_loop_of_ones_own_takes_the_same_steps():
    features, labels = records(40)
    found = []
    for way in ("fit", "loop"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if way == "fit":
            plan = plan_with(noise_multiplier=1e-4, expected_batch_size=40.0, steps=4)
            fit(model, loss, (features, labels), plan, optimizer=optimizer, progress=False)
        else:
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=40)
            model, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=1e-4,
                max_grad_norm=0.7,
                clipping="adaclip",
            )
            for _ in range(4):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
        found.append(model.weight.detach().clone())
    assert torch.allclose(found[0], found[1], atol=1e-3)


def test_a_state_goes_on_where_it_was():
    def step_of():
        return PrivateStep(GradientCapture(network()), plan_with(), KeyedRNG())

    step, again = step_of(), step_of()
    step.bounds.begin(plan_with().step_plan(0))
    step.bounds._state = a_state()
    again.load_state_dict(step.state_dict())
    again.bounds.begin(plan_with().step_plan(0))
    for ours, theirs in zip(step.bounds._state.scale(1.0), again.bounds._state.scale(1.0), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrong", [{"mean_decay": 1.0}, {"variance_decay": -0.1}, {"smallest": 0.0}, {"largest": 0.5}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        AdaClip(**wrong)


def test_secure_noise_is_refused_before_data():
    with pytest.raises(InvalidArgument, match="AdaClip"):
        fit(network(), loss, records(8), plan_with(secure_mode=True), progress=False)


def test_the_method_goes_through_json():
    assert clipping_from_dict(clipping_to_dict(AdaClip(largest=3.0))) == AdaClip(largest=3.0)
