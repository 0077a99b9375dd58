"""The independence probe: experiments on synthetic records before any private record is used.

Some records of a batch are replaced, made extreme, or taken away; no other record's gradient may change. What is found
this way is found whatever its cause: batch normalization in any disguise, ``x - x.mean(0)``, contrastive losses, losses
that divide by the tokens, class weights or valid labels of the whole batch, thresholds and branches that one record can
set off, experts with room for so many records, order, and what a module stores.

Which records are replaced follows a code: each record has a word of N bits, all with as many ones, and in experiment t
those whose bit t is set are replaced. Of two words neither covers the other, so for every ordered pair of records there
is an experiment in which the first is replaced and the second is not.

What each experiment is there for. In a batch of eight records:

- `repeat`, `check_statelessness`: memory from one batch to the next, a counter, random numbers that can't be repeated.
- `replace_ordinary` compares gradients where others are ordinary records: batch statistics, contrastive losses,
  divisions by what all records hold together; also what only gradients show, such as batch statistics behind a weight
  that is zero.
- `check_adversarial_values`: what begins with an extreme number, NaN, a mark of padding or of a missing label, a
  special id, or a number that the code compares with.
- `check_random_outcomes`: mixing that chance switches on, also rarely.
- `compare_with_autograd`: gradients that are captured wrongly or in part.

In a batch as large as training's, `fill_up`:

- every other record an ordinary one, or a copy of its neighbor: order, neighbors, repeated records.
- a code of extreme records: one record that changes one other, wherever both stand; thresholds. One of these
  experiments compares gradients, too; all do where gradients are not derivatives of what the forward pass gives.
- missing records (NaN): values that are filled in from others.
- all others alike: numbers of equal labels or values.
- smaller batches down to one record, in another order, with gradients and losses; sizes between: what depends on the
  number of records, on the position, a wrong reduction, a batch of one that is folded.

`check_draws` (`one_by_one.py`): generators with seeds that others know, and draws that records share.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, RecordCountMismatch, SordinoError, UnsupportedModule
from sordino.training.probing.probe_runner import (
    ProbeResult,
    ProbeRunner,
    ProbeTask,
    attempt,
    check_no_max_norm_embeddings,
    first_that_runs,
    preserve_model_state,
)
from sordino.training.probing.snapshots import GENERATORS, DisableRandomness, SeededGenerators, generators_used
from sordino.training.probing.synthetic import AdversarialValue, SyntheticRecords
from sordino.training.pytree import tensors_in

# Batches of everything; a larger one, of training's own size, is for what begins with more records.
_RECORDS = 8
_SEEDS, _SEEDS_UNREAD = 9, 5
_MOST_TURNS = 200
_WORDS_SEED = 20160701
# Batches of one shape go through the same kernels row by row, so what is left is rounding in the comparison itself.
_SAME_SHAPE = 1e-5
# Norms may be bounds, computed in another way where other records are extreme.
_NORMS = 1e-4
# Where sizes follow values (experts), or kernels add up in any order, a record's rounding is not always the same: some
# units in the last place.
_UNSTEADY = {"single": 1e-4, "tf32": 2.5e-3, "half": 2e-2}
# How much of a difference between two equal passes is called rounding: kernels that add up in any order. A difference
# later on may be so many times as large.
_UNREPEATED, _UNREPEATED_CUDA = 1e-5, 1e-4
_UNREPEATED_REDUCED = {"tf32": 2.5e-3, "half": 2e-2}
_SPREAD = 6.0
# In half precision a choice that is nearly a tie may fall otherwise in another kernel, for so many of the records.
_TIES = 0.05
# Numbers of one record count from this part of the mean of all on; in other kernels from a larger part.
_SMALL, _SMALL_ELSEWHERE = 1e-3, 0.1
# What is left of gradients without chance counts from this part of those with chance on.
_VANISHING = 1e-2
# Sizes of batches between the halves, in eighths of the largest.
_EIGHTHS = (3, 5, 7)
# The large experiment that looks at gradients even where these follow from what the forward pass gives.
_WITH_GRADIENTS = 1
_EXTREME = 1e4
_EXTREMES = (AdversarialValue(floats=_EXTREME), AdversarialValue(floats=-_EXTREME))
_FLOATS = (torch.nan, _EXTREME, -_EXTREME)
# Marks of missing labels, then ids: small ones are often special tokens.
_MARKS = (-1, -100)
_IDS = (*range(2, 13), 100, 999, "range")
_MARKS_ALONE = (*_MARKS, 2, 999)
# Extreme values are tried in all tensors of a batch, and in so many of its first ones.
_PARTS = 4
# So many experiments with ordinary records in a small batch; so many numbers, besides 0 and 1, that all others hold.
_ORDINARY, _ALIKE = 2, 3
_REMEDY = "Look for batch statistics, sums over dimension 0 and losses that compare records; see LayerNorm, GroupNorm"
_REDUCED = {"none": "made of records alone", "mean": "the mean over records", "sum": "the sum over records"}


def check_record_independence(task: ProbeTask) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient.

    Also refuses gradients that are captured wrongly or in part: they are compared with those of plain autograd.

    Guarantee: only the structure of the task's records (shapes, types, devices) is read. Random states, parameters,
    buffers, gradients, flags and Python attributes are as before.

    Args:
        task: with a `GradientCapture`.

    Raises:
        CoupledRecords: a record changes another one, the module stores something, or the loss is not the declared
            reduction.
        LossShapeError: the loss doesn't have the shape expected.
        UncapturedParameter: a parameter is used where no layer rule captures it, or lies outside the model.
        UnsupportedModule: model and loss fail on synthetic records.
    """
    check_no_max_norm_embeddings(task.model)
    with preserve_model_state(task.model):
        probe = _Probe(task)
        if task.options.again:
            probe.try_again()
            return
        probe.repeat()
        probe.replace_ordinary()
        probe.check_adversarial_values()
        probe.check_random_outcomes()
        probe.compare_with_autograd()
        probe.fill_up()
        probe.check_statelessness()


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A batch in which some records are others.

    Args:
        replaced: the positions at which another record stands, or one that holds something else.
        records: which of the synthetic records stands at each position.
        values: what some of them are made to hold, by position.
    """

    replaced: Sequence[int]
    records: list[int]
    values: dict[int, AdversarialValue] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        """The positions of the records that stay."""
        return sorted(set(range(len(self.records))) - set(self.replaced))

    def coupling(self) -> CoupledRecords:
        """What is raised where it changes something for the records that stay."""
        if self.values:
            return _coupled(f"an unusual record changes the others' gradients. {_REMEDY}")
        return _coupled(f"one record changes another record's gradient. {_REMEDY}")


class _Probe:
    """The experiments, in two batches: a small one for everything, and one as large as training's."""

    def __init__(self, task: ProbeTask) -> None:
        self._task, self._options = task, task.options
        self._runner = ProbeRunner(task)
        self._is_cuda = any(tensor.is_cuda for tensor in tensors_in(task.records))
        self._count = min(_RECORDS, self._options.num_records)
        self._sets = _replaced_sets(self._count)
        self._weights = _rows_of_weights(self._count, self._sets)
        # With the sums of all experiments, once one reads them.
        self._further: ProbeResult | None = None
        self._ran: list[AdversarialValue] = []
        self._least_refused: dict[int | None, int] = {}
        # How far two equal passes are apart, relative to the norms.
        self._unrepeated = 0.0
        # What the small batch gave with ordinary records in place of some, and the sum of its gradients.
        self._replaced: list[ProbeResult] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._records, self._first = self._find_records()
        # What the forward pass gives for the small batch.
        self._seen = self._runner.look(self._records.batch(range(self._count)), self._count, gradients=True)

    def _find_records(self) -> tuple[SyntheticRecords, ProbeResult]:
        """The first kind of synthetic records that the loop runs on, and what it gives on them."""
        # For the sums that experiments with ordinary records read, and for the one of all records.
        read = torch.cat([*([self._weights[:_ORDINARY]] if self._sets else []), _evenly(self._count)])

        def observed(records: SyntheticRecords) -> ProbeResult | None:
            batch = records.batch(range(self._count))
            found = self._runner.observe(batch, read[: 0 if self._options.again else None])
            if self._options.again:
                # Stand-ins are those of the first time.
                return found if found.finite else None
            if not self._sets:
                other = self._runner.observe(records.batch(range(self._count, 2 * self._count)), self._weights[:0])
                return found if found.finite and other.finite else None
            self._replaced = [
                self._runner.observe(
                    records.batch(self._with_stand_ins(replaced).records), self._weights[row : row + 1]
                )
                for row, replaced in enumerate(self._sets[:_ORDINARY])
            ]
            return found if all(one.finite for one in (found, *self._replaced)) else None

        records, found, failure = first_that_runs(self._task.kinds(self._count), observed)
        if records is None or found is None:
            raise self._does_not_run(records, failure)
        return records, found

    def _does_not_run(self, records: SyntheticRecords | None, failure: Exception | None) -> SordinoError:
        remedy = "Pass public_batch=, five public or invented records that it runs on"
        if records is None:
            return UnsupportedModule(
                "model and loss must have finite losses and gradients on synthetic records, got none that are: random "
                f"features with labels 0 and 1. {remedy}."
            )
        # The records are synthetic, so the failure may be shown in full.
        shown = f"{type(failure).__name__}: {failure}"
        try:
            self._runner.plain_run(records.batch(range(self._count)), self._count)
        except Exception:
            refusal = UnsupportedModule(
                "model and loss must run on synthetic records before they see private ones, got a failure on random "
                f"features with labels 0 and 1 ({shown}). {remedy}."
            )
        else:
            refusal = UnsupportedModule(
                "model must run while the gradients of its layers are captured, and without that it does: got "
                f"{shown}. A layer is called in a form that is not understood (one row for all records, records folded "
                "into rows); freeze its parameters, or let it return what it computes of each record."
            )
        refusal.__cause__ = failure
        return refusal

    # --- one batch, twice ----------------------------------------------------------------------------------------

    def repeat(self) -> None:
        """Measure how far two equal passes are apart: rounding, where a kernel adds up in any order."""
        is_read_again = not (self._options.again or self._runner.generators)
        apart = self._distance_again(sums=self._sums if is_read_again else None)
        # In half precision few entries may differ, and none by chance.
        if apart > _SAME_SHAPE / 10 or self._is_half:
            apart = max(apart, *(self._distance_again() for _ in range(3)))
        self._unrepeated = apart
        self._refuse_unrepeated()

    def check_statelessness(self) -> None:
        """The same records must have the same gradients after all the others that came meanwhile."""
        if not self._distance_again() <= self._tolerance:
            raise _forgets_nothing()

    def _distance_again(self, *, sums: dict[nn.Parameter, Tensor] | None = None) -> float:
        """How far the small batch is now from what it was; `sums` gets what `compare_with_autograd` reads."""
        weights = _evenly(self._count)
        if sums is not None and self._options.reduction != "none":
            weights = torch.cat([weights, torch.ones_like(weights)])
        again = self._runner.observe(self._records.batch(range(self._count)), weights, sums=sums)
        return _distance(self._first, replace(again, weights=weights[:1], sketches=again.sketches[:1]))

    def _refuse_unrepeated(self) -> None:
        """What is more than rounding comes from a state, or from random numbers that can't be repeated."""
        most = _UNREPEATED_CUDA if self._is_cuda else _UNREPEATED
        if not self._unrepeated <= _UNREPEATED_REDUCED.get(self._runner.precision, most):
            raise _forgets_nothing()

    @property
    def _tolerance(self) -> float:
        """For batches of one shape."""
        floor = _SAME_SHAPE
        if self._runner.singled.sizes_follow_values or self._unrepeated > 0:
            floor = _UNSTEADY[self._runner.precision]
        return max(floor, _SPREAD * self._unrepeated)

    @property
    def _tolerance_elsewhere(self) -> float:
        """For batches of other shapes."""
        return max(self._runner.other_shape(), _SPREAD * self._unrepeated)

    @property
    def _is_half(self) -> bool:
        return self._runner.precision == "half"

    @property
    def _is_unsteady(self) -> bool:
        """Whether two equal passes may be apart: kernels that add up in any order, half precision."""
        return self._is_cuda or self._is_half

    # --- what is the same where some records are others ------------------------------------------------------------

    def _require_same_rows(self, before: Tensor, after: Tensor, change: _Change) -> None:
        """Refuse a difference in what the forward pass gives for the records that stay."""
        if not _same_looks(before[change.kept], after[change.kept], max(self._tolerance, _NORMS)):
            raise change.coupling()

    def _require_same(self, before: ProbeResult, after: ProbeResult, change: _Change, row: int | None) -> None:
        """Refuse a difference in outputs, norms, losses, and the sum of gradients with the weights of `row`."""
        if before.outputs is not None and after.outputs is not None:
            self._require_same_rows(before.outputs, after.outputs, change)
        sums_differ = row is not None and not (
            _far(before.sketches[row], after.sketches[0], before.scale(row)) <= self._tolerance
        )
        if sums_differ or not _same(before, after, change.kept, self._tolerance):
            raise change.coupling()

    # --- once more, in case a function changes its mind ----------------------------------------------------------

    def try_again(self) -> None:
        """Repeat a few experiments in a small batch, or in one as large as training's.

        What may have changed since is the user's code. Where gradients are derivatives of what the forward pass gives,
        that is looked at; elsewhere gradients are compared.
        """
        count = self._options.num_records
        if not self._options.is_thorough:
            if not self._look_again(
                self._records, self._seen, self._with_stand_ins(self._sets[0] if self._sets else [])
            ):
                weights = torch.cat([self._weights[:1], _evenly(self._count)])
                self._first = self._runner.observe(self._records.batch(range(self._count)), weights)
                self.repeat()
                self.replace_ordinary()
        elif count > 1:
            odd = list(range(1, count, 2))

            def looked(records: SyntheticRecords) -> Tensor | None:
                seen = self._runner.look(records.batch(range(count)), count, gradients=True, large=True)
                return seen if bool(seen.isfinite().all()) else None

            large, seen, _ = first_that_runs(self._large_kinds(), looked)
            if large is not None and seen is not None:
                self._large = large
                if self._look_again(large, seen, self._extremes(odd, 0)):
                    return
            first = self._fill_large(_evenly(count))
            self._compare_large(first, self._extremes(odd, 0))

    def _look_again(self, records: SyntheticRecords, seen: Tensor, change: _Change) -> bool:
        """Compare what the forward pass gives with what it gave, then with some records replaced.

        Returns:
            Whether gradients are derivatives of it, so that they need not be compared themselves.
        """
        count = records.count
        if self._runner.gradients_follow and (records is self._records or self._is_unsteady):
            for _ in range(3 if self._is_unsteady else 1):
                again = self._runner.look(records.batch(range(count)), count, gradients=True)
                self._unrepeated = max(self._unrepeated, _apart(seen, again))
            self._refuse_unrepeated()
        if self._runner.gradients_follow and change.replaced:
            batch = records.batch(change.records, change.values)
            changed = attempt(lambda: self._runner.look(batch, count, gradients=True))
            if changed is None:
                return False
            self._require_same_rows(seen, changed, change)
        return self._runner.gradients_follow

    # --- some records of the small batch replaced ------------------------------------------------------------------

    def _with_stand_ins(self, replaced: Sequence[int], values: dict[int, AdversarialValue] | None = None) -> _Change:
        """The small batch with stand-ins for the records that are replaced."""
        records = [self._count + index if index in replaced else index for index in range(self._count)]
        return _Change(replaced=replaced, records=records, values=values or {})

    def _compare(self, change: _Change, row: int, changed: ProbeResult | None = None) -> None:
        """Compare the gradients of the small batch with those of a changed one, whose sum has the weights of `row`."""
        if changed is None:
            batch = self._records.batch(change.records, change.values)
            changed = self._runner.observe(batch, self._weights[row : row + 1])
        first = self._first
        if row >= _ORDINARY:
            if self._further is None:
                self._further = self._runner.observe(self._records.batch(range(self._count)), self._weights)
            first = self._further
        self._require_same(first, changed, change, row)

    def replace_ordinary(self) -> None:
        """Other ordinary records in place of some must leave the rest as they are."""
        if self._options.again and self._sets:
            self._compare(self._with_stand_ins(self._sets[0]), 0)
        for row, changed in enumerate(self._replaced):
            self._compare(self._with_stand_ins(self._sets[row]), row, changed)
        self._replaced = []

    def check_adversarial_values(self) -> None:
        """Whatever some records hold, the others' gradients stay as they are: extremes, NaN, marks, ids.

        Each replaced record holds another kind. Where code refuses one of them, each is tried by itself.
        """
        tried: set[AdversarialValue] = set()
        fill = _EXTREMES if self._records.tensors_of(floating=True) else ()
        for turn in range(_MOST_TURNS if self._sets else 0):
            row = turn % len(self._sets)
            replaced = self._sets[row]
            # What code compares with shows on the way, and is tried too.
            some = [kind for kind in self._kinds() if kind not in tried and not self._is_refused(kind)][: len(replaced)]
            if not some and (turn >= len(self._sets) or not fill):
                return
            tried.update(some)
            if fill and len(some) < len(replaced):
                some += [fill[index % 2] for index in range(len(replaced) - len(some))]
            self._try_together(row, dict(zip(replaced, some, strict=False)))

    def _try_together(self, row: int, values: dict[int, AdversarialValue]) -> None:
        if self._try(row, values):
            return
        runs = {
            index: value for index, value in values.items() if not self._is_refused(value) and self._runs(index, value)
        }
        if not runs or (len(runs) < len(values) and self._try(row, runs)):
            return
        for index, value in runs.items():
            self._try(row, {index: value})

    def _runs(self, index: int, value: AdversarialValue) -> bool:
        """Whether code runs with this one record and another; nothing is captured."""
        try:
            self._runner.plain_run(self._records.batch([index, (index + 1) % self._count], {0: value}), 2)
        except SordinoError:
            return True
        except Exception:
            if isinstance(value.integers, int) and value.integers > 1:
                least = self._least_refused.get(value.tensor, value.integers)
                self._least_refused[value.tensor] = min(value.integers, least)
            return False
        return True

    def _try(self, row: int, values: dict[int, AdversarialValue]) -> bool:
        """Whether code runs on these values; what refuses them can't be asked in this way."""
        change = self._with_stand_ins(list(values), values)
        try:
            if self._runner.gradients_follow:
                batch = self._records.batch(change.records, values)
                seen = self._runner.look(batch, self._count, gradients=True, looks=True)
                self._require_same_rows(self._seen, seen, change)
            if not self._runner.gradients_follow:
                self._compare(change, row)
        except SordinoError:
            raise
        except Exception:
            return False
        self._ran.extend(values.values())
        return True

    def _is_refused(self, value: AdversarialValue) -> bool:
        """Whether a smaller number was refused there: it is no id, and no larger one is."""
        least = self._least_refused.get(value.tensor)
        return least is not None and isinstance(value.integers, int) and value.integers >= least

    def _kinds(self) -> Iterator[AdversarialValue]:
        """What records are made to hold, in all tensors and in each of the first ones; then what code compares with."""
        floating, integer = (self._records.tensors_of(floating=kind) for kind in (True, False))
        singled = self._runner.singled

        def floats(values: Sequence[float]) -> Iterator[AdversarialValue]:
            for value in values if floating else ():
                yield AdversarialValue(floats=value)
                for tensor in floating[:_PARTS] if len(floating) > 1 else ():
                    yield AdversarialValue(floats=value, tensor=tensor)

        def integers(marks: Sequence[int | str], alone: Sequence[int | str]) -> Iterator[AdversarialValue]:
            for mark in marks if integer else ():
                yield AdversarialValue(integers=mark)
                for tensor in integer[:_PARTS] if len(integer) > 1 and mark in alone else ():
                    yield AdversarialValue(integers=mark, tensor=tensor)

        yield from floats(_FLOATS)
        yield from integers((*_MARKS, *_IDS), _MARKS_ALONE)
        if floating and integer:
            yield from (AdversarialValue(floats=_EXTREME, integers=mark) for mark in _MARKS)
        # Padding, labels to be ignored, special tokens.
        further = [mark for mark in singled.integers if mark not in (*_MARKS, *_IDS)]
        yield from integers(further, further)
        yield from floats(list(singled.floats))

    def check_random_outcomes(self) -> None:
        """Whatever chance decides, one record must not change the others: also what it decides rarely."""
        if not self._sets:
            return
        # What no Python code reads decides within tensors, for which the extremes of chance stand.
        unread = self._runner.generators <= {"torch"} and not self._runner.singled.reads_values
        courses = [SeededGenerators(seed=seed) for seed in range(1, _SEEDS_UNREAD if unread else _SEEDS)]
        courses += [SeededGenerators(forced=name, high=high) for name in GENERATORS for high in (False, True)]
        for chance in courses:
            # Draws that come only behind a branch of chance are noticed once that branch was taken.
            used = self._runner.generators
            if used if chance.forced is None else chance.forced in used:
                attempt(lambda chance=chance: self._vary(chance))

    def _vary(self, chance: SeededGenerators) -> None:
        """The others' gradients with some ordinary and some extreme records."""
        extreme = {index: _EXTREMES[1 - number % 2] for number, index in enumerate(self._sets[0])}
        change = self._with_stand_ins(self._sets[0], extreme)
        ordinary, unusual = self._records.batch(range(self._count)), self._records.batch(change.records, extreme)
        if self._runner.gradients_follow:
            one, other = (
                self._runner.look(batch, self._count, chance=chance, gradients=True, looks=True)
                for batch in (ordinary, unusual)
            )
            if bool(one.isfinite().all()):
                self._require_same_rows(one, other, change)
        if not self._runner.gradients_follow:
            plain, changed = (
                self._runner.observe(batch, self._weights[:1], chance=chance) for batch in (ordinary, unusual)
            )
            if plain.finite:
                self._require_same(plain, changed, change, 0)

    def compare_with_autograd(self) -> None:
        """The captured gradients must be those of plain autograd."""
        weights = _evenly(self._count)[0] if self._options.reduction == "none" else torch.ones(self._count)
        batch, least = self._records.batch(range(self._count)), _VANISHING * float(self._first.norms.sum())
        # Where nothing is drawn, the sum is known already.
        sums, self._sums = self._sums, {}
        with DisableRandomness() if self._runner.generators else nullcontext():
            if self._runner.generators:
                sums.clear()
                self._runner.observe(batch, weights[None], sums=sums)
            self._runner.compare_with_autograd(batch, weights, sums, least=least)

    # --- a batch as large as training's ------------------------------------------------------------------------------

    def fill_up(self) -> None:
        """All this in a batch as large as training's, in which thresholds are exceeded and order shows.

        Gradients, and what the forward pass gives, are looked at with every other record replaced, for every ordered
        pair of records, and in smaller batches. Where gradients are derivatives of what the forward pass gives, every
        ordered pair is looked at in that, and gradients in one of these experiments and in smaller batches.
        """
        count = self._options.num_records
        if count < 2:
            return
        even = list(range(0, count, 2))
        sets = [even, *_replaced_sets(count)]
        # Every fifth becomes a copy of its neighbor.
        others = list(range(count))
        for number, index in enumerate(even):
            others[index] = (index + 1) % count if number % 5 == 4 else count + index
        # Smaller batches are compared with one in which chance decides nothing. Where gradients follow from what the
        # forward pass gives, chance is looked at in that, and one such batch stands for all that is observed.
        follows = self._runner.gradients_follow
        calm = follows and bool(self._runner.generators)
        # Two passes read one sum.
        rows = [] if self._options.two_passes or follows else sets
        with DisableRandomness() if calm else nullcontext():
            first = self._fill_large(torch.cat([_evenly(count), *([_rows_of_weights(count, rows)] if rows else [])]))
        changes = [_Change(replaced=even, records=others)]
        changes += [self._extremes(replaced, turn) for turn, replaced in enumerate(sets) if turn]
        whole = _outputs_of(first)
        if follows and (calm or self._options.reduction != "none"):
            whole = self._runner.look(self._large.batch(range(count)), count, gradients=True, large=True)
        left = [
            turn
            for turn, change in enumerate(changes)
            if not follows or turn == _WITH_GRADIENTS or not self._compare_looks(whole, change)
        ]
        if follows and not self._runner.gradients_follow:
            left = list(range(len(changes)))
        reference = first
        # Without chance a loss may vanish up to rounding, such as one of a model with itself: its gradients would be
        # only rounding relative to those of the small batch.
        vanishes = not float(first.norms.mean()) > _VANISHING * float(self._first.norms.mean())
        if calm and (not self._runner.gradients_follow or vanishes):
            calm, reference = False, self._observe_large(range(count), first.weights[:0])
        with DisableRandomness() if calm else nullcontext():
            for turn in left:
                self._compare_large(reference, changes[turn], row=turn + 1 if rows else None)
        # After a look with gradients, whose outputs are copies of their own, one without may show what the loop wrote.
        if self._options.reduction != "none":
            whole = _outputs_of(reference)
            if calm:
                whole = self._runner.look(self._large.batch(range(count)), count)
        self._look_at_missing(whole, sets[-1], len(sets))
        self._look_at_alike(whole)
        if self._runner.generators or not self._is_same_in_parts(first):
            with DisableRandomness():
                if reference is first and not calm:
                    first = self._observe_large(range(count), _evenly(count))
                self.check_single_records(first)

    def _is_same_in_parts(self, first: ProbeResult) -> bool:
        """`check_single_records` where nothing was drawn so far; False where it fails and something is drawn in it."""
        refusal: CoupledRecords | None = None
        with generators_used(self._runner.generators):
            try:
                self.check_single_records(first)
            except CoupledRecords as failure:
                refusal = failure
        if refusal is not None and not self._runner.generators:
            raise refusal
        return refusal is None

    def _large_kinds(self) -> Iterator[SyntheticRecords]:
        """A large batch of diverse records, then one of ordinary ones."""
        pattern = self._records.pattern
        return (self._task.synthetic(self._options.num_records, pattern, diverse=diverse) for diverse in (True, False))

    def _fill_large(self, weights: Tensor) -> ProbeResult:
        """The large batch of the first kind of records that model and loss run on, with finite gradients."""

        def observed(records: SyntheticRecords) -> ProbeResult | None:
            self._large = records
            found = self._observe_large(range(records.count), weights)
            return found if found.finite else None

        _, first, failure = first_that_runs(self._large_kinds(), observed)
        if failure is not None:
            raise _too_many(failure, self._options.num_records) from failure
        if first is None:
            raise self._does_not_run(None, None)
        # How far equal passes are apart, where they were apart before or may be.
        if self._unrepeated > 0 or (self._options.again and self._is_unsteady):
            for _ in range(2):
                again = self._observe_large(range(self._large.count), weights, outputs=False)
                self._unrepeated = max(self._unrepeated, _distance(first, again))
            self._refuse_unrepeated()
        return first

    def _observe_large(
        self,
        records: Sequence[int],
        weights: Tensor,
        values: dict[int, AdversarialValue] | None = None,
        *,
        outputs: bool = True,
    ) -> ProbeResult:
        batch = self._large.batch(records, values)
        return self._runner.observe(batch, weights, large=True, looks=False, outputs=outputs)

    def _compare_looks(self, whole: Tensor, change: _Change, *, gradients: bool = True) -> bool:
        """Compare what the forward pass gives for records that stay; with `gradients` the loss's by it, too.

        Returns:
            Whether gradients are derivatives of it in this batch, so that they need not be compared themselves.
        """
        batch = self._large.batch(change.records, change.values)
        changed = attempt(lambda: self._runner.look(batch, self._large.count, gradients=gradients, large=True))
        if changed is None:
            return True
        self._require_same_rows(whole, changed, change)
        return self._runner.gradients_follow

    def _compare_large(self, first: ProbeResult, change: _Change, *, row: int | None = None) -> None:
        """Compare the records that stay, and the sum of their gradients if `row` is that of their weights."""
        weights = first.weights[:0] if row is None else first.weights[row : row + 1]
        changed = attempt(lambda: self._observe_large(change.records, weights, change.values))
        if changed is not None:
            self._require_same(first, changed, change, row)

    def _look_at_missing(self, whole: Tensor, replaced: list[int], turn: int) -> None:
        """What the forward pass gives for a record must be the same where some of the others are NaN, too."""
        missing = self._extremes(replaced, turn, last=True)
        # Where nothing stands for what is missing, this was the last of the experiments before.
        if missing != self._extremes(replaced, turn - 1):
            self._compare_looks(whole, missing, gradients=False)

    def _look_at_alike(self, whole: Tensor) -> None:
        """What the forward pass gives for a record must be the same where all others are alike: thresholds on counts.

        The others are copies of one record, and then hold one number, also one that the code compares with.
        """
        count = self._large.count
        numbers = [AdversarialValue(integers=number) for number in (0, 1) if self._large.tensors_of(floating=False)]
        ran = dict.fromkeys(
            kind.integers for kind in self._ran[::-1] if kind.tensor is None and kind.integers is not None
        )
        # Those that the code compares with come first.
        further = sorted(ran, key=lambda number: number not in self._runner.singled.integers)[:_ALIKE]
        seen: list[list[Tensor]] = []
        for kind in dict.fromkeys([*numbers, *(AdversarialValue(integers=number) for number in further), None]):
            held = {} if kind is None else dict.fromkeys(range(1, count), kind)
            one = list(tensors_in(self._large.batch([1], {0: kind} if kind is not None else {})))
            if not any(all(map(torch.equal, one, other)) for other in seen):
                batch = self._large.batch([0] + [1] * (count - 1), held)
                # Values that the code refuses can't be asked.
                changed = attempt(lambda batch=batch: self._runner.look(batch, count))
                # One record alone does not tell how large a number usually is.
                near = max(self._tolerance, _NORMS)
                if changed is not None and not _same_looks(whole[:1], changed[:1], near, scale=_scale(whole)):
                    raise _coupled(f"an unusual record changes the others' gradients. {_REMEDY}")
            seen.append(one)

    def _extremes(self, replaced: Sequence[int], turn: int, *, last: bool = False) -> _Change:
        """The large batch where the replaced records hold extremes; where nothing can be, they are copies."""
        count, floating = self._large.count, bool(self._large.tensors_of(floating=True))
        # Those that the code compares with come last.
        ran = list(dict.fromkeys(kind for kind in self._ran[::-1] if kind.tensor is None))[:_PARTS]
        kinds = _EXTREMES if floating else ran
        records, values = list(range(count)), {}
        for number, index in enumerate(replaced):
            if not kinds or (last and number % 5 == 4):
                records[index] = (index + 1) % count
                continue
            records[index] = count + index
            # NaN hides thresholds: it is in one of the experiments only.
            is_nan = last and number % 5 == 3 and floating
            values[index] = AdversarialValue(floats=torch.nan) if is_nan else kinds[(number + turn) % len(kinds)]
        return _Change(replaced=replaced, records=records, values=values)

    # --- other numbers of records --------------------------------------------------------------------------------

    def check_single_records(self, first: ProbeResult) -> None:
        """In a batch a record must have the gradient, and if asked for the loss, that it has in any smaller one.

        The same records come in batches of half the size, a quarter, and so on down to one, the last record first.
        Chance decides nothing in any of them.
        """
        count = self._options.num_records
        weights = _evenly(count)
        order = list(range(count - 1, -1, -1))
        parts: list[ProbeResult] = []
        least = _VANISHING * float(self._first.norms.mean())
        for size in _smaller(count):
            records, order = order[:size], order[size:]
            parts.append(self._part(records, weights[:, records]))
        tolerance = self._tolerance_elsewhere
        total = torch.stack([part.sketches[0] for part in parts]).sum(0)
        if not _far(first.sketches[0], total, max(first.scale(0), least * float(weights.sum()))) <= tolerance:
            raise _coupled(
                f"a batch's loss must be {_REDUCED[self._options.reduction]}, and this one is not. Set loss_reduction "
                "to what the loss does ('mean' or 'sum'), and divide by nothing that counts tokens, weights or records "
                "by hand"
            )
        norms = torch.cat([part.norms for part in parts]).flip(0)
        wrong = ~_near(first.norms, norms, 4 * tolerance, floor=_SMALL_ELSEWHERE, least=least)
        ties = _TIES if self._is_half else 0.0
        if int(wrong.sum()) > ties * len(wrong):
            raise _coupled(f"a record's gradient depends on which others there are, or on their order. {_REMEDY}")
        alone = [part.losses for part in parts if part.losses is not None]
        if self._options.values_released and first.losses is not None and len(alone) == len(parts):
            losses, together = torch.cat(alone).flip(0), first.losses
            if not torch.allclose(together, losses, rtol=tolerance, atol=tolerance * float(together.abs().max())):
                raise CoupledRecords(
                    "records must be independent of each other in the value of the loss, which is released, got a "
                    "coupling: a record's loss depends on how many others there are. Add nothing that counts records."
                )
        # What the forward pass gives for a record, in batches of sizes between the halves.
        whole = _outputs_of(first)
        for size in sorted({count * eighths // 8 for eighths in _EIGHTHS} - {0, 1}):
            part = self._runner.look(self._large.batch(range(size)), size)
            if part.shape[1] == whole.shape[1] and not _same_looks(whole[:size], part, 4 * tolerance, ties=ties):
                raise _coupled(f"a record's result depends on how many others there are. {_REMEDY}")

    def _part(self, records: list[int], weights: Tensor) -> ProbeResult:
        try:
            return self._observe_large(records, weights, outputs=False)
        except SordinoError:
            raise
        except Exception as failure:
            if len(records) > 1:
                raise _too_many(failure, len(records)) from failure
            raise RecordCountMismatch(
                "model and loss must run on a batch of one record, which sampling and microbatch_size give now and "
                f"then, got {type(failure).__name__}. A bare .squeeze() drops the records there: write .squeeze(1)."
            ) from failure


def _outputs_of(result: ProbeResult) -> Tensor:
    assert result.outputs is not None
    return result.outputs


def _replaced_sets(count: int) -> list[list[int]]:
    """Sets of records such that for every ordered pair one of them holds the first and not the second."""
    if count < 2:
        return []
    bits = next(bits for bits in range(2, 65) if math.comb(bits, bits // 2) >= count)
    words = list(combinations(range(bits), bits - bits // 2))
    # In an order that nothing else follows.
    random.Random(_WORDS_SEED).shuffle(words)  # noqa: S311
    return [[index for index, word in enumerate(words[:count]) if bit in word] for bit in range(bits)]


def _evenly(count: int) -> Tensor:
    return torch.linspace(0.5, 1.0, count)[None]


def _rows_of_weights(count: int, sets: Sequence[Sequence[int]]) -> Tensor:
    """For each set the weights of the records that stay, all different; 0 for those that are replaced."""
    if not sets:
        return _evenly(count)
    rows = _evenly(count).repeat(len(sets), 1)
    for row, replaced in zip(rows, sets, strict=True):
        row[list(replaced)] = 0
    return rows


def _smaller(count: int) -> list[int]:
    """Sizes that add up to `count` ≥ 2: about a half, a quarter, and so on; at last two and one."""
    sizes: list[int] = []
    while count >= 2 * _RECORDS:
        sizes.append(count // 2)
        count -= count // 2
    return [*sizes, *([1, 1] if count == 2 else [count - 3, 2, 1] if count > 3 else [2, 1])]


def _far(one: Tensor, other: Tensor, scale: float) -> float:
    """Distance of two sketches, relative to the norms that they are made of; NaN counts as infinity."""
    distance = float(torch.linalg.vector_norm(one - other))
    if distance == 0:
        return 0.0
    return distance / scale if math.isfinite(distance) and scale > 0 else math.inf


def _far_rows(one: Tensor, other: Tensor) -> float:
    """The largest relative difference of two rows of numbers ≥ 0; what is small relative to the mean counts less."""
    if not len(one) or torch.equal(one, other):
        return 0.0
    size = torch.maximum(one, other) + _SMALL * one.mean() + 1e-30
    apart = ((one - other).abs() / size).max()
    return float(apart) if bool(apart.isfinite()) else math.inf


def _near(one: Tensor, other: Tensor, tolerance: float, *, floor: float, least: float = 0.0) -> Tensor:
    """By record, whether two norms are the same."""
    return (one - other).abs() <= tolerance * (torch.maximum(one, other) + floor * one.mean() + least) + 1e-30


def _distance(one: ProbeResult, other: ProbeResult) -> float:
    """The largest relative difference in norms, losses and sums; those of `other` are the last ones of `one`."""
    rows = range(-len(other.weights), 0)
    apart = [_far(one.sketches[row], other.sketches[row], one.scale(row)) for row in rows]
    apart.append(_far_rows(one.norms, other.norms))
    if one.losses is not None and other.losses is not None:
        apart.append(_far_rows(one.losses.abs(), other.losses.abs()))
    return max(apart)


def _same(one: ProbeResult, other: ProbeResult, kept: Sequence[int], tolerance: float) -> bool:
    """Whether the records `kept` have the norms and the losses that they had, up to a relative tolerance."""
    if not bool(_near(one.norms[kept], other.norms[kept], max(tolerance, _NORMS), floor=_SMALL).all()):
        return False
    if one.losses is None or other.losses is None:
        return True
    here = one.losses[kept]
    atol = 1e-8 + tolerance * _SMALL * float(here.abs().mean()) if len(kept) else 0.0
    return torch.allclose(here, other.losses[kept], rtol=tolerance, atol=atol)


def _scale(rows: Tensor) -> Tensor:
    """How large each number usually is."""
    return rows.nan_to_num(0.0, 0.0, 0.0).abs().mean(0)


def _same_looks(
    one: Tensor, other: Tensor, tolerance: float, *, ties: float = 0.0, scale: Tensor | None = None
) -> bool:
    """Whether rows of numbers are the same up to rounding, but for a part `ties` of them; NaN is itself."""
    if one.shape != other.shape:
        return False
    scale = _scale(one) if scale is None else scale
    near = torch.isclose(one, other, rtol=tolerance, atol=0.0, equal_nan=True)
    same = (near | ((one - other).abs() <= tolerance * scale)).all(1)
    return int((~same).sum()) <= ties * len(same)


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest relative difference of two equal looks; what is small for its column counts less."""
    if torch.equal(one, other):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    apart = (one - other).abs() / (torch.maximum(one.abs(), other.abs()) + _SMALL * _scale(one) + 1e-30)
    apart = apart[~((one == other) | (one.isnan() & other.isnan()))]
    return float(apart.max()) if bool(apart.isfinite().all()) else math.inf


def _coupled(reason: str) -> CoupledRecords:
    return CoupledRecords(f"records must be independent of each other in model and loss, got a coupling: {reason}.")


def _forgets_nothing() -> CoupledRecords:
    return CoupledRecords(
        "model must forget a batch when the next one comes, got another gradient for the same records after other "
        "records. Keep no hidden state or counter between forward passes, and draw random numbers from torch's, "
        "numpy's or Python's own generator. On a GPU kernels that add up in any order do it too: call "
        "torch.use_deterministic_algorithms(True)."
    )


def _too_many(failure: Exception, count: int) -> UnsupportedModule:
    return UnsupportedModule(
        "model and loss must run on every number of records that training gives them at once, got a failure on "
        f"{count} synthetic records ({type(failure).__name__}: {failure}). Set microbatch_size to what fits."
    )
