"""Models that accelerate dispatched (``device_map=``): their layers are captured as without its hooks."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, attach_align_device_hook
from torch import nn
from torch.nn import functional as F

from oracles import per_record_gradients, relative_error, squared_norms
from sordino import PerformanceOptions, Plan, PrivacyEngine, fit
from sordino.errors import UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.gradients.rules import get_rule

RECORDS, TOKENS, WIDTH, CLASSES = 4, 5, 6, 3


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head, self.scale = inner, nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        found = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        found = found[0] if isinstance(found, tuple) else found
        return (self.head(found) * self.scale).square().mean((1, 2))


INNER = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
}
WAYS = {
    "every module": lambda model: [
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu", io_same_device=True))
        for part in list(model.modules())
    ],
    "recursively": lambda model: attach_align_device_hook(model, execution_device="cpu"),
    "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True),
}


def made(name):
    torch.manual_seed(0)
    return Model(INNER[name]())


def records():
    return torch.randn(RECORDS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INNER)
def test_a_dispatched_model_is_exact(name, way):
    model, x = made(name), records()
    wanted = squared_norms(per_record_gradients(model, lambda twin, one: twin(*one).sum(), (x,)))
    WAYS[way](model)
    capture = GradientCapture(model)
    with capture.capturing(RECORDS):
        model(x).sum().backward()
    assert relative_error(capture.squared_norms(), wanted) <= 1e-5


@pytest.mark.parametrize(
    "inner",
    [
        lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True),
        lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True),
    ],
)
def test_random_numbers_inside_are_no_hindrance(inner):
    model = Model(inner())
    WAYS["recursively"](model)
    capture = GradientCapture(model)
    with capture.capturing(RECORDS):
        model(records()).sum().backward()
    assert bool(capture.squared_norms().isfinite().all())


class _Doubling(ModelHook):
    def post_forward(self, module, output):
        del module
        return 2 * output


def test_what_else_replaces_a_forward_is_not_taken_for_the_layers_own():
    plain, moved, doubled, replaced = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    add_hook_to_module(moved, AlignDevicesHook(execution_device="cpu"))
    add_hook_to_module(doubled, _Doubling())
    replaced.forward = lambda x: F.linear(x, replaced.weight) * 2
    assert get_rule(plain) is not None
    assert get_rule(moved) is get_rule(plain)
    assert get_rule(doubled) is None
    assert get_rule(replaced) is None


@pytest.mark.parametrize("gradients", ["captured", "one-by-one", "auto"])
def test_an_offloaded_model_is_refused_by_name(gradients):
    model = made("linear")
    cpu_offload(model, execution_device="cpu")
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=4.0, delta=1e-5)
    with pytest.raises(UnsupportedModule, match="scale must be in memory"):
        fit(
            model,
            lambda m, x: m(x),
            (records(),),
            plan,
            progress=False,
            performance=PerformanceOptions(gradients=gradients),
        )
    with pytest.raises(UnsupportedModule, match="meta device"):
        PrivacyEngine(gradients=gradients).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(records(), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
