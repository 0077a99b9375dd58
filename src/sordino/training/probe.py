"""The independence probe (floor 3): an experiment on made-up records before any private record is used.

One record is replaced, poisoned with NaN, and taken away; no other record's gradient may notice. What is found this
way is found whatever its cause: batch normalisation in any disguise, ``x - x.mean(0)``, contrastive losses, losses
that divide by the tokens or class weights of the whole batch, buffers that collect statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, LossShapeError, SordinoError, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.training.determinism import WithoutChance, random_state_kept, same_chance
from sordino.training.losses import LossWatch
from sordino.training.structure import tensors_in
from sordino.training.synthetic import INTEGER_PATTERNS, SyntheticRecords

__all__ = ["check_records_are_independent"]

_RECORDS = 4
# Batches of one shape go through the same kernels row by row, so what is left is rounding in the comparison itself.
_SAME_SHAPE = 1e-5
# Alone, a record goes through other kernels: rounding, but far from the factor that a wrong reduction makes.
_OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OTHER_SHAPE_HALF = 5e-2
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
) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient.

    Guarantee: only the structure of `records` (shapes, types, devices) is read. Random states, buffers, gradients and
    flags are as before.

    Args:
        model: in the mode in which it will be trained.
        capture: hooks on the model, with no recording in use.
        records: a batch, or a batch with no rows, in the loop's structure; records first.
        run: batch ↦ loss. With `reduction` "none" one value per record, shape (B,); with "mean" or "sum" a scalar.
        reduction: how `run` reduces over records.
        may_be_empty: also require that `run` accepts a batch of no records.
        public_batch: at least five public or invented records in the structure of `records` (or of its first part):
            the experiment uses them instead of made-up ones, for loops that validate their input.

    Raises:
        CoupledRecords: a record changes another one, a buffer changes, or the loss is not the declared reduction.
        LossShapeError: the loss doesn't have the shape expected.
        UncapturedParameter: a parameter is used where no layer rule captures it.
        UnsupportedModule: an empty batch doesn't run, though it may come.
    """
    rows = next((tensor.size(0) for tensor in tensors_in(records) if tensor.dim()), 0)
    if any(tensor.dim() and tensor.size(0) == 0 for tensor in tensors_in(records)):
        rows = 0
    with random_state_kept(), _gradients_kept(model), _buffers_watched(model):
        probe = _Probe(capture, run, reduction)
        made_up, first = probe.workable(records, rows, list(tensors_in(public_batch)))
        probe.replace_first(made_up, first)
        probe.poison_first(made_up)
        probe.take_apart(made_up)
        if may_be_empty:
            probe.take_all(made_up)


@dataclass(frozen=True, kw_only=True)
class _Observation:
    losses: Tensor | None
    norms: Tensor
    divides_by_targets: bool

    @property
    def finite(self) -> bool:
        return bool(self.norms.isfinite().all()) and (self.losses is None or bool(self.losses.isfinite().all()))


