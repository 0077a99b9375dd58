"""A frozen public model as a feature extractor: records ↦ features, each record by itself.

A model that was trained on other people's public records is one fixed function. Applied to each private record by
itself it costs no privacy: neighboring datasets stay neighbors. Whatever private training stands behind it then
works on features of a good model, with few weights to train.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.errors import CoupledRecords, InvalidArgument, RecordCountMismatch, UnsupportedModule

# ----------------------------------------------------------------------------------------------------------------------
# An experiment on synthetic records: a feature extractor must treat each record by itself.
# ----------------------------------------------------------------------------------------------------------------------


_RECORDS = 5
# Batches of one shape go through the same kernels row by row: nothing but rounding in the comparison may be left.
_TOLERANCE = 1e-5
_FLOATS = (math.nan, 1e4, -1e4)
_INTEGERS = (0, 1, 2)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_no_batch_statistics(module: nn.Module) -> None:
    """Refuse a module in evaluation mode that still holds a normalization by the statistics of the batch.

    Raises:
        UnsupportedModule: it names the first such layer.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None):
            raise UnsupportedModule(
                f"{name or 'the model'} ({type(part).__name__}) must normalize by stored statistics, got one that uses "
                "those of the batch: a record's features would depend on its neighbors. Call eval(), and keep "
                "track_running_stats=True."
            )


