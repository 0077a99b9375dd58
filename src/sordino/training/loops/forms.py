"""Losses that were proved, by their form, and when one has to be proved again (floor 3).

A form leaves out the values of constants. ``loss + beta * penalty`` is proved with the beta of its first batch; where
that was 0, nothing was seen of the penalty.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import nn

from sordino.errors import CoupledRecords

__all__ = ["ProvedForm", "magnitude", "proves_again", "public_marks"]

_OF_TORCH = frozenset(vars(nn.Module()))
_FIRST_AGAIN, _FACTOR = 16, 4


def proves_again(times: int) -> bool:
    """Whether what came this many times is proved again: at 16, 64, 256, …"""
    while times > _FIRST_AGAIN and times % _FACTOR == 0:
        times //= _FACTOR
    return times == _FIRST_AGAIN


def magnitude(number: float) -> Hashable:
    """Sign and power of two of a number; zero is by itself."""
    if number == 0 or not math.isfinite(number):
        return str(abs(number))
    return math.copysign(1.0, number), math.frexp(number)[1]


def public_marks(module: nn.Module) -> Hashable:
    """What a module does besides its parameters and buffers, roughly: modes, frozen parts, its own plain attributes."""
    marks: list[Hashable] = [parameter.requires_grad for parameter in module.parameters()]
    for part in module.modules():
        marks.append(part.training)
        if type(part).__module__.startswith("torch."):
            continue
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            if isinstance(value, bool | str | None):
                marks.append(value)
            elif isinstance(value, int | float):
                marks.append(magnitude(float(value)))
    return tuple(marks)


@dataclass(eq=False, kw_only=True)
class ProvedForm:
    """What is known of a loss of one form.

    Args:
        late: constants behind a place where values left the tape; they must stay.
        numbers: all constants in the batch before.
        records: number of records in the batch before.

    Attributes:
        times: how many times it came.
        has_grown: whether a constant was of a new size in the batch that came last.
    """

    late: tuple[float, ...]
    numbers: tuple[float, ...]
    records: int
    _magnitudes: list[set[Hashable]] = field(init=False)
    _in_step: list[int] = field(init=False)
    times: int = field(init=False, default=1)
    has_grown: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._magnitudes = [{magnitude(number)} for number in self.numbers]
        self._in_step = [0] * len(self.numbers)

    def meet(self, late: tuple[float, ...], numbers: tuple[float, ...], records: int) -> bool:
        """Whether a loss of this form has to be proved again in the batch at hand.

        Raises:
            CoupledRecords: its constants follow the records.
        """
        if late != self.late:
            raise CoupledRecords(
                "loss must keep its constants from batch to batch when values of the batch were read into numpy or "
                "lists before it, got another one: it may have been computed from records. Stay with tensors up to the "
                "loss, and compute metrics after it."
            )
        self.times += 1
        self.has_grown = False
        if len(numbers) != len(self.numbers):
            self.numbers, self._magnitudes = numbers, [set() for _ in numbers]
            self._in_step = [0] * len(numbers)
        elif records != self.records:
            self._refuse_counts(numbers, records)
        for number, known in zip(numbers, self._magnitudes, strict=True):
            size = magnitude(number)
            self.has_grown = self.has_grown or size not in known
            known.add(size)
        self.numbers, self.records = numbers, records
        return self.has_grown or proves_again(self.times)

    def _refuse_counts(self, numbers: Sequence[float], records: int) -> None:
        """A constant that changes as the number of records does was made from it (``len(batch)``)."""
        for place, (old, new) in enumerate(zip(self.numbers, numbers, strict=True)):
            exact = (old, new) in {(self.records, records), (1 / self.records, 1 / records)}
            one, other = old * records, new * self.records
            inverse = math.isclose(old * self.records, new * records, rel_tol=1e-9)
            follows = old != new and (exact or inverse or math.isclose(one, other, rel_tol=1e-9))
            self._in_step[place] = self._in_step[place] + 1 if follows else 0
            if follows and (exact or self._in_step[place] > 1):
                raise CoupledRecords(
                    "loss must not use the number of records as a Python number, got a constant that follows it: one "
                    "record more would change what all others do. Take .mean() over records with "
                    "loss_reduction='mean', or divide by x.size(0), which is understood; len(x) is not."
                )