class _Probe:
    def __init__(self, capture: GradientCapture, run: Callable[[object], Tensor], reduction: str) -> None:
        self._capture = capture
        self._run = run
        self._reduction = reduction
        self._difference: dict[nn.Parameter, Tensor] = {}

    def workable(
        self, structure: object, rows: int, example: Sequence[Tensor]
    ) -> tuple[SyntheticRecords, _Observation]:
        """The first kind of made-up records that the loop runs on, and what it gives on them."""
        failure: Exception | None = None
        for pattern in INTEGER_PATTERNS:
            made_up = SyntheticRecords(structure, rows=rows, count=_RECORDS, pattern=pattern, example=example)
            try:
                observed = self.observe(made_up.batch(range(_RECORDS)), _RECORDS)
                again = self.observe(made_up.batch(made_up.without_first()), _RECORDS)
            except SordinoError:
                raise
            except Exception as error:
                failure = error
                continue
            if observed.finite and again.finite:
                return made_up, observed
        raise CoupledRecords(
            "model and loss must run on made-up records to show that records are independent, got a failure on "
            "random features with labels 0 and 1. Pass public_batch=, five public or invented records that it runs on."
        ) from failure

    def replace_first(self, made_up: SyntheticRecords, first: _Observation) -> None:
        """Another first record must leave the other records' losses and gradients as they are."""
        weights = torch.linspace(0.5, 1.0, _RECORDS)
        weights[0] = 0
        batch, other = made_up.batch(range(_RECORDS)), made_up.batch(made_up.without_first())
        scale = float((first.norms.cpu() * weights).sum())
        self._difference = {}
        plain = self.observe(batch, _RECORDS, weights)
        changed = self.observe(other, _RECORDS, -weights)
        self._compare(scale, _SAME_SHAPE, f"one record changes another record's gradient. {_REMEDY}")
        if not torch.allclose(plain.norms, first.norms, rtol=_OTHER_SHAPE[torch.float32]):
            raise CoupledRecords(
                "model must forget a batch when the next one comes, got another gradient for the same records after "
                "other records. Keep no hidden state or counter between forward passes."
            )
        pairs = () if plain.losses is None or changed.losses is None else ((plain.losses[1:], changed.losses[1:]),)
        if any(not torch.allclose(before, after, rtol=_SAME_SHAPE, atol=1e-8) for before, after in pairs):
            raise CoupledRecords(f"loss must be each record's own, got one that changes with others. {_REMEDY}.")
        if first.divides_by_targets:
            self._difference = {}
            self.observe(batch, _RECORDS, weights)
            self.observe(batch, _RECORDS, -weights, ignore_first=True)
            self._compare(
                scale,
                _SAME_SHAPE,
                "a mean over all targets of the batch that are not ignored couples them. Average over the targets of "
                "each record first (reduction='none')",
            )

    def poison_first(self, made_up: SyntheticRecords) -> None:
        """NaN in the first record must stay there: this finds couplings too weak for a difference of values."""
        try:
            observed = self.observe(made_up.batch(range(_RECORDS), poisoned=True), _RECORDS)
        except SordinoError:
            raise
        except Exception:
            return  # Code that refuses NaN can't be asked in this way.
        losses = torch.zeros(_RECORDS) if observed.losses is None else observed.losses
        if not (bool(observed.norms[1:].isfinite().all()) and bool(losses[1:].isfinite().all())):
            raise CoupledRecords(f"records must not touch each other, got a NaN that spread to others. {_REMEDY}.")

    def take_apart(self, made_up: SyntheticRecords) -> None:
        """In a batch a record must have the gradient that it has alone."""
        chosen = torch.tensor([0.0, 0.7, 0.0, 1.0])
        self._difference = {}
        with WithoutChance():
            whole = self.observe(made_up.batch(range(_RECORDS)), _RECORDS, chosen)
            for place in chosen.nonzero().flatten().tolist():
                self.observe(made_up.batch([place]), 1, -chosen[place : place + 1])
        dtype = next(iter(self._difference.values())).dtype if self._difference else torch.float32
        scale = float((whole.norms.cpu() * chosen).sum())
        wanted = {"none": "made of records alone", "mean": "the mean over records", "sum": "the sum over records"}
        self._compare(
            scale,
            _OTHER_SHAPE.get(dtype, _OTHER_SHAPE_HALF),
            f"a batch's loss must be {wanted[self._reduction]}, and this one is not. Set loss_reduction to what the "
            "loss does ('mean' or 'sum'), and divide by nothing that counts tokens, weights or records by hand",
        )

    def take_all(self, made_up: SyntheticRecords) -> None:
        """A batch of no records is a real step and must run."""
        try:
            self.observe(made_up.batch([]), 0)
        except SordinoError:
            raise
        except Exception as error:
            raise UnsupportedModule(
                "module must accept a batch of no records, which Poisson sampling draws now and then, got "
                f"{type(error).__name__}. Replace x.view(x.size(0), -1) by x.flatten(1), or expect larger batches."
            ) from error

    def observe(
        self, batch: object, count: int, weights: Tensor | None = None, *, ignore_first: bool = False
    ) -> _Observation:
        """One forward and backward; with `weights`, adds the weighted sum of gradients to the difference."""
        same_chance()
        scale = float(max(count, 1)) if self._reduction == "mean" else 1.0
        watch = LossWatch(records=count, ignore_first=ignore_first)
        with ExitStack() as stack:
            stack.enter_context(self._capture.recording(count, scale=scale))
            stack.enter_context(torch.enable_grad())
            with watch:
                loss = self._run(batch)
            self._check_shape(loss, count)
            total = loss.sum()
            names = self._capture.uncaptured_uses(total)
            if names:
                raise UncapturedParameter(
                    f"{', '.join(names)} must be used through a captured layer only, got another use. Call the layer "
                    "itself rather than reading its parameter, and keep penalties on parameters out of the loss."
                )
            if total.requires_grad:
                total.backward()
        norms = self._capture.squared_norms().sqrt()
        if weights is not None:
            self._capture.add_weighted_sums(weights.to(norms.device, norms.dtype), into=self._difference)
        self._capture.discard()
        losses = loss.detach() if self._reduction == "none" else None
        return _Observation(losses=losses, norms=norms, divides_by_targets=watch.divides_by_targets)

    def _check_shape(self, loss: Tensor, count: int) -> None:
        if self._reduction == "none" and loss.shape != (count,):
            got = tuple("B" if size == count and count > 1 else size for size in loss.shape)
            raise LossShapeError(
                f"loss must have shape (B,), one value per record, got {_written(got)}. Use reduction='none' and sum "
                "or average over everything but the records, for example .flatten(1).mean(1)."
            )
        if self._reduction != "none" and loss.numel() != 1:
            raise LossShapeError("loss must be one number for the whole batch, got several. Take .mean() over records.")

    def _compare(self, scale: float, tolerance: float, reason: str) -> None:
        squares = [float(torch.linalg.vector_norm(part.double())) ** 2 for part in self._difference.values()]
        self._difference, distance = {}, sum(squares) ** 0.5
        if not distance <= tolerance * scale:
            raise CoupledRecords(
                f"records must be independent of each other in model and loss, got a coupling: {reason}."
            )


def _written(shape: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


@contextmanager
def _buffers_watched(model: nn.Module) -> Iterator[None]:
    """Refuse buffers that a training forward changes, and put their values back."""
    kept = {name: (buffer, buffer.detach().clone(), buffer._version) for name, buffer in model.named_buffers()}
    changed: list[str] = []
    try:
        yield
    finally:
        now = dict(model.named_buffers())
        for name, (buffer, value, version) in kept.items():
            if now.get(name) is not buffer or buffer._version != version:
                changed.append(name)
                owner, _, attribute = name.rpartition(".")
                buffer.detach().copy_(value)
                setattr(model.get_submodule(owner), attribute, buffer)
    if changed:
        raise CoupledRecords(
            f"buffers must not change in a training forward pass, got changes of {', '.join(sorted(changed))}: what a "
            "buffer collects from records is released without noise. Turn the statistics off, or call .eval() on "
            "that layer."
        )
