"""Mean classification losses in a private forward: divided by all their targets, a public number (floor 3)."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sordino.errors import CoupledRecords

__all__ = ["NoClassWeights", "PublicDivisor", "with_public_divisor"]

_CLASS_LOSSES: dict[Callable[..., object], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


def with_public_divisor(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Call a function of torch; a mean cross entropy or negative log likelihood divides by the number of all targets.

    Torch divides by the targets that are not ``ignore_index``: one record's ignored targets would scale up the gradient
    of every other record. The number of all targets, records × positions, follows from shapes alone. An ignored target
    adds nothing; without ignored targets the result is torch's own.
    """
    call = _mean_over_targets(function, args, kwargs)
    if call is None or call.arguments["weight"] is not None or not _targets(call).numel():
        return function(*args, **kwargs)
    call.arguments["reduction"] = "sum"
    total = function(*call.args, **call.kwargs)
    assert isinstance(total, Tensor)
    return total / _targets(call).numel()


def _mean_over_targets(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> inspect.BoundArguments | None:
    """The call with its defaults, if it is one of a mean classification loss with targets that are classes."""
    signature = _CLASS_LOSSES.get(function)
    if signature is None:
        return None
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    target = call.arguments["target"]
    is_class = isinstance(target, Tensor) and not target.is_floating_point()
    old_options = call.arguments["size_average"] is not None or call.arguments["reduce"] is not None
    return call if call.arguments["reduction"] == "mean" and is_class and not old_options else None


def _targets(call: inspect.BoundArguments) -> Tensor:
    target = call.arguments["target"]
    assert isinstance(target, Tensor)
    return target


class PublicDivisor(TorchFunctionMode):
    """Inside, `with_public_divisor` for every call."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return with_public_divisor(func, args, kwargs or {})


class NoClassWeights(TorchFunctionMode):
    """Refuses mean classification losses with class weights: they divide by the weights of the whole batch.

    One record's label then scales every other record's gradient.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        call = _mean_over_targets(func, args, kwargs or {})
        weight = None if call is None else call.arguments["weight"]
        if isinstance(weight, Tensor) and weight.numel() and bool((weight != weight.flatten()[0]).any()):
            raise CoupledRecords(
                "loss must not divide by the class weights of the batch: a mean cross entropy with class weights "
                "lets one label scale every other record. Use reduction='none' and take .mean() of the result."
            )
        return func(*args, **(kwargs or {}))
