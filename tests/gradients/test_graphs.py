"""Recorded graphs give the engine's own sums, or say that they can't; no compiler is needed to try."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.clipping import FlatClipping
from sordino.errors import UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture, numerics
from sordino.gradients.step_graphs import StepGraphs, trace_step

C = 0.05


def factors(squares: Tensor) -> Tensor:
    return FlatClipping().clip_factors(squares, max_grad_norm=C)


def losses_of(model: nn.Module):
    return lambda x, y: F.cross_entropy(model(x).flatten(1), y, reduction="none")


def recorded(model: nn.Module, x: Tensor, y: Tensor, losses=None) -> tuple[GradientCapture, StepGraphs]:
    capture = GradientCapture(model)
    groups = [list(model.parameters())]
    run = losses_of(model) if losses is None else losses
    return capture, trace_step(capture, run, (x, y), factors, groups, lambda graph, _: graph)


def engine_sums(capture: GradientCapture, losses, x: Tensor, y: Tensor) -> dict[nn.Parameter, Tensor]:
    with capture.capturing(records=len(x)):
        losses(x, y).sum().backward()
    sums: dict[nn.Parameter, Tensor] = {}
    capture.add_weighted_sums(factors(capture.squared_norm_bounds()), sums)
    capture.discard()
    return sums


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


MODELS = {
    "logistic": (lambda: nn.Linear(6, 3), (6,)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), (6,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3)), (5, 6)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)), (2, 8, 8)),
    "twice": (Tied, (6,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_engines_sums_on_other_records_and_after_a_step(name: str) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    capture, graphs = recorded(model, torch.zeros(4, *shape), torch.zeros(4, dtype=torch.long))
    for _ in range(2):
        x, y = torch.randn(4, *shape), torch.randint(2, (4,))
        expected = engine_sums(capture, losses_of(model), x, y)
        got = graphs.run((x, y), torch.ones(4, dtype=torch.bool))
        assert got is not None
        assert got.keys() == expected.keys() == set(model.parameters())
        for parameter, total in expected.items():
            torch.testing.assert_close(got[parameter], total, rtol=1e-6, atol=1e-6 * C)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))


def test_records_that_fill_up_a_batch_weigh_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    capture, graphs = recorded(model, torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    counted = torch.arange(8) < 5
    got = graphs.run((x, y), counted)
    assert got is not None
    for parameter, total in engine_sums(capture, losses_of(model), x[:5], y[:5]).items():
        torch.testing.assert_close(got[parameter], total, rtol=1e-6, atol=1e-6 * C)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_record_out_of_range_sends_the_batch_the_ordinary_way(value: float) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    capture, graphs = recorded(model, torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    x[1] = value
    got = graphs.run((x, y), torch.ones(4, dtype=torch.bool))
    if got is None:
        return
    assert value == 1e30
    for parameter, total in engine_sums(capture, losses_of(model), x, y).items():
        torch.testing.assert_close(got[parameter], total, rtol=1e-6, atol=1e-6 * C)


def test_no_record_of_a_graph_contributes_more_than_the_bound() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    _, graphs = recorded(model, torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))
    x, y = 10 ** torch.linspace(-3, 9, 4)[:, None] * torch.randn(4, 6), torch.randint(3, (4,))
    for place in range(4):
        got = graphs.run((x, y), torch.arange(4) == place)
        assert got is not None
        length = torch.stack([total.double().norm() for total in got.values()]).norm()
        assert length <= C * (1 + 1e-6)


def refused(model: nn.Module, losses=None) -> None:
    recorded(model, torch.rand(4, 6), torch.zeros(4, dtype=torch.long), losses)


def test_random_numbers_in_the_model_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModule, match="random numbers"):
        refused(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3)).train())


def test_a_decision_by_values_is_refused_by_name() -> None:
    model = nn.Linear(6, 3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        scale = 2.0 if outputs.sum() > 0 else 1.0
        return scale * F.cross_entropy(outputs, y, reduction="none")

    with pytest.raises(UnsupportedModule, match="decide by values"):
        refused(model, losses)


def test_results_of_unknown_size_are_refused_by_name() -> None:
    model = nn.Linear(6, 3)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return F.cross_entropy(outputs, y, reduction="none") + outputs[outputs > 0].sum()

    with pytest.raises(UnsupportedModule, match="known sizes"):
        refused(model, losses)


def test_a_table_is_recorded_though_records_repeat_their_ids() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(24, 3))
    capture, graphs = recorded(model, torch.zeros(4, 4, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    ids, y = torch.randint(5, (4, 4)), torch.randint(3, (4,))
    got = graphs.run((ids, y), torch.ones(4, dtype=torch.bool))
    assert got is not None
    for parameter, total in engine_sums(capture, losses_of(model), ids, y).items():
        torch.testing.assert_close(got[parameter], total, rtol=1e-6, atol=1e-6 * C)


def test_a_use_outside_the_layers_is_refused_while_the_graph_is_recorded() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(UncapturedParameter):
        refused(model, lambda x, y: F.cross_entropy(F.linear(x, model.weight), y, reduction="none"))


def test_a_recording_that_comes_first_in_a_process_tries_no_library_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which library is faster is found out once in a process: never while operations are recorded.
    numerics._is_faster.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(numerics, "_maker", lambda: "Another")
    model, x, y = nn.Linear(200, 300), torch.rand(40, 200), torch.randint(300, (40,))
    capture, graphs = recorded(model, x, y)
    try:
        assert graphs.run((x, y), torch.ones(40, dtype=torch.bool)) is not None
    finally:
        capture.detach()
        numerics._is_faster.cache_clear()
