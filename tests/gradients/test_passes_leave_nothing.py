"""After a pass was read or thrown away, nothing of it stays in memory, whatever holds what through torch's graphs."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PerformanceOptions, Plan, PrivacyEngine, fit
from sordino.gradients import GradientCapture


class Standardized(nn.Linear):
    """Computes its weight from a parameter, as weight standardization does."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return nn.functional.linear(x, weight / (weight.std(1, keepdim=True) + 1e-3), self.bias)


class Own(nn.Module):
    """Reads its parameter in functions of torch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.einsum("bi,ij,bj->bj", x, self.table, x.tanh())


def model(middle):
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Tanh(), nn.Linear(6, 2))


def tensors():
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def read(capture, net, batch):
    with capture.capturing(4):
        net(batch).square().sum().backward()
    capture.squared_norms()
    capture.add_weighted_sums(torch.ones(4), into={}, last=True)


def discard(capture, net, batch):
    with capture.capturing(4):
        net(batch).square().sum().backward()
    capture.squared_norms()
    capture.discard()


def begin_again(capture, net, batch):
    capture.start(4)
    net(batch).square().sum().backward()


def leave_without_backward(capture, net, batch):
    capture.start(4)
    net(batch).sum()


_MIDDLES = {
    "linear": lambda: nn.Linear(6, 6),
    "standardized": lambda: Standardized(6, 6),
    "functions": Own,
    "lstm": lambda: nn.LSTM(6, 6),
}


@pytest.mark.parametrize("use", [read, discard, begin_again, leave_without_backward])
@pytest.mark.parametrize("middle", _MIDDLES)
def test_many_passes_leave_as_many_tensors_as_few(middle, use):
    torch.manual_seed(0)
    inner = _MIDDLES[middle]()
    net = nn.Sequential(nn.Linear(5, 6), _First(inner), nn.Tanh(), nn.Linear(6, 2))
    capture, batch = GradientCapture(net), torch.randn(4, 5)
    counts = []
    for _ in range(6):
        use(capture, net, batch)
        counts.append(tensors())
    assert counts[-1] == counts[2]


class _First(nn.Module):
    """A recurrent layer as one of rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x[None])[0][0] if isinstance(self.inner, nn.LSTM) else self.inner(x)


def by_fit(net, **options):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=3, expected_batch_size=10, delta=1e-5)
    data = torch.randn(20, 5), torch.randint(2, (20,))

    def losses(net, x, y):
        return nn.functional.cross_entropy(net(x), y, reduction="none")

    fit(net, losses, data, plan, progress=False, performance=PerformanceOptions(**options))


def by_fit_in_microbatches(net):
    by_fit(net, microbatch_size=4)


def by_fit_in_two_passes(net):
    by_fit(net, clipping_mode="two_pass")


def by_engine(net, **settings):
    data = TensorDataset(torch.randn(20, 5), torch.randint(2, (20,)))
    net, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **settings,
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction=settings.get("loss_reduction", "mean"))
        loss.backward()
        optimizer.step()


def by_engine_with_sums(net):
    by_engine(net, loss_reduction="sum")


def is_kept_after(use, middle):
    """Whether a model is still in memory after two runs: the second meets what the first left in caches."""
    for _ in range(2):
        torch.manual_seed(0)
        net = model(_First(_MIDDLES[middle]()))
        left = weakref.ref(net)
        use(net)
        del net
        gc.collect()
    return left() is not None


@pytest.mark.parametrize("middle", _MIDDLES)
def test_a_model_is_free_after_its_run(middle):
    assert not is_kept_after(by_fit, middle)


@pytest.mark.parametrize(
    "use",
    [by_fit_in_microbatches, by_fit_in_two_passes, by_engine, by_engine_with_sums],
)
@pytest.mark.parametrize("middle", ["linear", "functions"])
def test_a_model_is_free_however_it_was_trained(middle, use):
    assert not is_kept_after(use, middle)


def test_a_model_is_free_after_compiled_steps():
    assert not is_kept_after(partial(by_fit, compile=True), "linear")


@pytest.mark.parametrize("middle", ["linear", "standardized", "functions"])
def test_a_long_run_leaves_as_many_tensors_as_a_short_one(middle):
    def left_by(steps):
        before = tensors()
        train(steps)
        return tensors() - before

    def train(steps):
        torch.manual_seed(0)
        net = model(_MIDDLES[middle]())
        plan = Plan(
            noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=steps, expected_batch_size=10, delta=1e-5
        )
        data = torch.randn(20, 5), torch.randint(2, (20,))

        def losses(net, x, y):
            return nn.functional.cross_entropy(net(x), y, reduction="none")

        fit(net, losses, data, plan, progress=False)

    train(2)
    assert left_by(20) <= left_by(2)
