"""Which random numbers a forward and backward pass draws, on synthetic records.

Numbers of private records come from the global generators, which are in secret states while a batch is processed
(`sordino.training.generators`). Numbers from elsewhere are not secret. Where a logical batch is split, a number that
all records of a microbatch share ties them to each other, and one record less ties others.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy import random as numpy_random
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import CoupledRecords, SordinoError
from sordino.gradients import GradientCapture, Recorder
from sordino.training.probing.determinism import Chance, random_states
from sordino.training.probing.observation import Observer, backward_into_the_module
from sordino.training.probing.probe import ProbeSize, without_traces
from sordino.training.probing.synthetic import INTEGER_PATTERNS, SyntheticRecords
from sordino.training.structure import tensors_in

__all__ = ["check_draws"]

# The most rows that training's batches and the public records allow, of these.
_ROWS = (11, 7, 5, 3, 2)
# Seeds that no model uses by itself.
_SEEDS = (736_878_701, 736_878_702)
# A layer that is dropped half of the time is met both ways all but once in 4096 times.
_OTHERS = 13


def check_draws(
    model: nn.Module,
    recorder: Recorder,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    public_batch: object = None,
    is_split: bool = False,
    size: ProbeSize | None = None,
) -> None:
    """Refuse random numbers that are not secret, or that tie the records of a microbatch to each other.

    Guarantee: only the structure of `records` is read.

    Args:
        model: in the mode in which it will be trained.
        recorder: of the model's gradients, with no recording in use.
        records: a batch, or a batch with no rows; or a tuple whose first part is one.
        run: batch ↦ loss, as for `check_records_are_independent`.
        reduction: "none", "mean" or "sum".
        public_batch: records to use instead of synthetic ones.
        is_split: whether a logical batch may come in several microbatches of more than one record, or in several
            processes.
        size: how many records at once.

    Raises:
        CoupledRecords: a generator of the model's own, a seed, or a number for all records of a microbatch.
    """
    with without_traces(model):
        look = _Look(recorder, run, reduction, records, list(tensors_in(public_batch)), size or ProbeSize())
        first = look.drawn(_SEEDS[0])
        if first is None or not (first.used.any() or first.of_torch):
            return
        if first.of_own:
            raise CoupledRecords(
                "random numbers in model and loss must come from torch's global generators, got generator=…: from a "
                "seed that others know, a record's numbers follow from its place in the batch. Leave generator= out; "
                "the global generators have secret states while a batch is processed."
            )
        # torch's generators tell by themselves whether they were seeded.
        second = look.drawn(_SEEDS[1]) if first.used.any() else None
        same = second is not None and (first.used & _equal(first.after, second.after)).any()
        if first.was_seeded or same:
            raise CoupledRecords(
                "random generators must not be seeded in model and loss, got a new seed: a record's numbers would "
                "follow from its place in the batch. Leave it out; seed before training."
            )
        # Each record has draws of its own where the model gets one at a time.
        if not is_split or look.rows == 1:
            return
        fewer = look.drawn(_SEEDS[0], rows=look.rows - 1)
        may_share = fewer is not None and (first.used & _equal(first.after, fewer.after)).any()
        if first.is_shared(fewer) or (may_share and look.matters()):
            raise CoupledRecords(
                "random numbers in model and loss must be drawn for each record where batches are split into "
                "microbatches or over processes, got a draw that all rows share: which records share it depends on how "
                "many there are. Draw one row per record, switch the layer off (layerdrop=0), or use microbatch_size=1 "
                "or None in one process."
            )


@dataclass(frozen=True, kw_only=True)
class _OtherDraws(Chance):
    """torch's generators start with `seed`, those of Python and NumPy with `other`."""

    other: int

    def start(self) -> None:
        """Start all generators anew."""
        super().start()
        random.seed(self.other)
        numpy_random.seed(self.other)  # noqa: NPY002


class _Draws(TorchDispatchMode):
    """Notes where the random numbers of a block come from.

    Args:
        rows: number of records.
        seed: of torch's generators.
    """

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        self.rows, self._seed = rows, seed
        self.of_torch = self.of_own = self.was_seeded = False
        self.sizes: list[int] = []
        self.used = np.zeros(2, dtype=bool)
        self.after: list[np.ndarray] = []
        self.norms: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.of_torch = True
            given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Generator)]
            self.of_own |= any(generator.initial_seed() != self._seed for generator in given)
            self.was_seeded |= torch.initial_seed() != self._seed
            first = next(iter(tensors_in(found)), None)
            self.sizes += [] if first is None else [first.numel()]
        return found

    def is_shared(self, fewer: "_Draws | None") -> bool:
        """Whether a draw is not as many times as large as one with fewer records as there are more records."""
        if fewer is not None and len(fewer.sizes) == len(self.sizes):
            pairs = zip(self.sizes, fewer.sizes, strict=True)
            return any(size * fewer.rows != other * self.rows for size, other in pairs)
        return any(size % self.rows for size in self.sizes)


class _Look:
    def __init__(
        self,
        recorder: Recorder,
        run: Callable[[object], Tensor],
        reduction: str,
        structure: object,
        example: Sequence[Tensor],
        size: ProbeSize,
    ) -> None:
        self._recorder, self._run, self._reduction = recorder, run, reduction
        self._structure, self._example = structure, example
        self._two_passes = size.two_passes
        most = min([size.records, *(len(tensor) - 1 for tensor in example if tensor.dim())])
        self.rows = next((rows for rows in _ROWS if rows <= most), 1) if isinstance(recorder, GradientCapture) else 1
        self._given = next((tensor.size(0) for tensor in tensors_in(structure) if tensor.dim()), 0)

    def drawn(self, seed: int, *, rows: int | None = None, other: int | None = None) -> _Draws | None:
        """What the first kind of synthetic records that the loop runs on draws; None where it runs on none."""
        rows = self.rows if rows is None else rows
        for pattern in INTEGER_PATTERNS:
            records = SyntheticRecords(
                self._structure, rows=self._given, count=rows, pattern=pattern, example=self._example
            )
            draws = _Draws(rows, seed)
            try:
                chance = Chance(seed=seed) if other is None else _OtherDraws(seed=seed, other=other)
                self._observe(records.batch(range(rows)), rows, draws, chance)
            except SordinoError:
                raise
            except Exception:
                self._recorder.discard()
                continue
            return draws
        return None

    def matters(self) -> bool:
        """Whether any record's gradient changes with Python's or NumPy's numbers: type checkers draw some too."""
        norms = [self._norms(other) for other in range(_OTHERS)]
        return not all(torch.allclose(norms[0], other, rtol=1e-4, equal_nan=True) for other in norms[1:])

    def _norms(self, other: int) -> Tensor:
        draws = self.drawn(_SEEDS[0], other=other)
        assert draws is not None
        assert draws.norms is not None
        return draws.norms

    def _observe(self, batch: object, rows: int, draws: _Draws, chance: Chance) -> None:
        chance.start()
        before = random_states()[1:]
        with draws:
            if isinstance(self._recorder, GradientCapture):
                observer = Observer(self._recorder, self._run, self._reduction, two_passes=self._two_passes)
                draws.norms = observer.observe(batch, torch.ones(1, rows), chance=chance, large=True).norms
            else:
                with self._recorder.recording(1), torch.enable_grad():
                    total = self._run(batch).sum()
                    backward_into_the_module(total, total.backward, records=rows)
                self._recorder.discard()
        draws.after = random_states()[1:]
        draws.used = ~_equal(before, draws.after)


def _equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.array_equal(a, b) for a, b in zip(one, other, strict=True)])
