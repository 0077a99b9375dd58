"""What scripts written for Opacus leave in: understood, or refused by name with what to write."""

import copy
import inspect
import math
import pickle
import re
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino.clipping import GroupedClipping
from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, NotOffered, PrivacyError, SordinoError
from sordino.schedules import ExponentialSchedule
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
    given = parts(noise_multiplier=ExponentialSchedule(start=2.0, end=0.25, over=3), max_grad_norm=3.0)
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


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: [p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()],
        lambda model, optimizer: len([*next(model.parameters()).grad_sample]),
        lambda model, optimizer: optimizer.grad_samples[0],
        lambda model, optimizer: optimizer.accumulated_iterations.bit_length(),
        lambda model, optimizer: optimizer.virtual_step(),
    ],
)
def test_per_record_gradients_say_that_none_are_held(use):
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**parts())
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(NotOffered):
            use(model, optimizer)
        optimizer.step()
    again = pickle.loads(pickle.dumps((model, copy.deepcopy(model))))
    assert all(isinstance(p, nn.Parameter) for one in again for p in one.parameters())
    engine.detach()
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert not hasattr(optimizer, "grad_samples")


def test_the_optimizer_inside_is_the_optimizer_itself():
    engine = PrivacyEngine()
    _, optimizer, _ = engine.make_private(**parts())
    assert optimizer.original_optimizer is optimizer
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    pickle.loads(pickle.dumps(optimizer.state_dict()))
    engine.detach()
    assert not hasattr(optimizer, "original_optimizer")


@pytest.mark.parametrize("name", ["drop_last", "pin_memory", "timeout", "worker_init_fn", "persistent_workers"])
def test_the_users_options_of_the_loader_can_be_read(name):
    given = parts()
    _, _, loader = PrivacyEngine().make_private(**given)
    assert getattr(loader, name) == getattr(given["data_loader"], name)


ELSEWHERE = [
    "validate",
    "is_compatible",
    "get_compatible_module",
    "get_privacy_spent",
    "attach",
    "history",
    "step",
    "to",
    "module",
]


@pytest.mark.parametrize("name", [*ELSEWHERE, "get_optimizer_hook_fn", "sample_rate", "steps", "DEFAULT_ALPHAS"])
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
    plan = engine.private_model(model).plan
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
        ({"grad_sample_mode": "ghost"}, "criterion="),
        ({"grad_sample_mode": "ghost", "criterion": F.cross_entropy}, "fourth object"),
        ({"alphas": [2, 3]}, "make_private("),
        ({"max_clipbound": 3.0}, "QuantileClipping"),
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
    options = {"wrap_model": True, "rand_on_empty": True, "grad_sample_mode": "functorch", "batch_first": True}
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrivacyEngine(nn.Linear(2, 2), 8, 32),
        lambda: PrivacyEngine(nn.Linear(2, 2), sample_rate=0.1, alphas=[2], noise_multiplier=1.0, max_grad_norm=1.0),
        lambda: PrivacyEngine(module=nn.Linear(2, 2), batch_size=8, sample_size=32, secure_rng=False),
        lambda: PrivacyEngine().make_private(*parts().values()),
        lambda: PrivacyEngine().make_private_with_epsilon(**parts(), total_steps=9),
    ],
)
def test_signatures_of_other_versions_say_what_to_write(make):
    with pytest.raises(InvalidArgument, match=r"engine\.make_private\("):
        make()


def test_a_misspelt_argument_is_a_type_error_still():
    with pytest.raises(TypeError, match="max_gradnorm"):
        PrivacyEngine().make_private(**parts(), max_gradnorm=1.0)
    assert "noise_multiplier" in inspect.signature(PrivacyEngine.make_private).parameters


