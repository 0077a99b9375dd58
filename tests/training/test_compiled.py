import copy
import shutil
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import PerformanceOptions, Plan, PrivacyEngine, fit
from sordino.clipping import QuantileClipping
from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, NotOffered, UnsupportedModule
from sordino.gradients.step_graphs import StepGraphs
from sordino.randomness import KeyedRNG
from sordino.schedules import ExponentialSchedule
from sordino.training import compiled_step
from sordino.training.compiled_step import padded_size


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def trained(model: nn.Module, *, compile: bool, **changes: object) -> Tensor:
    values = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.1,
        "steps": 6,
        "expected_batch_size": 16.0,
        "delta": 1e-5,
    }
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(160, 7, generator=generator), torch.randint(3, (160,), generator=generator)
    fit(
        model,
        cross_entropy,
        data,
        Plan(**{**values, **changes}),
        performance=PerformanceOptions(compile=compile),
        rng=KeyedRNG(seed=3, reproducible=True),
        progress=False,
    )
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_compiled_training_ends_where_ordinary_training_does() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    torch.testing.assert_close(trained(model(), compile=True), trained(model(), compile=False), rtol=1e-6, atol=1e-6)


def test_where_the_compiler_fails_steps_run_uncompiled_after_one_warning_for_each_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    def fail(graph: object, inputs: object) -> NoReturn:
        raise RuntimeError("no kernel\nat line 3")

    monkeypatch.setattr(compiled_step, "_compiled", fail)
    torch.testing.assert_close(trained(model(), compile=True), trained(model(), compile=False))
    messages = [record.getMessage() for record in caplog.records]
    assert messages
    assert len(messages) == len(set(messages))
    assert all(text.endswith("records run uncompiled, which only takes longer: no kernel") for text in messages)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clipping": QuantileClipping(count_noise=5.0)}, "clipping norm that adapts"),
        ({"max_grad_norm": ExponentialSchedule(start=1.0, end=0.5)}, "schedule of max_grad_norm"),
        ({"secure_mode": True}, "secure mode"),
    ],
)
def test_plans_that_cant_be_compiled_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        trained(nn.Linear(7, 3), compile=True, **changes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_a_model_that_draws_random_numbers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModule, match="random numbers"):
        trained(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)), compile=True)


