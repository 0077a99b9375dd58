"""What a loop may do between a batch and the step: a table, each row a loop that somebody writes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loops import Autoencoder, Lstm, Transformer, WithLoss, ce, cnn, dropout, mlp, records, tokens, train
from sordino.training.engine import PrivacyEngine


def annealed(model, batch, state):
    state["step"] = state.get("step", 0) + 1
    out, mean, spread = model(batch[0])
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return F.mse_loss(out, batch[0]) + min(1.0, state["step"] / 100) * divergence


def shown(model, batch, state):
    out = model(batch[0])
    loss = F.cross_entropy(out, batch[1])
    accuracy = (out.argmax(1) == batch[1]).float().mean().item()
    state["sum"] = state.get("sum", 0.0) + loss.item() * len(batch[1])
    state["text"] = f"{loss.item():.3f} {accuracy:.2f} {float(loss.detach()):.3f} {math.exp(loss.item()):.2f}"
    state["scores"] = out.detach().cpu().numpy().argmax(1)
    return loss


def half(model, batch, state):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


def tokens_by_hand(model, batch, state):
    count, length = batch[0].shape
    losses = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")
    return losses.sum() / (count * length)


def masked(model, batch, state):
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    valid = (batch[1] > 0).float()
    return ((losses * valid).sum(1) / valid.sum(1).clamp(min=1)).mean()


def two_backwards(model, batch, state):
    out = model(batch[0])
    F.cross_entropy(out, batch[1]).backward(retain_graph=True)
    (0.1 * out.square().sum(1).mean()).backward()


def warming(model, batch, state):
    state["step"] = state.get("step", 0) + 1
    out = model(batch[0])
    loss = F.cross_entropy(out, batch[1])
    return loss if state["step"] < 2 else loss + 0.1 * out.square().sum(1).mean()


def average_shown(model, batch, state):
    loss = ce(model, batch)
    state["average"] = 0.9 * state.get("average", 0.0) + 0.1 * loss.item()
    state["tensor"] = 0.9 * state.get("tensor", 0.0) + 0.1 * loss.detach()
    return loss


def cached_constant(model, batch, state):
    if "weight" not in state:
        state["weight"] = torch.linspace(0.5, 1.0, 3)
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * state["weight"][batch[1]]).mean()


def smoothed_targets(model, batch, state):
    hard = F.one_hot(batch[1], 3).float()
    return -((0.9 * hard + 0.1 / 3) * F.log_softmax(model(batch[0]), 1)).sum(1).mean()


def distribution(model, batch, state):
    return -torch.distributions.Categorical(logits=model(batch[0])).log_prob(batch[1]).mean()


def augmented(model, batch, state):
    x = batch[0] + 0.1 * torch.randn(batch[0].size(0), 6)
    return F.cross_entropy(model(x * (torch.rand(len(x), 1) > 0.1)), batch[1])


def autograd_backward(model, batch, state):
    torch.autograd.backward(ce(model, batch))


def distilled(model, batch, state):
    with torch.no_grad():
        teacher = model(batch[0]).softmax(1)
    model.eval()
    steady = model(batch[0]).detach()
    model.train()
    out = model(batch[0])
    return F.kl_div(F.log_softmax(out, 1), teacher, reduction="batchmean") + F.mse_loss(out, steady)


ACCEPTED = {
    "distilled from itself": (distilled, dropout),
    "cross entropy": (ce, mlp),
    "dropout": (ce, dropout),
    "convolutions": (ce, cnn, "images"),
    "cross entropy as a sum": (
        lambda m, b, s: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
        mlp,
        "classes",
        {"loss_reduction": "sum"},
    ),
    "none, then mean": (lambda m, b, s: F.cross_entropy(m(b[0]), b[1], reduction="none").mean(), mlp),
    "label smoothing": (lambda m, b, s: nn.CrossEntropyLoss(label_smoothing=0.1)(m(b[0]), b[1]), mlp),
    "smoothed targets": (smoothed_targets, mlp),
    "binary cross entropy": (lambda m, b, s: F.binary_cross_entropy_with_logits(m(b[0]), b[1]), mlp, "bits"),
    "squared error": (lambda m, b, s: F.mse_loss(m(b[0]), b[1]), mlp, "numbers"),
    "huber": (lambda m, b, s: F.huber_loss(m(b[0]), b[1]), mlp, "numbers"),
    "smooth l1": (lambda m, b, s: F.smooth_l1_loss(m(b[0]), b[1]), mlp, "numbers"),
    "several tasks": (lambda m, b, s: ce(m, b) + 0.3 * F.mse_loss(m(b[0]), b[0][:, :3]), mlp),
    "two backward passes": (two_backwards, mlp),
    "torch.autograd.backward": (autograd_backward, mlp),
    "annealed divergence": (annealed, Autoencoder, "numbers"),
    "printed numbers": (shown, mlp),
    "averages for display": (average_shown, mlp),
    "bfloat16": (half, mlp),
    "bfloat16 images": (half, cnn, "images"),
    "language model by record": (tokens, Transformer, "tokens"),
    "language model by hand": (tokens_by_hand, Lstm, "tokens"),
    "masked tokens by record": (masked, Lstm, "tokens"),
    "a loss inside the model": (lambda m, b, s: m(*b)["loss"], WithLoss),
    "a loss that comes later": (warming, mlp),
    "a constant made on the way": (cached_constant, mlp),
    "a distribution of torch": (distribution, mlp),
    "augmentation by chance": (augmented, mlp),
    "declared criterion": (ce, dropout, "classes", {"criterion": nn.CrossEntropyLoss()}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_ordinary_loop_is_accepted_in_every_step(name):
    loop, model, *rest = ACCEPTED[name]
    train(loop, model, *rest[:1], **(rest[1] if len(rest) > 1 else {}))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, images):
        return self.body(images)


class Labeled(nn.Module):
    """A model that makes its own mean loss over shifted tokens, as causal language models do."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)

    def forward(self, ids):
        logits = self.head(self.table(ids))
        shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def pixel_labels(x):
    labels = (x[:, 0] > 0).long()
    labels[0, :2] = -100
    return labels