def test_the_wrapped_module_is_the_module_itself():
    given = parts()
    names, plain = set(given["module"].state_dict()), pickle.dumps(nn.Linear(2, 2))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**given)
    assert model._module is model
    assert set(model._module.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    train(model, optimizer, loader)
    copied = copy.deepcopy(model)
    assert copied._module is copied
    again = pickle.loads(pickle.dumps(model))
    assert again._module is again
    with pytest.raises(NotOffered, match=r"engine\.detach"):
        model.remove_hooks()
    engine.detach()
    assert not hasattr(model, "_module")
    assert not hasattr(model, "remove_hooks")
    assert pickle.dumps(nn.Linear(2, 2))[:20] == plain[:20]


def test_a_module_that_has_such_a_name_keeps_it():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self._module = nn.Linear(4, 2)

        def remove_hooks(self):
            return "mine"

        def forward(self, x):
            return self._module(x)

    model, engine = Holder(), PrivacyEngine()
    inner = model._module
    made = engine.make_private(**parts(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    train(*made)
    assert model._module is inner
    assert model.remove_hooks() == "mine"
    engine.detach()
    assert model._module is inner


def test_a_module_made_private_again_on_its_engine_goes_on_and_is_counted():
    """Rounds of a federated client, a cell of a notebook that is run again; also with another model beside it."""
    engine, beside = PrivacyEngine(), parts()
    other = engine.make_private(**beside)
    given = parts()
    for number in range(3):
        given["optimizer"] = torch.optim.SGD(given["module"].parameters(), lr=0.1)
        model, optimizer, loader = engine.make_private(**given)
        before = next(model.parameters()).detach().clone()
        train(model, optimizer, loader)
        assert not torch.equal(before, next(model.parameters()))
        assert engine.next_steps == (0, 4)
        alone = PrivacyEngine()
        for _ in range(number + 1):
            train(*alone.make_private(**parts()))
        assert engine.get_epsilon(1e-5) == alone.get_epsilon(1e-5)
    train(*other)
    assert engine.next_steps == (4, 4)


def test_the_loader_and_the_optimizer_of_before_can_not_train_a_module_made_private_again():
    engine, given = PrivacyEngine(), parts()
    model, old, first = engine.make_private(**given)
    given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(**given)
    with pytest.raises(NonPrivateStep, match="detach"):
        next(iter(first))
    x, y = next(batches := iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(NonPrivateStep, match="another optimizer"):
        old.step()
    optimizer.step()
    train(model, optimizer, batches)


def test_a_target_counts_a_module_made_private_again_once():
    """Steps that its earlier loader can no more take are not planned for."""
    options = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1}
    given, engine = parts(), PrivacyEngine()
    del given["noise_multiplier"]
    engine.make_private_with_epsilon(**given, **options)
    model, optimizer, loader = engine.make_private_with_epsilon(**given, **options)
    assert (
        optimizer.noise_multiplier
        == PrivacyEngine()
        .make_private_with_epsilon(
            **{**given, **{k: v for k, v in parts().items() if k in {"module", "optimizer"}}}, **options
        )[1]
        .noise_multiplier
    )
    train(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) <= 3.0


def test_another_engine_does_not_take_a_private_module():
    given = parts()
    PrivacyEngine().make_private(**given)
    with pytest.raises(InvalidArgument, match="that engine's make_private again"):
        PrivacyEngine().make_private(**given)


class Recurrent(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.body, self.out = nn.LSTM(4, width, num_layers=layers, batch_first=True), nn.Linear(width, 2)

    def forward(self, x, hidden):
        return self.out(self.body(x, hidden)[0][:, -1])


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("size", [2, 8])
def test_first_states_that_the_loop_makes_for_a_batch(layers, width, size):
    """Zeros or ones with the records in the second dimension, for batches of any size, one among them."""
    data = TensorDataset(torch.randn(32, 3, 4), torch.randint(0, 2, (32,)))
    model = Recurrent(layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = parts(module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=size))
    model, optimizer, loader = PrivacyEngine().make_private(**given)
    sizes = set()
    for x, y in loader:
        sizes.add(len(x))
        hidden = torch.zeros(layers, x.size(0), width), torch.ones(layers, x.size(0), width)
        F.cross_entropy(model(x, hidden), y).backward()
        optimizer.step()
    assert len(sizes) > 1


def test_zeros_as_wide_as_the_batch_by_chance_are_a_constant():
    model, optimizer, loader = PrivacyEngine().make_private(**parts())
    for x, y in loader:
        shift = torch.zeros(3, len(x))[:, :1].sum() + torch.ones(2, 8).sum() + torch.ones(1, 2)
        F.cross_entropy(model(x) + shift, y).backward()
        optimizer.step()


def test_a_state_carried_from_batch_to_batch_is_refused_still():
    data = TensorDataset(torch.randn(32, 3, 4), torch.randint(0, 2, (32,)))
    model = Recurrent(1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = parts(module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8))
    model, optimizer, loader = PrivacyEngine().make_private(**given)
    state = torch.zeros(1, 40, 3)

    def loop():
        for x, y in loader:
            hidden = state[:, : len(x)]
            F.cross_entropy(model(x, (hidden, hidden)), y).backward()
            optimizer.step()
            state[:, : len(x)] += x.mean(0, keepdim=True)[..., :3].mean(1, keepdim=True)

    with pytest.raises(CoupledRecords):
        loop()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state, x: state.numpy().__iadd__(torch.linspace(0, 1, state.shape[1]).view(1, -1, 1).numpy()),
        lambda state, x: state.data.add_(torch.linspace(0, 1, state.shape[1]).view(1, -1, 1)),
        lambda state, x: state.add_(x.mean()),
        lambda state, x: state.add_(x.mean((1, 2)).flip(0).view(1, -1, 1)),
    ],
)
def test_first_states_into_which_something_else_is_written_are_refused(spoil):
    """Before they are used, and between two uses, from the first batch on or later."""
    data = TensorDataset(torch.randn(64, 3, 4), torch.randint(0, 2, (64,)))
    for first, between in ((0, False), (0, True), (3, True)):
        model = Recurrent(1, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = parts(module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8))
        model, optimizer, loader = PrivacyEngine().make_private(**given)

        def loop(loader=loader, model=model, optimizer=optimizer, first=first, between=between):
            for number, (x, y) in enumerate(loader):
                state = torch.zeros(1, x.size(0), 3)
                weight = (state + 1)[0, :, :1].squeeze(1) if between else 1
                if number >= first:
                    spoil(state, x)
                (F.cross_entropy(model(x, (state, state)), y, reduction="none") * weight).mean().backward()
                optimizer.step()

        with pytest.raises(PrivacyError):
            loop()


def _penalty(model, x, y):
    return F.cross_entropy(model(x), y) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())


def _invented_first(model, x, y):
    return F.cross_entropy(model(nn.Linear(2, 4)(torch.randn(len(x), 2))), y) + F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (_penalty, r"weight_decay"),
        (_invented_first, r"engine\.mark_public\(x\.detach\(\)\)"),
    ],
)
def test_what_leads_past_the_batch_is_told_apart(loss, advice):
    """A penalty on the model's own weights, and what another trainable module made."""
    engine = PrivacyEngine()
    model, _, loader = engine.make_private(**parts())
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(NonPrivateStep, match=advice):
        loss(model, x, y).backward()


