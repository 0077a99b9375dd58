"""Which uses must be read together, and whether all of them have arrived.

A use is a call of a module. Uses that share a key (a group of parameters, or a parameter) form a cluster, which is
complete when the backward pass has left the last of its calls.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,  # pyright: ignore[reportPrivateUsage]
)

from sordino.errors import PrivacyError
from sordino.gradients.norms import NormMeasurement, group_numbers
from sordino.gradients.numerics import guard_holds, has_weight, is_away
from sordino.gradients.rules.base import LayerCall, LayerRule
from sordino.gradients.rules.composite import LinearMapsRule, direct_rule
from sordino.gradients.rules.convolution import ConvolutionRule
from sordino.gradients.rules.linear import LinearRule, TransposedLinearRule
from sordino.shapes import Float

if TYPE_CHECKING:
    from sordino.gradients.captured_gradients import CapturedGradients


class CallGroups:
    """Calls that were made and uses that arrived, cluster by cluster.

    Calls that a backward pass makes again (checkpointing) are none more. Those of reentrant checkpoints are only made
    there, and their number is not known ahead.

    Args:
        keys: what a use is read together by, at least one.
        held: keys whose clusters are not complete before the end; may grow between backward passes.
    """

    def __init__(self, keys: Callable[[LayerCall], Iterable[Hashable]], held: Collection[Hashable] = ()) -> None:
        self._keys, self._held = keys, held
        self._parent: dict[Hashable, Hashable] = {}
        self._counted: set[LayerCall] = set()
        self._expected: Counter[Hashable] = Counter()
        self.restart()

    def restart(self) -> None:
        """Another backward pass through the same calls."""
        self._came: Counter[Hashable] = Counter()
        self._arrived: dict[Hashable, list[LayerCall]] = {}
        self._done: set[Hashable] = set()

    def add_call(self, use: LayerCall) -> None:
        """A call was made."""
        root = self._joined(use)
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            self._counted.add(use)
            self._expected[root] += 1

    def is_done(self, use: LayerCall) -> bool:
        """Whether one of the use's keys was in a cluster that was complete."""
        return any(key in self._done for key in self._keys(use))

    def add_gradient(self, use: LayerCall, *, alone: bool = False) -> list[LayerCall]:
        """The uses of the cluster that is complete with this one, if any.

        Args:
            use: what arrived.
            alone: whether a call that only the backward pass made is taken to be the last of its cluster.
        """
        root = self._joined(use)
        self._arrived.setdefault(root, []).append(use)
        if use in self._counted:
            self._came[root] += 1
        elif not alone:
            return []
        is_complete = self._came[root] == self._expected[root] and all(
            self._root(key) is not root for key in self._held
        )
        return self._take(root) if is_complete else []

    def incomplete_groups(self) -> list[list[LayerCall]]:
        """What arrived of the clusters that are not complete: some of their calls were not part of the loss."""
        return [self._take(root) for root in list(self._arrived)]

    def _take(self, root: Hashable) -> list[LayerCall]:
        uses = self._arrived.pop(root)
        self._done.update(key for use in uses for key in self._keys(use))
        return uses

    def _joined(self, use: LayerCall) -> Hashable:
        """The name of the use's cluster, after all its keys were joined."""
        first, *others = dict.fromkeys(self._root(key) for key in self._keys(use))
        for other in others:
            self._parent[other] = first
            for counter in (self._expected, self._came):
                counter[first] += counter.pop(other, 0)
            if other in self._arrived:
                self._arrived.setdefault(first, []).extend(self._arrived.pop(other))
        return first

    def _root(self, key: Hashable) -> Hashable:
        while (parent := self._parent.get(key)) is not None:
            key = parent
        return key


# ----------------------------------------------------------------------------------------------------------------------
# Norms while the backward pass runs, sums afterwards.
#
# A layer is measured as soon as the backward pass has left it. Where its rule keeps gradients per record, what the
# layer saw is freed before those below are reached, instead of after the pass.
#
# Between norm and sum lies the rest of the pass, and code of the user's. So a layer is measured early only if its sum
# follows from what was kept, and it is measured again where that has changed.
# ----------------------------------------------------------------------------------------------------------------------


