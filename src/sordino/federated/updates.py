"""A client's update as named float tensors (floor 4, federated): what may leave a client, and nothing else.

Only trained floating-point parameters are on the list. Buffers, counts of examples, losses and batch statistics stay
where they are: no noise covers them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["GivenUpdate", "Update", "as_tensors", "clipped_update", "difference", "shared_parameters"]

Update: TypeAlias = Mapping[str, Tensor]
"""Name of a shared parameter ↦ how far the client wants it moved, in the parameter's shape."""

GivenUpdate: TypeAlias = Mapping[str, npt.ArrayLike | Tensor] | Sequence[npt.ArrayLike | Tensor]
"""An update as transports carry it: by name, or a list in the order of the shared parameters; tensors, or arrays."""


def as_tensors(update: object, names: Collection[str]) -> dict[str, Tensor]:
    """An update with its numbers, whatever arrays hold them, as named tensors; their values are exact.

    Args:
        update: a mapping of names, or a list in the order of `names`; each entry a tensor, a NumPy array, anything
            that NumPy makes an array of numbers of, or None where the client gave nothing.
        names: of the shared parameters.

    Returns:
        The tensors. Empty for None, and for a list of another length: no update of the form that was asked for.

    Raises:
        InvalidArgument: the update or an entry is of a type that holds no real numbers. The message names the type.
    """
    if isinstance(update, list | tuple):
        update = dict(zip(names, update, strict=True)) if len(update) == len(names) else None
    if update is None:
        return {}
    if not isinstance(update, Mapping):
        raise InvalidArgument(
            "update must be a mapping of parameters' names to tensors or arrays, or a list of them, got "
            f"{type(update).__name__}. Convert it first."
        )
    return {name: _as_tensor(value) for name, value in update.items() if value is not None}


def _as_tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach().dequantize() if value.is_quantized else value.detach()
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # lists of different lengths
            array = np.array(None)
        if array.dtype.kind not in "biuf":
            raise InvalidArgument(
                "update must hold tensors or arrays of real numbers, got "
                f"{type(value).__name__}. Convert its entries with torch.as_tensor or numpy.asarray."
            )
        # A copy in the machine's byte order, of a type that torch has.
        has_torch = array.dtype.kind == "f" and array.itemsize <= 8
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=") if has_torch else np.float64))
    if tensor.is_complex():
        raise InvalidArgument("update must hold real numbers, got complex ones. Send their parts.")
    # Types of eight bits hold numbers and have no arithmetic.
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.double()


def shared_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that clients train and send, by name: those that require gradients.

    Raises:
        InvalidArgument: there are none, or one is not of real floating-point numbers.
    """
    shared = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not shared:
        raise InvalidArgument(
            "model must have a parameter that requires gradients, got none. Unfreeze what is learned."
        )
    for name, parameter in shared.items():
        if not parameter.is_floating_point():
            raise InvalidArgument(f"{name} must be of floating-point numbers, got {parameter.dtype}. Freeze it.")
    return shared


def difference(after: nn.Module, before: Update) -> dict[str, Tensor]:
    """How far the shared parameters of `after` are from `before`: the update that a client would send.

    Args:
        after: the client's model.
        before: the parameters that the server gave, by name.
    """
    trained = dict(after.named_parameters())
    return {name: (trained[name].detach() - value.detach()).to(value.dtype) for name, value in before.items()}


def clipped_update(update: Mapping[str, npt.ArrayLike | Tensor], *, max_update_norm: float) -> dict[str, Tensor]:
    """The update scaled down to ℓ2 norm `max_update_norm` over all its tensors; zero if an entry is not finite.

    When: on the client, so that nothing larger ever leaves it. The server clips again and relies only on that. Not
    with bounds that adapt: they count whose update is below the bound, and must see the norms.

    Args:
        update: named tensors or arrays.
        max_update_norm: > 0, in units of the parameters.

    Example:
        >>> clipped = clipped_update({"weight": torch.tensor([3.0, 4.0])}, max_update_norm=1.0)
        >>> [round(float(value), 3) for value in clipped["weight"]]
        [0.6, 0.8]
    """
    bound = checks.positive(max_update_norm=max_update_norm)
    update = as_tensors(update, tuple(update))
    largest = max((float(value.detach().abs().max()) for value in update.values() if value.numel()), default=0.0)
    if not all(bool(value.isfinite().all()) for value in update.values()):
        return {name: torch.zeros_like(value) for name, value in update.items()}
    if largest == 0:
        return dict(update)
    # Divided by the largest entry first, so that squares neither overflow nor vanish.
    squares = sum(float((value.detach().double() / largest).square().sum()) for value in update.values())
    norm = largest * squares**0.5
    if norm <= bound:
        return dict(update)
    # Rounding to the update's own type moves each entry by less than one part in 1/eps, or by less than the least
    # number of the type; both are taken off the bound.
    widths = [torch.finfo(value.dtype) for value in update.values()]
    numbers = sum(value.numel() for value in update.values())
    relative, least = max(info.eps for info in widths), max(info.tiny * info.eps for info in widths)
    room = max(0.0, bound - least * numbers**0.5) / (1 + 2 * relative)
    return {name: (value.double() * (room / norm)).to(value.dtype) for name, value in update.items()}
