"""What a loop may not do between a batch and the step, and what a module may not do with its records."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loops import Lstm, ce, mlp, records, tokens, train
from sordino.errors import PrivacyError
from sordino.training.engine import PrivacyEngine


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def coupled(out):
    return (out / out.detach().abs().max()).sum(1).mean()


def centered(model, batch, state):
    x = batch[0]
    return F.cross_entropy(model(x - x.mean().item()), batch[1])


def scaled(model, batch, state):
    scale = 1 / batch[0].abs().max().item()
    return F.cross_entropy(model(batch[0] * scale), batch[1])


def scaled_by_bare_number(model, batch, state):
    return ce(model, batch) * float(batch[0].abs().max())


def normed_loss(model, batch, state):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.mean() / (losses.std().item() + 1e-8)


def standardized(model, batch, state):
    x = batch[0].numpy()
    return F.cross_entropy(model(batch[0] * 0 + torch.from_numpy((x - x.mean(0)) / x.std(0))), batch[1])


def balanced(model, batch, state):
    counts = np.bincount(batch[1].numpy(), minlength=3).clip(1)
    weight = torch.tensor(1 / counts, dtype=torch.float32)
    return (weight[batch[1]] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()


def trimmed(model, batch, state):
    longest = (batch[1] > 0).sum(1).max()
    return F.cross_entropy(model(batch[0])[:, :longest].mean(1), batch[1][:, 0])


def missing_marks(model, batch, state):
    valid = (batch[1] >= 0).float()
    losses = F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="none")
    return (losses * valid).sum() / valid.sum().clamp(min=1)


def missing_nans(model, batch, state):
    there = ~torch.isnan(batch[1])
    return F.mse_loss(model(batch[0])[there], batch[1][there])


def without_outliers(model, batch, state):
    losses = model(batch[0])[:, 0].square()
    return (losses * (losses.detach() < 3 * losses.detach().mean())).mean()


def reversed_part(model, batch, state):
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + coupled(Reversed.apply(out))


def hidden_backward(model, batch, state):
    out = model(batch[0])
    F.cross_entropy(out, batch[1]).backward(retain_graph=True)
    coupled(Reversed.apply(out)).backward()


def second_backward(model, batch, state):
    out = model(batch[0])
    F.cross_entropy(out, batch[1]).backward(retain_graph=True)
    torch.autograd.backward([coupled(out)])


def hooked(model, batch, state):
    out = model(batch[0])
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return F.cross_entropy(out, batch[1])


def weighted_backward(model, batch, state):
    loss = ce(model, batch)
    loss.backward(gradient=loss.detach())


def dino(model, batch, state):
    out = model(batch[0])
    center = state.get("center", torch.zeros(3))
    state["center"] = 0.9 * center + 0.1 * out.detach().mean(0)
    return -(F.softmax(out.detach() - center, 1) * F.log_softmax(out, 1)).sum(1).mean()


def baseline(model, batch, state):
    reward = batch[0][:, 0]
    loss = -(F.log_softmax(model(batch[0]), 1)[:, 0] * (reward - state.get("mean", 0.0))).mean()
    state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * reward.mean().item()
    return loss


def late_coupling(model, batch, state):
    state["step"] = state.get("step", 0) + 1
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + (coupled(out) if state["step"] > 2 else 0.0)


CENTRES, ENCODER, TEMPERATURE = nn.Parameter(torch.zeros(3, 3)), nn.Linear(6, 6), torch.ones((), requires_grad=True)


def center_loss(model, batch, state):
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + (out - CENTRES[batch[1]]).square().sum(1).mean()


def branch(model, batch, state):
    loss = ce(model, batch)
    return loss * 2 if batch[0].mean() > 0 else loss


def guarded(model, batch, state):
    loss = ce(model, batch)
    return loss if torch.isfinite(loss) else None


def centred_without_gradients(model, batch, state):
    with torch.no_grad():
        center = model(batch[0]).mean(0)
    return F.cross_entropy(model(batch[0]) - center, batch[1])


def scaled_in_evaluation(model, batch, state):
    model.eval()
    scale = model(batch[0]).abs().max().detach()
    model.train()
    return F.cross_entropy(model(batch[0]) / scale, batch[1])


class PythonChance(nn.Module):
    def __init__(self, chance=0.5, generator=random.random):
        super().__init__()
        self.layer, self.chance, self.generator = nn.Linear(6, 3), chance, generator

    def forward(self, x):
        out = self.layer(x)
        return 0.5 * out + 0.5 * out.mean(0) if self.training and self.generator() < self.chance else out


class Mixing(nn.Module):
    """MixStyle of Zhou et al. 2021, on features."""

    def __init__(self):
        super().__init__()
        self.layer, self.beta = nn.Linear(6, 3), torch.distributions.Beta(0.1, 0.1)

    def forward(self, x):
        if random.random() > 0.5:
            return self.layer(x)
        share = self.beta.sample((len(x), 1))
        return self.layer(share * x + (1 - share) * x[torch.randperm(len(x))])


class Storing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind
        self.register_buffer("seen", torch.zeros(6))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.first = True

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.kind == "buffer by data" and self.first:
            self.seen.data.copy_(mean)
        elif self.kind == "frozen parameter":
            self.frozen.data = 0.9 * self.frozen.data + 0.1 * mean
        elif self.kind == "initialized by data" and self.first:
            self.layer.bias.data = -self.layer(x).detach().mean(0)
        self.first = False
        return self.layer(x)


class TableInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(9, 8)), nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(F.embedding(ids, self.table, max_norm=1.0))


class WithMemory(nn.Module):
    """Reads a plain tensor and a number, and has others that it doesn't read."""

    def __init__(self):
        super().__init__()
        self.layer, self.center, self.scale = nn.Linear(6, 3), torch.zeros(6), 1.0
        self.seen, self.last_loss = torch.zeros(6), 0.0

    def forward(self, x):
        return self.layer((x - self.center) * self.scale)


