"""One file that training goes on from: tensors as safetensors, all else as JSON in its header. Never pickle.

A checkpoint holds no key and no state of a generator: anyone who resumes draws fresh entropy, so no noise value is used
twice. What it says of randomness are commitments to keys. With independent noise a checkpoint that is stolen gives no
noise away; with correlated noise it holds past noise, which later steps take back, and is as secret as the records.

Example:
    >>> import torch
    >>> content = to_bytes({"step": 3}, {"weights": torch.ones(2), "betas": (0.9, 0.999)})
    >>> facts, state = from_bytes(content)
    >>> facts["step"], state["betas"], state["weights"]
    (3, (0.9, 0.999), tensor([1., 1.]))
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import InvalidArgument

_FORMAT = "sordino checkpoint 1"
_LENGTH = 8  # bytes of the header's length, at the start of a safetensors file


def to_bytes(facts: Mapping[str, object], state: Mapping[str, object]) -> bytes:
    """A checkpoint.

    Args:
        facts: what it is a checkpoint of, in plain JSON types.
        state: nested dicts, lists and tuples of tensors, numbers, texts and None.

    Raises:
        InvalidArgument: names the path in `state` that holds anything else.
    """
    tensors: dict[str, Tensor] = {}
    body = _pack(dict(state), "", tensors)
    text = json.dumps({"facts": dict(facts), "state": body}, allow_nan=False)
    return save(tensors, metadata={"format": _FORMAT, "content": text})


def from_bytes(content: bytes, name: str = "checkpoint") -> tuple[dict[str, object], dict[str, object]]:
    """The facts and the state of a checkpoint, tensors on the CPU. Nothing in the file is run.

    Raises:
        InvalidArgument: the bytes are no checkpoint, for instance a pickle file.
    """
    try:
        tensors = load(content)
        header = json.loads(content[_LENGTH : _LENGTH + int.from_bytes(content[:_LENGTH], "little")])
        metadata = header.get("__metadata__", {})
        if metadata.get("format") != _FORMAT:
            raise InvalidArgument(_refusal(name, "another safetensors file"))
        body = json.loads(metadata["content"])
        return dict(body["facts"]), cast("dict[str, object]", _unpack(body["state"], tensors))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(_refusal(name, "another kind of file or a damaged one")) from error


def read(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The facts and the state of the checkpoint in a file."""
    if not path.is_file():
        raise InvalidArgument(f"path must be a checkpoint file, got {str(path)!r}, where there is none.")
    return from_bytes(path.read_bytes(), str(path))


def _refusal(name: str, got: str) -> str:
    return (
        f"{name} must be a checkpoint that sordino wrote (safetensors), got {got}. "
        "Pickle files, such as those of torch.save, are not read: reading one can run code."
    )


# --- modules and optimizers --------------------------------------------------------------------------------------


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, those that `state_dict` leaves out among them."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def load_module(module: nn.Module, state: object) -> None:
    """Write the tensors of `module_state` back in place; nothing is written unless all of them fit.

    Raises:
        InvalidArgument: names what the module or the checkpoint lacks, or what has another shape or type.
    """
    saved = cast("dict[str, Tensor]", state)
    own = module_state(module)
    strange = sorted(own.keys() ^ saved.keys())
    strange += sorted(
        name
        for name in own.keys() & saved.keys()
        if own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype
    )
    if strange:
        raise InvalidArgument(
            f"module must be the one that was saved, got one that differs in {', '.join(strange[:8])}"
            f"{' and more' if len(strange) > 8 else ''}. Build it as it was built for the checkpoint."
        )
    for name, tensor in own.items():
        tensor.copy_(shard_state(saved[name], tensor))


def load_optimizer(optimizer: Optimizer, kind: object, state: object) -> None:
    """Give an optimizer the state that was saved.

    Raises:
        InvalidArgument: it is of another kind, or holds other groups of parameters.
    """
    if type(optimizer).__name__ != kind:
        raise InvalidArgument(
            f"optimizer must be {kind} as in the checkpoint, got {type(optimizer).__name__}. Build the same one."
        )
    try:
        optimizer.load_state_dict(_spread_state(optimizer, cast("dict[str, object]", state)))
    except (ValueError, KeyError) as error:
        raise InvalidArgument(
            "optimizer must hold the same groups of parameters as in the checkpoint, got others. Build the same one."
        ) from error


# --- shards ------------------------------------------------------------------------------------------------------


def gather_state(value: object, *, keep: bool = True) -> object:
    """Nested dicts, lists and tuples with every sharded tensor made whole; all processes that hold shards call it.

    Who doesn't `keep` them only takes part: whole tensors are dropped one after the other.
    """
    if isinstance(value, Tensor):
        full = cast("Callable[[], Tensor]", getattr(value, "full_tensor"))() if _is_sharded(value) else value  # noqa: B009
        return full if keep else None
    if isinstance(value, dict):
        return {name: gather_state(part, keep=keep) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gather_state(part, keep=keep) for part in value)
    return value


def shard_state(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in shards as `like` is sharded, or as it is; exchanges nothing.

    What has no row for each row of `like` (a scalar, a sum over the rows) is left whole in every process.
    """
    if not _is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    held = cast("DTensor", like)
    rows = value.dim() > 0 and value.shape[0] == held.shape[0]
    where = held.placements if rows else (Replicate(),)
    return distribute_tensor(value.to(held.device), held.device_mesh, where, src_data_rank=None)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _spread_state(optimizer: Optimizer, state: dict[str, object]) -> dict[str, object]:
    """An optimizer's saved state with what belongs to shards in shards; a number a parameter stays a number."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(_is_sharded(parameter) for parameter in own):
        return state
    groups = cast("list[dict[str, list[int]]]", state["param_groups"])
    numbers = [number for group in groups for number in group["params"]]
    of = dict(zip(numbers, own, strict=True))
    kept = cast("dict[int, dict[str, object]]", state["state"])
    return state | {
        "state": {
            number: {
                name: shard_state(value, of[number]) if isinstance(value, Tensor) and value.dim() else value
                for name, value in values.items()
            }
            for number, values in kept.items()
        }
    }


# --- nested state to JSON and back -------------------------------------------------------------------------------


def _pack(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise _unpackable(path, "a sparse tensor")
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_key(key, path), _pack(part, f"{path}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        parts = [_pack(part, f"{path}/{number}", tensors) for number, part in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    raise _unpackable(path, type(value).__name__)


def _key(key: object, path: str) -> str | int | float:
    if not isinstance(key, str | int | float):
        raise _unpackable(path, f"a key of type {type(key).__name__}")
    return key


def _unpackable(path: str, got: str) -> InvalidArgument:
    return InvalidArgument(
        f"state must be made of tensors, numbers and texts, got {got} at {path}. "
        "Checkpoints hold no Python objects, since reading those can run code."
    )


def _unpack(body: object, tensors: Mapping[str, Tensor]) -> object:
    if not isinstance(body, dict):
        return body
    ((kind, value),) = body.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "float":
            return float(value)
        case "dict" | "counter":
            pairs = {key: _unpack(part, tensors) for key, part in value}
            return Counter(pairs) if kind == "counter" else pairs
        case "list":
            return [_unpack(part, tensors) for part in value]
        case _:
            return tuple(_unpack(part, tensors) for part in value)
