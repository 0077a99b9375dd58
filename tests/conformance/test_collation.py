"""How batches are made of records is a part of the mechanism: one record must not reach another there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from conformance_adapter import one_step
from sordino.training.fit import fit
from sordino.training.plan import Plan


class Sequences(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(4 + 40 * (index == 1)).long()


def dynamic(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def fixed(items):
    return torch.stack([F.pad(item[:20], (0, 20 - len(item[:20]))) for item in items])


def in_a_dict(collate):
    return lambda items: {"input_ids": collate(items), "labels": collate(items)}


def language_model():
    return nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))


def token_losses(model, ids, labels):
    return F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none").mean(1)


def test_padding_to_the_longest_record_of_a_batch_is_refused(library):
    loader = DataLoader(Sequences(), batch_size=16, collate_fn=in_a_dict(dynamic))
    with pytest.raises(library.refusals, match="public length"):
        one_step(library.make_private(language_model(), loader), lambda m, b: token_losses(m, *b.values()).mean())


def test_padding_to_a_public_length_trains(library):
    loader = DataLoader(Sequences(), batch_size=16, collate_fn=in_a_dict(fixed))
    one_step(library.make_private(language_model(), loader), lambda m, b: token_losses(m, *b.values()).mean())


@pytest.mark.parametrize("collate", [dynamic, fixed])
def test_the_native_path_asks_the_same_of_a_collate_function(library, collate):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=16.0, delta=1e-5)

    def loss(model, batch):
        return token_losses(model, *batch.values())

    def run():
        fit(language_model(), loss, Sequences(), plan, collate_fn=in_a_dict(collate), progress=False)

    if collate is fixed:
        run()
    else:
        with pytest.raises(library.refusals, match="public length"):
            run()


class Labeled(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((5,), float(index)), index % 3


def mixup(items):
    x, y = default_collate(items)
    y = F.one_hot(y, 3).float()
    return 0.5 * x + 0.5 * x.roll(1, 0), 0.5 * y + 0.5 * y.roll(1, 0)


def standardized(items):
    x, y = default_collate(items)
    return (x - x.mean(0)) / (x.std(0) + 1e-6), y


@pytest.mark.parametrize("collate", [mixup, standardized])
def test_a_collate_function_that_mixes_records_is_refused(library, collate):
    loader = DataLoader(Labeled(), batch_size=16, collate_fn=collate)
    with pytest.raises(library.refusals, match="own item"):
        one_step(library.make_private(nn.Linear(5, 3), loader), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
