"""Batches of synthetic records, some of which hold what they are made to hold."""

import pytest
import torch

from sordino.training.probing.synthetic import AdversarialValue, SyntheticRecords

STRUCTURE = torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int16), torch.zeros(2, dtype=torch.long), torch.ones(7)
KINDS = [
    AdversarialValue(floats=1e4),
    AdversarialValue(floats=torch.nan, tensor=0),
    AdversarialValue(integers=-100),
    AdversarialValue(integers="range", tensor=1),
    AdversarialValue(floats=-1e4, integers=5, tensor=2),
]


@pytest.mark.parametrize("shift", range(len(KINDS)))
def test_each_record_holds_its_own_value_and_the_others_what_they_held(shift):
    records = SyntheticRecords(STRUCTURE, rows=2, count=12, pattern="mixed")
    places = [3, 1, 1, 15, 0, 7, 7, 22, 9, 4, 2, 11]
    poisons = {position: KINDS[(position + shift) % len(KINDS)] for position in (0, 2, 3, 5, 6, 7, 10, 11)}
    held, plain = records.batch(places, poisons), records.batch(places)
    for place, (got, wanted) in enumerate(zip(held[:3], plain[:3], strict=True)):
        for position in range(len(places)):
            row = wanted[position]
            row = poisons[position].applied(row, place) if position in poisons else row
            assert torch.equal(got[position].nan_to_num(7.0), row.nan_to_num(7.0))
    assert torch.equal(held[3], plain[3])
