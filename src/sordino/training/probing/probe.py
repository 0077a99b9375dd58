"""The independence probe (floor 3): experiments on made-up records before any private record is used.

One record is replaced, made extreme, and taken away; no other record's gradient may change. What is found this way is
found whatever its cause: batch normalisation in any disguise, ``x - x.mean(0)``, contrastive losses, losses that divide
by the tokens, class weights or valid labels of the whole batch, thresholds and branches that one record can set off,
and what a module stores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, RecordCountMismatch, SordinoError, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.training.probing.determinism import GENERATORS, Chance, WithoutChance, random_state_kept
from sordino.training.probing.observation import Observation, Observer
from sordino.training.probing.state import ModuleState, attributes_kept
from sordino.training.probing.synthetic import INTEGER_PATTERNS, Poison, SyntheticRecords
from sordino.training.structure import tensors_in

__all__ = ["check_records_are_independent", "gradient_distance", "refuse_renormalised_tables", "without_traces"]

_RECORDS = 4
# Enough for one record to lie more than three standard deviations from the mean of all.
_MANY_RECORDS = 16
_SEEDS = 9
# Batches of one shape go through the same kernels row by row, so what is left is rounding in the comparison itself.
_SAME_SHAPE = 1e-5
# Alone, a record goes through other kernels: rounding, but far from the factor that a wrong reduction makes.
_OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OTHER_SHAPE_HALF = 5e-2
_EXTREME = 1e4
_FLOATS = (torch.nan, _EXTREME, -_EXTREME)
# Marks of missing labels, then ids: small ones are often special tokens.
_MARKS = (-1, -100)
_IDS = (*range(2, 13), 100, 999, "range")
_MARKS_ALONE = (*_MARKS, 2, 999)
# A batch of many tensors is poisoned as a whole and in its first parts.
_PARTS = 4
_REMEDY = "Look for batch statistics, sums over dimension 0 and losses that compare records; see LayerNorm, GroupNorm"


def check_records_are_independent(
    model: nn.Module,
    capture: GradientCapture,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    may_be_empty: bool = False,
    public_batch: object = None,
    values_released: bool = False,
) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient.

    Guarantee: only the structure of `records` (shapes, types, devices) is read. Random states, parameters, buffers,
    gradients, flags and Python attributes are as before.

    Args:
        model: in the mode in which it will be trained.
        capture: hooks on the model, with no recording in use.
        records: a batch, or a batch with no rows, in the loop's structure; records first.
        run: batch ↦ loss. With `reduction` "none" one value per record, shape (B,); with "mean" or "sum" a scalar.
        reduction: how `run` reduces over records.
        may_be_empty: also require that `run` accepts a batch of no records.
        public_batch: at least five public or invented records in the structure of `records` (or of its first part):
            the experiment uses them instead of made-up ones, for loops that validate their input.
        values_released: losses are released, not only gradients: a record must also have the loss that it has alone.

    Raises:
        CoupledRecords: a record changes another one, the module stores something, or the loss is not the declared
            reduction.
        LossShapeError: the loss doesn't have the shape expected.
        UncapturedParameter: a parameter is used where no layer rule captures it, or lies outside the model.
        UnsupportedModule: an empty batch doesn't run, though it may come.
    """
    rows = next((tensor.size(0) for tensor in tensors_in(records) if tensor.dim()), 0)
    if any(tensor.dim() and tensor.size(0) == 0 for tensor in tensors_in(records)):
        rows = 0
    refuse_renormalised_tables(model)
    with without_traces(model):
        probe = _Probe(Observer(capture, run, reduction), records, rows, list(tensors_in(public_batch)), reduction)
        probe.replace_first()
        probe.take_apart(values=values_released)
        probe.poison_first()
        probe.vary_chance()
        probe.beside_a_large_record()
        probe.forget()
        if may_be_empty:
            probe.take_all()


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Leave the model and chance as they were, and refuse a model that was written to in the block."""
    with random_state_kept(), _gradients_kept(model), attributes_kept(model):
        state = ModuleState(model)
        try:
            yield
        except BaseException:
            state.restore()
            raise
        state.refuse_changes()


def refuse_renormalised_tables(model: nn.Module) -> None:
    """Refuse embeddings with ``max_norm``: they rewrite the rows that a batch looks up."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModule(
                f"{name or 'the model'} ({type(module).__name__}) must have max_norm=None, got a limit: the rows that "
                "a batch looks up are rewritten in its forward pass. Normalise the output instead."
            )


