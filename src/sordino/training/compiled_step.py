"""A step as compiled graphs: the engine's own forward, norms and sums without Python in between.

Batches of Poisson sampling have other sizes each time. Graphs are made for a few public sizes, and a batch is filled up
to the next one with copies of its first record that weigh nothing. Noise stays outside, where it always is.
"""

import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from os import environ
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from sordino.errors import InvalidArgument, SordinoError, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.gradients.step_graphs import StepGraphs, trace_step
from sordino.training.accumulators import ClippedSumAccumulator
from sordino.training.exclusions import Option
from sordino.training.loss_tracing.loss_tracer import module_state_key
from sordino.training.plan import Plan
from sordino.training.probing.probe_runner import first_that_runs
from sordino.training.probing.snapshots import tensor_attributes
from sordino.training.probing.synthetic import INTEGER_PATTERNS, SyntheticRecords
from sordino.training.probing.torch_modes import IndexBoundsCheck, PublicDivisor
from sordino.training.pytree import map_tensors, tensors_in

_LOG = logging.getLogger(__name__)

# What the graphs give may differ from the ordinary way by other orders of additions.
_SAME = 1e-5
# So often graphs are recorded for batches of one kind.
_MOST = 16
_UNSTEADY = (
    "batches of %d records run uncompiled in further states of the model, which only takes longer: its attributes "
    "changed too often"
)


def padded_size(records: int, expected_batch_size: float) -> int:
    """The public size to which a batch of `records` is filled up.

    Example:
        >>> [padded_size(records, 512.0) for records in (1, 480, 500, 530)]
        [64, 512, 512, 576]
    """
    # A power of two, at least two standard deviations of the size: most batches need one of two sizes.
    width = 1 << max(0, math.ceil(math.log2(2 * max(expected_batch_size, 1) ** 0.5)))
    return -(-records // width) * width


class CompiledStep:
    """Chunks through compiled graphs, one pair for each public size and state of the model.

    Guarantee: the clipped sums are those of `Bounds.add`, up to the order of additions. What the graphs don't cover
    (a record that is not finite, norms out of range) is computed the ordinary way.

    Args:
        capture: hooks on the model.
        plan: with fixed bounds.
        loss: ``loss(model, *batch)``, one value per record.
        is_written: whether a loop wrote values of a batch into a tensor. Graphs that read it don't run.

    Attributes:
        is_new: whether graphs were made for the last chunk. It is left to the ordinary way, where the caller must check
            that records are independent in model and loss as they are now, before the graphs run.

    Raises:
        InvalidArgument: the plan's bounds adapt or change, or there is no C++ compiler.
    """

    def __init__(
        self,
        capture: GradientCapture,
        plan: Plan,
        loss: Callable[..., Tensor],
        is_written: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        plan.check_options({Option.COMPILE})
        _check_compiler()
        self._capture, self._plan, self._loss, self.is_new = capture, plan, loss, False
        self._is_written = is_written
        # None where graphs could not be made.
        self._graphs: dict[Hashable, StepGraphs | None] = {}
        # How often they were recorded for batches of one kind.
        self._recorded: Counter[Hashable] = Counter()

    def sums(self, bounds: ClippedSumAccumulator, batch: tuple[object, ...]) -> dict[nn.Parameter, Tensor] | None:
        """The clipped sums of a chunk, by the `bounds` of the open step; None where only the ordinary way will do."""
        tensors = list(tensors_in(batch))
        records = tensors[0].shape[0]
        size = padded_size(records, self._plan.step_plan(0).expected_batch_size)
        if any(tensor.dim() == 0 or tensor.shape[0] != records for tensor in tensors):
            raise UnsupportedModule(
                "batch must hold one row per record in each tensor to be compiled, got another. Leave compile out."
            )
        shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        device = tensors[0].device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        kind = (size, shapes, bounds.values, autocast)
        key = (kind, module_state_key(self._capture.model, _exactly))
        graphs = self._graphs.get(key)
        is_known = key in self._graphs and (graphs is None or self._fits(graphs))
        self.is_new = not is_known and self._recorded[kind] < _MOST
        if self.is_new:
            self._recorded[kind] += 1
            if self._recorded[kind] == _MOST:
                _LOG.warning(_UNSTEADY, size)
            self._graphs[key] = self._graphs_of(bounds, batch, records, size)
        if not is_known or graphs is None:
            return None
        counted = torch.arange(size, device=device) < records
        return graphs.run([_filled(tensor, size) for tensor in tensors], counted)

    def use(self, capture: GradientCapture) -> None:
        """Record with the hooks of `capture` from here on; graphs of others are thrown away."""
        if capture is not self._capture:
            self._capture = capture
            self.forget()

    def forget(self) -> None:
        """Throw all graphs away: the loss of one of them was refused."""
        self._graphs.clear()
        self._recorded.clear()

    def _fits(self, graphs: StepGraphs) -> bool:
        return graphs.fits(self._living) and not any(map(self._is_written, graphs.held))

    def _living(self) -> list[Tensor]:
        """The model's tensors that graphs may read."""
        model = self._capture.model
        return [*model.parameters(), *model.buffers(), *tensor_attributes(model).values()]

    def _graphs_of(
        self, bounds: ClippedSumAccumulator, batch: tuple[object, ...], records: int, size: int
    ) -> StepGraphs | None:
        """Graphs for batches of `size` records, or None, with a warning, where model, loss or compiler raises."""
        try:
            return self._record(bounds, batch, records, size)
        except SordinoError:
            raise
        except Exception as failure:
            # The records were synthetic: the message quotes no other.
            reason = str(failure).partition("\n")[0]
            _LOG.warning("batches of %d records run uncompiled, which only takes longer: %s", size, reason)
            return None

    def _record(self, bounds: ClippedSumAccumulator, batch: tuple[object, ...], records: int, size: int) -> StepGraphs:
        model = self._capture.model

        def losses(*tensors: Tensor) -> Tensor:
            parts = iter(tensors)
            with PublicDivisor():
                return self._loss(model, *map_tensors(lambda _: next(parts), batch))  # pyright: ignore[reportGeneralTypeIssues]

        def tried(records: SyntheticRecords) -> list[Tensor]:
            first = list(tensors_in(records.batch(range(size))))
            with self._capture.capturing(records=size), IndexBoundsCheck():
                losses(*first)
            self._capture.discard()
            return first

        kinds = (SyntheticRecords(batch, rows=records, count=size, pattern=pattern) for pattern in INTEGER_PATTERNS)
        made_up, first, failure = first_that_runs(kinds, tried)
        if made_up is None or first is None:
            raise failure or RuntimeError("nothing to record")
        others = tensor_attributes(model).values()
        graphs = trace_step(self._capture, losses, first, bounds.clip_factors, bounds.groups, _compiled, others)
        other = list(tensors_in(made_up.batch(range(size, 0, -1))))
        self._compare(bounds, graphs, losses, other)
        return graphs

    def _compare(
        self, bounds: ClippedSumAccumulator, graphs: StepGraphs, losses: Callable[..., Tensor], batch: Sequence[Tensor]
    ) -> None:
        """Synthetic records give the same sums both ways."""
        counted = torch.ones(len(batch[0]), dtype=torch.bool, device=batch[0].device)
        sums = graphs.run(batch, counted)
        ordinary: dict[nn.Parameter, Tensor] = {}
        with self._capture.capturing(records=len(batch[0])):
            losses(*batch).sum().backward()
        bounds.add(ordinary, records=len(batch[0]))
        self._capture.discard()
        if sums is not None and not _are_close(sums, ordinary):
            raise UnsupportedModule(
                "model and loss must give the same sums compiled as they are, got others: something depends on values "
                "or on the outside. Leave compile out."
            )


def _are_close(sums: Mapping[nn.Parameter, Tensor], ordinary: Mapping[nn.Parameter, Tensor]) -> bool:
    """Whether sums are equal up to rounding, of which some parameters' (a bias of attention's keys) are all made."""
    largest = max((float(total.abs().max()) for total in ordinary.values() if total.numel()), default=0.0)
    return sums.keys() == ordinary.keys() and all(
        bool(((sums[parameter] - total).abs() <= _SAME * (largest + 1e-6)).all())
        for parameter, total in ordinary.items()
    )


def _exactly(number: float) -> Hashable:
    """A number as it is; one that is not a number equals itself here."""
    return number if number == number else str(number)


def _filled(tensor: Tensor, size: int) -> Tensor:
    missing = size - tensor.shape[0]
    filled = torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if missing else tensor
    # As the synthetic records lie that graphs are compiled for.
    return filled.contiguous()


def _compiled(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    # The graph is one of plain operations already: what torch.compile does ahead of the compiler, in every call, is
    # not needed.
    from torch._inductor import compile as compiled

    with torch.no_grad():
        return cast("Callable[..., Sequence[Tensor]]", compiled(graph, list(inputs)))


def _check_compiler() -> None:
    names = [environ["CXX"]] if "CXX" in environ else ["g++", "clang++", "cl"]
    if not any(shutil.which(name) for name in names):
        raise InvalidArgument("compile must be False without a C++ compiler, got True. Install g++ or clang.")
