"""Whether two results of a pipeline are one and the same (room `audit`, floor 4)."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, nn

__all__ = ["same"]

_DEEPEST = 12


def same(one: object, other: object, *, depth: int = 0) -> bool:
    """Whether two results are equal to the last bit: tensors, arrays, modules, estimators, and nestings of them.

    Of an object that is none of these the public attributes are compared, and private ones are not: what a caller may
    rely on is what would be released. NaN equals NaN.
    """
    if depth > _DEEPEST or type(one) is not type(other):
        return type(one) is type(other)
    match one, other:
        case (Tensor(), Tensor()):
            return same(one.detach().cpu().numpy(), other.detach().cpu().numpy(), depth=depth + 1)
        case (np.ndarray(), np.ndarray()):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if one.dtype == object:
                return all(same(a, b, depth=depth + 1) for a, b in zip(one.flat, other.flat, strict=True))
            return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        case (nn.Module(), nn.Module()):
            return same(dict(one.state_dict()), dict(other.state_dict()), depth=depth + 1)
        case (Mapping(), Mapping()):
            return list(one) == list(other) and all(same(one[key], other[key], depth=depth + 1) for key in one)
        case (str() | bytes() | int() | bool() | None, _):
            return one == other
        case (float() | np.generic(), _):
            return bool(one == other or (one != one and other != other))
        case (Sequence(), Sequence()):
            return len(one) == len(other) and all(same(a, b, depth=depth + 1) for a, b in zip(one, other, strict=True))
        case _:
            return _same_attributes(one, other, depth)


def _same_attributes(one: object, other: object, depth: int) -> bool:
    if not hasattr(one, "__dict__") or callable(one):
        return True
    names = [name for name in vars(one) if not name.startswith("_") and name not in {"randomness", "seconds"}]
    if names != [name for name in vars(other) if not name.startswith("_") and name not in {"randomness", "seconds"}]:
        return False
    return all(same(getattr(one, name), getattr(other, name), depth=depth + 1) for name in names)
