"""Loss functions that normalise over the whole batch (floor 3), watched while the probe runs."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sordino.errors import CoupledRecords

__all__ = ["LossWatch"]

_CLASS_LOSSES: dict[Callable[..., object], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


class LossWatch(TorchFunctionMode):
    """Looks at every classification loss: class weights are refused, ignored targets are tried out.

    A mean cross entropy divides by the weights, or by the number of targets that are not ignored, of the whole
    batch: one record's labels then scale every other record's gradient.

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
        signature = _CLASS_LOSSES.get(func)
        if signature is None:
            return func(*args, **(kwargs or {}))
        call = signature.bind(*args, **(kwargs or {}))
        call.apply_defaults()
        target, weight = call.arguments["target"], call.arguments["weight"]
        if call.arguments["reduction"] == "mean" and isinstance(target, Tensor) and not target.is_floating_point():
            if isinstance(weight, Tensor) and weight.numel() and bool((weight != weight.flatten()[0]).any()):
                raise CoupledRecords(
                    "loss must not divide by the class weights of the batch: a mean cross entropy with class weights "
                    "lets one label scale every other record. Use reduction='none' and take .mean() of the result."
                )
            if target.numel() > self._records:
                self.divides_by_targets = True
                call.arguments["target"] = self._ignored(target, call.arguments["ignore_index"])
        return func(*call.args, **call.kwargs)

    def _ignored(self, target: Tensor, ignore_index: int) -> Tensor:
        if not self._ignore_first:
            return target
        changed = target.clone()
        torch.flatten(changed)[0] = ignore_index
        return changed
