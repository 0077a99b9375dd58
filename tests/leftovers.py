"""What an object holds of private records: all that is reachable from it, pickled forms, and files."""

import contextlib
import io
import pickle
import types
import weakref
from importlib.util import find_spec

import numpy as np
import torch

# A number of records that is no other size: an axis of this length is one of records.
RECORDS = 211


def marked(columns=4, *, seed=0):
    """Records [RECORDS, columns] in [-1, 1], no two entries alike."""
    return np.random.default_rng(seed).uniform(-1, 1, size=(RECORDS, columns)).astype(np.float32)


def leaves(thing):
    """Every array, tensor, text, byte string and long list of numbers reachable from `thing`, with the way to it."""
    waiting, seen = [("it", thing)], {}
    while waiting:
        way, value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, type | types.ModuleType | int | float | complex):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its place
        if isinstance(value, torch.Tensor | np.ndarray | str | bytes | bytearray):
            yield way, value
            if isinstance(value, torch.Tensor) and value.is_leaf:
                waiting.append((f"{way}.grad", value.grad))
        if isinstance(value, np.ndarray) and value.dtype == object:
            waiting.append((f"{way}[]", value.ravel().tolist()))
        waiting += [(f"{way}{name}", part) for name, part in parts(value)]


def parts(value):
    """What lies directly in an object."""
    if isinstance(value, weakref.ref | types.MethodType | types.FunctionType):
        if isinstance(value, weakref.ref):
            yield "()", value()
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
            yield ".__func__", value.__func__
        else:
            yield from (
                (f"<{k}>", cell.cell_contents) for k, cell in enumerate(value.__closure__ or ()) if filled(cell)
            )
            yield "()", value.__defaults__
            yield "()", value.__kwdefaults__
            yield "()", getattr(value, "__wrapped__", None)
        return
    if isinstance(value, dict | types.MappingProxyType):
        for key, entry in list(value.items()):
            yield f"[{key if isinstance(key, str) else ''}]", key
            yield f"[{key if isinstance(key, str) else ''}]", entry
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("[]", entry) for entry in value)
        numbers = [entry for entry in value if isinstance(entry, int | float)]
        if numbers and not isinstance(value, set | frozenset):
            yield "[]", np.array(numbers, dtype=np.float64)
    for name, entry in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", entry
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)
    if hasattr(value, "func") and hasattr(value, "keywords"):  # partial
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))


def filled(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def signs(rows, texts=()):
    """Bytes that tell of a record: two entries that stand side by side, in each precision; and its text."""
    flat = np.asarray(rows).reshape(len(rows), -1)[:, :2]
    kinds = (np.float64, np.float32, np.float16)
    return [row.tobytes() for kind in kinds[:2] for row in flat.astype(kind)] + [text.encode() for text in texts]


def found_in(thing, rows, texts=()):
    """The ways on which something of the records is reachable from `thing`, or how its pickled form holds them."""
    tell = signs(rows, texts)
    ways = []
    for way, leaf in leaves(thing):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu()
            leaf = (leaf.float() if leaf.dtype == torch.bfloat16 else leaf.to_dense()).numpy()
        if isinstance(leaf, np.ndarray) and RECORDS in leaf.shape:
            ways.append(f"{way}: an array of shape {leaf.shape}")
        raw = leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf
        raw = raw.encode(errors="replace") if isinstance(raw, str) else bytes(raw)
        if any(sign in raw for sign in tell):
            ways.append(f"{way}: a record")
    for name in ("pickle", "cloudpickle"):
        if find_spec(name) is None:
            continue
        stream = io.BytesIO()
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError, RuntimeError, ValueError):
            __import__(name).dump(thing, stream)
        if any(sign in stream.getvalue() for sign in tell):
            ways.append(f"{name} writes a record")
    return ways


def found_in_folder(folder, rows, texts=()):
    """The files below `folder` that hold something of the records."""
    tell = signs(rows, texts)
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if any(sign in file.read_bytes() for sign in tell)]