class _Attending(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(7, 3 * 8), nn.Linear(4, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).view(len(x), 3, 1, 2, 4).unbind(1)
        return self.out(F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)).mean((1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*_prims_common.*:FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_attention_that_drops_nothing_draws_nothing_and_is_compiled() -> None:
    torch.manual_seed(1)
    model = _Attending(dropout=0.0)
    compiled, ordinary = (trained(copy.deepcopy(model), compile=way, steps=2) for way in (True, False))
    torch.testing.assert_close(compiled, ordinary, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
@pytest.mark.parametrize("way", ["attention", "bernoulli"])
def test_what_draws_random_numbers_stays_refused_by_name(way: str) -> None:
    torch.manual_seed(1)
    builds = {
        "attention": lambda: _Attending(dropout=0.3),
        "bernoulli": lambda: nn.Sequential(nn.Linear(7, 5), nn.FeatureAlphaDropout(0.2), nn.Linear(5, 3)),
    }
    with pytest.raises(UnsupportedModule, match="random numbers"):
        trained(builds[way](), compile=True)


def test_without_a_compiler_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InvalidArgument, match="C\\+\\+ compiler"):
        trained(nn.Linear(7, 3), compile=True)


def test_sizes_are_public_few_and_large_enough() -> None:
    for expected in (1.0, 16.0, 100.0, 512.0, 4096.0):
        for records in range(1, int(2 * expected) + 2):
            size = padded_size(records, expected)
            assert records <= size < records + 4 * expected**0.5 + 1
        likely = range(int(expected - 2 * expected**0.5), int(expected + 2 * expected**0.5) + 1)
        assert len({padded_size(max(records, 1), expected) for records in likely}) <= 4


# --- loops of the user's own ----------------------------------------------------------------------------------------


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")


def tabular(records: int = 160) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(records, 7, generator=generator), torch.randint(3, (records,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class Loop:
    """A custom loop around an engine with a chosen seed."""

    def __init__(
        self, model: nn.Module, data: TensorDataset | None = None, *, batch_size: int = 16, **changes: object
    ) -> None:
        of_engine = {name: changes.pop(name) for name in ("clipping_mode", "secure_mode") if name in changes}
        self.engine = PrivacyEngine(reproducible=True, seed=3, **of_engine)
        values = {"noise_multiplier": 1.0, "max_grad_norm": 0.5} | changes
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(tabular() if data is None else data, batch_size=batch_size),
            **values,
        )

    def train(self, *, compiled: bool, epochs: int = 1) -> Tensor:
        backward = self.engine.compiled_backward(self.model, cross_entropy) if compiled else self.backward
        for _ in range(epochs):
            for x, y in self.loader:
                backward(x, y)
                self.optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.engine.backward(cross_entropy(self.model, x, y))


def runs_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether graphs gave the sums, one entry for each of their runs."""
    runs: list[bool] = []
    run = StepGraphs.run

    def noted(graphs: StepGraphs, batch: Sequence[Tensor], counted: Tensor) -> dict[nn.Parameter, Tensor] | None:
        sums = run(graphs, batch, counted)
        runs.append(sums is not None)
        return sums

    monkeypatch.setattr(StepGraphs, "run", noted)
    return runs


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_loop_ends_where_the_ordinary_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, ordinary = Loop(network()), Loop(network())
    runs = runs_of_graphs(monkeypatch)
    found = compiled.train(compiled=True)
    # Batches of 6 to 23 records: three sizes, each compared once when it is recorded.
    assert runs.count(True) == 3 + (10 - 3)
    torch.testing.assert_close(found, ordinary.train(compiled=False), rtol=1e-6, atol=1e-6)
    assert compiled.engine.event() == ordinary.engine.event()
    assert compiled.engine.get_epsilon(1e-5) == ordinary.engine.get_epsilon(1e-5)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_parts_empty_batches_and_a_record_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> Loop:
        data = tabular(24)
        data.tensors[0][5] = torch.nan
        return Loop(network(), data, batch_size=2, microbatch_size=2)

    compiled, ordinary = loop(), loop()
    runs = runs_of_graphs(monkeypatch)
    found = compiled.train(compiled=True, epochs=2)
    assert False in runs
    assert runs.count(True) > 10
    torch.testing.assert_close(found, ordinary.train(compiled=False, epochs=2), rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_is_done_with_a_batch_besides_is_refused() -> None:
    # Every batch has all 160 records: the second one goes through the graphs of the first.
    loop = Loop(network(), batch_size=160)
    backward = loop.engine.compiled_backward(loop.model, cross_entropy)
    for batch in loop.loader:
        backward(*batch)
        loop.optimizer.step()
    x, y = next(batches := iter(loop.loader))
    backward(x, y)
    with torch.no_grad():
        assert loop.model(x).shape == (len(x), 3)
    with pytest.raises(NonPrivateStep, match="one compiled_backward"):
        backward(x, y)
    with pytest.raises(NonPrivateStep, match="one compiled_backward"):
        loop.model(x)
    batches.close()


@needs_compiler
@pytest.mark.parametrize("change", ["mean", "in place", "order", "missing", "foreign", "earlier"])
def test_anything_but_the_batch_as_it_came_is_refused(change: str) -> None:
    loop = Loop(network())
    backward = loop.engine.compiled_backward(loop.model, cross_entropy)
    batches = iter(loop.loader)
    old = next(batches)
    x, y = next(batches)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    if change == "in place":
        x.sub_(x.mean(0))
    given = {
        "mean": lambda: (x - x.mean(0), y),
        "in place": lambda: (x, y),
        "order": lambda: (y, x),
        "missing": lambda: (x,),
        "foreign": lambda: (torch.rand(4, 7), torch.zeros(4).long()),
        "earlier": lambda: old,
    }[change]()
    with pytest.raises(NonPrivateStep, match="as the loader gave it"):
        backward(*given)
    assert all(map(torch.equal, before, loop.model.parameters()))


@needs_compiler
def test_calls_out_of_order_are_refused() -> None:
    loop = Loop(network())
    backward = loop.engine.compiled_backward(loop.model, cross_entropy)
    with pytest.raises(NonPrivateStep, match="Take the next batch first"):
        backward(torch.rand(4, 7), torch.zeros(4).long())
    x, y = next(iter(loop.loader))
    with pytest.raises(NonPrivateStep, match="forward and a backward pass"):
        loop.optimizer.step()
    loop.model(x)
    with pytest.raises(NonPrivateStep, match="one compiled_backward"):
        backward(x, y)
    with pytest.raises(NotOffered, match="make_private"):
        loop.engine.compiled_backward(nn.Linear(7, 3), cross_entropy)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_loss_that_couples_records_is_refused_in_a_compiled_loop() -> None:
    def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")

    loop = Loop(network())
    backward = loop.engine.compiled_backward(loop.model, centred)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    for _ in range(2):
        for batch in loop.loader:
            with pytest.raises(CoupledRecords):
                backward(*batch)
            break
    assert all(map(torch.equal, before, loop.model.parameters()))


@needs_compiler
@pytest.mark.parametrize("of", ["features", "labels"])
def test_a_loss_that_begins_to_couple_records_is_refused_when_graphs_are_made(of: str) -> None:
    steps: list[int] = []

    def changed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if steps and of == "features":
            x = x - x.mean(0)
        losses = cross_entropy(model, x, y)
        return losses * (1 + y.double().mean().to(x.dtype)) if steps and of == "labels" else losses

    data = torch.rand(160, 7), torch.randint(3, (160,))
    plan = Plan(noise_multiplier=1.0, max_grad_norm=0.5, sample_rate=0.1, steps=4, expected_batch_size=16.0, delta=1e-5)
    with pytest.raises(CoupledRecords, match="another record"):
        fit(
            network(),
            changed,
            data,
            plan,
            performance=PerformanceOptions(compile=True),
            progress=False,
            on_step=steps.append,
        )
    assert steps == [1]


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clipping": QuantileClipping(count_noise=5.0)}, "clipping norm that adapts"),
        ({"max_grad_norm": ExponentialSchedule(start=1.0, end=0.5, over=9)}, "schedule of max_grad_norm"),
        ({"secure_mode": True}, "secure mode"),
        ({"clipping_mode": "two_pass"}, "two_pass"),
        ({"criterion": F.cross_entropy}, "criterion"),
    ],
)
def test_a_loop_that_cant_be_compiled_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    loop = Loop(network(), **changes)
    with pytest.raises(InvalidArgument, match=reason):
        loop.engine.compiled_backward(loop.model, cross_entropy)


@needs_compiler
def test_dropout_is_refused_in_a_compiled_loop() -> None:
    loop = Loop(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    with pytest.raises(UnsupportedModule, match="random numbers"):
        loop.train(compiled=True)


class Scaled(nn.Module):
    """Reads a number, a plain tensor and a buffer beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.factor, self.mask = nn.Linear(7, 3), 1.0, torch.ones(3)
        self.not_read = torch.eye(3).to_sparse()
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor * self.mask + self.shift


def every_record(model: nn.Module, data: TensorDataset | None = None) -> Loop:
    """A loop whose batches all have the same 160 records."""
    return Loop(model, data, batch_size=160)


def trained_with_changes(loop: Loop, changes: Sequence[Callable[[], object]], *, compiled: bool) -> Tensor:
    """Train two steps after each change."""
    backward = loop.engine.compiled_backward(loop.model, cross_entropy) if compiled else loop.backward
    for change in changes:
        change()
        for _ in range(2):
            for x, y in loop.loader:
                backward(x, y)
                loop.optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "factor", 1.5),
        lambda model: setattr(model, "mask", torch.tensor([2.0, 0.0, 1.0])),
        lambda model: model.mask.mul_(3.0),
        lambda model: setattr(model, "shift", torch.tensor([2.0, 0.0, 1.0])),
        lambda model: setattr(model.layer.weight, "data", torch.ones(7, 3).t()),
    ],
    ids=["number", "tensor", "tensor in place", "buffer", "strides"],
)
def test_what_a_model_holds_may_change_between_steps(
    change: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_step, "_compiled", lambda graph, inputs: graph)
    found = []
    for compiled in (True, False):
        loop = every_record(Scaled())
        changes = (lambda: None, lambda model=loop.model: change(model))
        found.append(trained_with_changes(loop, changes, compiled=compiled))
    assert not caplog.records
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_may_change_its_type_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    runs = runs_of_graphs(monkeypatch)
    found = []
    for compiled in (True, False):
        loop = every_record(Normed(7))
        found.append(trained_with_changes(loop, (lambda: None, loop.model.double), compiled=compiled))
    assert runs == [True] * 4
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_a_model_that_changes_at_every_step_runs_uncompiled_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_step, "_compiled", lambda graph, inputs: graph)
    monkeypatch.setattr(compiled_step, "_MOST", 3)

    def decay(model: nn.Module) -> Callable[[], None]:
        return lambda: setattr(model, "factor", 0.9 * model.factor)

    found = []
    for compiled in (True, False):
        loop = every_record(Scaled())
        found.append(trained_with_changes(loop, 5 * [decay(loop.model)], compiled=compiled))
    (record,) = caplog.records
    assert record.getMessage().startswith("batches of 160 records run uncompiled")
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_what_a_loop_writes_into_a_tensor_of_the_loss_reaches_no_later_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "_compiled", lambda graph, inputs: graph)
    runs = runs_of_graphs(monkeypatch)

    def trained_parameters(*, write: bool) -> Tensor:
        loop, scale = every_record(network()), torch.ones(())
        backward = loop.engine.compiled_backward(loop.model, lambda model, x, y: cross_entropy(model, x, y) * scale)
        for _ in range(3):
            for x, y in loop.loader:
                backward(x, y)
                loop.optimizer.step()
                if write:
                    scale.copy_(x.mean())
        return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])

    assert torch.equal(trained_parameters(write=True), trained_parameters(write=False))
    assert len(runs) == 6


class Attentive(nn.Module):
    """Attention with layers of its own: the bias of the keys has a gradient of zero, up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into, self.query, self.key, self.value = (nn.Linear(width, 8) for width in (1, 8, 8, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.into(x[:, :, None])
        heads = self.query(tokens), self.key(tokens), self.value(tokens)
        return self.out(F.scaled_dot_product_attention(*heads).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lstm, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x[:, :3, None])[0][:, -1])


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*_prims_common.*:FutureWarning")
@pytest.mark.parametrize("model", [Attentive, Recurrent])
def test_sums_of_rounding_alone_and_inputs_with_gaps_are_compiled(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_of_graphs(monkeypatch)
    found = [every_record(model()).train(compiled=compiled, epochs=2) for compiled in (True, False)]
    assert runs == [True] * 2
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
