"""What a run says of its end (floor 2): the guarantee, and measured values that are public or private."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.runs.files import decode, encode

__all__ = ["Metric", "guarantee_body", "guarantee_of", "metrics_body", "metrics_of"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured value.

    Args:
        value: the number.
        public: True only when it was computed from public data, or from the private model on public data.
        what: what was measured, in words.
    """

    value: float
    public: bool
    what: str = ""


def guarantee_body(guarantee: Guarantee) -> dict[str, object]:
    """The guarantee as numbers and as a sentence, in plain JSON types."""
    return {
        "epsilon": encode(guarantee.epsilon),
        "delta": guarantee.delta,
        "relation": guarantee.relation.value,
        "unit": guarantee.unit.value,
        "sampler": guarantee.sampler,
        "accountant": guarantee.accountant,
        "caveats": list(guarantee.caveats),
        "sentence": guarantee.sentence(),
    }


def guarantee_of(body: Mapping[str, object]) -> Guarantee:
    """The guarantee that `guarantee_body` described."""
    try:
        epsilon, caveats = decode(body["epsilon"]), body["caveats"]
        return Guarantee(
            epsilon=math.inf if epsilon is None else epsilon,
            delta=float(str(body["delta"])),
            relation=NeighboringRelation(str(body["relation"])),
            unit=PrivacyUnit(str(body["unit"])),
            sampler=str(body["sampler"]),
            accountant=str(body["accountant"]),
            caveats=tuple(map(str, caveats)) if isinstance(caveats, list) else (),
        )
    except KeyError as missing:
        raise InvalidArgument(f"guarantee.json must hold {missing}, got none. The run folder was changed.") from missing


def metrics_body(metrics: Mapping[str, Metric]) -> dict[str, object]:
    """The values in plain JSON types; every one says whether it is public."""
    return {
        name: {"value": encode(metric.value), "visibility": "public" if metric.public else "private"}
        | ({"what": metric.what} if metric.what else {})
        for name, metric in metrics.items()
    }


def metrics_of(body: Mapping[str, object]) -> dict[str, Metric]:
    """The values that `metrics_body` described. Anything not marked public is private."""
    found: dict[str, Metric] = {}
    for name, entry in body.items():
        value = decode(entry.get("value")) if isinstance(entry, dict) else None
        if isinstance(entry, dict) and value is not None:
            public = entry.get("visibility") == "public"
            found[name] = Metric(value=value, public=public, what=str(entry.get("what", "")))
    return found
