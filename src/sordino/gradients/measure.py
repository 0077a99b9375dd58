"""Norms of uses and what rounding can do to them, group by group (floor 1, gradients)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients.rules.rule import Use
from sordino.gradients.shared import shared_squared_norms

__all__ = ["Measured", "group_numbers"]

# Called with a use and the parameters that were measured with it alone.
Note = Callable[[Use, frozenset[str]], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """Squares and squared lengths, which add over parameters; the two are apart until the end.

    Args:
        squares: squared norms of each group and record.
        lacking: how much more the true ones can be.
        apart: squared distance, at most, between what was measured and what a sum at weight 1 adds.
    """

    squares: Float[Tensor, "G B"]
    lacking: Float[Tensor, "G B"]
    apart: Float[Tensor, "G B"]

    @staticmethod
    def nothing(groups: int, records: int, device: torch.device) -> "Measured":
        """Before the first use."""
        parts = (torch.zeros(groups, records, dtype=torch.float64, device=device) for _ in range(3))
        return Measured(squares=next(parts), lacking=next(parts), apart=next(parts))

    def add(self, uses: Sequence[Use], group_of: Mapping[nn.Parameter, int], note: Note | None = None) -> None:
        """Take in uses whose parameters are used by no others.

        Args:
            uses: at least one record each.
            group_of: the number of each parameter's group, 0 by default.
            note: told of each use that is the only one of some parameters.
        """
        gathered = _gathered(uses, group_of)
        waiting = Counter(id(members[0]) for _, members, _ in gathered if len(members) == 1)
        for group, members, shares in gathered:
            if len(members) == 1:
                names = frozenset(names[0] for names in shares)
                part = members[0].rule.squared_norms(members[0], names)
                rounding = members[0].rule.rounding(members[0], names)
                if note is not None:
                    note(members[0], names)
                waiting[id(members[0])] -= 1
                if not waiting[id(members[0])]:
                    members[0].release()
            else:
                part, rounding = shared_squared_norms(members, shares)
            self.squares[group] += part
            if rounding is not None:
                self.lacking[group] += rounding.squares
                self.apart[group] += rounding.length.square()

    def squared_bounds(self) -> Float[Tensor, "G B"]:
        """Square of a bound on the norm of what each record adds to a sum at weight 1."""
        # (√(n² + lacking) + apart)², multiplied out so that it is n² where there is nothing to add.
        measured = self.squares + self.lacking
        return measured + 2 * (measured * self.apart).sqrt_() + self.apart


def group_numbers(groups: Sequence[Sequence[nn.Parameter]]) -> dict[nn.Parameter, int]:
    """The number of each parameter's group."""
    return {parameter: number for number, members in enumerate(groups) for parameter in members}


def _gathered(
    uses: Sequence[Use], group_of: Mapping[nn.Parameter, int]
) -> list[tuple[int, list[Use], list[tuple[str, ...]]]]:
    """Parameters of one group that share exactly the same uses: (group, the uses, per parameter its name in each use).

    Squared norms add over parameters, but not over the uses of one parameter.
    """
    # By number: a tensor's hash is a call of its own.
    shares: dict[int, list[tuple[int, str]]] = {}
    groups: dict[int, int] = {}
    for position, use in enumerate(uses):
        for name, parameter in use.parameters.items():
            present = shares.get(id(parameter))
            if present is None:
                shares[id(parameter)] = [(position, name)]
                groups[id(parameter)] = group_of.get(parameter, 0) if group_of else 0
            else:
                present.append((position, name))
    found: dict[tuple[int, tuple[int, ...]], list[tuple[str, ...]]] = defaultdict(list)
    for number, occurrences in shares.items():
        positions = tuple([position for position, _ in occurrences])
        found[groups[number], positions].append(tuple([name for _, name in occurrences]))
    return [(group, [uses[position] for position in key], names) for (group, key), names in found.items()]
