"""Private numbers that would reach the parameters past the gradient: settings and state of the optimizer, ``.data``."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from sordino.errors import NonPrivateStep, PrivacyError
from sordino.training.engine import PrivacyEngine


def train(model, optimizer, *, before=None, after=None, epochs=4, **options):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=16),
        **options,
    )
    for _ in range(epochs):
        for batch in loader:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            if before is not None:
                before(model, optimizer, batch, loss)
            optimizer.step()
            if after is not None and loader.is_last_microbatch:
                after(model, optimizer, batch, loss)


def network():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    model.register_buffer("scale", torch.ones(3))
    return model


def group(optimizer, name, value):
    optimizer.param_groups[0][name] = value


def by_scheduler(model, optimizer, batch, loss):
    value = loss.item()
    LambdaLR(optimizer, lambda _: value).step()


KNOWN = {
    "rate from item": lambda m, o, b, loss: group(o, "lr", 0.1 * loss.item()),
    "rate from a size": lambda m, o, b, loss: group(o, "lr", 0.01 * b[0].size(0)),
    "rate as a tensor": lambda m, o, b, loss: group(o, "lr", 0.1 * loss.detach()),
    "decay from item": lambda m, o, b, loss: group(o, "weight_decay", b[0].mean().abs().item()),
    "pair of numbers": lambda m, o, b, loss: group(o, "betas", (loss.item() / 100, 0.99)),
    "state entry": lambda m, o, b, loss: o.state[m[0].weight].update(exp_avg=torch.ones(4, 6) * b[0].mean()),
    "state in place": lambda m, o, b, loss: o.state[m[0].weight]["exp_avg"].add_(b[0].mean()),
    "state copied": lambda m, o, b, loss: o.state[m[0].weight]["exp_avg"].copy_(b[0][:4]),
    "state number": lambda m, o, b, loss: o.state[m[0].weight].update(bias=loss.item()),
    "scheduler": by_scheduler,
    "data": lambda m, o, b, loss: setattr(m[2].bias, "data", b[0][:, :3].mean(0)),
    "data in place": lambda m, o, b, loss: m[2].bias.data.add_(b[0][:, :3].mean(0)),
}
# What carries no notes is seen between a batch and its step, by any change.
CHANGED = {
    "rate from len": lambda m, o, b, loss: group(o, "lr", 0.01 * len(b[0])),
    "rate from float": lambda m, o, b, loss: group(o, "lr", 0.1 * float(loss.detach())),
    "state through numpy": lambda m, o, b, loss: o.state[m[0].weight].update(
        exp_avg=torch.from_numpy(b[0].numpy()[:4].copy())
    ),
    "data through numpy": lambda m, o, b, loss: setattr(
        m[2].bias, "data", torch.from_numpy(2 * b[0].numpy()[:, :3].mean(0))
    ),
    "data past torch's count": lambda m, o, b, loss: m[2].bias.data.copy_(
        torch.from_numpy(b[0].numpy()[:, :3].mean(0))
    ),
    "memory through numpy": lambda m, o, b, loss: m[2].bias.detach().numpy().__setitem__(0, b[0].numpy().mean()),
    "a buffer's data": lambda m, o, b, loss: m.scale.data.copy_(torch.from_numpy(b[0].numpy()[:, :3].std(0))),
    "a buffer through numpy": lambda m, o, b, loss: m.scale.copy_(torch.from_numpy(b[0].numpy()[:, :3].std(0))),
    "a new buffer": lambda m, o, b, loss: setattr(m, "scale", torch.from_numpy(b[0].numpy()[:, :3].std(0))),
    "no_grad copy": lambda m, o, b, loss: m[2].bias.detach().copy_(torch.tensor(b[0].numpy()[:, :3].mean(0))),
}


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_private_number_is_refused_before_and_after_the_step(name, when):
    model = network()
    way, first = KNOWN[name], []

    def once_there_is_state(*given):
        if first or when == "after":
            way(*given)
        first.append(1)

    with pytest.raises(PrivacyError):
        train(model, adam(model), **{when: once_there_is_state})


@pytest.mark.parametrize("name", CHANGED)
def test_any_change_between_a_batch_and_its_step_is_refused_and_nothing_moves(name):
    model = network()
    before = []

    def change(*given):
        before[:] = [model[0].weight.detach().clone()]
        CHANGED[name](*given)

    with pytest.raises(NonPrivateStep, match=r"after optimizer\.step"):
        train(model, adam(model), before=change)
    assert torch.equal(model[0].weight, before[0])


def test_a_rate_that_follows_the_number_of_records_is_refused_after_the_step_too():
    for of in (lambda size: 0.01 * size, lambda size: 1 / size):
        model = network()
        with pytest.raises(PrivacyError):
            train(model, adam(model), after=lambda m, o, b, loss, of=of: group(o, "lr", of(len(b[0]))), epochs=8)


def clamp(model, optimizer, batch, loss):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.5, 0.5)
            parameter.data.mul_(0.999)


def restored(model, optimizer, batch, loss):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def averaged(model, optimizer, batch, loss):
    state = optimizer.state[model[0].weight]
    state["exp_avg"].mul_(0.5)


FREE = {
    "rate by hand": lambda m, o, b, loss: group(o, "lr", o.param_groups[0]["lr"] * 0.9),
    "limits on weights": clamp,
    "state and weights restored": restored,
    "state damped": averaged,
    "a buffer": lambda m, o, b, loss: m.scale.mul_(0.9),
    "a number shown": lambda m, o, b, loss: f"{loss.item():.3f} {o.param_groups[0]['lr']}",
}


@pytest.mark.parametrize("microbatch_size", [None, 8])
@pytest.mark.parametrize("name", FREE)
def test_public_changes_after_the_step_go_on(name, microbatch_size):
    model = network()
    train(model, adam(model), after=FREE[name], epochs=2, microbatch_size=microbatch_size)


class KeepsMean(nn.Linear):
    def forward(self, x):
        self.means = x.detach().mean(0)
        self.plain = type(self.means) is torch.Tensor
        return super().forward(x)


OF_THE_BATCH = {
    "float of the loss": lambda m, o, loss: group(o, "lr", float(loss.detach())),
    "number of an attribute": lambda m, o, loss: group(o, "lr", abs(m.means[0].item())),
    "made of an attribute": lambda m, o, loss: group(o, "lr", 0.3 * m.means.square().sum()),
    "parameter from an attribute": lambda m, o, loss: m.bias.data.copy_(0.5 * m.means[:3]),
    "parameter plus an attribute": lambda m, o, loss: setattr(m.bias, "data", m.bias.data + m.means[:3]),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_is_made_of_the_batch_is_refused_after_the_step(name):
    model = KeepsMean(6, 3)
    with pytest.raises(PrivacyError):
        train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            after=lambda m, o, b, loss: OF_THE_BATCH[name](m, o, loss),
        )


class KeepsMore(nn.Linear):
    """Keeps what it saw in a list and a dictionary."""

    def __init__(self):
        super().__init__(6, 3)
        self.seen, self.table = [torch.zeros(6)], {"means": {"last": torch.zeros(6)}}

    def forward(self, x):
        assert all(type(kept) is torch.Tensor for kept in (*self.seen, *self.table["means"].values()))
        self.seen = [*self.seen[-1:], x.detach().mean(0)]
        self.table["means"]["last"] = x.detach().mean(0)
        return super().forward(x)


MADE_OF_WHAT_IS_KEPT = {
    "rate from a list": lambda m, o: group(o, "lr", 0.3 * m.seen[-1].square().sum()),
    "parameter from a list": lambda m, o: m.bias.data.copy_(0.5 * m.seen[-1][:3]),
    "parameter from a dictionary": lambda m, o: m.bias.data.copy_(0.5 * m.table["means"]["last"][:3]),
    "moved within the list": lambda m, o: (m.seen.insert(0, m.seen.pop()), m.bias.data.copy_(0.5 * m.seen[0][:3])),
}


@pytest.mark.parametrize("name", MADE_OF_WHAT_IS_KEPT)
def test_what_is_made_of_what_a_module_keeps_in_containers_is_refused_after_the_step(name):
    model = KeepsMore()
    with pytest.raises(PrivacyError):
        train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            after=lambda m, o, b, loss: MADE_OF_WHAT_IS_KEPT[name](m, o),
        )


def test_what_a_module_keeps_in_containers_can_be_looked_at_and_thrown_away():
    model, shown = KeepsMore(), []

    def look(model, optimizer, batch, loss):
        shown.append(f"{float(model.seen[-1][0]):.3f} {len(model.seen)}")
        del model.seen[0]

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), after=look)
    assert len(shown) == 16


def test_what_a_module_keeps_can_be_looked_at_and_is_its_own_when_it_is_called():
    model, told = KeepsMean(6, 3), []

    def look(model, optimizer, batch, loss):
        told.append(f"{float(model.means[0]):.3f} {copy.deepcopy(model.means).shape}")
        with torch.no_grad():
            model.bias.clamp_(-1, 1)
            model.eval()(torch.ones(2, 6))
        assert model.plain
        assert type(model.means) is torch.Tensor
        model.train()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), after=look)
    assert len(told) == 16


def test_schedulers_after_the_step_go_on_with_rates_that_are_tensors_too():
    for rate in (0.1, torch.tensor(0.1)):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=isinstance(rate, torch.Tensor))
        scheduler = StepLR(optimizer, 2)
        if isinstance(rate, torch.Tensor):
            optimizer.param_groups[0]["capturable"] = False
        train(model, optimizer, after=lambda *_, scheduler=scheduler: scheduler.step(), epochs=2)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_before_the_step_are_seen_whenever_they_were_registered(late):
    model, sizes = network(), [1]
    optimizer = adam(model)

    def hook(stepped, args, kwargs):
        group(stepped, "lr", 0.01 * sizes[-1])

    def before(model, optimizer, batch, loss):
        sizes.append(len(batch[0]))
        if late and len(sizes) == 2:
            optimizer.register_step_pre_hook(hook)

    def after(model, optimizer, batch, loss):
        if not late and len(sizes) == 2:
            optimizer.register_step_pre_hook(hook)

    with pytest.raises(NonPrivateStep):
        train(model, optimizer, before=before, after=after)


def test_a_hook_may_change_the_private_gradient_but_not_to_what_came_from_a_batch():
    for add in (False, True):
        model, seen = network(), []
        optimizer = adam(model)

        def hook(stepped, args, kwargs, model=model, seen=seen, add=add):
            model[0].bias.grad.mul_(0.5)
            if add:
                model[0].bias.grad.add_(seen[-1][0][:, :4].mean(0))

        def before(model, optimizer, batch, loss, seen=seen):
            seen.append(batch)

        def after(model, optimizer, batch, loss, seen=seen, hook=hook):
            if len(seen) == 1:
                optimizer.register_step_pre_hook(hook)

        if add:
            with pytest.raises(PrivacyError):
                train(model, optimizer, before=before, after=after)
        else:
            train(model, optimizer, before=before, after=after)