def width_of_independent_features(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """The number of features d of ``run(*inputs)`` of shape (records, d), after the experiment.

    Guarantee: only shapes and types of `inputs` are read. One of a few synthetic records is replaced, made extreme,
    made NaN and moved to another index; the features of the others must stay as they are. The same batch must also give
    the same features again, so that nothing is drawn at random or remembered from other batches.

    Args:
        run: a batch, records first ↦ features.
        inputs: a batch of any number of records, even none.

    Raises:
        CoupledRecords: a record changes another one's features, or the run cannot be asked.
        UnsupportedModule: the output is not one row a record.
    """
    made_up, first = _workable(run, inputs)
    _compare(first, run(*made_up), "the same records have other features the second time")
    for changed in _changed(made_up):
        try:
            found = run(*changed)
        except Exception:  # noqa: S112
            continue  # Code that refuses such a value can't be asked in this way.
        _compare(first[1:], found[1:], "a record changes the features of another one")
    order = [*range(1, _RECORDS), 0]
    moved = run(*(part[order] for part in made_up))
    _compare(first[order], moved, "a record's features depend on its index in the batch")
    _compare(first, run(*made_up), "what came between changes a record's features")
    return first.shape[1]


def _workable(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Synthetic records that the run accepts and answers with finite features, and those features."""
    failure: Exception | None = None
    for integer in ("mixed", "ones", "zeros"):
        made_up = tuple(_values(like, integer, index) for index, like in enumerate(inputs))
        try:
            found = run(*made_up)
        except UnsupportedModule:
            raise
        except Exception as error:
            failure = error
            continue
        if bool(found.isfinite().all()):
            return made_up, found
    raise CoupledRecords(
        "model must run on synthetic records, floats in (0, 1) and integers 0 and 1, to show that records are "
        "independent, got a failure. Wrap it in a module that takes such records."
    ) from failure


def _values(like: Tensor, integer: str, index: int) -> Tensor:
    shape = (_RECORDS, *like.shape[1:])
    count = math.prod(shape)
    if like.dtype.is_floating_point:
        # An irrational step fills (0, 1) evenly and never repeats.
        steps = torch.arange(1, count + 1, dtype=torch.float64) * (math.sqrt(5) - 1) / 2 + index / 7
        return (steps % 1).reshape(shape).to(like.device, like.dtype)
    if integer != "mixed":
        return torch.full(shape, int(integer == "ones"), dtype=like.dtype, device=like.device)
    # Each record starts with a one, as a mask must; lengths and contents differ.
    values = (torch.arange(count).reshape(_RECORDS, -1) * 7 % 5 < 3).long()
    values[:, 0] = 1
    return values.reshape(shape).to(like.device, like.dtype)


def _changed(made_up: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The records with another first one: another synthetic one, and whatever values it may hold."""
    yield tuple(torch.cat([part[-1:], part[1:]]) for part in made_up)
    for value in _FLOATS:
        yield tuple(_poisoned(part, value) if part.dtype.is_floating_point else part for part in made_up)
    for value in _INTEGERS:
        yield tuple(part if part.dtype.is_floating_point else _poisoned(part, value) for part in made_up)


def _poisoned(part: Tensor, value: float) -> Tensor:
    poisoned = part.clone()
    poisoned[0] = value
    return poisoned


def _compare(expected: Tensor, found: Tensor, fault: str) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    if found.shape != expected.shape or not bool(((found - expected).abs() <= _TOLERANCE * scale).all()):
        raise CoupledRecords(
            f"model must treat each record by itself, got one in which {fault}. Look for batch statistics, sums over "
            "dimension 0, dropout that eval() leaves on, and state that a forward pass changes."
        )


# ----------------------------------------------------------------------------------------------------------------------
# What a private training uses in addition to the private records, named and hashed.
# ----------------------------------------------------------------------------------------------------------------------


_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class PublicInput:
    """Something public that a training stands on: weights, or a dataset.

    A guarantee speaks about the private records only. It says nothing for those whose records are in a public input, so
    a statement names every one of them, by a hash that anyone can compare.

    Args:
        name: what it is and where it comes from.
        sha256: of a file, or of weights as `fingerprint` counts them; 64 hexadecimal digits.

    Example:
        >>> PublicInput(name="weights of a net", sha256="0123456789abcdef" * 4).describe()
        'weights of a net (SHA-256 0123456789abcdef…)'
    """

    name: str
    sha256: str

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise InvalidArgument("sha256 must be 64 hexadecimal digits in lower case, got something else. Hash again.")

    def describe(self) -> str:
        """Name and beginning of the hash, for a statement."""
        return f"{self.name} (SHA-256 {self.sha256[:_SHOWN]}…)"

    def require(self, file: Path) -> Path:
        """`file`, if it is this input.

        Raises:
            InvalidArgument: it is another one.
        """
        found = file_sha256(file)
        if found != self.sha256:
            raise InvalidArgument(
                f"{file.name} must be {self.describe()}, got a file of SHA-256 {found[:_SHOWN]}…. Install the "
                f"version named."
            )
        return file


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def module_digest(module: nn.Module) -> str:
    """SHA-256 over a module's parameters and buffers: their names, types, shapes and bytes, in the order of names.

    The same weights have the same fingerprint in whatever kind of file they came.

    Example:
        >>> module_digest(nn.Linear(2, 1)) == module_digest(nn.Linear(2, 1))
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# A frozen public model as a feature extractor: records ↦ features, each record by itself.
# ----------------------------------------------------------------------------------------------------------------------


_CHUNK = 64


def feature_extractor(
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
    an experiment on synthetic records checks; so one record more or less among the records is one row more or less
    among the features. That the weights were made without the private records is the user's word, and `public_input`
    names them for the statement.

    Args:
        model: any module that takes tensors with the records first. It stays the caller's, in the mode it is in.
        layer: dotted name of the submodule whose output is taken, ``"layer4"``; None takes the model's output.
        source: what the weights are and where they come from; None takes the model's class.
        autocast: ``torch.bfloat16`` to run in it, several times faster where the processor has it; features then agree
            to about three digits.

    Raises:
        InvalidArgument: there is no such layer.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> extract = feature_extractor(network, source="a net that was trained on clouds")
        >>> extract(torch.zeros(10, 3, 16, 16)).shape
        torch.Size([10, 8])
        >>> extract.public_input.describe()
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
        self.public_input = PublicInput(name=source, sha256=module_digest(model))

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
        if module_digest(self._model) != self.public_input.sha256:
            raise InvalidArgument("model must have the weights that were frozen, got others. Call features() again.")
        device = next((part.device for part in self._model.parameters()), torch.device("cpu"))
        inputs = [self._input(part) for part in records]
        if not inputs or len({len(part) for part in inputs}) != 1:
            raise RecordCountMismatch("records must be tensors of the same number of records, got others.")
        count = len(inputs[0])
        with self._frozen():
            check_no_batch_statistics(self._model)
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
            if module_digest(self._model) != self.public_input.sha256:
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


# ----------------------------------------------------------------------------------------------------------------------
# A fresh head on a public model, and the choice of what is trained.
# ----------------------------------------------------------------------------------------------------------------------


TRAINABLE = ("head", "norms", "biases", "all")
"""What `replace_head` leaves trainable: the head alone, with the scales and shifts of normalizations, with all biases
(known as BiTFiT), or everything."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_HEADS_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def replace_head(model: nn.Module, classes: int, *, trainable: str = "head", head: str | None = None) -> nn.Linear:
    """Put a fresh linear layer in the place of a public model's last one, and freeze what is not to be trained.

    The head starts at zero, so every class begins equally likely and nothing is drawn at random. Every BatchNorm
    becomes the fixed scale and shift that it is in evaluation mode (`FixedNorm`): its public statistics stay, and in
    training no record meets another one in it.

    Guarantee: none is spent: no record is seen. Train the model with `sordino.fit` or `sordino.PrivacyEngine`.

    Args:
        model: changed in place.
        classes: of the new head, ≥ 1.
        trainable: one of `TRAINABLE`. The fewer weights, the less noise: "head" for small budgets and few records.
        head: dotted name of the layer to replace; None takes the last `torch.nn.Linear` in the order of the modules,
            which is the classifier of the common networks for images and texts.

    Returns:
        The head, in its place.

    Raises:
        UnsupportedModule: there is no linear layer, or its weights are tied to another module.
        InvalidArgument: `head` names another kind of module.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 1000))
        >>> replace_head(net, 10)
        Linear(in_features=288, out_features=10, bias=True)
        >>> [name for name, weight in net.named_parameters() if weight.requires_grad]
        ['3.weight', '3.bias']
    """
    checks.integer(1, classes=classes)
    checks.one_of(TRAINABLE, trainable=trainable)
    name, old = _last_linear(model) if head is None else _named_linear(model, head)
    if name == "":
        raise UnsupportedModule("model must hold its head, got the head alone. Make a new nn.Linear instead.")
    _check_not_tied(model, name, old)
    fresh = nn.Linear(old.in_features, classes, device=old.weight.device, dtype=old.weight.dtype)
    nn.init.zeros_(fresh.weight)
    nn.init.zeros_(fresh.bias)
    _put(model, name, fresh)
    for name, part in list(model.named_modules()):
        if isinstance(part, _HEADS_BATCH_NORMS):
            _put(model, name, FixedNorm(part))
    set_trainable(model, trainable, head=fresh)
    return fresh


def set_trainable(model: nn.Module, trainable: str, *, head: nn.Module) -> None:
    """Freeze every parameter of the model, except for those of the head and those that `trainable` names.

    Args:
        model: its parameters' `requires_grad` is set.
        trainable: one of `TRAINABLE`.
        head: a part of the model that is trained in any case.
    """
    checks.one_of(TRAINABLE, trainable=trainable)
    chosen = {id(weight) for weight in head.parameters()}
    for part in model.modules():
        own = dict(part.named_parameters(recurse=False))
        if trainable == "norms" and not isinstance(part, _NORMS):
            continue
        if trainable != "head":
            chosen |= {id(weight) for name, weight in own.items() if trainable != "biases" or name.endswith("bias")}
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in chosen)


class FixedNorm(nn.Module):
    """A BatchNorm in evaluation mode for good: x ↦ scale·x + shift for each channel; nothing in it is trained.

    Args:
        norm: with stored statistics.

    Raises:
        UnsupportedModule: it has none.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise UnsupportedModule(
                "BatchNorm must have stored statistics to be fixed, got track_running_stats=False. Use a model with "
                "GroupNorm or LayerNorm."
            )
        deviation = torch.sqrt(norm.running_var.detach() + norm.eps)
        scale = (1.0 if norm.weight is None else norm.weight.detach()) / deviation
        shift = (0.0 if norm.bias is None else norm.bias.detach()) - norm.running_mean.detach() * scale
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The map on (B, channels, …), each record by itself."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * self.scale.reshape(shape) + self.shift.reshape(shape)


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if not found:
        raise UnsupportedModule(
            "model must have a torch.nn.Linear as its head, got none. Use its features: sordino.transfer.public_models."
        )
    return found[-1]


def _named_linear(model: nn.Module, name: str) -> tuple[str, nn.Linear]:
    part = dict(model.named_modules()).get(name)
    if not isinstance(part, nn.Linear):
        raise InvalidArgument(f"head must name a torch.nn.Linear of the model, got {name!r}. See named_modules().")
    return name, part


def _check_not_tied(model: nn.Module, name: str, head: nn.Linear) -> None:
    for other, part in model.named_modules():
        if part is not head and any(weight is head.weight for weight in part.parameters(recurse=False)):
            raise UnsupportedModule(
                f"{name} must have weights of its own, got weights that it shares with {other}. Name another layer as "
                "the head."
            )


def _put(model: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, part)
