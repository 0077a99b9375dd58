"""What scripts written for Opacus leave in: understood, or refused by name with what to write."""

import copy
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino.clipping import GroupedClipping
from sordino.errors import InvalidArgument, NotOffered, SordinoError
from sordino.schedules import Exponential
from sordino.training.engine import PrivacyEngine


def parts(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=8),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return {**given, **options}


def train(model, optimizer, loader):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_optimizer_and_engine_show_the_values_of_the_coming_step():
    engine = PrivacyEngine()
    given = parts(noise_multiplier=Exponential(start=2.0, end=0.25, over=3), max_grad_norm=3.0)
    model, optimizer, loader = engine.make_private(**given)
    shown = []
    for x, y in loader:
        shown.append((optimizer.noise_multiplier, engine.noise_multiplier))
        assert optimizer.max_grad_norm == engine.max_grad_norm == 3.0
        assert optimizer.expected_batch_size == engine.expected_batch_size == 8.0
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert [one for one, _ in shown] == pytest.approx([2.0, 1.0, 0.5, 0.25])
    assert all(one == other for one, other in shown)
    engine.detach()
    assert not hasattr(optimizer, "noise_multiplier")
    assert not hasattr(engine, "noise_multiplier")


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size"])
def test_a_value_set_by_hand_is_refused_before_the_step_and_a_schedule_is_named(name):
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**parts())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    setattr(optimizer, name, 0.1)
    with pytest.raises(InvalidArgument, match=f"{name}=Exponential"):
        train(model, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [("signal_skip_step", "microbatch_size"), ("attach_step_hook", "register_step_post_hook"), ("add_noise", "step()")],
)
def test_methods_of_other_optimizers_say_what_to_write(name, words):
    _, optimizer, _ = PrivacyEngine().make_private(**parts())
    with pytest.raises(NotOffered) as refusal:
        getattr(optimizer, name)(True)
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", ["validate", "is_compatible", "get_compatible_module", "get_privacy_spent", "attach"])
def test_methods_of_other_engines_say_what_to_write(name):
    with pytest.raises(NotOffered, match=name):
        getattr(PrivacyEngine(), name)
    assert not hasattr(PrivacyEngine(), name)


def test_an_unknown_attribute_of_the_engine_is_an_ordinary_error():
    with pytest.raises(AttributeError) as refusal:
        PrivacyEngine().nothing  # noqa: B018
    assert not isinstance(refusal.value, SordinoError)


def test_a_list_of_norms_clips_each_parameter_to_its_own():
    norms = [0.3, 0.05, 0.2, 0.1]
    engine = PrivacyEngine()
    given = parts(max_grad_norm=norms, clipping="per_layer", noise_multiplier=0.0)
    model, optimizer, loader = engine.make_private(**given)
    plan = engine.attached(model).plan
    assert plan.max_grad_norm == pytest.approx(math.hypot(*norms))
    assert plan.clipping == GroupedClipping(by="parameter", weights=tuple(norms))
    x, y = next(iter(loader))
    x = x.as_subclass(torch.Tensor)
    wanted = [torch.zeros_like(parameter) for parameter in model.parameters()]
    alone = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    alone.load_state_dict(model.state_dict())
    for row, label in zip(x.detach().clone(), y.detach().clone(), strict=True):
        loss = F.cross_entropy(alone(row.as_subclass(torch.Tensor)[None]), label.as_subclass(torch.Tensor)[None])
        gradients = torch.autograd.grad(loss, list(alone.parameters()))
        for total, gradient, norm in zip(wanted, gradients, norms, strict=True):
            total += gradient * min(1.0, norm / float(gradient.norm())) / 8
    engine = PrivacyEngine()
    given = parts(max_grad_norm=norms, clipping="per_layer", noise_multiplier=0.0)
    given["data_loader"] = DataLoader(
        TensorDataset(x.detach().clone().as_subclass(torch.Tensor), y.detach().clone().as_subclass(torch.Tensor)),
        batch_size=len(x),
    )
    model, optimizer, loader = engine.make_private(**given, expected_batch_size=8.0)
    train(model, optimizer, loader)
    for parameter, total in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, total, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": [1.0, 1.0]}, "clipping='per_layer'"),
        ({"max_grad_norm": [1.0, 1.0], "clipping": "per_layer"}, "one number per group"),
        ({"max_grad_norm": [1.0, -1.0, 1.0, 1.0], "clipping": "per_layer"}, "max_grad_norm"),
        ({"wrap_model": False}, "engine.detach"),
        ({"rand_on_empty": "yes"}, "rand_on_empty"),
    ],
)
def test_options_that_can_not_be_kept_are_refused_before_the_first_batch(options, words):
    def both():
        model, optimizer, loader = PrivacyEngine().make_private(**parts(**options))
        train(model, optimizer, loader)

    with pytest.raises(InvalidArgument) as refusal:
        both()
    assert words in str(refusal.value)


