"""One row where every record should have its own (floor 1, gradients).

A row for the whole batch, position ids or a constant, is expanded to all records. The same shape comes out of
``x[mask]`` when one record is left: expanding that would let this record count once for every record of the batch.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.utils._pytree import tree_flatten

from sordino.errors import RecordCountMismatch

__all__ = ["refuse_lone_input", "refuse_lone_row"]


def refuse_lone_input(args: tuple[object, ...], kwargs: Mapping[str, object], records: int) -> None:
    """Refuse a call of the model whose inputs have one row, when there are more records than one.

    Raises:
        RecordCountMismatch: no input has the records in one of its first two dimensions, and one has a single row.
    """
    # Most models are called with tensors alone.
    bare = not kwargs and all(isinstance(value, Tensor) for value in args)
    leaves = args if bare else tree_flatten((args, dict(kwargs)))[0]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    single = any(tensor.shape[0] == 1 for tensor in inputs)
    if records > 1 and single and not any(records in tensor.shape[:2] for tensor in inputs):
        raise RecordCountMismatch(
            "the model must be called with all records of the batch, got one row. Run the whole batch through the "
            "model, and weigh the losses of records that should not count by zero."
        )


def refuse_lone_row(tensor: Tensor, label: str, records: int) -> None:
    """Refuse to expand a row that was computed from the outputs of captured layers: they had a row per record.

    Raises:
        RecordCountMismatch: the row requires grad.
    """
    if records > 1 and tensor.is_floating_point() and tensor.requires_grad:
        raise RecordCountMismatch(
            f"the input of {label} must have one row per record, got one row that was computed from the records. Keep "
            "one row per record until the loss."
        )
