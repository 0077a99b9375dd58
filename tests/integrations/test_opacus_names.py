"""The page on migrating names every public name of Opacus, and what it names on our side exists."""

import importlib
import inspect
import pkgutil
import re
import warnings
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-opacus.md").read_text(encoding="utf-8")


def public_names(module):
    """`__all__`, or what the module itself defines."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return set(declared)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }


def names_of_opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip("opacus", reason="opacus is not installed")
        found = public_names(package)
        for entry in pkgutil.walk_packages(package.__path__, "opacus."):
            if "test" in entry.name:
                continue
            try:
                module = importlib.import_module(entry.name)
            except ImportError:
                continue  # it needs a library that opacus does not install
            found |= public_names(module)
    return found


def test_every_public_name_of_opacus_is_on_the_page():
    found = names_of_opacus()
    assert len(found) > 100
    assert sorted(name for name in found if f"`{name}`" not in PAGE) == []


OURS = {
    "sordino": ["PrivacyEngine", "PoissonSampling", "__version__"],
    "sordino.clipping": ["QuantileClipping", "GroupedClipping"],
    "sordino.schedules": ["ExponentialSchedule", "StepSchedule", "ListSchedule"],
    "sordino.gradients": ["layer_rule", "check_layer_rule"],
    "sordino.errors": ["UnsupportedModule", "UncapturedParameter", "CoupledRecords", "PrivacyError"],
    "sordino.accounting": [
        "ACCOUNTANTS",
        "Accountant",
        "calibrate_noise_multiplier",
        "central_limit_epsilon",
        "epsilon",
        "renyi_divergence",
    ],
    "sordino.audit": ["check_library"],
}


@pytest.mark.parametrize("room", OURS)
def test_what_the_page_names_here_exists(room):
    module = importlib.import_module(room)
    for name in OURS[room]:
        assert hasattr(module, name), name
        assert re.search(rf"\b{name}\b", PAGE), name


@pytest.mark.parametrize("name", ["flat", "per_layer", "automatic", "psac", "global", "adaclip"])
def test_ways_of_clipping_on_the_page_exist(name):
    from sordino.clipping import get_clipping

    assert f'`"{name}"`' in PAGE
    assert get_clipping(name) is not None


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell", "MultiheadAttention"])
def test_torchs_own_layers_are_exact_in_place_of_replacements(kind):
    """Beside plain autograd, one record at a time."""
    import torch
    from torch import nn

    from sordino.audit import ConformanceLoss, EngineLibrary

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layer = getattr(nn, kind)
            if kind == "MultiheadAttention":
                self.layer = layer(4, 2, batch_first=True)
            else:
                self.layer = layer(4, 5) if kind.endswith("Cell") else layer(4, 5, batch_first=True)

        def forward(self, x):
            if kind == "MultiheadAttention":
                return self.layer(x, x, x)[0].sum((1, 2))
            if not kind.endswith("Cell"):
                return self.layer(x)[0].sum((1, 2))
            state = None
            for step in range(x.shape[1]):
                state = self.layer(x[:, step], state)
            return (state[0] if kind == "LSTMCell" else state).sum(1)

    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))
    loss = ConformanceLoss.of(lambda model, batch: model(batch[0]).square())
    model = Around()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for record in x:
        model.zero_grad()
        model(record[None]).square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients)).item()
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, 0.7 / norm)
    found = EngineLibrary().clipped_sum(Around(), (x,), loss, max_grad_norm=0.7)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=2e-6)
