"""Where a tensor comes from (floor 3): the batch that the loader gave last, an earlier one, or elsewhere.

A batch's own tensors carry a mark, so that a tensor of an earlier batch is known. What torch makes of them is on the
batch's tape.
"""

from torch import Tensor

from sordino.training.structure import leaves_in, tensors_in

__all__ = ["Place", "is_public", "mark", "mark_public", "place_of", "texts_in"]

Place = tuple[int, int]
"""(step, chunk) of the batch that a tensor belongs to."""

_TAG = "_sordino_chunk"
_PUBLIC = "_sordino_public"


def mark(batch: object, place: Place) -> None:
    """Mark the batch's own tensors with their place."""
    for tensor in tensors_in(batch):
        setattr(tensor, _TAG, place)


def place_of(tensor: Tensor) -> Place | None:
    """The place of the batch that `tensor` is known to belong to, None when nothing is known."""
    return getattr(tensor, _TAG, None)


def mark_public(batch: object) -> None:
    """Mark tensors as made without private records."""
    for tensor in tensors_in(batch):
        setattr(tensor, _PUBLIC, True)


def is_public(tensor: Tensor) -> bool:
    """Whether it was marked as made without private records."""
    return getattr(tensor, _PUBLIC, False) is True


def texts_in(batch: object) -> dict[int, object]:
    """Everything in a batch that is neither a tensor nor a number, by identity."""
    return {id(leaf): leaf for leaf in leaves_in(batch) if not isinstance(leaf, Tensor | int | float | None)}