def test_options_that_change_nothing_are_accepted():
    options = {"wrap_model": True, "rand_on_empty": True, "grad_sample_mode": "ghost", "batch_first": True}
    train(*PrivacyEngine().make_private(**parts(**options)))


def wrapped_by_opacus(kind):
    """A class as Opacus would make it, without the package."""
    module = sys.modules.get("opacus", ModuleType("opacus"))
    return type("Wrapped", (kind,), {"__module__": module.__name__})


def test_what_opacus_wrapped_is_refused_by_name():
    given = parts()
    wrapped = wrapped_by_opacus(nn.Sequential)(given["module"])
    with pytest.raises(InvalidArgument, match=r"module\._module"):
        PrivacyEngine().make_private(**{**given, "module": wrapped})
    optimizer = wrapped_by_opacus(torch.optim.SGD)(given["module"].parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match="original_optimizer"):
        PrivacyEngine().make_private(**{**given, "optimizer": optimizer})
    loader = wrapped_by_opacus(DataLoader)(given["data_loader"].dataset, batch_size=8)
    with pytest.raises(InvalidArgument, match="DataLoader"):
        PrivacyEngine().make_private(**{**given, "data_loader": loader})


@pytest.mark.parametrize("name", ["batch_sampler", "sampler", "sample_rate", "generator"])
def test_names_of_other_loaders_say_what_to_write(name):
    _, _, loader = PrivacyEngine().make_private(**parts())
    with pytest.raises(NotOffered, match=name):
        getattr(loader, name)
    assert not hasattr(loader, name)
    assert copy.copy(loader).dataset is loader.dataset


def test_a_memory_manager_around_the_loader_is_told_of_microbatch_size():
    _, _, loader = PrivacyEngine().make_private(**parts())
    with pytest.raises(NotOffered, match="microbatch_size"):
        loader.batch_sampler  # noqa: B018


@pytest.mark.parametrize("same", [True, False])
def test_the_loader_that_came_back_is_taken_like_the_users_own(same):
    """Run after run over the loader of the run before, on one engine and on one engine each."""
    given, engine = parts(), PrivacyEngine()
    own, epsilons = given["data_loader"], []
    for _ in range(3):
        engine = engine if same else PrivacyEngine()
        given |= parts(data_loader=given["data_loader"])
        model, optimizer, given["data_loader"] = engine.make_private(**given)
        assert given["data_loader"].own_loader is own
        train(model, optimizer, given["data_loader"])
        epsilons.append(engine.get_epsilon(1e-5))
        alone, again = PrivacyEngine(), parts(data_loader=own)
        for _ in range(len(epsilons) if same else 1):
            train(*alone.make_private(**{**again, **parts(data_loader=own)}))
        assert epsilons[-1] == alone.get_epsilon(1e-5)
    assert (epsilons[0] < epsilons[1] < epsilons[2]) is same


def test_a_target_over_a_loader_that_came_back_counts_what_was_spent():
    engine, given = PrivacyEngine(), parts()
    del given["noise_multiplier"]
    targeted = {
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
        "epochs": 1,
    }
    model, optimizer, loader = engine.make_private_with_epsilon(**given, **targeted)
    train(model, optimizer, loader)
    spent = engine.get_epsilon(1e-5)
    given |= parts(data_loader=loader)
    del given["noise_multiplier"]
    model, optimizer, loader = engine.make_private_with_epsilon(**given, **{**targeted, "target_epsilon": 5.0})
    train(model, optimizer, loader)
    assert spent < engine.get_epsilon(1e-5) <= 5.0


def test_an_earlier_model_goes_on_beside_a_later_one_over_its_loader():
    engine, given = PrivacyEngine(), parts()
    first = engine.make_private(**given)
    second = engine.make_private(**parts(data_loader=first[2]))
    for (x, y), (a, b) in zip(first[2], second[2], strict=True):
        for (model, optimizer, _), batch, labels in ((first, x, y), (second, a, b)):
            F.cross_entropy(model(batch), labels).backward()
            optimizer.step()
    twice = PrivacyEngine()
    for _ in range(2):
        train(*twice.make_private(**parts()))
    assert engine.get_epsilon(1e-5) == twice.get_epsilon(1e-5)
