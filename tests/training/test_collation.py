"""`collate_fn` is a part of the mechanism: rows come from their own records, shapes are public, no value is carried."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from sordino.errors import CoupledRecords, InvalidArgument, RecordCountMismatch
from sordino.training.collation import Collation
from sordino.training.probing.padding import PaddedTensor
from sordino.training.pytree import tensors_in

EXAMPLE = (torch.full((4,), 7.0), 1)


def with_features(change):
    def collate(items):
        features, labels = default_collate(items)
        return change(features), labels

    return collate


def sorted_by_value(features):
    return features[features[:, 0].argsort()]


MIXING = {
    "mixup": lambda x: 0.5 * x + 0.5 * x.roll(1, 0),
    "mean": lambda x: 0.3 * x + 0.7 * x.mean(0),
    "weak mean": lambda x: x - 1e-6 * x.mean(0),
    "standardized": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6),
    "sorted": sorted_by_value,
    "flipped": lambda x: x.flip(0),
    "clipped at a far value of the batch": lambda x: x / x.abs().max() if bool((x.abs() > 1e4).any()) else x,
    "missing values filled with the batch's mean": lambda x: torch.where(x.isnan(), x.nanmean(0), x),
    "divided by the number of records": lambda x: x / len(x),
    "mixed half of the time": lambda x: x + x.mean(0) if random.random() < 0.5 else x,
    "mixed one time in ten": lambda x: x + x.mean(0) if float(torch.rand(())) < 0.1 else x,
    "mixed with numpy": lambda x: x + x.mean(0) if np.random.rand() < 0.5 else x,
}


@pytest.mark.parametrize("name", MIXING)
def test_a_row_that_depends_on_another_record_is_refused(name):
    with pytest.raises(CoupledRecords):
        Collation(with_features(MIXING[name]), EXAMPLE)


KEEPING = {
    "scaled": lambda x: x / 255,
    "normalized within each record": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6),
    "noisy": lambda x: x + 0.1 * torch.randn_like(x),
    "masked at random": lambda x: x * (torch.rand(x.shape) < 0.9),
    "with a position": lambda x: torch.cat([x, torch.ones(len(x), 1)], 1),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_row_made_of_its_own_record_is_accepted(name):
    layout = Collation(with_features(KEEPING[name]), EXAMPLE).layout
    assert layout.empty[0].shape[0] == 0


def padded(items):
    return nn.utils.rnn.pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)


def padded_to_a_multiple_of_64(items):
    batch = padded(items)
    return F.pad(batch, (0, -batch.shape[1] % 64))


def padded_to_a_public_length(items):
    return torch.stack([F.pad(torch.as_tensor(item)[:32], (0, max(32 - len(item), 0))) for item in items])


SEQUENCES = {"tensor": torch.ones(5).long(), "list": [3, 1, 4, 1, 5], "array": np.ones(5, dtype=np.int64)}


def padded_in_front(items):
    longest = max(len(item) for item in items)
    return torch.stack([F.pad(torch.as_tensor(item), (longest - len(item), 0), value=9) for item in items])


def with_a_square_mask(items):
    batch = padded(items)
    length = batch.shape[1]
    masks = [F.pad(torch.ones(len(item), len(item)), (0, length - len(item)) * 2) for item in items]
    return {"ids": batch, "mask": torch.stack(masks)}


PADDING = {
    "at the end": (padded, {0: PaddedTensor(dims=(1,), fill=0, in_front=False)}),
    "to a multiple": (padded_to_a_multiple_of_64, {0: PaddedTensor(dims=(1,), fill=0, in_front=False)}),
    "in front": (padded_in_front, {0: PaddedTensor(dims=(1,), fill=9, in_front=True)}),
    "in two dimensions": (
        with_a_square_mask,
        {
            0: PaddedTensor(dims=(1,), fill=0, in_front=False),
            1: PaddedTensor(dims=(1, 2), fill=0.0, in_front=False),
        },
    ),
}


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("name", PADDING)
def test_padding_to_the_longest_record_is_described(kind, name):
    collate, wanted = PADDING[name]
    found = Collation(collate, SEQUENCES[kind]).padding
    assert found is not None
    assert found.tensors == wanted
    assert found.may_vary is None


def filled_with_the_largest(items):
    largest = max(int(torch.as_tensor(item).max()) for item in items)
    longest = max(len(item) for item in items)
    return torch.stack([F.pad(torch.as_tensor(item), (0, longest - len(item)), value=largest) for item in items])


def repeated_to_the_longest(items):
    longest = max(len(item) for item in items)
    return torch.stack([torch.as_tensor(item).repeat(longest)[:longest] for item in items])


def cut_to_the_shortest(items):
    return torch.stack([torch.as_tensor(item)[: min(map(len, items))] for item in items])


@pytest.mark.parametrize("collate", [filled_with_the_largest, repeated_to_the_longest, cut_to_the_shortest])
def test_what_fits_lengths_in_another_way_must_give_batches_of_one_length(collate):
    collation = Collation(collate, SEQUENCES["tensor"])
    assert collation.padding is None
    collation.layout.check(collate([torch.ones(5).long()] * 3), 3, collation.padding)
    with pytest.raises(CoupledRecords, match="public length") as refusal:
        collation.layout.check(collate([torch.ones(4).long()] * 3), 3, collation.padding)
    assert not any(character.isdigit() for character in str(refusal.value))


def test_a_length_told_beside_the_batch_is_refused():
    def told(items):
        return padded(items), max(map(len, items))

    with pytest.raises(CoupledRecords, match="public length"):
        Collation(told, SEQUENCES["tensor"])


def test_where_padding_matters_a_batch_of_another_length_is_refused():
    collation = Collation(padded, SEQUENCES["tensor"])
    collation.padding.may_vary = False
    collation.layout.check(torch.ones(3, 5).long(), 3, collation.padding)
    with pytest.raises(CoupledRecords, match="public length"):
        collation.layout.check(torch.ones(3, 6).long(), 3, collation.padding)
    assert not collation.padding.varies


@pytest.mark.parametrize("kind", SEQUENCES)
def test_padding_to_a_public_length_is_accepted(kind):
    assert Collation(padded_to_a_public_length, SEQUENCES[kind]).layout.empty.shape == (0, 32)


def test_a_batch_of_another_shape_is_refused_without_telling_the_shape():
    layout = Collation(default_collate, EXAMPLE).layout
    layout.check([torch.zeros(3, 4), torch.zeros(3).long()], 3)
    for batch in (
        [torch.zeros(3, 5), torch.zeros(3).long()],
        [torch.zeros(3, 4), torch.zeros(3)],
        [torch.zeros(3, 4)],
        [torch.zeros(2, 4), torch.zeros(3).long()],
    ):
        with pytest.raises(CoupledRecords) as refusal:
            layout.check(batch, 3)
        assert not any(character.isdigit() for character in str(refusal.value))


def test_a_value_of_the_whole_batch_is_refused():
    def with_scale(items):
        return {"x": torch.stack([item[0] for item in items]), "scale": max(float(item[0].max()) for item in items)}

    with pytest.raises(CoupledRecords, match="public constant"):
        Collation(with_scale, EXAMPLE)
    with pytest.raises(CoupledRecords, match="public constant"):
        Collation(lambda items: {"x": torch.stack([item[0] for item in items]), "n": len(items)}, EXAMPLE)


def test_a_batch_without_records_first_is_refused():
    with pytest.raises(RecordCountMismatch):
        Collation(lambda _: torch.zeros(3, 3), EXAMPLE)


@dataclasses.dataclass
class Sentence:
    ids: torch.Tensor
    words: list


def usual(items):
    return {
        "ids": torch.stack([item["ids"] for item in items]),
        "pair": (torch.tensor([item["label"] for item in items]), [item["name"] for item in items]),
        "sentence": Sentence(torch.stack([item["ids"] for item in items]), [item["name"] for item in items]),
        "boxes": [{"box": item["boxes"]} for item in items],
        "scale": torch.tensor(3.0),
        "kind": "public",
    }


ITEM = {"ids": torch.full((7,), 9), "label": 5, "name": "Ada", "boxes": torch.full((2, 4), 8.0)}


def test_every_usual_structure_has_an_empty_batch_that_holds_constants_only():
    empty = Collation(usual, ITEM).layout.empty
    assert empty["ids"].shape == (0, 7)
    assert empty["ids"].dtype == torch.long
    assert empty["pair"][0].shape == (0,)
    assert empty["pair"][1] == []
    assert empty["sentence"].ids.shape == (0, 7)
    assert empty["sentence"].words == []
    assert empty["boxes"] == []
    assert empty["scale"] == 3
    assert empty["kind"] == "public"


def test_made_up_records_hold_nothing_of_the_item_that_shows_their_structure():
    batch = Collation(usual, ITEM).substitute(3)
    assert batch["ids"].shape == (3, 7)
    assert all(float(tensor.max()) <= 1 for tensor in tensors_in({**batch, "scale": None}))
    assert "Ada" not in batch["pair"][1]


def test_items_of_unknown_kinds_need_public_ones():
    class Image:
        def __init__(self, value):
            self.value = value

    def collate(items):
        return torch.tensor([item.value for item in items])

    with pytest.raises(CoupledRecords, match="public_records"):
        Collation(collate, Image(1.0))
    layout = Collation(collate, public_records=[Image(float(place)) for place in range(5)]).layout
    assert layout.empty.shape == (0,)
    with pytest.raises(InvalidArgument, match="public_records"):
        Collation(collate, public_records=[Image(1.0)])
    with pytest.raises(CoupledRecords):
        Collation(lambda items: collate(items).cumsum(0), public_records=[Image(float(place)) for place in range(5)])


def test_a_function_that_needs_real_items_asks_for_public_ones():
    numbers = {"cat": 0, "dog": 1}

    def collate(items):
        return torch.tensor([numbers[item] for item in items])

    with pytest.raises(CoupledRecords, match="public_records"):
        Collation(collate, "cat")
    Collation(collate, public_records=["cat", "dog", "dog", "cat", "cat"])


def test_trying_a_function_changes_no_random_state_and_no_item():
    def popping(items):
        return torch.stack([item.pop("x") for item in items]) + torch.rand(len(items), 4)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    example = {"x": torch.ones(4)}
    Collation(popping, example)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(example["x"], torch.ones(4))
