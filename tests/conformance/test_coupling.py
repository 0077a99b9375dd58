"""Records that touch each other are refused before a parameter changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance_adapter import one_step


def data():
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def refused(library, model, loss, records=None, **options):
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(library.refusals):
        one_step(library.make_private(model, data() if records is None else records, **options), loss)
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def with_normalization(norm):
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))


def test_batch_normalisation_without_affine_parameters_is_refused(library):
    assert refused(library, with_normalization(nn.BatchNorm1d(4, affine=False)), cross_entropy)


def test_frozen_batch_normalisation_in_training_mode_is_refused(library):
    model = with_normalization(nn.BatchNorm1d(4).requires_grad_(False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert refused(library, model, cross_entropy, optimizer=optimizer)


def test_batch_normalisation_in_evaluation_mode_is_accepted_and_its_buffers_stay(library):
    norm = nn.BatchNorm1d(4).eval()
    norm.requires_grad_(False)
    model = with_normalization(norm)
    buffers = [buffer.clone() for buffer in model.buffers()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = library.make_private(model, data(), optimizer=optimizer)
    one_step(private, cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


class Centered(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.l, self.by = nn.Linear(5, 3), weight

    def forward(self, x):
        return self.l(x - self.by * x.mean(0))


@pytest.mark.parametrize("weight", [1.0, 1e-6])
def test_a_batch_mean_inside_the_model_is_refused_however_small(library, weight):
    assert refused(library, Centered(weight), cross_entropy)


def test_an_in_batch_contrastive_loss_is_refused(library):
    def contrast(model, batch):
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

    assert refused(library, nn.Linear(5, 4), contrast)


def test_mixing_records_at_random_is_refused(library):
    def mixup(model, batch):
        mixed = 0.6 * batch[0] + 0.4 * batch[0][torch.randperm(len(batch[0]))]
        return F.cross_entropy(model(mixed), batch[1])

    assert refused(library, nn.Linear(5, 3), mixup)


def test_class_weights_with_a_mean_normaliser_are_refused(library):
    weight = torch.tensor([1.0, 1.0, 4.0])
    assert refused(library, nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight))


def tokens():
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*torch.randint(0, 7, (2, 8, 4), generator=generator))


def language_model():
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))


def token_mean(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)


def test_a_mean_over_the_tokens_of_the_batch_is_accepted(library):
    """It divides by records × positions; the conformance cases check the numbers."""
    one_step(library.make_private(language_model(), tokens()), token_mean)


def test_a_mean_over_the_tokens_that_are_left_after_a_selection_is_refused(library):
    def selected(model, batch):
        valid = batch[1] != 0
        return F.cross_entropy(model(batch[0])[valid], batch[1][valid])

    assert refused(library, language_model(), selected, tokens())


def test_a_mean_over_each_records_own_tokens_is_accepted(library):
    def record_mean(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1).mean()

    one_step(library.make_private(language_model(), tokens()), record_mean)


def test_a_masked_mean_over_the_batch_is_refused(library):
    def masked(model, batch):
        mask = (batch[1] > 0).float()
        losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return (losses * mask).sum() / mask.sum()

    assert refused(library, language_model(), masked, tokens())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return self.l(x)


def test_a_buffer_that_collects_from_records_is_refused(library):
    model = Counting()
    assert refused(library, model, cross_entropy)
