"""`make_private(plan=…)`: a plan made elsewhere is carried out as it stands, in a loop of one's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.mechanisms.correlated import CyclicPoisson, optimize_banded
from sordino.research import ProjectedClipping
from sordino.schedules import ListSchedule
from sordino.training import CorrelatedNoise, LossRelease, Plan


def plan(**changes):
    values = {
        "noise_multiplier": 1.3,
        "max_grad_norm": 0.7,
        "sample_rate": 0.25,
        "steps": 6,
        "expected_batch_size": 16.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


def parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data_loader": DataLoader(data, batch_size=16),
    }


def train(model, optimizer, loader, epochs):
    taken = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            taken += 1
    return taken


def trained(epochs=1, **options):
    engine = PrivacyEngine(seed=3, reproducible=True)
    model, optimizer, loader = engine.make_private(**parts(), **options)
    train(model, optimizer, loader, epochs)
    return engine, model


def test_a_plan_says_what_the_arguments_say():
    by_plan, first = trained(plan=plan(steps=0))
    by_arguments, second = trained(noise_multiplier=1.3, max_grad_norm=0.7, sample_rate=0.25, expected_batch_size=16.0)
    assert torch.equal(first.weight, second.weight)
    assert by_plan.event() == by_arguments.event() == plan().event(4)


def test_the_loop_ends_with_the_plan_and_reaches_its_guarantee():
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**parts(), plan=plan())
    with pytest.raises(NonPrivateStep, match="at most 6 batches"):
        train(model, optimizer, loader, epochs=3)
    assert engine.event() == plan().event()
    assert engine.get_epsilon(1e-5) == pytest.approx(plan().guarantee().epsilon, rel=1e-9)


def test_the_last_epoch_of_a_plan_may_be_short():
    engine = PrivacyEngine()
    assert train(*engine.make_private(**parts(), plan=plan()), epochs=2) == 6


def test_a_plan_survives_its_file():
    read = Plan.from_json(plan(steps=0).to_json())
    assert torch.equal(trained(plan=read)[1].weight, trained(plan=plan(steps=0))[1].weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", 1.3),
        ("max_grad_norm", 0.7),
        ("sample_rate", 0.25),
        ("expected_batch_size", 16.0),
        ("poisson_sampling", False),
        ("neighboring_relation", "replace_one"),
        ("clipping", "per_layer"),
        ("correlated_noise", "auto"),
    ],
)
def test_what_the_plan_says_is_not_said_twice(name, value):
    with pytest.raises(InvalidArgument, match=f"{name} must be left out with plan"):
        PrivacyEngine().make_private(**parts(), plan=plan(), **{name: value})


@pytest.mark.parametrize("missing", ["noise_multiplier", "max_grad_norm"])
def test_without_a_plan_noise_and_norm_are_required(missing):
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    del given[missing]
    with pytest.raises(InvalidArgument, match=f"{missing} must be given"):
        PrivacyEngine().make_private(**parts(), **given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_release": LossRelease(max_loss=5.0)}, "loss_release must be None"),
        ({"clipping": ProjectedClipping(projections=8)}, "clipping must be by exact norms"),
        ({"privacy_unit": "user"}, "units must be given"),
    ],
)
def test_a_plan_that_no_loop_can_carry_out_is_refused(changes, words):
    given = parts()
    with pytest.raises(InvalidArgument, match=words):
        PrivacyEngine().make_private(**given, plan=plan(**changes))
    assert not given["optimizer"].__dict__.get("noise_multiplier")


def test_secure_mode_is_the_plans():
    with pytest.raises(InvalidArgument, match="secure_mode must be the plan's"):
        PrivacyEngine(secure_mode=True).make_private(**parts(), plan=plan())
    engine = PrivacyEngine()
    train(*engine.make_private(**parts(), plan=replace(plan(), secure_mode=True)), epochs=1)
    assert engine.event() == replace(plan(), secure_mode=True).event(4)


def test_correlated_noise_comes_with_the_plan():
    chosen = plan(
        correlated_noise=CorrelatedNoise(
            strategy=optimize_banded(4, steps=6), participation=CyclicPoisson(groups=4, sample_rate=0.25)
        )
    )
    engine = PrivacyEngine()
    assert train(*engine.make_private(**parts(), plan=chosen), epochs=2) == 6
    assert engine.get_epsilon(1e-5) == pytest.approx(chosen.guarantee().epsilon, rel=1e-9)


def test_a_scheduled_rate_draws_each_batch_at_the_rate_that_is_charged_also_after_a_break():
    """An epoch that is broken off must not leave later draws at other steps' rates."""
    chosen = plan(sample_rate=ListSchedule(values=(0.1, 0.9, 0.1, 0.9, 0.1, 0.9)), steps=6)
    for options in ({"plan": chosen}, {"plan": replace(chosen, steps=0)}):
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(**parts(), **options)
        sizes = []
        for _ in range(6):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                sizes.append(len(x))
                break
        # 64 records: 6 expected at rate 0.1 and 58 at 0.9; 30 lies eight standard deviations from both.
        assert [size > 30 for size in sizes] == [False, True] * 3
        assert [event.sample_rate for event in engine.event().events] == [0.1, 0.9] * 3