# Rules whose norms and sums depend on the kept tensors and on the module's settings, never on parameters.
_PURE: tuple[type[LayerRule], ...] = (LinearRule, TransposedLinearRule, LinearMapsRule, ConvolutionRule)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What was measured of one use.

    Args:
        groups: the numbers of its groups.
        measured: in these groups.
        state: what its sum depends on, as it was.
    """

    groups: list[int]
    measured: NormMeasurement
    state: object


class NormsInBackward:
    """What was measured of a chunk before all of it had arrived.

    A use is measured alone when its parameters were called once and its graph is not run again. Where another use of a
    parameter turns up all the same, the first is taken back: the norm of their sum has cross terms.

    Args:
        groups: parameters that will be measured together, each in one group.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        # What surrounds the reading of norms.
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self._group_of = group_numbers(groups)
        self._called: Counter[nn.Parameter] = Counter()
        self._arrived: set[nn.Parameter] = set()
        self._parts: dict[LayerCall, _Part] = {}

    def expect(self, use: LayerCall) -> None:
        """A call was made; those that a backward pass makes again (checkpointing) are none more."""
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
            self._called.update(use.parameters.values())

    def arrive(self, use: LayerCall) -> None:
        """Measure a use that arrived for the first time, if nothing else can be added to it."""
        parameters = set(use.parameters.values())
        is_first = self._arrived.isdisjoint(parameters)
        self._arrived |= parameters
        if not is_first:
            for other in [other for other in self._parts if not parameters.isdisjoint(other.parameters.values())]:
                self.take_back(other)
            return
        is_only = all(self._called[parameter] <= 1 for parameter in parameters)
        if not is_only or not use.records or not _may_wait(use) or _get_current_graph_task_keep_graph():
            return
        groups = sorted({self._group_of.get(parameter, 0) for parameter in parameters})
        positions = {parameter: groups.index(self._group_of.get(parameter, 0)) for parameter in parameters}
        measured = NormMeasurement.nothing(len(groups), use.records, use.device)
        with self.reading(), torch.no_grad():
            measured.add([use], positions)
        self._parts[use] = _Part(groups=groups, measured=measured, state=_state(use))

    def take_back(self, use: LayerCall) -> None:
        """Forget what was measured of `use`; gradients per record that were kept for it stay, as what is read."""
        if self._parts.pop(use, None) is None:
            return
        if not use.grads:
            names = tuple(use.parameters)
            use.rule, use.context, use.grads = direct_rule, names, tuple(use.memo[name] for name in names)
        use.memo = {}

    def take_all_back(self) -> None:
        """`take_back` of everything."""
        for use in list(self._parts):
            self.take_back(use)

    def add_to(
        self, measured: NormMeasurement, uses: Sequence[LayerCall], group_of: Mapping[nn.Parameter, int]
    ) -> list[LayerCall]:
        """Add what was measured in these groups, and holds, to `measured`; the uses that are left."""
        for use, part in list(self._parts.items()):
            grouped = all(group_of.get(each, 0) == self._group_of.get(each, 0) for each in use.parameters.values())
            if not grouped or part.state != _state(use):
                self.take_back(use)
        for part in self._parts.values():
            # By number, not by a list of them, which would be sent to the device.
            for position, group in enumerate(part.groups):
                measured.squares[group].add_(part.measured.squares[position])
                if part.measured.norm_error is not None and part.measured.sum_error is not None:
                    measured.add_errors(group, part.measured.norm_error[position], part.measured.sum_error[position])
        return [use for use in uses if use not in self._parts]


def _may_wait(use: LayerCall) -> bool:
    """Whether the sum follows from what is kept: by a known rule, or as every gradient per record is kept."""
    return bool(use.saved) and (use.rule.measures_kept_gradients or type(use.rule) in _PURE)


def _state(use: LayerCall) -> object:
    """Versions of what is kept, and the module's settings."""
    tensors = (*use.grads, *use.memo.values())
    settings = {key: value for key, value in vars(use.module).items() if isinstance(value, int | float | str | tuple)}
    return [None if tensor is None else tensor._version for tensor in tensors], settings if use.grads else None


# ----------------------------------------------------------------------------------------------------------------------
# Uses whose sums wait on another device.
#
# Before a sum is taken, the processor must know whether every record has weight. To look is to wait for the device. So
# uses whose weights are known stay until they hold much memory together, or the backward pass is over; one look is then
# for all of them. Where looking costs nothing none waits.
# ----------------------------------------------------------------------------------------------------------------------


# Entries that uses may hold while they wait. To go over so many takes a card longer than to be looked at.
_WAITING_ENTRIES = 1 << 26


def may_wait(weights: Tensor, entries: int) -> bool:
    """Whether sums at these weights can wait for more, when the uses that wait hold so many entries."""
    return is_away(weights) and entries <= _WAITING_ENTRIES


def held_entries(use: LayerCall) -> int:
    """How many numbers are kept of a use."""
    return sum(tensor.numel() for tensor in (*use.saved, *use.grads, *use.memo.values()) if tensor is not None)


# ----------------------------------------------------------------------------------------------------------------------
# Group-wise clipping while the backward pass runs.
#
# A group's factors depend on its own norms alone, so its clipped sum can be taken as soon as the backward pass has left
# its last layer, and what was kept of its layers is freed before the layers below are reached.
# ----------------------------------------------------------------------------------------------------------------------


# (squared bounds [g, B], the numbers of these groups) ↦ one factor per group and record.
GroupFactors = Callable[[Float[Tensor, "g B"], Sequence[int]], Float[Tensor, "g B"]]


class GroupwiseInBackward:
    """Which groups of parameters wait for which uses, and the clipped sums of those that are done.

    Groups that one use reads together are done together. A use that comes after its group was done is refused by the
    recording: its norm would be missing.

    Args:
        groups: parameters that are clipped together, each in one group.
        factors: clips.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], factors: GroupFactors) -> None:
        self.groups, self.factors = groups, factors
        self.sums: dict[nn.Parameter, Tensor] = {}
        # Groups whose sums wait, with their weights, and how many entries their uses hold.
        self.waiting: list[tuple[CapturedGradients, Float[Tensor, "g B"]]] = []
        self.held_entries = 0
        # What surrounds the reading of norms and sums.
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self._group_of = group_numbers(groups)
        self.clusters = CallGroups(self._numbers)

    def members(self, uses: Sequence[LayerCall]) -> list[int]:
        """The groups that `uses` read, in order."""
        return sorted({number for use in uses for number in self._numbers(use)})

    def _numbers(self, use: LayerCall) -> list[int]:
        return [self._group_of[parameter] for parameter in use.parameters.values()]


# ----------------------------------------------------------------------------------------------------------------------
# Norms in one backward pass, clipped sums in the next.
#
# The first pass measures each layer as it is reached and keeps nothing of it; once the factors are known, the same pass
# runs again over the same graph, and each layer's weighted sum is formed as it is reached. Both passes bring the same
# values, bit for bit, or the sums are refused: a record's factor belongs to the gradient that was measured.
#
# Calls of one parameter are measured together, so those of a shared one are kept until the last of them has come.
# ----------------------------------------------------------------------------------------------------------------------


# (squared bounds [G, B]) ↦ one factor per group and record.
Factors = Callable[[Float[Tensor, "G B"]], Float[Tensor, "G B"]]
# Adds the sums of one use at weights [G, B] to the entries of its parameters; the flag: every record has weight.
Weigh = Callable[[LayerCall, Float[Tensor, "G B"], bool], None]

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


class TwoPassBackward:
    """Runs the backward passes of one chunk, and holds what is known between them.

    Guarantee: the sums are those of `GradientCapture.add_weighted_sums` with `factors` for
    `GradientCapture.squared_norm_bounds`, up to the order of additions.

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
        self.clusters = CallGroups(lambda use: use.parameters.values(), self._shared)
        self._state: Literal["waiting", "norms", "sums", "done"] = "waiting"
        self._measured: NormMeasurement | None = None
        self._weights: Tensor | None = None
        self._kept: Tensor | None = None
        # Whether every record has weight, once that is known.
        self._everyone: bool | None = None
        self._must_repeat = False
        self._start()

    def _start(self) -> None:
        self.clusters.restart()
        self._turns: dict[Hashable, list[_Turn]] = defaultdict(list)
        self._of_use: dict[LayerCall, _Turn] = {}
        self._next: dict[Hashable, int] = defaultdict(int)
        self._same: list[Tensor] = []
        # Uses of the second pass with what is known of them, and what adds their sums.
        self._waiting: list[tuple[LayerCall, _Turn, Weigh]] = []
        self._held_entries = 0

    @property
    def is_complete(self) -> bool:
        """Whether the sums are taken."""
        return self._state == "done"

    def backward(self, run: Callable[[bool], object], nothing: NormMeasurement, *, scale: float) -> object:
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
                'before backward, or use clipping_mode="low_memory".'
            )
        result = self._first(run, nothing)
        if not self._turns:
            # It asked for other gradients than the parameters'.
            self._state = "waiting"
            return result
        assert self._measured is not None
        with self.reading():
            self._weights = self.factors(self._measured.squared_norm_bounds() * scale**2)
            self._kept, self._everyone = has_weight(self._weights * scale), None
        self._state = "sums"
        result = run(False)
        if sum(self._next.values()) != sum(map(len, self._turns.values())):
            raise _not_repeated()
        self._check_repeated()
        with torch.no_grad(), self.reading():
            self._add_waiting()
        self._state, self._weights, self._kept = "done", None, None
        self._start()
        return result

    def _check_repeated(self) -> None:
        """Refuse a second pass with other values; where sums wait, the same look is for whether all have weight."""
        same = torch.stack(self._same)
        if self._waiting:
            assert self._kept is not None
            if guard_holds(torch.cat([same, self._kept.flatten()])):
                self._everyone = True
                return
        if not guard_holds(same):
            raise _not_repeated()

    def _first(self, run: Callable[[bool], object], nothing: NormMeasurement) -> object:
        """Norms; once more when a parameter turned up again that had been taken for done."""
        self._state = "norms"
        while True:
            self._start()
            self._must_repeat = False
            self._measured = NormMeasurement(squares=nothing.squares.clone())
            result = run(True)
            if not self._must_repeat:
                with self.reading():
                    for uses in self.clusters.incomplete_groups():
                        self._measure(uses)
                return result

    def arrive(self, use: LayerCall, weigh: Weigh) -> None:
        """What a backward pass brings: measured in the first, weighed in the second, and dropped.

        Raises:
            PrivacyError: a backward pass that is neither, or the second is not like the first.
        """
        if self._state in ("waiting", "done"):
            raise PrivacyError(
                f"backward through {use.label} must be one of the two passes that clip its batch, got another. Call "
                'loss.backward() once, on the loss itself, or use clipping_mode="low_memory".'
            )
        with torch.no_grad(), self.reading():
            turn = _Turn(fingerprint=_fingerprint(use), entries=held_entries(use))
            key = (use.label, *use.parameters)
            if self._state == "norms":
                self._turns[key].append(turn)
                self._of_use[use] = turn
                self._take(use)
            else:
                self._weigh(use, key, turn, weigh)

    def _take(self, use: LayerCall) -> None:
        if self._must_repeat:
            _drop(use)
        elif self.clusters.is_done(use):
            self._shared.update(use.parameters.values())
            self._must_repeat = True
            _drop(use)
        else:
            self._measure(self.clusters.add_gradient(use, alone=True))

    def _measure(self, uses: list[LayerCall]) -> None:
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

    def _weigh(self, use: LayerCall, key: Hashable, turn: _Turn, weigh: Weigh) -> None:
        position, known = self._next[key], self._turns.get(key, [])
        if position >= len(known):
            raise _not_repeated()
        self._next[key] += 1
        before = known[position]
        if before.fingerprint.shape != turn.fingerprint.shape:
            raise _not_repeated()
        self._same.append((before.fingerprint == turn.fingerprint).all())
        assert self._weights is not None
        if not use.records:
            _drop(use)
            return
        self._waiting.append((use, before, weigh))
        self._held_entries += turn.entries
        if not may_wait(self._weights, self._held_entries):
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add up what waits, and drop what was kept of it."""
        if not self._waiting:
            return
        assert self._weights is not None
        assert self._kept is not None
        if self._everyone is None:
            self._everyone = guard_holds(self._kept)
        for use, before, weigh in self._waiting:
            for names in before.again:
                # The sum weighs the very gradients that were measured.
                use.rule.squared_norms(use, names)
            use.memo.update(before.memo)
            weigh(use, self._weights, self._everyone)
            _drop(use)
        self._waiting, self._held_entries = [], 0


def _not_repeated() -> PrivacyError:
    return PrivacyError(
        "the second backward pass of a batch must repeat the first exactly, got other values. Checkpoint with "
        "preserve_rng_state=True, keep no state in the forward pass, and on a GPU call "
        'torch.use_deterministic_algorithms(True); or use clipping_mode="low_memory".'
    )


def _drop(use: LayerCall) -> None:
    use.saved, use.grads, use.versions, use.memo = (), (), (), {}


def _is_small(value: Tensor, turn: _Turn) -> bool:
    return _SMALL * value.numel() <= turn.entries


def _fingerprint(use: LayerCall) -> Tensor:
    """A number for each tensor that arrived; equal values at equal positions give equal numbers, NaN among them."""
    return torch.stack([tensor_fingerprint(tensor) for tensor in (*use.saved, *use.grads) if tensor is not None])


def tensor_fingerprint(tensor: Tensor) -> Tensor:
    """A whole number made of the entries' bits and of their positions; takes no memory of the tensor's size."""
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
    """The sum of the words, each scrambled with its position; it wraps around."""
    scrambled = row + _SCRAMBLE * torch.arange(1, row.numel() + 1, device=row.device)
    for shift in (30, 27, 31):
        scrambled = (scrambled ^ (scrambled >> shift)) * _SCRAMBLE
    return scrambled.sum()
