"""Tensors that a loop brings along besides its batch (floor 3): what can be told from their values and memory."""

import torch
from torch import Tensor

__all__ = ["counts_records", "memory_of", "says_nothing"]


def memory_of(tensor: Tensor) -> int:
    """Where the tensor's memory begins; views of one tensor have it in common."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # No memory of its own: then it could lie in any.


def counts_records(value: Tensor) -> bool:
    """Whether it is 0, 1, 2, …: positions of records, which say nothing about them."""
    integer = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    return value.dim() == 1 and integer and bool((value == torch.arange(len(value), device=value.device)).all())


def says_nothing(value: Tensor) -> bool:
    """Whether it holds 0, 1, 2, …, or nothing but zeros or nothing but ones."""
    return counts_records(value) or bool((value == 0).all()) or bool((value == 1).all())