class _Probe:
    def __init__(
        self, observer: Observer, structure: object, rows: int, example: Sequence[Tensor], reduction: str
    ) -> None:
        self._observer = observer
        self._structure, self._rows, self._example = structure, rows, example
        self._reduction = reduction
        self._weights = torch.linspace(0.5, 1.0, _RECORDS)
        self._weights[0] = 0
        self._made_up, self._first = self._workable()

    def _workable(self) -> tuple[SyntheticRecords, Observation]:
        """The first kind of made-up records that the loop runs on, and what it gives on them."""
        failure: Exception | None = None
        for pattern in INTEGER_PATTERNS:
            made_up = self._records(_RECORDS, pattern)
            try:
                observed = self._observe(made_up)
                again = self._observer.observe(made_up.batch(made_up.without_first()), self._weights)
            except SordinoError:
                raise
            except Exception as error:
                failure = error
                continue
            if observed.finite and again.finite:
                self._pattern = pattern
                return made_up, observed
        raise CoupledRecords(
            "model and loss must run on made-up records to show that records are independent, got a failure on "
            "random features with labels 0 and 1. Pass public_batch=, five public or invented records that it runs on."
        ) from failure

    def _records(self, count: int, pattern: str, *, far_out: bool = False) -> SyntheticRecords:
        return SyntheticRecords(
            self._structure, rows=self._rows, count=count, pattern=pattern, example=self._example, far_out=far_out
        )

    def _observe(self, made_up: SyntheticRecords, poison: Poison | None = None) -> Observation:
        return self._observer.observe(made_up.batch(range(_RECORDS), poison=poison), self._weights)

    def replace_first(self) -> None:
        """Another first record must leave the other records' losses and gradients as they are."""
        other = self._made_up.batch(self._made_up.without_first())
        changed = self._observer.observe(other, self._weights)
        _compare(self._first, changed, _SAME_SHAPE, f"one record changes another record's gradient. {_REMEDY}")
        self.forget()

    def poison_first(self) -> None:
        """Whatever the first record holds, the others' gradients stay as they are: extremes, NaN, marks, ids."""
        for poison in self._poisons():
            try:
                observed = self._observe(self._made_up, poison)
            except SordinoError:
                raise
            except Exception:  # noqa: S112
                continue  # Code that refuses such a value can't be asked in this way.
            _compare(self._first, observed, _SAME_SHAPE, f"an unusual record changes the others' gradients. {_REMEDY}")

    def _poisons(self) -> Iterator[Poison]:
        floating, integer = (self._made_up.places(floating=kind) for kind in (True, False))
        alone = len(floating) + len(integer) > 1
        for value in _FLOATS if floating else ():
            yield Poison(floats=value)
            for place in floating[:_PARTS] if alone else ():
                yield Poison(floats=value, place=place)
        for mark in (*_MARKS, *_IDS) if integer else ():
            yield Poison(integers=mark)
            for place in integer[:_PARTS] if len(integer) > 1 and mark in _MARKS_ALONE else ():
                yield Poison(integers=mark, place=place)
        if floating and integer:
            for mark in _MARKS:
                yield Poison(floats=_EXTREME, integers=mark)
        yield from self._singled_out(floating, integer)

    def _singled_out(self, floating: Sequence[int], integer: Sequence[int]) -> Iterator[Poison]:
        """What the code itself compares with: padding, labels to be ignored, special tokens."""
        for mark in list(self._observer.singled.integers) if integer else ():
            if mark not in (*_MARKS, *_IDS):
                yield Poison(integers=mark)
                for place in integer[:_PARTS] if len(integer) > 1 else ():
                    yield Poison(integers=mark, place=place)
        for value in list(self._observer.singled.floats) if floating else ():
            yield Poison(floats=value)
            for place in floating[:_PARTS] if len(floating) + len(integer) > 1 else ():
                yield Poison(floats=value, place=place)

    def vary_chance(self) -> None:
        """Whatever chance decides, one record must not change the others: also what it decides rarely."""
        courses = [Chance(seed=seed) for seed in range(1, _SEEDS)]
        courses += [Chance(forced=name, high=high) for name in GENERATORS for high in (False, True)]
        for chance in courses:
            # Draws that come only behind a branch of chance are noticed once that branch was taken.
            used = self._observer.generators
            if used if chance.forced is None else chance.forced in used:
                self._compare_first(self._made_up, self._weights, chance)

    def beside_a_large_record(self) -> None:
        """The same where another record exceeds a threshold already, in a larger batch."""
        if self._example and any(len(tensor) <= _MANY_RECORDS for tensor in self._example if tensor.dim()):
            return
        weights = torch.linspace(0.5, 1.0, _MANY_RECORDS)
        weights[0] = 0
        made_up = self._records(_MANY_RECORDS, self._pattern, far_out=True)
        self._compare_first(made_up, weights, Chance())

    def _compare_first(self, made_up: SyntheticRecords, weights: Tensor, chance: Chance) -> None:
        """Others' gradients with an ordinary and with an extreme first record."""
        extreme = Poison(floats=_EXTREME)
        try:
            plain = self._observer.observe(made_up.batch(range(len(weights))), weights, chance=chance)
            places = made_up.without_first()
            changed = self._observer.observe(made_up.batch(places, poison=extreme), weights, chance=chance)
        except SordinoError:
            raise
        except Exception:
            return
        if plain.finite:
            _compare(plain, changed, _SAME_SHAPE, f"one record changes another record's gradient. {_REMEDY}")

    def forget(self) -> None:
        """The same records must have the same gradients after all the others that came meanwhile."""
        again = self._observe(self._made_up)
        if not gradient_distance(self._first, again) <= _SAME_SHAPE * self._first.scale:
            raise CoupledRecords(
                "model must forget a batch when the next one comes, got another gradient for the same records after "
                "other records. Keep no hidden state or counter between forward passes."
            )

    def take_apart(self, *, values: bool = False) -> None:
        """In a batch a record must have the gradient, and if asked for the loss, that it has alone."""
        chosen = torch.tensor([0.0, 0.7, 0.0, 1.0])
        with WithoutChance():
            whole = self._observer.observe(self._made_up.batch(range(_RECORDS)), chosen)
            places = chosen.nonzero().flatten().tolist()
            parts = [self._alone(self._made_up.batch([place]), chosen[place : place + 1]) for place in places]
        tolerance = _OTHER_SHAPE.get(whole.dtype, _OTHER_SHAPE_HALF)
        wanted = {"none": "made of records alone", "mean": "the mean over records", "sum": "the sum over records"}
        _compare(
            whole,
            parts,
            tolerance,
            f"a batch's loss must be {wanted[self._reduction]}, and this one is not. Set loss_reduction to what the "
            "loss does ('mean' or 'sum'), and divide by nothing that counts tokens, weights or records by hand",
        )
        alone = [part.losses for part in parts if part.losses is not None]
        if values and whole.losses is not None and len(alone) == len(places):
            here = whole.losses[places]
            if not torch.allclose(here, torch.cat(alone), rtol=tolerance, atol=tolerance * float(here.abs().max())):
                raise CoupledRecords(
                    "records must be independent of each other in the value of the loss, which is released, got a "
                    "coupling: a record's loss depends on how many others there are. Add nothing that counts records."
                )

    def _alone(self, batch: object, weight: Tensor) -> Observation:
        try:
            return self._observer.observe(batch, weight)
        except SordinoError:
            raise
        except Exception as failure:
            raise RecordCountMismatch(
                "model and loss must run on a batch of one record, which sampling and microbatch_size give now and "
                f"then, got {type(failure).__name__}. A bare .squeeze() drops the records there: write .squeeze(1)."
            ) from failure

    def take_all(self) -> None:
        """A batch of no records is a real step and must run."""
        try:
            self._observer.observe(self._made_up.batch([]), torch.zeros(0))
        except SordinoError:
            raise
        except Exception as error:
            raise UnsupportedModule(
                "module must accept a batch of no records, which Poisson sampling draws now and then, got "
                f"{type(error).__name__}. Replace x.view(x.size(0), -1) by x.flatten(1), or expect larger batches."
            ) from error


def gradient_distance(one: Observation, other: Observation | Sequence[Observation]) -> float:
    """Norm of the difference of two weighted sums of gradients, the second one given in parts."""
    others = [other] if isinstance(other, Observation) else list(other)
    square = 0.0
    for parameter in dict.fromkeys([*one.sums, *(parameter for part in others for parameter in part.sums)]):
        terms = [part.sums[parameter].double() for part in others if parameter in part.sums]
        total = one.sums[parameter].double() if parameter in one.sums else torch.zeros_like(terms[0])
        for term in terms:
            total = total - term
        square += float(torch.linalg.vector_norm(total)) ** 2
    return square**0.5


def _compare(one: Observation, other: Observation | Sequence[Observation], tolerance: float, reason: str) -> None:
    """Refuse a difference in the gradients of the compared records, or in their losses."""
    same = gradient_distance(one, other) <= tolerance * one.scale
    if isinstance(other, Observation) and one.losses is not None and other.losses is not None:
        same = same and torch.allclose(one.losses[1:], other.losses[1:], rtol=tolerance, atol=1e-8)
    if not same:
        raise CoupledRecords(f"records must be independent of each other in model and loss, got a coupling: {reason}.")


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield
