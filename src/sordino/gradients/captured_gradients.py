"""Everything captured from one chunk of records, and what is computed from it."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sordino.errors import PrivacyError, UncapturedParameter
from sordino.gradients.backward_strategies import (
    GroupwiseInBackward,
    NormsInBackward,
    TwoPassBackward,
    held_entries,
    may_wait,
)
from sordino.gradients.norms import NormMeasurement, group_numbers
from sordino.gradients.numerics import guard_holds, has_weight, is_small, storage_number
from sordino.gradients.rules.base import KernelTimings, LayerCall, LayerRule, chunk_records, weighted_sums_of_kept
from sordino.gradients.rules.convolution import ConvolutionRule
from sordino.gradients.rules.linear import LinearRule
from sordino.shapes import Bool, Float


class CapturedGradients:
    """The uses of captured parameters in one chunk: filled by the backward pass, read once for norms and sums.

    Args:
        records: number of records in the chunk, ≥ 0.
        scale: what every captured gradient is multiplied by (the record count, when the loss was a mean).
        device: where results live when nothing was captured.
        low_memory: whether rules spare memory, at the price of time.
        timings: where the fastest kernels are measured and kept; None takes the cost model's.
        backward_strategy: takes norms or sums while backward passes run; None to read the recording afterwards.
    """

    def __init__(
        self,
        records: int,
        *,
        scale: float,
        device: torch.device,
        low_memory: bool = False,
        timings: KernelTimings | None = None,
        backward_strategy: NormsInBackward | GroupwiseInBackward | TwoPassBackward | None = None,
    ) -> None:
        self.records = records
        self.scale = scale
        self.open = True
        # What takes the sums.
        self.backward_strategy = None if isinstance(backward_strategy, NormsInBackward) else backward_strategy
        # Whether calls are made whose backward pass never comes.
        self.is_rehearsed = False
        self._early = backward_strategy if isinstance(backward_strategy, NormsInBackward) else None
        self._lean, self._timings = low_memory, timings
        self._device = device
        self._uses: dict[int, LayerCall] = {}
        self._norms: Tensor | None = None
        self._bounds: Tensor | None = None
        self._group_of: dict[nn.Parameter, int] = {}
        self._sealed = self._spent = False
        self._poison: str | None = None

    def invalidate(self, name: str) -> None:
        """Remember that parameter `name` had an uncaptured use: norms and sums are refused from now on."""
        self._poison = name

    def clear(self) -> None:
        """Drop what was kept.

        The graph of the loss holds the recording, and what was kept of a call may hold the graph: a cycle through
        torch that Python does not find.
        """
        for use in self._uses.values():
            use.saved, use.grads, use.versions, use.memo = (), (), (), {}
        self._uses.clear()

    def receive(self, use: LayerCall, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        """Take a use whose output gradients arrived; a second backward through the same call adds to the first."""
        if not self.open or self._sealed:
            self.invalidate(use.label)
            raise PrivacyError(
                f"backward through {use.label} must happen in the recording of its forward pass, got a recording that "
                "has ended. Run forward and backward of a batch before its private gradient is taken."
            )
        if all(grad is None for grad in grads):
            return
        if isinstance(self.backward_strategy, GroupwiseInBackward) and self.backward_strategy.clusters.is_done(use):
            self.invalidate(use.label)
            raise PrivacyError(
                f"{use.label} must be called and run backward once in a batch that is clipped block by block, got a "
                'backward pass after its sum was taken. Use clipping_mode="low_memory", or one forward and one '
                "backward a batch."
            )
        if id(use) in self._uses:
            if self._early is not None:
                self._early.take_back(use)
            use.grads = tuple(_added(old, new) for old, new in zip(use.grads, grads, strict=True))
            return
        use.saved, use.grads, use.low_memory, use.timings = saved, grads, self._lean, self._timings
        use.versions = tuple(tensor._version for tensor in saved)
        if isinstance(self.backward_strategy, TwoPassBackward):
            self._pass(self.backward_strategy, use)
            return
        self._uses[id(use)] = use
        if self._early is not None:
            self._early.arrive(use)
        if self.backward_strategy is not None:
            self._take(self.backward_strategy, self.backward_strategy.clusters.add_gradient(use))

    def expect(self, use: LayerCall) -> None:
        """A captured call was made, whose backward pass may come."""
        if self.backward_strategy is not None and not self.is_rehearsed:
            self.backward_strategy.clusters.add_call(use)
        if self._early is not None and not self.is_rehearsed:
            self._early.expect(use)

    def backward(self, run: Callable[[bool], object]) -> object:
        """Run the backward pass of the chunk's loss, or both where it takes two.

        Args:
            run: one backward pass; called with whether the graph must be kept for another.
        """
        if not isinstance(self.backward_strategy, TwoPassBackward):
            return run(False)
        measured = NormMeasurement.nothing(len(self.backward_strategy.groups), self.records, self._device)
        return self.backward_strategy.backward(run, measured, scale=self.scale)

    def add_backward_sums(self, into: dict[nn.Parameter, Tensor]) -> None:
        """Add the clipped sums that were taken during the backward pass, and those of what is left."""
        self._check()
        assert self.backward_strategy is not None
        if isinstance(self.backward_strategy, GroupwiseInBackward):
            for uses in self.backward_strategy.clusters.incomplete_groups():
                self._take(self.backward_strategy, uses)
            self._add_waiting(self.backward_strategy)
        elif not self.backward_strategy.is_complete:
            raise PrivacyError(
                "a batch must be run backward to be clipped in two passes, got none. Call loss.backward() on the loss."
            )
        self._check()
        self._sealed = self._spent = True
        taken: set[int] = set()
        for parameter, value in self.backward_strategy.sums.items():
            _accumulate(into, parameter, value, taken)
        self.backward_strategy.sums.clear()

    def _take(self, blocks: GroupwiseInBackward, uses: list[LayerCall]) -> None:
        """Clip the groups that `uses` belong to, add up, and drop what was kept of them; where a look costs, later."""
        if not uses or not self.records:
            return
        numbers = blocks.members(uses)
        part = CapturedGradients(
            self.records, scale=self.scale, device=self._device, low_memory=self._lean, timings=self._timings
        )
        part._uses = {id(use): self._uses.pop(id(use)) for use in uses}
        part.group([blocks.groups[number] for number in numbers])
        try:
            with blocks.reading():
                weights = blocks.factors(part.squared_norm_bounds(), numbers)
                blocks.waiting.append((part, weights))
                blocks.held_entries += sum(map(held_entries, uses))
                if not may_wait(weights, blocks.held_entries):
                    self._add_waiting(blocks)
        except BaseException:
            self.invalidate(uses[0].label)
            raise

    def _add_waiting(self, blocks: GroupwiseInBackward) -> None:
        """Add up the groups that wait, and drop what was kept of them; one look is for all."""
        everyone = None
        if len(blocks.waiting) > 1:
            together = torch.cat([weights.flatten() for _, weights in blocks.waiting])
            everyone = guard_holds(has_weight(together * self.scale))
        for part, weights in blocks.waiting:
            part.add_weighted_sums(weights, blocks.sums, last=True, everyone=everyone)
        blocks.waiting, blocks.held_entries = [], 0

    def _pass(self, passes: TwoPassBackward, use: LayerCall) -> None:
        """Give `use` to the pass that is running."""

        def weigh(use: LayerCall, weights: Float[Tensor, "G B"], everyone: bool) -> None:
            part = CapturedGradients(
                self.records, scale=self.scale, device=self._device, low_memory=self._lean, timings=self._timings
            )
            part._uses, part._group_of = {id(use): use}, passes.group_of
            part.add_weighted_sums(weights, passes.sums, everyone=everyone)

        try:
            passes.arrive(use, weigh)
        except BaseException:
            self.invalidate(use.label)
            raise

    def group(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Measure the parameters of each group apart; those in no group belong to the first."""
        if self._sealed:
            raise PrivacyError(
                "groups must be set before norms are read, got a recording that was read. Set them first."
            )
        self._group_of = group_numbers(groups)

    @property
    def groups(self) -> int:
        """Number of groups, at least one."""
        return max(self._group_of.values(), default=0) + 1

    def squared_norms(self) -> Float[Tensor, "G B"]:
        """Squared norm of each record's summed gradient in each group, in float64."""
        return self._measured()[0].clone()

    def squared_norm_bounds(self) -> Float[Tensor, "G B"]:
        """Square of a bound on the norm of what each record adds at weight 1, rounding included, in float64."""
        return self._measured()[1].clone()

    def _measured(self) -> tuple[Float[Tensor, "G B"], Float[Tensor, "G B"]]:
        self._check()
        if self.backward_strategy is not None:
            raise PrivacyError(
                "a recording that is clipped while backward passes run must be read by its sums, got a request for "
                "norms. Record without."
            )
        self._sealed = True
        if self._norms is None or self._bounds is None:
            measured = NormMeasurement.nothing(self.groups, self.records, self._device)
            with torch.no_grad():
                if self.records:
                    uses = self.layer_calls
                    if self._early is not None:
                        uses = self._early.add_to(measured, uses, self._group_of)
                    measured.add(uses, self._group_of)
                # The squares of a recording that nothing rounded are bounds as they are.
                norms, bounds = measured.squares, measured.squared_norm_bounds()
                if self.scale != 1:
                    scaled = norms * self.scale**2
                    bounds = scaled if bounds is norms else bounds * self.scale**2
                    norms = scaled
                self._norms, self._bounds = norms, bounds
        return self._norms, self._bounds

    def add_weighted_sums(
        self,
        weights: Float[Tensor, "G B"],
        into: dict[nn.Parameter, Tensor],
        *,
        without: Bool[Tensor, " B"] | None = None,
        last: bool = False,
        everyone: bool | None = None,
    ) -> None:
        """Add ``scale · Σ_b weights[g, b] · gradient[b]`` to every used parameter's entry of `into`, g its group.

        Records `without` are padding, with weight 0: finite gradients that need not be left out. With `last` every use
        is dropped once it was added, and the recording can't be read again. `everyone` says whether every record has
        weight, where that is known.
        """
        self._check()
        self._spent = last
        self._sealed = True
        with torch.no_grad():
            scaled = weights.detach() if self.scale == 1 else weights.detach() * self.scale
            kept = has_weight(scaled)
            if not any(p.dtype is torch.float64 for use in self._uses.values() for p in use.parameters.values()):
                # Once for all layers.
                scaled = scaled.float()
            if everyone is None:
                everyone = guard_holds(kept if without is None else kept | without)
            for group in range(scaled.shape[0]):
                self._add_group(group, scaled[group], into, None if everyone else kept[group])
        if last:
            self.clear()

    def _add_group(
        self, group: int, weights: Float[Tensor, " B"], into: dict[nn.Parameter, Tensor], kept: Tensor | None
    ) -> None:
        index = None if kept is None else kept.nonzero().flatten()
        if self.records == 0 or (index is not None and index.numel() == 0):
            return
        chosen = weights if index is None else weights.index_select(0, index)
        taken: set[int] = set()
        alone = self.groups == 1
        members = [
            (use, [name for name, p in use.parameters.items() if alone or self._group_of.get(p, 0) == group])
            for use in self._uses.values()
        ]
        small = [
            (use, name) for use, names in members if use.memo for name in names if _is_weighed_with_others(use, name)
        ]
        if len(small) > 1:
            # First, so that the sums of a layer are complete as soon as its own turn comes.
            sums = weighted_sums_of_kept([use.memo[name] for use, name in small], chosen, index)
            for (use, name), value in zip(small, sums, strict=True):
                _accumulate(into, use.parameters[name], value, taken)
        for use, names in members:
            others = names if len(small) < 2 else [name for name in names if not _is_weighed_with_others(use, name)]
            if others:
                sums = (use if index is None else use.select(index)).weighted_sums(others, chosen)
                for name in others:
                    _accumulate(into, use.parameters[name], sums[name], taken)
            if self._spent and alone:
                use.saved, use.grads, use.versions, use.memo = (), (), (), {}

    def per_record_gradients(self) -> Iterator[dict[nn.Parameter, Float[Tensor, "b *shape"]]]:
        """Each record's gradient before `scale`, a few records at a time, summed over the uses of a parameter."""
        self._check()
        self._sealed = True
        if self._early is not None:
            self._early.take_all_back()
        entries = sum(
            parameter.numel() for parameter in {p for use in self.layer_calls for p in use.parameters.values()}
        )
        step = chunk_records(self.records, entries, in_cache=True)
        for start in range(0, self.records, step):
            index = torch.arange(start, min(start + step, self.records), device=self._device)
            found: dict[nn.Parameter, Tensor] = {}
            for use in self.layer_calls:
                part = use.select(index)
                with torch.no_grad():
                    for name, parameter in use.parameters.items():
                        value = part.rule.per_record_gradient(part, name)
                        found[parameter] = found[parameter] + value if parameter in found else value
            yield found

    @property
    def layer_calls(self) -> list[LayerCall]:
        """The uses whose output gradients arrived."""
        return list(self._uses.values())

    def _check(self) -> None:
        if self._spent:
            raise PrivacyError("a recording must be read before its last sums, got one that was dropped. Record again.")
        if self._poison is not None:
            raise UncapturedParameter(
                f"{self._poison} must be used through a captured layer only, got an uncaptured use in this batch. "
                "Discard the batch and see the refusal that was raised in its backward pass."
            )
        for use in self._uses.values():
            use.check_unmodified()


# Weighted sums that are those of kept gradients where there are any; a rule of the user's may form them in its own way.
_WEIGH_KEPT = (LayerRule.weighted_sums, LinearRule.weighted_sums, ConvolutionRule.weighted_sums)


def _is_weighed_with_others(use: LayerCall, name: str) -> bool:
    """Whether a parameter's sum is that of kept gradients which are small."""
    kept = use.memo.get(name)
    known = not use.grads or type(use.rule).weighted_sums in _WEIGH_KEPT
    return kept is not None and known and is_small(kept)


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old + new


def _accumulate(into: dict[nn.Parameter, Tensor], parameter: nn.Parameter, value: Tensor, taken: set[int]) -> None:
    present = into.get(parameter)
    if present is not None:
        present.add_(value)
        return
    # The entry will be added to: it must be the only owner of its memory, row by row.
    # By the memory's own number: its address is not asked for, which tensors without values don't have.
    number = storage_number(value)
    alone = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes and number not in taken
    into[parameter] = value if alone else value.clone(memory_format=torch.contiguous_format)
    taken.add(number)
