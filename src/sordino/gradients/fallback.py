"""Any module that no rule reads: per-record gradients by running it again, one record each (floor 1, gradients).

The module is called once in the forward pass, by torch itself. Afterwards its per-record gradients are the
vector-Jacobian products of the module alone, from the inputs it was called with and the gradients that reached its
outputs: vectorised by ``torch.func.vmap``, or record by record where it can't be vectorised. Each record runs as a
batch of one, so that whatever the module does with its batch dimension, no record's gradient sees another's inputs.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.errors import RecordCountMismatch, UnsupportedModule
from sordino.gradients.numerics import row_squared_norms
from sordino.gradients.records import layout_of
from sordino.gradients.rules.cost import CHUNK_ENTRIES, chunk_records
from sordino.gradients.rules.rule import LayerRule, Use, weigh

__all__ = ["CapturedCall", "FunctionalFallback", "KeptCall", "functional_fallback", "keep_call"]

_Gradients = dict[str, Tensor]
_OneRecord = Callable[[_Gradients, tuple[Tensor, ...], tuple[Tensor, ...]], _Gradients]


@dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """How to call the module again with one record.

    Args:
        spec: structure of (args, kwargs).
        constants: the leaves of (args, kwargs); None where a record's tensor goes.
        slots: which leaves are records' tensors, in the order they were kept.
        input_dims: where each of them had its records; None when a record's slice goes in as it is.
        outputs: which leaves of the output are captured.
        output_dims: where each of them has its records.
    """

    spec: TreeSpec
    constants: tuple[object, ...]
    slots: tuple[int, ...]
    input_dims: tuple[int | None, ...]
    outputs: tuple[int, ...]
    output_dims: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KeptCall:
    """A captured call with its tensors: inputs with the records first, outputs as the module returned them."""

    call: CapturedCall
    saved: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    leaves: tuple[object, ...]
    output_spec: TreeSpec

    def rebuild(self, passed: tuple[Tensor, ...]) -> object:
        """The module's output with its captured leaves replaced by `passed`."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.call.outputs, passed, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.output_spec)