def test_an_engine_is_saved_by_its_state():
    with pytest.raises(TypeError, match=r"engine\.state_dict\(\)"):
        pickle.dumps(PrivacyEngine())
    with pytest.raises(TypeError, match=r"engine\.state_dict\(\)"):
        copy.deepcopy(PrivacyEngine())


@pytest.mark.parametrize("name", ["is_compatible", "validate", "get_compatible_module"])
def test_methods_of_the_class_of_other_engines_say_what_to_write(name):
    with pytest.raises(NotOffered, match=name):
        getattr(PrivacyEngine, name)
    assert not hasattr(PrivacyEngine, name)
    with pytest.raises(AttributeError) as refusal:
        PrivacyEngine.nothing  # noqa: B018
    assert not isinstance(refusal.value, SordinoError)


@pytest.mark.parametrize("options", [{"alphas": [2, 3]}, {"eps_error": 0.01}, {"delta_error": 1e-9}])
def test_options_of_other_accountants_say_what_to_write(options):
    with pytest.raises(InvalidArgument, match=r"engine\.get_epsilon\(delta\)"):
        PrivacyEngine().accountant.get_epsilon(delta=1e-5, **options)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"clipping": "adaptive"}, "QuantileClipping"),
        ({"clipping": "ghost"}, "Leave it out"),
        ({"max_grad_norm": [1.0] * 4}, "clipping='per_layer'"),
        ({"epsilon_tolerance": 0.1}, "target_epsilon="),
    ],
)
def test_options_of_other_engines_say_what_to_write(options, advice):
    with pytest.raises(InvalidArgument, match=re.escape(advice)):
        PrivacyEngine().make_private(**parts(**options))


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model.add_hooks(loss_reduction="mean", batch_first=True),
        lambda model, optimizer: model.del_grad_sample(),
        lambda model, optimizer: optimizer.summed_grad.norm(),
    ],
)
def test_parts_of_wrapped_modules_and_optimizers_say_what_to_write(use):
    model, optimizer, _ = PrivacyEngine().make_private(**parts())
    with pytest.raises(NotOffered):
        use(model, optimizer)
