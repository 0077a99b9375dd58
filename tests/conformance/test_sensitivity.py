"""One record moves the clipped sum by at most C (added or removed) or 2C (replaced), whatever the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance.adapter import clipped_sum, distance, one_step

C = 0.7
LOSSES = {
    "mse": F.mse_loss,
    "bce with logits": lambda out, y: F.binary_cross_entropy_with_logits(out, (y > 0).float()),
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def data(outputs=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 5, generator=generator), torch.randn(16, outputs, generator=generator)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_replacing_one_record_by_1000_times_itself_moves_the_clipped_sum_by_at_most_twice_the_norm(
    library, name, outputs
):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(5, outputs), data(outputs)

    def loss(model, batch):
        return LOSSES[name](model(batch[0]), batch[1])

    before = clipped_sum(library, model, (x, y), loss, max_grad_norm=C)
    x[0] *= 1000
    y[0] *= 1000
    after = clipped_sum(library, model, (x, y), loss, max_grad_norm=C)
    assert distance(before, after) <= 2 * C * (1 + 1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_leaving_one_record_out_moves_the_clipped_sum_by_at_most_the_norm(library, name):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(5, 1), data()
    x[0] *= 1000

    def loss(model, batch):
        return LOSSES[name](model(batch[0]), batch[1])

    with_it = clipped_sum(library, model, (x, y), loss, max_grad_norm=C)
    without = clipped_sum(library, model, (x[1:], y[1:]), loss, max_grad_norm=C)
    assert distance(with_it, without) <= C * (1 + 1e-5)


def test_a_loss_that_broadcasts_targets_over_the_batch_is_refused(library):
    x, y = data()
    with pytest.raises(library.refusals):
        clipped_sum(
            library, nn.Linear(5, 1), (x, y[:, 0]), lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), max_grad_norm=C
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: F.mse_loss(model(x), y),
        lambda model, x, y: F.mse_loss(model(x), y, reduction="none"),
        lambda model, x, y: F.mse_loss(model(x), y.T, reduction="none"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_is_not_one_value_per_record_is_refused_natively_with_the_shape_expected(library, loss):
    with pytest.raises(library.refusals, match=r"\(B,\)"):
        library.fit(nn.Linear(5, 1), data(), loss)


def test_a_step_without_a_clipped_backward_raises_and_changes_nothing(library):
    model, (x, y) = nn.Linear(5, 1), data()
    private = library.make_private(model, TensorDataset(x, y))
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(library.refusals):
        private.optimizer.step()
    next(iter(private.loader))
    with pytest.raises(library.refusals):
        private.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_optimizer_that_the_user_built_first_is_private_or_refuses(library):
    model, (x, y) = nn.Linear(5, 1), data()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    private = library.make_private(model, TensorDataset(x, y), optimizer=own, noise_multiplier=1000.0)
    before = [p.clone() for p in model.parameters()]
    for batch in private.loader:
        F.mse_loss(private.model(batch[0]), batch[1]).backward()
        try:
            own.step()
        except library.refusals:
            return
    moved = distance(list(model.parameters()), before)
    assert moved > 1, "noise of standard deviation 1000 / 16 must be in the step"


def test_another_optimizer_over_the_same_parameters_is_refused(library):
    model, (x, y) = nn.Linear(5, 1), data()
    other = torch.optim.Adam([model.bias], lr=1.0)
    private = library.make_private(model, TensorDataset(x, y))
    one_step(private, lambda m, b: F.mse_loss(m(b[0]), b[1]))
    before = model.bias.clone()
    with pytest.raises(library.refusals):
        other.step()
    assert torch.equal(model.bias, before)


def test_an_absurd_noise_multiplier_destroys_accuracy_in_the_trainer_too(library):
    sizes = []
    for noise_multiplier in (0.1, 1000.0):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        loss = lambda m, x, y: F.mse_loss(m(x), y, reduction="none").flatten()  # noqa: E731
        library.fit(model, data(), loss, noise_multiplier=noise_multiplier)
        sizes.append(float(model.weight.detach().norm()))
    assert sizes[1] > 20 * sizes[0]


def test_an_absurd_noise_multiplier_destroys_accuracy(library):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    accuracies = {}
    for noise_multiplier in (0.1, 1000.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private = library.make_private(
            model, TensorDataset(x, y), optimizer=optimizer, batch_size=64, noise_multiplier=noise_multiplier, seed=4
        )
        for _ in range(10):
            for features, labels in private.loader:
                F.cross_entropy(model(features), labels).backward()
                private.optimizer.step()
        with torch.no_grad():
            size = float(model.weight.norm())
            accuracies[noise_multiplier] = (float((model(x).argmax(1) == y).double().mean()), size)
    assert accuracies[0.1][0] > 0.9
    assert accuracies[1000.0][1] > 20 * accuracies[0.1][1], "the weights must be mostly noise"
