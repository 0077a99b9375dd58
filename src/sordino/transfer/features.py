"""A frozen public model as a feature extractor: records ↦ features, each record by itself (floor 1).

A model that was trained on other people's public records is one fixed function. Applied to each private record by
itself it costs no privacy: neighbouring data sets stay neighbours. Whatever private training stands behind it then
works on features of a good model, with few weights to train.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument, RecordCountMismatch, UnsupportedModule
from sordino.transfer.independence import refuse_batch_statistics, width_of_independent_features
from sordino.transfer.public import PublicInput, fingerprint

__all__ = ["FrozenFeatures", "features"]

_CHUNK = 64


def features(
    model: nn.Module,
    layer: str | None = None,
    *,
    source: str | None = None,
    autocast: torch.dtype | None = None,
) -> "FrozenFeatures":
    """A public model, frozen, as a map from records to features.

    When: there are public weights for the kind of records at hand. Put `sordino.estimators.WhitenedLogisticRegression`,
    or any private training, behind it.

    Guarantee: none is spent. The map is fixed before a private record is seen and takes each record by itself, which
    an experiment on made-up records checks; so one record more or less among the records is one row more or less among
    the features. That the weights were made without the private records is the user's word, and `public_input` names
    them for the statement.

    Args:
        model: any module that takes tensors with the records first. It stays the caller's, in the mode it is in.
        layer: dotted name of the submodule whose output is taken, ``"layer4"``; None takes the model's output.
        source: what the weights are and where they come from; None takes the model's class.
        autocast: ``torch.bfloat16`` to run in it, several times faster where the processor has it; features then agree
            to about three digits.

    Raises:
        InvalidArgument: there is no such layer.

    Example:
        >>> extract = features(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), source="a net that was trained on clouds")
        >>> extract(torch.zeros(10, 3, 16, 16)).shape
        torch.Size([10, 8])
        >>> extract.public_input.words
        'a net that was trained on clouds (SHA-256 ...)'

    References:
        Tramèr, Boneh 2021, "Differentially private learning needs better features (or much more data)", section 5.
    """
    if layer is not None and layer not in dict(model.named_modules()):
        raise InvalidArgument(
            f"layer must be one of the model's modules, got {layer!r}. See [name for name, _ in model.named_modules()]."
        )
    return FrozenFeatures(model, layer, source or type(model).__name__, autocast)


@final
class FrozenFeatures:
    """What `features` returns: call it with records.

    Args:
        model, layer, source, autocast: see `features`.

    Attributes:
        public_input: name and fingerprint of the weights.
    """

    def __init__(self, model: nn.Module, layer: str | None, source: str, autocast: torch.dtype | None) -> None:
        self._model, self._layer, self._autocast = model, layer, autocast
        self._widths: dict[tuple[object, ...], int] = {}
        self.public_input = PublicInput(name=source, sha256=fingerprint(model))

    def __call__(self, *records: Tensor | npt.NDArray[np.generic], batch_size: int = _CHUNK) -> Tensor:
        """Features of records.

        A map over places (B, channels, height, width) is averaged over its places.

        Args:
            records: the model's inputs, records first; floats are converted to the weights' type.
            batch_size: records at a time ≥ 1: memory and speed. The last chunk is filled up, so that a record
                goes through the same kernels however many others there are.

        Returns:
            float32 (records, features), on the processor's memory. A record with a NaN gives a row with NaN.

        Raises:
            CoupledRecords: a record's features depend on other records.
            UnsupportedModule: the output is not one row or one map a record, or BatchNorm uses the batch.
            InvalidArgument: the weights are no longer those that were frozen.
        """
        checks.integer(1, batch_size=batch_size)
        if fingerprint(self._model) != self.public_input.sha256:
            raise InvalidArgument("model must have the weights that were frozen, got others. Call features() again.")
        device = next((part.device for part in self._model.parameters()), torch.device("cpu"))
        inputs = [self._input(part) for part in records]
        if not inputs or len({len(part) for part in inputs}) != 1:
            raise RecordCountMismatch("records must be tensors of the same number of records, got others.")
        count = len(inputs[0])
        with self._frozen():
            refuse_batch_statistics(self._model)
            found = torch.empty((count, self._width([part[:0].to(device) for part in inputs])), dtype=torch.float32)
            for start in range(0, count, batch_size):
                chunk = [_filled(part[start : start + batch_size], batch_size).to(device) for part in inputs]
                there = min(batch_size, count - start)
                found[start : start + there] = self._run(*chunk)[:there].cpu()
        return found

    def _input(self, part: Tensor | npt.NDArray[np.generic]) -> Tensor:
        tensor = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
        if not tensor.dim():
            raise RecordCountMismatch("records must be tensors with the records first, got a single number.")
        own = next((weight.dtype for weight in self._model.parameters() if weight.dtype.is_floating_point), None)
        return tensor.to(own or torch.float32) if tensor.dtype.is_floating_point else tensor

    def _width(self, empty: list[Tensor]) -> int:
        """d, after the experiment, which is made once for every form of records."""
        form = tuple((part.shape[1:], part.dtype) for part in empty)
        if form not in self._widths:
            self._widths[form] = width_of_independent_features(self._run, empty)
            if fingerprint(self._model) != self.public_input.sha256:
                raise UnsupportedModule("model must not change in a forward pass, got one that writes to its weights.")
        return self._widths[form]

    def _run(self, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, dtype=self._autocast, enabled=self._autocast is not None):
            output = self._model(*inputs) if self._layer is None else self._at_layer(*inputs)
        if not isinstance(output, Tensor) or output.dim() not in {2, 4, 5} or len(output) != len(inputs[0]):
            raise UnsupportedModule(
                f"{self._layer or 'the model'} must give a row or a map for each record, got another output. "
                "Wrap it in a module that picks and averages what you want."
            )
        return output.float() if output.dim() == 2 else output.float().flatten(2).mean(2)

    def _at_layer(self, *inputs: Tensor) -> object:
        held: list[object] = []
        take: Callable[..., None] = lambda _module, _inputs, output: held.append(output)  # noqa: E731
        hook = self._model.get_submodule(self._layer or "").register_forward_hook(take)
        try:
            self._model(*inputs)
        finally:
            hook.remove()
        if len(held) != 1:
            raise UnsupportedModule(f"{self._layer} must run once in a forward pass, got another number of times.")
        return held[0]

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode


def _filled(chunk: Tensor, length: int) -> Tensor:
    """The chunk with copies of its first record up to `length`: another record's features don't see them."""
    missing = length - len(chunk)
    return torch.cat([chunk, chunk[:1].expand(missing, *chunk.shape[1:])]) if missing else chunk
