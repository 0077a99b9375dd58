"""Clipping methods by name and as JSON (floor 1, clipping)."""

from collections.abc import Callable
from typing import cast

from sordino import checks
from sordino.clipping.adaclip import AdaClip
from sordino.clipping.automatic import AutomaticClipping, PsacClipping
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping
from sordino.clipping.grouped import GroupedClipping
from sordino.clipping.keep_or_drop import GlobalClipping
from sordino.clipping.projected import ProjectedClipping
from sordino.clipping.quantile import QuantileClipping
from sordino.errors import InvalidArgument

__all__ = ["clipping_called", "clipping_from_dict", "clipping_to_dict"]

_KINDS = {
    method.kind: method
    for method in (
        AdaClip,
        AutomaticClipping,
        FlatClipping,
        GlobalClipping,
        GroupedClipping,
        ProjectedClipping,
        PsacClipping,
        QuantileClipping,
    )
}
_NAMES: dict[str, Clipping] = {
    "adaclip": AdaClip(),
    "automatic": AutomaticClipping(),
    "flat": FlatClipping(),
    "global": GlobalClipping(),
    "per_layer": GroupedClipping(by="layer"),
    "psac": PsacClipping(),
}


def clipping_called(name: str | Clipping) -> Clipping:
    """A method by its name with default options, or the method itself.

    Example:
        >>> clipping_called("per_layer").words
        'flat clipping of each layer, equal bounds'
    """
    if isinstance(name, Clipping):
        return name
    checks.one_of(_NAMES, clipping=name, hint="Or give an object of sordino.clipping.")
    return _NAMES[name]


def clipping_to_dict(clipping: Clipping) -> dict[str, object]:
    """The method as plain JSON types, with its kind."""
    return {
        "kind": clipping.kind,
        **{
            name: clipping_to_dict(value)
            if isinstance(value, Clipping)
            else [list(part) if isinstance(part, tuple) else part for part in value]
            if isinstance(value, tuple)
            else value
            for name, value in clipping.options().items()
        },
    }


def clipping_from_dict(body: object) -> Clipping:
    """What `clipping_to_dict` wrote. Unknown kinds and options raise `InvalidArgument`."""
    method = _KINDS.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if method is None or not isinstance(body, dict):
        raise InvalidArgument(f"clipping must be one of {', '.join(sorted(_KINDS))} with its options. Check the file.")
    options = {
        name: clipping_from_dict(value) if isinstance(value, dict) else value
        for name, value in body.items()
        if name != "kind"
    }
    try:
        return cast("Callable[..., Clipping]", method)(**options)
    except TypeError as error:
        raise InvalidArgument(
            f"options of {method.kind} clipping must be its own, got others. Check the file."
        ) from error
