"""What a module does may change while it is trained: hooks, replaced methods, nested settings, modes of torch."""

import functools
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from loops import ce, train
from sordino.errors import CoupledRecords, NonPrivateStep, PrivacyError
from sordino.training.loss_tracing.loss_tracer import module_state_key

LATE = 5


def coupled(out):
    return 0.5 * out + 0.5 * out.mean(0)


@dataclass
class Inner:
    mix: bool = False
    kinds: list = field(default_factory=lambda: [{"mix": "no"}])


class Slotted:
    __slots__ = ("mix",)

    def __init__(self):
        self.mix = False


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.act, self.head = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
        self.config = SimpleNamespace(inner=Inner(), table={"mix": [0]})
        self.slotted, self.post, self.table = Slotted(), lambda out: out, {"post": self.plain}

    def plain(self, out):
        return out

    def forward(self, x):
        out = self.table["post"](self.post(self.head(self.act(self.body(x)))))
        inner = self.config.inner
        mixes = inner.mix or inner.kinds[0]["mix"] == "yes" or self.config.table["mix"][0] or self.slotted.mix
        return coupled(out) if mixes else out


def by_closure():
    state = {"on": False}

    def hook(module, args, out):
        return coupled(out) if state["on"] else out

    return hook, state


class Coupling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return coupled(out) if func is F.linear else out


class Mixing(nn.Tanh):
    def forward(self, x):
        return coupled(super().forward(x))


def own_forward(part):
    original = part.forward
    part.forward = lambda x: coupled(original(x))


def own_class_forward(model):
    class Other(Net):
        def forward(self, x):
            return coupled(super().forward(x))

    model.__class__ = Other


def class_with_a_switch(model):
    switch = {"mix": False}

    class Switched(nn.Tanh):
        def forward(self, x):
            return coupled(super().forward(x)) if switch["mix"] else super().forward(x)

    model.act = Switched()
    return switch


def test_what_the_forward_of_a_class_holds_counts_too():
    steps = []

    def build():
        model = Net()
        model.switches = class_with_a_switch(model)
        # The module itself holds nothing of it.
        switches.append(vars(model).pop("switches"))
        return model

    def loop(model, batch, state):
        steps.append(len(steps) + 1)
        switches[-1]["mix"] = len(steps) >= LATE
        return ce(model, batch)

    switches = []
    with pytest.raises(PrivacyError):
        train(loop, build, steps=8, sample_rate=0.1, expected_batch_size=8.0)
    assert steps[-1] <= LATE


CHANGES = {
    "a hook on a layer": lambda m: m.head.register_forward_hook(lambda *given: coupled(given[-1])),
    "a hook on the root": lambda m: m.register_forward_hook(lambda *given: coupled(given[-1])),
    "a hook before a layer": lambda m: m.head.register_forward_pre_hook(lambda part, args: (coupled(args[0]),)),
    "a hook on gradients": lambda m: m.act.register_full_backward_hook(lambda p, i, o: (coupled(i[0]),)),
    "a hook of all modules": lambda m: register_module_forward_hook(
        lambda part, args, out: coupled(out) if part is m.head else None
    ),
    "a hook before all modules": lambda m: register_module_forward_pre_hook(
        lambda part, args: (coupled(args[0]),) if part is m.head else None
    ),
    "a layer's forward": lambda m: own_forward(m.head),
    "the root's forward": lambda m: setattr(m, "forward", MethodType(lambda self, x: coupled(Net.forward(self, x)), m)),
    "another class": own_class_forward,
    "another part": lambda m: setattr(m, "act", Mixing()),
    "a function in an attribute": lambda m: setattr(m, "post", coupled),
    "a partial function": lambda m: setattr(
        m, "post", functools.partial(lambda out, share: share * coupled(out), share=1.0)
    ),
    "a function in a table": lambda m: m.table.update(post=coupled),
    "a nested flag": lambda m: setattr(m.config.inner, "mix", True),
    "a nested word": lambda m: m.config.inner.kinds[0].update(mix="yes"),
    "a nested number": lambda m: m.config.table.update(mix=[1]),
    "a slot": lambda m: setattr(m.slotted, "mix", True),
}


