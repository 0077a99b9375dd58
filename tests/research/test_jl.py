"""Norms by projections: the estimate's law, sums against plain autograd, refusals, and what a run is charged."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from sordino import PrivacyEngine, fit
from sordino.clipping import FlatClipping, clipping_from_dict, clipping_to_dict
from sordino.errors import InvalidArgument, LossShapeError
from sordino.events import PoissonSampled, ProjectedGaussian
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedAccumulator, ProjectedClipping
from sordino.training import Plan


def records(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def plan_with(projections=50, **given):
    body = {"noise_multiplier": 20.0, "max_grad_norm": 0.5, "sample_rate": 1.0, "steps": 2}
    body |= {"expected_batch_size": 20.0, "delta": 1e-5, "clipping": ProjectedClipping(projections=projections)}
    return Plan(**{**body, **given})


def projected(model, projections):
    sums = ProjectedAccumulator(GradientCapture(model), KeyedRNG())
    sums.begin(plan_with(projections).step_plan(0))
    return sums


def one_by_one(model, features, labels):
    found = []
    for x, y in zip(features, labels, strict=True):
        model.zero_grad()
        loss(model, x[None], y[None]).sum().backward()
        found.append(torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()]))
    model.zero_grad()
    return torch.stack(found)


def test_the_estimate_over_the_squared_norm_is_chi_square():
    model, projections = network(), 5
    features, labels = records(3)
    exact = one_by_one(network(), features, labels).double().square().sum(1)
    sums = projected(model, projections)
    ratios = torch.stack([sums.estimates(loss, (features, labels), records=3) / exact for _ in range(80)])
    for record in range(3):
        assert stats.kstest(projections * ratios[:, record].numpy(), "chi2", args=(projections,)).pvalue > 1e-4


def test_the_estimate_has_no_bias_and_a_wrong_scale_of_five_percent_shows():
    features, labels = records(1)
    exact = float(one_by_one(network(), features, labels).double().square().sum())
    sums = ProjectedAccumulator(GradientCapture(network()), KeyedRNG(seed=2, reproducible=True))
    sums.begin(plan_with(3000).step_plan(0))
    ratio = float(sums.estimates(loss, (features, labels), records=1)) / exact
    # Standard error √(2/3000) = 2.6 %.
    assert abs(ratio - 1) < 0.05 < ratio * 1.05**2 - 1


def test_sums_are_those_of_plain_autograd_with_the_estimated_factors():
    model = network()
    features, labels = records(6)
    sums = projected(model, 7)
    kept = []
    original = sums.estimates
    sums.estimates = lambda *args, **named: kept.append(original(*args, **named)) or kept[-1]
    found = sums.sums(loss, (features, labels), records=6)
    factors = FlatClipping().clip_factors(kept[0], max_grad_norm=0.5).float()
    expected = (one_by_one(network(), features, labels) * factors[:, None]).sum(0)
    assert torch.allclose(torch.cat([found[p].flatten() for p in model.parameters()]), expected, atol=1e-6)


def test_projections_and_the_backward_pass_see_one_dropout_mask():
    # With many projections the estimate is the norm under the mask that the backward pass uses next.
    model = network(dropout=0.5)
    features, labels = records(1)
    sums = projected(model, 300)
    for _ in range(1):
        state = torch.get_rng_state()
        estimate = float(sums.estimates(loss, (features, labels), records=1))
        assert torch.equal(state, torch.get_rng_state())
        copied = network(dropout=0.5)
        torch.set_rng_state(state)
        gradients = torch.autograd.grad(loss(copied, features, labels).sum(), list(copied.parameters()))
        exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
        assert estimate == pytest.approx(exact, rel=0.4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_records_that_are_not_finite_add_nothing(bad):
    features, labels = records(5)
    broken = features.clone()
    broken[2] = bad
    # A bound that clips no one, so that random factors play no part.
    found = []
    for x, y in ((broken, labels), (features[[0, 1, 3, 4]], labels[[0, 1, 3, 4]])):
        model = network()
        sums = ProjectedAccumulator(GradientCapture(model), KeyedRNG())
        sums.begin(plan_with(max_grad_norm=1e6).step_plan(0))
        result = sums.sums(loss, (x, y), records=len(x))
        found.append(torch.cat([result[p].flatten() for p in model.parameters()]))
    assert torch.allclose(found[0], found[1], atol=1e-6)


def test_a_chunk_without_a_finite_record_adds_nothing():
    features, labels = records(2)
    assert projected(network(), 3).sums(loss, (features * math.nan, labels), records=2) == {}


def test_a_plan_is_charged_for_the_estimates():
    plan = plan_with(sample_rate=0.5)
    event = ProjectedGaussian(noise_multiplier=20.0, projections=50)
    assert plan.step_event() == PoissonSampled(sample_rate=0.5, event=event)
    exact = plan_with(sample_rate=0.5, clipping=FlatClipping())
    assert plan.guarantee().epsilon > exact.guarantee().epsilon
    assert Plan.from_json(plan.to_json()) == plan


def test_the_noise_is_chosen_for_the_estimates():
    common = {"target_epsilon": 1.0, "delta": 1e-5, "sample_rate": 1.0, "steps": 10}
    common |= {"max_grad_norm": 1.0, "expected_batch_size": 10.0}
    plan = Plan.for_epsilon(**common, clipping=ProjectedClipping(projections=400))
    assert plan.noise_multiplier > Plan.for_epsilon(**common).noise_multiplier
    assert plan.guarantee().epsilon <= 1.0


@pytest.mark.parametrize("chunk", [None, 7])
def test_fit_moves_as_plain_descent_where_nothing_is_clipped(chunk):
    from sordino.training import PerformanceOptions

    features, labels = records(20)
    model = network()
    plan = plan_with(5, noise_multiplier=0.0, max_grad_norm=1e3)
    body = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.3), "progress": False}
    fit(model, loss, (features, labels), plan, performance=PerformanceOptions(microbatch_size=chunk), **body)
    expected = network()
    for _ in range(2):
        expected.zero_grad()
        loss(expected, features, labels).mean().backward()
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter -= 0.3 * parameter.grad
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_noise_in_the_gradient_is_that_of_the_plan():
    model = nn.Linear(100, 100)
    before = model.weight.detach().clone()
    plan = plan_with(noise_multiplier=3.0, steps=1)

    def flat(model, x, y):
        return (model(x) * 0).sum(1) + 0 * y

    features, labels = torch.randn(20, 100), torch.zeros(20)
    fit(model, flat, (features, labels), plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), progress=False)
    moved = (model.weight.detach() - before).double().numpy().flatten()
    # Sensitivity 0.5, divisor 20.
    assert stats.kstest(moved / (3.0 * 0.5 / 20), "norm").pvalue > 1e-4
    assert np.std(moved) == pytest.approx(plan.step_plan(0).gradient_noise_stddev, rel=0.03)


def test_a_loop_of_ones_own_is_refused_and_nothing_moves():
    features, labels = records(20)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=20)
    with pytest.raises(InvalidArgument, match="ProjectedClipping"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=ProjectedClipping(projections=5),
        )
    # The model is as it was: an ordinary step is nobody's business.
    nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()


def test_losses_must_be_one_a_record():
    with pytest.raises(LossShapeError):
        projected(network(), 2).sums(lambda model, x, y: loss(model, x, y).mean(), records(4), records=4)


def test_projections_must_be_a_count():
    with pytest.raises(InvalidArgument, match="projections"):
        ProjectedClipping(projections=0)
    assert clipping_from_dict(clipping_to_dict(ProjectedClipping(projections=9))) == ProjectedClipping(projections=9)