def remembered(what, write):
    """Before each batch but the first, `write` sets something of the module to the batch before."""

    def loop(model, batch, state):
        if "before" in state:
            write(model, state["before"])
        state["before"] = batch[0]
        return F.cross_entropy(model(batch[0]), batch[1])

    return what, loop


REMEMBERED = dict(
    [
        remembered("a center in an attribute", lambda model, x: model.center.copy_(x.mean(0))),
        remembered("a moving center", lambda model, x: model.center.mul_(0.9).add_(0.1 * x.mean(0))),
        remembered("a number in an attribute", lambda model, x: setattr(model, "scale", 0.5 + x.mean().item())),
    ]
)

REFUSED = {
    "x - x.mean().item()": (centered, mlp),
    "x / x.max().item()": (scaled, mlp),
    "loss * float(x.max())": (scaled_by_bare_number, mlp),
    "loss / losses.std().item()": (normed_loss, mlp),
    "standardized in numpy": (standardized, mlp),
    "class weights from numpy": (balanced, mlp),
    "trimmed to the longest": (trimmed, Lstm, "tokens"),
    "-1 for a missing label": (missing_marks, mlp),
    "NaN for a missing target": (missing_nans, mlp, "numbers"),
    "outliers left out": (without_outliers, mlp),
    "a custom function in the loss": (reversed_part, mlp),
    "a custom function in a second backward": (hidden_backward, mlp),
    "a second backward": (second_backward, mlp),
    "a hook on the output": (hooked, mlp),
    "a weighted backward": (weighted_backward, mlp),
    "DINO's center": (dino, mlp),
    "a moving baseline": (baseline, mlp),
    "a coupling that comes later": (late_coupling, mlp),
    "centers outside": (center_loss, mlp),
    "an encoder outside": (lambda m, b, s: F.cross_entropy(m(ENCODER(b[0])), b[1]), mlp),
    "a temperature outside": (lambda m, b, s: F.cross_entropy(m(b[0]) * TEMPERATURE, b[1]), mlp),
    "an encoder before a criterion": (
        lambda m, b, s: F.cross_entropy(m(ENCODER(b[0])), b[1]),
        mlp,
        "classes",
        {"criterion": F.cross_entropy},
    ),
    "another loss than the criterion": (
        lambda m, b, s: coupled(m(b[0])),
        mlp,
        "classes",
        {"criterion": F.cross_entropy},
    ),
    "centered by a forward without gradients": (centred_without_gradients, mlp),
    "scaled by a forward in evaluation": (scaled_in_evaluation, mlp),
    "a branch on the batch": (branch, mlp),
    "if isfinite(loss)": (guarded, mlp),
    "mixing by Python's chance": (ce, PythonChance),
    "mixing by numpy's chance, rarely": (ce, lambda: PythonChance(0.001, np.random.rand)),
    "mixing by torch's chance, rarely": (ce, lambda: PythonChance(0.001, lambda: float(torch.rand(())))),
    "MixStyle": (ce, Mixing),
    "a buffer written past torch": (ce, lambda: Storing("buffer by data")),
    "a frozen parameter that collects": (ce, lambda: Storing("frozen parameter")),
    "a parameter initialized by the batch": (ce, lambda: Storing("initialized by data")),
    "max_norm": (
        lambda m, b, s: F.cross_entropy(m(b[0]).transpose(1, 2), b[1], reduction="none").mean(1).mean(),
        lambda: nn.Sequential(nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 9)),
        "tokens",
    ),
    "max_norm in a module of one's own": (tokens, TableInside, "tokens"),
    **{name: (loop, WithMemory) for name, loop in REMEMBERED.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_couples_records_or_learns_past_the_noise_is_refused(name):
    loop, model, *rest = REFUSED[name]
    with pytest.raises(PrivacyError):
        train(loop, model, *rest[:1], **(rest[1] if len(rest) > 1 else {}))


def test_attributes_that_a_module_does_not_read_may_show_what_came():
    def show(model, x):
        model.seen.add_(x.mean(0))
        model.last_loss = x.mean().item()
        model.center.copy_(x.mean(0))
        model.center.zero_()

    _, loop = remembered("shown", show)
    assert bool(train(loop, WithMemory).seen.any())


@pytest.mark.parametrize("criterion", [None, F.cross_entropy])
@pytest.mark.parametrize("kind", ["buffer by data", "frozen parameter", "initialized by data"])
def test_what_a_module_stored_is_put_back_when_it_is_refused(kind, criterion):
    made = []

    def model():
        made.append(Storing(kind))
        return made[0]

    torch.manual_seed(0)
    before = {name: value.clone() for name, value in Storing(kind).state_dict().items()}
    with pytest.raises(PrivacyError):
        train(ce, model, criterion=criterion)
    assert all(torch.equal(value, before[name]) for name, value in made[0].state_dict().items())


@pytest.mark.parametrize("name", ["centers outside", "an encoder outside", "a temperature outside"])
def test_a_learner_outside_gets_no_gradient_not_even_a_made_up_one(name):
    learners = [CENTRES, *ENCODER.parameters(), TEMPERATURE]
    for learner in learners:
        learner.grad = None
    loop, model, *_ = REFUSED[name]
    with pytest.raises(PrivacyError):
        train(loop, model)
    assert all(learner.grad is None for learner in learners)


def test_attributes_of_a_module_are_after_the_probe_what_they_were_before():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.sizes, self.total = nn.Linear(6, 3), 0, [], torch.zeros(6)

        def forward(self, x):
            self.calls += 1
            self.sizes.append(len(x))
            self.total += x.detach().sum(0)
            return self.layer(x)

    model = train(ce, Counting, steps=1)
    assert model.calls == 1
    assert len(model.sizes) == 1
    assert bool(model.total.isfinite().all())


def test_a_batch_left_out_after_its_loss_was_read_is_refused():
    def bare(model, batch, state):
        loss = ce(model, batch)
        state["finite"] = math.isfinite(loss.item())
        return loss

    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    batches = iter(loader)
    bare(model, next(batches), {})
    with pytest.raises(PrivacyError, match="left out"):
        next(batches)
