"""Records whose code raises, and datasets that fetch many at once."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from sordino.training.engine import PrivacyEngine
from sordino.training.fit import fit
from sordino.training.plan import PerformanceOptions, Plan

_COUNT = 8
_ODD = 5


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def raising_loss(model, x, y):
    if bool((y == 7).any()):
        raise ValueError(f"label 7 in {y.tolist()}")
    return loss(model, x, y)


class Records(Dataset):
    """Record `_ODD` may be odd: it can't be read, can't be collated, or its loss can't be computed."""

    def __init__(self, kind):
        generator = torch.Generator().manual_seed(0)
        self.x, self.kind = torch.randn(_COUNT, 4, generator=generator), kind
        self.y = torch.arange(_COUNT) % 3
        if kind == "loss":
            self.y[_ODD] = 7

    def __len__(self):
        return _COUNT

    def __getitem__(self, index):
        if self.kind == "item" and index == _ODD:
            raise KeyError(f"label {float(self.x[index, 0])}")
        return self.x[index], self.y[index]


def collate(items):
    batch = default_collate(items)
    if bool((batch[0] == SPECIAL).any()):
        raise ValueError(f"odd value {SPECIAL}")
    return batch


SPECIAL = 12345.0


def plan():
    return Plan(
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        sample_rate=1.0,
        steps=1,
        expected_batch_size=float(_COUNT),
        delta=1e-5,
    )


def trained(data, *, loss=loss, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    fit(model, loss, data, plan(), optimizer=lambda held: torch.optim.SGD(held, lr=1.0), progress=False, **options)
    return model.weight.detach()


class Without(Dataset):
    """The same records without the odd one."""

    def __init__(self, records):
        self.records = records
        self.kept = [index for index in range(_COUNT) if index != _ODD]

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, index):
        return self.records.x[self.kept[index]], self.records.y[self.kept[index]]


@pytest.mark.parametrize("kind", ["item", "loss", "collate"])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_record_whose_code_raises_counts_as_zero_and_training_goes_on(kind, microbatch_size):
    records = Records(kind)
    options = {"loss": raising_loss, "performance": PerformanceOptions(microbatch_size=microbatch_size)}
    if kind == "collate":
        records.x[_ODD] = SPECIAL
        options["collate_fn"] = collate
    found = trained(records, **options)
    wanted = trained(Without(Records("none")), loss=loss)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_cannot_be_read_is_left_out_of_an_engines_batches(workers):
    torch.manual_seed(0)
    model, engine = nn.Linear(4, 3), PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(Records("item"), batch_size=_COUNT, num_workers=workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        sizes.append(x.size(0))
    assert sizes == [_COUNT - 1]


class Meeting(Records):
    """`__getitems__` lets the records of one call meet."""

    def __init__(self):
        super().__init__("none")
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(len(indices))
        x = self.x[indices]
        return list(zip(x - x.mean(0), self.y[indices], strict=True))


def test_many_items_are_fetched_one_by_one_so_that_no_records_meet():
    records = Meeting()
    trained(records)
    assert set(records.calls) == {1}


def test_an_arrays_own_fetching_gives_what_single_items_give(tmp_path):
    from sordino.data import MappedArrays
    from sordino.training.record_source import fetch_items

    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    arrays = MappedArrays(tmp_path / "x.npy")
    together = fetch_items(arrays, [3, 1])
    assert all(np.array_equal(a[0], arrays[i][0]) for a, i in zip(together, [3, 1], strict=True))
