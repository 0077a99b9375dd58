"""Norms in one backward pass, clipped sums in the next (floor 1, gradients).

The first pass measures each layer as it is reached and keeps nothing of it; once the factors are known, the same pass
runs again over the same graph, and each layer's weighted sum is formed as it is reached. Both passes bring the same
values, bit for bit, or the sums are refused: a record's factor belongs to the gradient that was measured.

Calls of one parameter are measured together, so those of a shared one are kept until the last of them has come.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.errors import PrivacyError
from sordino.gradients.clusters import Clusters
from sordino.gradients.measure import Measured, group_numbers
from sordino.gradients.rules.rule import Use

__all__ = ["TwoPasses", "fingerprint"]

# (squared bounds [G, B]) ↦ one factor per group and record.
Factors = Callable[[Float[Tensor, "G B"]], Float[Tensor, "G B"]]
# Adds the sums of one use at weights [G, B] to the entries of its parameters.
Weigh = Callable[[Use, Float[Tensor, "G B"]], None]

# Of what a rule keeps between norm and sum, tensors this many times smaller than what the layer saw stay.
_SMALL = 8
# Words that are scrambled one by one; of more their sums are.
_FEW_WORDS = 1 << 12
# An odd number without a pattern: the golden ratio's bits, as a signed word.
_SCRAMBLE = 0x9E37_79B9_7F4A_7C15 - (1 << 64)


@dataclass(eq=False, kw_only=True)
class _Turn:
    """What the second pass must know of a use of the first: its values' fingerprint, and what its norm was taken by.

    Args:
        fingerprint: of the kept tensors and the gradients.
        entries: how many numbers these are.
        memo: what the rule kept, as far as it is small.
        again: the parameters whose gradients per record are to be formed again, as they were for the norm.
    """

    fingerprint: Tensor
    entries: int
    memo: dict[str, Tensor] = field(default_factory=dict)
    again: list[frozenset[str]] = field(default_factory=list)


class TwoPasses:
    """Runs the backward passes of one chunk, and holds what is known between them.

    Guarantee: the sums are those of `GradientCapture.add_weighted_sums` with `factors` for
    `GradientCapture.squared_bounds`, up to the order of additions.

    Args:
        groups: parameters that are clipped together, each in one group.
        factors: clips; called once.
        shared: parameters that were found to be used by more calls than could be foreseen; grows.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], factors: Factors, *, shared: set[nn.Parameter] | None = None
    ) -> None:
        self.groups, self.factors = groups, factors
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self.group_of = group_numbers(groups)
        self._shared: set[nn.Parameter] = set() if shared is None else shared
        self.clusters = Clusters(lambda use: use.parameters.values(), self._shared)
        self._state: Literal["waiting", "norms", "sums", "done"] = "waiting"
        self._measured: Measured | None = None
        self._weights: Tensor | None = None
        self._must_repeat = False
        self._start()

    def _start(self) -> None:
        self.clusters.restart()
        self._turns: dict[Hashable, list[_Turn]] = defaultdict(list)
        self._of_use: dict[Use, _Turn] = {}
        self._next: dict[Hashable, int] = defaultdict(int)
        self._same: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether the sums are taken."""
        return self._state == "done"

    def backward(self, run: Callable[[bool], object], nothing: Measured, *, scale: float) -> object:
        """Both passes.

        Args:
            run: one backward pass of the chunk's loss; called with whether its graph must be kept.
            nothing: what is measured before the first layer, for the groups and records of the chunk.
            scale: what every gradient is multiplied by.

        Raises:
            PrivacyError: there were two passes already, or the second was not like the first.
        """
        if self._state != "waiting":
            raise PrivacyError(
                "backward must run once in a batch that is clipped in two passes, got one more. Add the losses up "
                'before backward, or use memory="lean".'
            )
        result = self._first(run, nothing)
        if not self._turns:
            # It asked for other gradients than the parameters'.
            self._state = "waiting"
            return result
        assert self._measured is not None
        with self.reading():
            self._weights = self.factors(self._measured.squared_bounds() * scale**2)
        self._state = "sums"
        result = run(False)
        if sum(self._next.values()) != sum(map(len, self._turns.values())) or not bool(torch.stack(self._same).all()):
            raise _not_repeated()
        self._state, self._weights = "done", None
        self._start()
        return result

    def _first(self, run: Callable[[bool], object], nothing: Measured) -> object:
        """Norms; once more when a parameter turned up again that had been taken for done."""
        self._state = "norms"
        while True:
            self._start()
            self._must_repeat = False
            self._measured = Measured(
                squares=nothing.squares.clone(), lacking=nothing.lacking.clone(), apart=nothing.apart.clone()
            )
            result = run(True)
            if not self._must_repeat:
                with self.reading():
                    for uses in self.clusters.rest():
                        self._measure(uses)
                return result

    def arrive(self, use: Use, weigh: Weigh) -> None:
        """What a backward pass brings: measured in the first, weighed in the second, and dropped.

        Raises:
            PrivacyError: a backward pass that is neither, or the second is not like the first.
        """
        if self._state in ("waiting", "done"):
            raise PrivacyError(
                f"backward through {use.label} must be one of the two passes that clip its batch, got another. Call "
                'loss.backward() once, on the loss itself, or use memory="lean".'
            )
        with torch.no_grad(), self.reading():
            turn = _Turn(fingerprint=_fingerprint(use), entries=_entries(use))
            key = (use.label, *use.parameters)
            if self._state == "norms":
                self._turns[key].append(turn)
                self._of_use[use] = turn
                self._take(use)
            else:
                self._weigh(use, key, turn, weigh)

    def _take(self, use: Use) -> None:
        if self._must_repeat:
            _drop(use)
        elif self.clusters.is_done(use):
            self._shared.update(use.parameters.values())
            self._must_repeat = True
            _drop(use)
        else:
            self._measure(self.clusters.arrive(use, alone=True))

    def _measure(self, uses: list[Use]) -> None:
        """Add the norms of a complete cluster, and drop what was kept of it."""
        if not uses:
            return
        assert self._measured is not None
        for use in uses:
            use.check_unmodified()
        if uses[0].records:
            self._measured.add(uses, self.group_of, lambda use, names: self._of_use[use].again.append(names))
        for use in uses:
            turn = self._of_use.pop(use)
            large = any(value.is_floating_point() and not _is_small(value, turn) for value in use.memo.values())
            turn.memo = {name: value for name, value in use.memo.items() if _is_small(value, turn)}
            turn.again = turn.again if large else []
            _drop(use)

    def _weigh(self, use: Use, key: Hashable, turn: _Turn, weigh: Weigh) -> None:
        place, known = self._next[key], self._turns.get(key, [])
        if place >= len(known):
            raise _not_repeated()
        self._next[key] += 1
        before = known[place]
        if before.fingerprint.shape != turn.fingerprint.shape:
            raise _not_repeated()
        self._same.append((before.fingerprint == turn.fingerprint).all())
        assert self._weights is not None
        if use.records:
            for names in before.again:
                # The sum weighs the very gradients that were measured.
                use.rule.squared_norms(use, names)
            use.memo.update(before.memo)
            weigh(use, self._weights)
        _drop(use)


def _not_repeated() -> PrivacyError:
    return PrivacyError(
        "the second backward pass of a batch must repeat the first exactly, got other values. Checkpoint with "
        "preserve_rng_state=True, keep no state in the forward pass, and on a GPU call "
        'torch.use_deterministic_algorithms(True); or use memory="lean".'
    )


def _drop(use: Use) -> None:
    use.saved, use.grads, use.versions, use.memo = (), (), (), {}


def _entries(use: Use) -> int:
    return sum(tensor.numel() for tensor in (*use.saved, *use.grads) if tensor is not None)


def _is_small(value: Tensor, turn: _Turn) -> bool:
    return _SMALL * value.numel() <= turn.entries


def _fingerprint(use: Use) -> Tensor:
    """A number for each tensor that arrived; equal values at equal places give equal numbers, NaN among them."""
    return torch.stack([fingerprint(tensor) for tensor in (*use.saved, *use.grads) if tensor is not None])


def fingerprint(tensor: Tensor) -> Tensor:
    """A whole number made of the entries' bits and of their places; takes no memory of the tensor's size."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = 8 // size
    if flat.storage_offset() % words:
        flat = flat.clone()
    whole = flat.numel() // words * words
    # Eight bytes at a time: sums of shorter integers are slow.
    row = flat[:whole].view(torch.int64)
    rest = [flat[whole:].view(kinds[size]).long()] if whole < flat.numel() else []
    if row.numel() > _FEW_WORDS:
        # Sums of rows and of columns see every entry twice. An odd width, for even numbers of top bits add up to zero.
        width = math.isqrt(row.numel()) | 1
        table = row[: row.numel() // width * width].view(-1, width)
        row = torch.cat([table.sum(0), table.sum(1), row[table.numel() :]])
    return _mixed(torch.cat([row, *rest]))


def _mixed(row: Tensor) -> Tensor:
    """The sum of the words, each scrambled with its place; it wraps around."""
    scrambled = row + _SCRAMBLE * torch.arange(1, row.numel() + 1, device=row.device)
    for shift in (30, 27, 31):
        scrambled = (scrambled ^ (scrambled >> shift)) * _SCRAMBLE
    return scrambled.sum()