POSITIONS = {
    "flattened tokens": (
        lambda: nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)),
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=3),
        lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y, ignore_index=3, reduction="none").mean(1),
        lambda g: (torch.randint(0, 9, (8, 6), generator=g),) * 2,
    ),
    "pixels": (
        Segmenter,
        lambda m, x, y: F.cross_entropy(m(x), y),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").flatten(1).mean(1),
        lambda g: (x := torch.randn(8, 1, 4, 4, generator=g), pixel_labels(x)),
    ),
    "log likelihoods by hand": (
        Segmenter,
        lambda m, x, y: F.nll_loss(m(x).log_softmax(1), y),
        lambda m, x, y: F.nll_loss(m(x).log_softmax(1), y, reduction="none").flatten(1).mean(1),
        lambda g: (x := torch.randn(8, 1, 4, 4, generator=g), pixel_labels(x)),
    ),
    "inside the module": (
        Labeled,
        lambda m, x, y: m(x),
        lambda m, x, y: torch.stack([m(row[None]) for row in x]) * 5 / 6,
        lambda g: (torch.randint(0, 9, (8, 6), generator=g), torch.zeros(8)),
    ),
}


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_mean_over_positions_has_each_records_mean_over_all_its_positions(name, microbatch_size):
    """Clipped record by record; a position that is ignored adds nothing and changes no divisor."""
    build, mean, each, made = POSITIONS[name]
    x, y = made(torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = build()
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for place in range(len(x)):
        loss = each(model, x[place : place + 1], y[place : place + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient * min(1.0, 0.2 / max(float(norm), 1e-9)) / len(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=0.2,
        microbatch_size=microbatch_size,
    )
    for batch in loader:
        mean(model, *batch).backward()
        optimizer.step()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_a_label_to_be_ignored_counts_for_nothing_and_changes_no_other_record():
    x, y = records().tensors
    gradients = []
    for labels, options in ((y, {}), (torch.cat([torch.tensor([-100]), y[1:]]), {})):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, labels), batch_size=24),
            noise_multiplier=0.0,
            max_grad_norm=1e6,
            **options,
        )
        (batch,) = loader
        ce(model, batch).backward()
        optimizer.step()
        gradients.append(model.weight.grad.clone())
    torch.manual_seed(0)
    alone = nn.Linear(6, 3)
    F.cross_entropy(alone(x[:1]), y[:1]).backward()
    assert torch.allclose(gradients[0] - gradients[1], alone.weight.grad / 24, atol=1e-6)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse C.* tensor support is in beta state:UserWarning")
def test_a_module_may_hold_a_sparse_matrix(layout):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.matrix = nn.Linear(6, 3), (torch.eye(6) + torch.eye(6).roll(1, 0)).to_sparse(layout=layout)

        def forward(self, x):
            return self.layer((self.matrix @ x.t()).t())

    assert bool(train(ce, Mixing).layer.weight.isfinite().all())
