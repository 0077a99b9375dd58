"""Clipped sums of a sharded model that are scattered while they are formed (floor 3): no process keeps a whole one.

A chunk's sums arrive layer by layer. As soon as those of one exchange are there, all processes add them up and each
keeps its rows. The order of the exchanges is agreed on once, so processes never wait for different parameters: who has
no records, or meets the layers in another order, gives zeros or waits with what comes later in it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sordino.training.sums.bounds import sum_dtype

if TYPE_CHECKING:
    from sordino.training.processes.sharded import Shards

__all__ = ["ScatteredSums"]


class ScatteredSums(dict[nn.Parameter, Tensor]):
    """Where a chunk's whole sums are put: they are taken out again by and by, and this process's rows are kept.

    Guarantee: releases nothing. After `end_chunk` in all processes, the rows of all together are the sums of every
    chunk so far, each entry once.

    Args:
        shards: of the model.
        parameters: whole ones, all that are trained.
    """

    def __init__(self, shards: "Shards", parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._shards, self._parameters = shards, list(parameters)
        self.rows: dict[nn.Parameter, Tensor] = {}
        self._arrived: list[nn.Parameter] = []
        self._left: list[list[nn.Parameter]] = []
        self._begin_chunk()

    def __setitem__(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Take one sum of the chunk, and exchange those that are next in order and complete."""
        super().__setitem__(parameter, value)
        self._arrived.append(parameter)
        while self._left and all(each in self for each in self._left[0]):
            self._exchange(self._left.pop(0))

    def end_chunk(self) -> None:
        """Exchange what is left of the chunk; every process calls it for every chunk."""
        if not self._left and not self._shards.has_order(self._parameters):
            self._shards.agree_on_order(self._parameters, self._arrived)
            self._begin_chunk()
        while self._left:
            self._exchange(self._left.pop(0))
        # A layer that was used again after its sum was exchanged has added to it.
        for bucket in self._shards.late(self._parameters, self):
            self._exchange(bucket)
        self._begin_chunk()

    def _begin_chunk(self) -> None:
        self._arrived = []
        known = self._shards.has_order(self._parameters)
        self._left = self._shards.in_order(self._parameters) if known else []

    def _exchange(self, bucket: list[nn.Parameter]) -> None:
        sums = {parameter: self._taken(parameter) for parameter in bucket}
        for parameter, rows in zip(bucket, self._shards.summed(bucket, sums), strict=True):
            held = self.rows.get(parameter)
            self.rows[parameter] = rows if held is None else held.add_(rows)

    def _taken(self, parameter: nn.Parameter) -> Tensor:
        value, dtype = self.pop(parameter, None), sum_dtype(parameter)
        return torch.zeros_like(parameter, dtype=dtype) if value is None else value.to(dtype)
