"""Strategies and participations as plain JSON types, for plans that are written down (floor 1)."""

from collections.abc import Callable
from dataclasses import fields
from typing import cast

import numpy as np

from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.dense import DenseStrategy
from sordino.mechanisms.correlated.participation import (
    CyclicPoisson,
    EveryEpoch,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from sordino.mechanisms.correlated.strategies import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    IndependentNoise,
    Strategy,
)
from sordino.mechanisms.correlated.tree import BinaryTree

__all__ = ["participation_from_dict", "participation_to_dict", "strategy_from_dict", "strategy_to_dict"]

_STRATEGIES: dict[str, type] = {
    "independent": IndependentNoise,
    "banded": BandedToeplitz,
    "banded_inverse": BandedInverse,
    "buffered": BufferedToeplitz,
    "tree": BinaryTree,
    "dense": DenseStrategy,
}
_PARTICIPATIONS: dict[str, type] = {
    "single": SingleParticipation,
    "min_separation": MinSeparation,
    "every_epoch": EveryEpoch,
    "cyclic_poisson": CyclicPoisson,
}


def strategy_to_dict(strategy: Strategy) -> dict[str, object]:
    """The strategy with its kind; numbers keep all their digits.

    Example:
        >>> strategy_to_dict(BandedToeplitz(coefficients=(1.0, 0.5), steps=9))
        {'kind': 'banded', 'coefficients': [1.0, 0.5], 'steps': 9}
    """
    return _to_dict(strategy, _STRATEGIES)


def strategy_from_dict(body: object) -> Strategy:
    """What `strategy_to_dict` wrote. Unknown kinds, missing and surplus fields raise `InvalidArgument`."""
    return cast("Strategy", _from_dict(body, _STRATEGIES, "strategy"))


def participation_to_dict(participation: Participation) -> dict[str, object]:
    """The participation with its kind.

    Example:
        >>> participation_to_dict(CyclicPoisson(groups=8, sample_rate=0.01))
        {'kind': 'cyclic_poisson', 'groups': 8, 'sample_rate': 0.01}
    """
    return _to_dict(participation, _PARTICIPATIONS)


def participation_from_dict(body: object) -> Participation:
    """What `participation_to_dict` wrote. Unknown kinds, missing and surplus fields raise `InvalidArgument`."""
    return cast("Participation", _from_dict(body, _PARTICIPATIONS, "participation"))


def _to_dict(value: object, kinds: dict[str, type]) -> dict[str, object]:
    kind = next(name for name, member in kinds.items() if type(value) is member)
    body: dict[str, object] = {"kind": kind}
    for item in fields(kinds[kind]):
        entry = getattr(value, item.name)
        body[item.name] = entry.tolist() if isinstance(entry, np.ndarray) else entry
        if isinstance(entry, tuple):
            body[item.name] = list(entry)
    return body


def _from_dict(body: object, kinds: dict[str, type], what: str) -> object:
    member = kinds.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if member is None or not isinstance(body, dict):
        raise InvalidArgument(f"{what} must be one of {', '.join(kinds)} with its fields, got another. Check the file.")
    given = {name: value for name, value in body.items() if name != "kind"}
    expected = {item.name for item in fields(member)}
    if set(given) != expected:
        raise InvalidArgument(
            f"fields of {what} {body['kind']} must be {sorted(expected)}, got {sorted(given)}. Check the file."
        )
    return cast("Callable[..., object]", member)(
        **{name: _numbers(value, member) if isinstance(value, list) else value for name, value in given.items()}
    )


def _numbers(value: list[object], member: type) -> object:
    return np.asarray(value, dtype=np.float64) if member is DenseStrategy else tuple(value)
