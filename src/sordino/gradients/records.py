"""Where the records are in a module's inputs and outputs (floor 1, gradients).

Everywhere the first dimension, except in torch's recurrent and attention modules, which have their own conventions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from sordino.errors import RecordCountMismatch
from sordino.gradients.lone import refuse_lone_row

__all__ = ["LayoutOfCall", "layout_of"]

# Where a leaf came from: the position or the name of the argument.
Place = int | str


@dataclass(frozen=True, kw_only=True)
class LayoutOfCall:
    """Record dimensions of a call; this class is the plain convention, records first.

    Args:
        label: the module's name, for messages.
        records: number of records B.
    """

    label: str
    records: int

    def places(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Place]:
        """For every leaf of (args, kwargs) the argument it belongs to."""
        places: list[Place] = []
        for position, value in enumerate(args):
            places += [position] * len(tree_flatten(value)[0])
        for name, value in kwargs.items():
            places += [name] * len(tree_flatten(value)[0])
        return places

    def input_dim(self, place: Place) -> int | None:  # noqa: ARG002
        """The record dimension of an input, or None when it holds no records."""
        return 0

    def output_dim(self, leaf: int) -> int:  # noqa: ARG002
        """The record dimension of an output leaf."""
        return 0

    def keep_input(self, tensor: Tensor, place: Place) -> tuple[Tensor, int | None] | None:
        """(the tensor with records first, where the record dimension was), or None for a constant."""
        dim = self.input_dim(place)
        if dim is None or tensor.dim() == 0:
            return None
        self._check(tensor, dim, "input")
        if tensor.shape[dim] != self.records:
            refuse_lone_row(tensor, self.label, self.records)
        return self.spread(tensor, dim).movedim(dim, 0), dim

    def spread(self, tensor: Tensor, dim: int) -> Tensor:
        """`tensor` with its record dimension expanded from 1 to B where it was broadcast."""
        self._check(tensor, dim, "output")
        sizes = list(tensor.shape)
        sizes[dim] = self.records
        return tensor.expand(sizes)

    def _check(self, tensor: Tensor, dim: int, what: str) -> None:
        if tensor.dim() <= dim or tensor.shape[dim] not in (1, self.records):
            raise RecordCountMismatch(
                f"an {what} of {self.label} must have the records as its {('first', 'second')[dim]} dimension, "
                "got another size there. Keep one row per record until the loss."
            )


@dataclass(frozen=True, kw_only=True)
class _Recurrent(LayoutOfCall):
    """nn.RNN, nn.LSTM, nn.GRU: states always have the records second."""

    batch_first: bool

    def input_dim(self, place: Place) -> int | None:
        return 0 if self.batch_first and place in (0, "input") else 1

    def output_dim(self, leaf: int) -> int:
        return 0 if self.batch_first and leaf == 0 else 1


@dataclass(frozen=True, kw_only=True)
class _Attention(LayoutOfCall):
    """nn.MultiheadAttention: masks are shared, per record, or per record and head."""

    batch_first: bool
    heads: int

    def input_dim(self, place: Place) -> int | None:
        if place in (0, 1, 2, "query", "key", "value"):
            return 0 if self.batch_first else 1
        return 0 if place in (3, "key_padding_mask") else None

    def output_dim(self, leaf: int) -> int:
        return 0 if self.batch_first or leaf > 0 else 1

    def keep_input(self, tensor: Tensor, place: Place) -> tuple[Tensor, int | None] | None:
        if place in (5, "attn_mask") and tensor.dim() == 3:
            if tensor.shape[0] != self.records * self.heads:
                self._check(tensor, 0, "input")
            return tensor.unflatten(0, (self.records, self.heads)), None
        return super().keep_input(tensor, place)


def layout_of(module: nn.Module, label: str, records: int) -> LayoutOfCall:
    """The convention that `module` follows."""
    if isinstance(module, nn.RNNBase):
        return _Recurrent(label=label, records=records, batch_first=module.batch_first)
    if isinstance(module, nn.MultiheadAttention):
        return _Attention(label=label, records=records, batch_first=module.batch_first, heads=module.num_heads)
    return LayoutOfCall(label=label, records=records)
