"""Loss functions that normalise over the whole batch (floor 3): made to count records, or tried out and refused."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sordino.errors import CoupledRecords

__all__ = ["DividedByRecords", "LossWatch", "divided_by_records"]

_CLASS_LOSSES: dict[Callable[..., object], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


def divided_by_records(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], *, records: int
) -> object:
    """Call a function of torch; a mean classification loss with one label a record divides by the records.

    Torch divides by the labels that are not ``ignore_index``: a record that carries that label would scale up the
    gradient of every other one. Without such a label the result is the same.
    """
    call = _mean_over_labels(function, args, kwargs)
    if call is None or call.arguments["weight"] is not None or _labels(call).numel() != records or not records:
        return function(*args, **kwargs)
    call.arguments["reduction"] = "sum"
    total = function(*call.args, **call.kwargs)
    assert isinstance(total, Tensor)
    return total / records


def _mean_over_labels(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> inspect.BoundArguments | None:
    """The call with its defaults, if it is one of a mean classification loss with labels that are classes."""
    signature = _CLASS_LOSSES.get(function)
    if signature is None:
        return None
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    target = call.arguments["target"]
    is_class = isinstance(target, Tensor) and not target.is_floating_point()
    old_options = call.arguments["size_average"] is not None or call.arguments["reduce"] is not None
    return call if call.arguments["reduction"] == "mean" and is_class and not old_options else None


def _labels(call: inspect.BoundArguments) -> Tensor:
    target = call.arguments["target"]
    assert isinstance(target, Tensor)
    return target


class DividedByRecords(TorchFunctionMode):
    """Inside, `divided_by_records` for every call.

    Args:
        records: number of records in the batch.
    """

    def __init__(self, *, records: int) -> None:
        super().__init__()
        self._records = records

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return divided_by_records(func, args, kwargs or {}, records=self._records)


class LossWatch(TorchFunctionMode):
    """Looks at every classification loss: class weights are refused, ignored targets are tried out.

    A mean cross entropy divides by the weights, or by the number of targets that are not ignored, of the whole
    batch: one record's labels then scale every other record's gradient. Otherwise it is `DividedByRecords`.

    Args:
        records: number of records in the batch.
        ignore_first: make the first target one to be ignored.

    Attributes:
        divides_by_targets: whether some loss had several targets a record and divides by those not ignored.
    """

    def __init__(self, *, records: int, ignore_first: bool = False) -> None:
        super().__init__()
        self.divides_by_targets = False
        self._records = records
        self._ignore_first = ignore_first

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        call = _mean_over_labels(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        target, weight = _labels(call), call.arguments["weight"]
        if isinstance(weight, Tensor) and weight.numel() and bool((weight != weight.flatten()[0]).any()):
            raise CoupledRecords(
                "loss must not divide by the class weights of the batch: a mean cross entropy with class weights "
                "lets one label scale every other record. Use reduction='none' and take .mean() of the result."
            )
        if target.numel() > self._records:
            self.divides_by_targets = True
            call.arguments["target"] = self._ignored(target, call.arguments["ignore_index"])
        return divided_by_records(func, call.args, call.kwargs, records=self._records)

    def _ignored(self, target: Tensor, ignore_index: int) -> Tensor:
        if not self._ignore_first:
            return target
        changed = target.clone()
        torch.flatten(changed)[0] = ignore_index
        return changed