def keep_call(
    module: nn.Module, label: str, records: int, args: tuple[object, ...], kwargs: Mapping[str, object], output: object
) -> KeptCall:
    """Sort the inputs and outputs of a call into records' tensors and constants.

    Raises:
        RecordCountMismatch: a tensor's record dimension is neither 1 nor the record count.
        UnsupportedModule: packed sequences, or no floating output.
    """
    if any(isinstance(value, nn.utils.rnn.PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedModule(f"{label} must be called with padded tensors, got a packed sequence. Pad it.")
    layout = layout_of(module, label, records)
    constants, spec = tree_flatten((tuple(args), dict(kwargs)))
    places = layout.places(tuple(args), dict(kwargs))
    slots, dims, saved = [], [], []
    for position, (leaf, place) in enumerate(zip(constants, places, strict=True)):
        if isinstance(leaf, Tensor) and (kept := layout.keep_input(leaf, place)) is not None:
            slots.append(position)
            dims.append(kept[1])
            saved.append(kept[0])
    leaves, output_spec = tree_flatten(output)
    # A parameter that is returned as it is would be an ordinary use.
    own = {id(parameter) for parameter in module.parameters()}
    leaves = [leaf.detach() if isinstance(leaf, Tensor) and id(leaf) in own else leaf for leaf in leaves]
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not positions:
        raise UnsupportedModule(f"{label} must return a floating tensor, got none. Return tensors, tuples or dicts.")
    output_dims = tuple(layout.output_dim(position) for position in positions)
    others = [*constants, *module.parameters(), *module.buffers()]
    owned = {_storage(leaf) for leaf in others if isinstance(leaf, Tensor)}
    outputs = tuple(_own(layout.spread(leaves[i], dim), owned) for i, dim in zip(positions, output_dims, strict=True))
    if not slots and any(leaves[i].shape[dim] != 1 for i, dim in zip(positions, output_dims, strict=True)):
        raise RecordCountMismatch(
            f"the output of {label} must have a leading dimension of 1 when no record goes in, got another. "
            "Return one row and let it broadcast."
        )
    chosen = set(slots)
    call = CapturedCall(
        spec=spec,
        constants=tuple(None if i in chosen else leaf for i, leaf in enumerate(constants)),
        slots=tuple(slots),
        input_dims=tuple(dims),
        outputs=tuple(positions),
        output_dims=output_dims,
    )
    return KeptCall(call=call, saved=tuple(saved), outputs=outputs, leaves=tuple(leaves), output_spec=output_spec)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(output: Tensor, owned: set[int]) -> Tensor:
    """A tensor that no one else modifies in place: outputs may be views of inputs or parameters."""
    return output.clone() if _storage(output) in owned or 0 in output.stride() else output


class FunctionalFallback(LayerRule):
    """Per-record gradients of a whole module by vector-Jacobian products."""

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over `names`; gradients are kept for the sum when they are small enough."""
        wanted = sorted(names)
        entries = sum(use.parameters[name].numel() for name in wanted)
        keep = use.records * entries <= 4 * CHUNK_ENTRIES
        parts: list[Tensor] = []
        kept: list[_Gradients] = []
        for chunk in _chunks(use, entries):
            gradients = _per_record(chunk, wanted)
            parts.append(torch.stack([row_squared_norms(gradients[name]) for name in wanted]))
            if keep:
                kept.append(gradients)
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=_device(use))
        squares = torch.cat(parts, dim=1)
        if keep:
            use.memo.update({name: torch.cat([gradients[name] for gradients in kept]) for name in wanted})
        else:
            use.memo.update({_MEASURED + name: row for name, row in zip(wanted, squares, strict=True)})
        return squares.sum(0)

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradient of each record for parameter `name`."""
        if use.records == 0:
            return use.parameters[name].new_zeros((0, *use.parameters[name].shape))
        return _per_record(use, [name])[name]

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From the kept gradients where there are any, otherwise by running the module once more."""
        wanted = sorted(names)
        sums = {name: weigh(use.memo[name], weights) for name in wanted if name in use.memo}
        missing = [name for name in wanted if name not in sums]
        if not missing:
            return sums
        sums.update({name: torch.zeros_like(use.parameters[name], dtype=torch.float32) for name in missing})
        start = 0
        for chunk in _chunks(use, sum(use.parameters[name].numel() for name in missing)):
            gradients = _per_record(chunk, missing)
            chosen = weights[start : start + chunk.records]
            for name in missing:
                # Parameters may have been measured apart, for other groups: each keeps its own norm.
                squares = chunk.memo.get(_MEASURED + name)
                kept = 1.0 if squares is None else _no_longer_than_measured(gradients[name], squares)
                sums[name] = sums[name] + weigh(gradients[name], chosen * kept)
            start += chunk.records
        return sums


functional_fallback = FunctionalFallback()

# Before a parameter's name in a use's memo, for the squared norms of gradients that were not kept. A dot can't begin
# the name of a parameter.
_MEASURED = "."


def _no_longer_than_measured(gradient: Float[Tensor, "B *shape"], squares: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Factors that shrink gradients to the norms that were measured; rows that became non-finite are set to zero.

    Running a module again in another batch may round in another way, and a record whose terms cancel makes that as
    large as it likes.
    """
    again = row_squared_norms(gradient)
    gradient[~again.isfinite()] = 0
    return torch.where(again > squares, (squares / again).sqrt(), torch.ones_like(again)).nan_to_num(nan=0.0)


def _device(use: Use) -> torch.device:
    return next(iter(use.parameters.values())).device


def _chunks(use: Use, entries: int) -> Iterable[Use]:
    step = chunk_records(use.records, entries)
    if 0 < use.records <= step:
        yield use
        return
    for start in range(0, use.records, step):
        yield use.select(torch.arange(start, min(start + step, use.records), device=_device(use)))


# Modules that vmap refused once: they go record by record from then on.
_SEQUENTIAL: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _per_record(use: Use, names: list[str]) -> _Gradients:
    arrived = [position for position, grad in enumerate(use.grads) if grad is not None]
    grads = tuple(grad for grad in use.grads if grad is not None)
    parameters = {name: use.parameters[name].detach() for name in names}
    saved = tuple(_as_parameters(tensor, use) for tensor in use.saved)
    one = _one_record(use, arrived)
    # oneDNN's fused recurrent kernel has no batching rule.
    recurrent = isinstance(use.module, nn.RNNBase)
    with warnings.catch_warnings(action="ignore"), mkldnn.flags(enabled=False) if recurrent else nullcontext():
        try:
            if use.module not in _SEQUENTIAL:
                try:
                    return vmap(one, in_dims=(None, 0, 0), randomness="error")(parameters, saved, grads)
                except RuntimeError:
                    _SEQUENTIAL.add(use.module)
            rows = [
                one(parameters, tuple(tensor[b] for tensor in saved), tuple(grad[b] for grad in grads))
                for b in range(use.records)
            ]
            return {name: torch.stack([row[name] for row in rows]) for name in names}
        except RuntimeError as error:
            raise UnsupportedModule(
                f"{use.label} must run on a single record through torch.func, got {type(error).__name__}. "
                "Write a layer rule for it."
            ) from error


def _as_parameters(tensor: Tensor, use: Use) -> Tensor:
    """`tensor` in single precision where it came from autocast: the module runs again without it."""
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half and all(p.dtype == torch.float32 for p in use.module.parameters()) else tensor


def _one_record(use: Use, arrived: list[int]) -> _OneRecord:
    call = use.context
    assert isinstance(call, CapturedCall)

    def gradient(parameters: _Gradients, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> _Gradients:
        leaves = list(call.constants)
        for position, dim, tensor in zip(call.slots, call.input_dims, inputs, strict=True):
            leaves[position] = tensor if dim is None else tensor.unsqueeze(dim)
        args, kwargs = tree_unflatten(leaves, call.spec)

        def forward(chosen: _Gradients) -> tuple[Tensor, ...]:
            outputs, _ = tree_flatten(functional_call(use.module, chosen, args, kwargs))
            return tuple(outputs[call.outputs[i]].squeeze(call.output_dims[i]) for i in arrived)

        outputs, pull = vjp(forward, parameters)[:2]
        return pull(tuple(grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)))[0]

    return gradient
