"""Models that the user has compiled: they train as plain Python, to the same parameters, and are evaluated compiled."""

import pytest
import torch
from torch import nn

from sordino import Plan, PrivacyEngine, fit
from sordino.errors import SordinoError
from sordino.gradients.module_hooks import PlainPython
from sordino.randomness import KeyedRNG

pytestmark = pytest.mark.usefixtures("_no_compiled_leftovers")


@pytest.fixture
def _no_compiled_leftovers(monkeypatch):
    torch.compiler.reset()
    # Of loops that other tests left in the middle of a batch.
    with torch.compiler.set_stance("default"):
        monkeypatch.setattr(PlainPython, "_running", set())
        monkeypatch.setattr(PlainPython, "_before", None)
        yield
    torch.compiler.reset()


class Net(nn.Module):
    """Two layers, and between them what `between` makes of the batch."""

    def __init__(self, between=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.dropout = nn.Linear(5, 8), nn.Linear(8, 2), nn.Dropout(dropout)
        self.between = between

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.first(x)))
        return self.last(hidden if self.between is None else self.between(hidden))


def couple_if_compiled(hidden):
    return hidden - hidden.mean(0) if torch.compiler.is_compiling() else hidden


def couple(hidden):
    return hidden - hidden.mean(0)


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(120, 5, generator=generator), torch.randint(2, (120,), generator=generator)
    )


def parameters_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_in_loop(model):
    engine = PrivacyEngine(seed=3, reproducible=True)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=torch.utils.data.DataLoader(data(), batch_size=30),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return parameters_of(model)


def train_by_fit(model):
    def losses(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.25, steps=12, expected_batch_size=30, delta=1e-5)
    fit(
        model,
        losses,
        data(),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        rng=KeyedRNG(seed=3, reproducible=True),
        progress=False,
    )
    return parameters_of(model)


TRAIN = pytest.mark.parametrize("train", [train_in_loop, train_by_fit])


class Backend:
    """Counts the graphs that it is given, and runs them as they are."""

    def __init__(self, change=None):
        self.graphs, self.change = 0, change

    def __call__(self, graph, inputs):
        self.graphs += 1
        if self.change is None:
            return graph.forward
        return lambda *given: tuple(map(self.change, graph.forward(*given)))


@TRAIN
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_trains_to_the_parameters_of_the_plain_model(train, dropout):
    model = Net(dropout=dropout)
    torch.testing.assert_close(train(torch.compile(model, backend="eager")), train(Net(dropout=dropout)))


@TRAIN
def test_nothing_is_compiled_while_records_are_recorded(train):
    backend = Backend()
    model = torch.compile(Net(), backend=backend)
    train(model)
    assert backend.graphs == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"


@TRAIN
def test_coupled_records_are_refused(train):
    with pytest.raises(SordinoError, match="record"):
        train(torch.compile(Net(couple), backend="eager"))


@TRAIN
def test_what_compiled_code_does_otherwise_is_not_done(train):
    torch.testing.assert_close(train(torch.compile(Net(couple_if_compiled), backend="eager")), train(Net()))


def test_a_backend_that_fails_fails_no_records():
    def fail(graph, inputs):
        raise RuntimeError("no kernel")

    torch.testing.assert_close(train_by_fit(torch.compile(Net(), backend=fail)), train_by_fit(Net()))


def test_a_trained_model_is_evaluated_compiled():
    backend = Backend()
    model = torch.compile(Net(), backend=backend)
    train_by_fit(model)
    with torch.no_grad():
        model.eval()(torch.zeros(3, 5))
    assert backend.graphs > 0


def test_a_loop_that_is_left_leaves_nothing_behind():
    engine = PrivacyEngine()
    model, _, loader = engine.make_private(
        module=(compiled := torch.compile(Net(), backend="eager")),
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.5),
        data_loader=torch.utils.data.DataLoader(data(), batch_size=30),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, _ in loader:
        model(x)
        break
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    engine.detach()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_recordings_may_end_in_any_order():
    first = PlainPython()
    second = PlainPython()
    first.end()
    first.end()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    del second
    assert torch._dynamo.eval_frame._stance.stance == "default"