@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes_is_tried_anew_before_its_next_step(name, criterion):
    handles, steps = [], []

    def loop(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] == LATE:
            handles.append(CHANGES[name](model))
        loss = ce(model, batch)
        steps.append(state["step"])
        return loss

    try:
        with pytest.raises(PrivacyError):
            train(loop, Net, steps=8, sample_rate=0.1, expected_batch_size=8.0, criterion=criterion)
    finally:
        for handle in handles:
            if hasattr(handle, "remove"):
                handle.remove()
    # The forward may have run when the loss is proved behind it, the step may not.
    assert steps[-1] <= LATE


def test_what_a_hook_is_told_later_counts_too():
    hook, switch = by_closure()

    def loop(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 1:
            model.head.register_forward_hook(hook)
        switch["on"] = state["step"] == 3
        return ce(model, batch)

    with pytest.raises(CoupledRecords):
        train(loop, Net)


@pytest.mark.parametrize("late", [1, 3])
def test_a_state_that_lasts_for_the_forward_only_is_refused(late):
    def hooked(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] < late:
            return ce(model, batch)
        handle = model.head.register_forward_hook(lambda *given: coupled(given[-1]))
        loss = ce(model, batch)
        handle.remove()
        return loss

    def switched(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        model.config.inner.mix = state["step"] >= late
        loss = ce(model, batch)
        model.config.inner.mix = False
        return loss

    def under_a_mode(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] < late:
            return ce(model, batch)
        with Coupling():
            out = model(batch[0])
        return F.cross_entropy(out, batch[1])

    for loop in (hooked, switched, under_a_mode):
        with pytest.raises(NonPrivateStep, match="one state"):
            train(loop, Net)


def test_a_state_that_was_refused_is_refused_again():
    model_of = []

    def loop(model, batch, state):
        state["step"] = state.get("step", 0) + 1
        model.config.inner.mix = state["step"] > 1
        model_of[:] = [model]
        try:
            ce(model, batch).backward()
        except CoupledRecords:
            state["refused"] = state.get("refused", 0) + 1

    with pytest.raises(NonPrivateStep):
        train(loop, Net)


class Busy(nn.Module):
    """Changes its own attributes in every forward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.sizes, self.first = nn.Linear(6, 3), 0, [], True
        self.stats = {"mean": 0.0}

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.stats["mean"], self.first = float(x.detach().mean()), False
        return self.layer(x)


def with_modes(model, batch, state):
    out = model(batch[0])
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model.train()
    return F.cross_entropy(out, batch[1])


def noticed(model, batch, state):
    handle = model.layer.register_forward_hook(lambda *given: None)
    loss = ce(model, batch)
    loss.backward()
    handle.remove()


@pytest.mark.parametrize("loop", [ce, with_modes, noticed])
def test_modules_that_count_and_loops_that_look_go_on(loop):
    train(loop, Busy)


class Caching(nn.Module):
    """Keeps what it saw until the loop takes it away."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 3), []

    def forward(self, x):
        self.kept = [*self.kept, x.detach().mean()]
        return self.layer(x)


@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
def test_a_module_that_its_loop_puts_back_goes_on_when_its_loss_is_tried_again(criterion):
    def loop(model, batch, state):
        model.kept.clear()
        state["steps"] = state.get("steps", 0) + 1
        return ce(model, batch)

    train(loop, Caching, steps=18, sample_rate=0.05, expected_batch_size=1.0, criterion=criterion)


def test_a_device_for_new_tensors_is_no_other_state():
    with torch.device("cpu"):
        train(ce, Net)


def test_unchanged_modules_have_the_same_marks_and_are_not_read():
    model = Net()
    assert module_state_key(model) == module_state_key(model)
    assert hash(module_state_key(model)) == hash(module_state_key(model))
    with torch.no_grad():
        model.head.weight.add_(1)
    before = module_state_key(model)
    model.loop = model.config.loop = model
    assert module_state_key(model) != before
