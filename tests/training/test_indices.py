"""Indices outside their table raise before a kernel reads them."""

import pytest
import torch
from torch.nn import functional as F

from sordino.training.probing.torch_modes import IndexBoundsCheck

TABLE = torch.arange(12.0).view(4, 3)


def one(value):
    return torch.tensor([value])


READS = {
    "embedding": lambda i: F.embedding(one(i), TABLE),
    "a bag": lambda i: F.embedding_bag(one(i)[None], TABLE),
    "rows": lambda i: TABLE.index_select(0, one(i)),
    "gather": lambda i: TABLE.gather(0, one(i).expand(1, 3)),
    "brackets": lambda i: TABLE[one(i), one(0)],
    "scatter": lambda i: torch.zeros(4).scatter(0, one(i), 1.0),
    "labels": lambda i: F.cross_entropy(TABLE[:1].repeat(1, 2)[:, :4], one(i)),
    "symbols": lambda i: F.ctc_loss(torch.zeros(5, 1, 4).log_softmax(2), one(i)[None], one(5), one(1)),
}


@pytest.mark.parametrize("name", READS)
def test_an_index_inside_is_read_and_one_outside_raises(name):
    with IndexBoundsCheck():
        READS[name](1)
        for outside in (4, 999, -7):
            with pytest.raises((IndexError, RuntimeError)):
                READS[name](outside)


def test_a_label_to_be_ignored_and_an_index_from_the_end_are_inside():
    with IndexBoundsCheck():
        assert float(F.cross_entropy(TABLE[:2], torch.tensor([-100, 1]))) > 0
        assert torch.equal(TABLE[torch.tensor([-1])], TABLE[3:])
