"""One look at a model and loss on made-up records (floor 3): losses, gradient norms, a weighted sum of gradients."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sordino.errors import LossShapeError, UncapturedParameter
from sordino.gradients import GradientCapture
from sordino.gradients.passes import TwoPasses
from sordino.training.probing.determinism import Chance, generators_used
from sordino.training.probing.indices import IndicesChecked
from sordino.training.probing.losses import NoClassWeights, PublicDivisor
from sordino.training.probing.singled import SingledOut
from sordino.training.structure import tensors_in

__all__ = [
    "OTHER_SHAPE",
    "OTHER_SHAPE_HALF",
    "Observation",
    "Observer",
    "PastOutputs",
    "backward_into_the_module",
    "foreign_leaves",
    "learner_outside",
    "past_outputs",
]

# Alone or in another batch, a record goes through other kernels: rounding, but far from the factor that a wrong
# reduction makes.
OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-3}
OTHER_SHAPE_HALF = 5e-2
# A parameter's gradient that is nothing but rounding, relative to the whole gradient, and how much more it is in half
# precision; and what a parameter's error may be, relative to the whole gradient's.
_NOISE, _HALF_NOISE, _FLOOR = 1e-6, 1e4, 1e-2
# So many entries of a record's outputs are looked at one by one.
_SEEN = 64
# So many numbers, and one for the rest, stand for the gradient of a parameter.
_PROJECTED = 64
# Nodes at which captured layers read gradients.
_CAPTURED = frozenset({"_EdgeBackward", "_DirectionBackward"})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one forward and backward gave.

    Args:
        losses: one value per record, float64 on the CPU, or None for a loss that is reduced.
        norms: of the records' gradients, float64 on the CPU.
        sketches: for each row of weights, a random projection of the weighted sum of the records' gradients: two of
            them are as far apart as the sums, up to a factor near 1.
        weights: the rows of weights, on the CPU.
        outputs: what the forward pass gave for each record, in a few numbers, as `Observer.look` tells it; or None.
    """

    losses: Tensor | None
    norms: Tensor
    sketches: tuple[Tensor, ...]
    weights: Tensor
    outputs: Tensor | None = None

    @property
    def finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return bool(self.norms.isfinite().all()) and (self.losses is None or bool(self.losses.isfinite().all()))

    def scale(self, row: int) -> float:
        """The weighted sum of the norms."""
        weights = self.weights[row]
        return float((self.norms * weights)[weights != 0].sum())


class Observer:
    """Runs model and loss on batches of made-up records and reads the gradients that a private step would read.

    Args:
        capture: hooks on the model, with no recording in use.
        run: batch ↦ loss.
        reduction: "none", "mean" or "sum" over records.
        two_passes: run backward passes as the step does, twice, keeping nothing of a layer.

    Attributes:
        generators: the generators of random numbers that were used so far.
        singled: what tensors were compared with so far.
        dtype: in which gradients were summed.
    """

    def __init__(
        self, capture: GradientCapture, run: Callable[[object], Tensor], reduction: str, *, two_passes: bool = False
    ) -> None:
        self.generators: set[str] = set()
        self.singled = SingledOut()
        self._capture = capture
        self._run = run
        self._reduction = reduction
        self._two_passes = two_passes
        self._own = set(capture.model.parameters())
        self._directions: dict[int, Tensor] = {}
        # Outputs of the model, by their number, that no loss was made of so far.
        self._idle: set[int] | None = None
        self.dtype = torch.float32

    def observe(
        self,
        batch: object,
        weights: Tensor,
        *,
        chance: Chance | None = None,
        large: bool = False,
        looks: bool = True,
        outputs: bool = False,
    ) -> Observation:
        """One forward and backward.

        Args:
            batch: made-up records.
            weights: rows of one for each record, in sums of gradients; a record of weight 0 adds nothing, not even NaN.
            chance: the course of random numbers.
            large: the batch is as large as one of training: spare memory where the step does.
            looks: look into operations and graph, which a smaller batch needn't have shown already.
            outputs: also tell what the forward pass gave for each record.

        Raises:
            LossShapeError: the loss doesn't have the shape of its reduction.
            UncapturedParameter: a parameter would get an ordinary gradient.
        """
        count = weights.size(1)
        taking = _Norms(self._capture.trainable(), weights) if large and self._two_passes else None
        (chance or Chance()).start()
        with ExitStack() as stack:
            if looks:
                stack.enter_context(generators_used(self.generators))
            scale = float(max(count, 1)) if self._reduction == "mean" else 1.0
            stack.enter_context(
                self._capture.recording(count, scale=scale, taking=None if taking is None else taking.passes)
            )
            noted = stack.enter_context(self._outputs_noted()) if outputs else None
            loss = self._loss(stack, batch, count, looks=looks)
            total = loss.sum()
            rows = None if noted is None else self._rows(noted, loss, count)
            if looks:
                self._check_parameters(total)
                self._backward(total, count)
            else:
                self._capture.backward(lambda again: total.backward(retain_graph=again))
        norms = taking.norms if taking is not None else self._capture.squared_norms().sqrt()
        sketches: list[Tensor] = []
        for row in weights:
            sums: dict[nn.Parameter, Tensor] = {}
            if taking is None:
                self._capture.add_weighted_sums(row.to(norms.device, norms.dtype), into=sums)
            else:
                self._capture.add_taken_sums(sums)
            sketches.append(self.sketch(sums))
        self._capture.discard()
        return Observation(
            losses=loss.detach().cpu().double() if self._reduction == "none" else None,
            norms=norms.cpu(),
            sketches=tuple(sketches),
            weights=weights,
            outputs=rows,
        )

    def compare_with_autograd(self, batch: object, weights: Tensor, *, least: float = 0.0) -> None:
        """Compare the captured sum of gradients with what torch's autograd gives, for every trained parameter.

        Args:
            batch: made-up records, on which chance decides nothing.
            weights: one for each record; all 1 for a loss that is reduced.
            least: a whole gradient with a smaller norm is nothing but rounding.

        Raises:
            UncapturedParameter: names the parameters with another gradient.
        """
        count = len(weights)
        sums: dict[nn.Parameter, Tensor] = {}
        Chance().start()
        with ExitStack() as stack:
            scale = float(max(count, 1)) if self._reduction == "mean" else 1.0
            stack.enter_context(self._capture.recording(count, scale=scale))
            self._backward(self._loss(stack, batch, count, looks=True).sum(), count)
        self._capture.add_weighted_sums(weights.double(), into=sums)
        self._capture.discard()
        Chance().start()
        trained = self._capture.trainable()
        with ExitStack() as stack:
            stack.enter_context(self._capture.ordinary())
            loss = self._loss(stack, batch, count, looks=True)
            total = (loss * weights.to(loss.device, loss.dtype)).sum() if loss.dim() else loss * scale
            plain = _plain_gradients(total, trained) if total.requires_grad else ()
        gradients = dict(zip(trained, plain, strict=False))
        whole = sum(float(torch.linalg.vector_norm(g.double())) ** 2 for g in plain if g is not None) ** 0.5
        whole = max(whole, least)
        wrong = [
            name
            for parameter, name in self._capture.names.items()
            if parameter.requires_grad and not self._is_gradient(sums.get(parameter), gradients.get(parameter), whole)
        ]
        if wrong:
            raise UncapturedParameter(
                f"{', '.join(wrong)} must get from the captured layers the gradient that the loss has, got another: "
                "part of the loss reaches it on a way that is not captured (a term that a module keeps in an attribute "
                "instead of returning it, a custom autograd function on the parameter, a hook). Return such terms from "
                "the module that computes them, call the layer that holds the parameter, or freeze the parameter."
            )

    def _is_gradient(self, captured: Tensor | None, plain: Tensor | None, whole: float) -> bool:
        wanted = None if plain is None else plain.detach().double()
        size = 0.0 if wanted is None else float(torch.linalg.vector_norm(wanted))
        if captured is None or not bool(captured.any()):
            # What a layer passes on may be rounding only: a bias that a softmax takes out again.
            return size <= _NOISE * whole * (_HALF_NOISE if self.singled.is_half else 1.0)
        got = captured.double()
        difference = float(torch.linalg.vector_norm(got if wanted is None else got - wanted))
        tolerance = OTHER_SHAPE_HALF if self.singled.is_half else OTHER_SHAPE.get(captured.dtype, OTHER_SHAPE_HALF)
        return difference <= tolerance * size + _FLOOR * tolerance * whole

    def look(self, batch: object, count: int) -> Tensor:
        """What the forward pass gives for each record, in a few numbers: float64 on the CPU, shape (count, numbers).

        They are made of the rows of the model's outputs, and of the losses where there is one for each record; not of
        outputs that no loss was made of in `observe`. Nothing is captured, and no gradient computed.
        """
        Chance().start()
        with self._outputs_noted() as noted, self._capture.ordinary(), PublicDivisor(), torch.no_grad():
            loss = self._run(batch)
        return self._rows(noted, loss, count)

    @contextmanager
    def _outputs_noted(self) -> Iterator[list[Tensor]]:
        """The tensors that calls of the model return in the block."""
        noted: list[Tensor] = []

        def note(_module: nn.Module, _args: object, output: object) -> None:
            noted.extend(tensors_in(output))

        # Before the capture's own, which must stay the last where the model itself holds parameters.
        handle = self._capture.model.register_forward_hook(note, prepend=True)
        try:
            yield noted
        finally:
            handle.remove()

    def _rows(self, noted: Sequence[Tensor], loss: Tensor, count: int) -> Tensor:
        if loss.requires_grad:
            nodes = _nodes(loss) if len(noted) > 1 else None
            idle = {number for number, one in enumerate(noted) if nodes and one.grad_fn and one.grad_fn not in nodes}
            self._idle = idle if self._idle is None else self._idle & idle
        used = (tensor for number, tensor in enumerate(noted) if number not in (self._idle or ()))
        rows = [_in_few_numbers(tensor, count) for tensor in used if _has_rows(tensor, count)]
        if loss.shape == (count,):
            rows.append(loss.detach().cpu().double()[:, None])
        return torch.cat(rows, 1) if rows else torch.zeros(count, 0, dtype=torch.float64)

    def plain_run(self, batch: object, count: int) -> None:
        """Run model and loss without capturing anything: whatever it raises is not the capture's doing."""
        Chance().start()
        with ExitStack() as stack:
            stack.enter_context(self._capture.ordinary())
            self._loss(stack, batch, count, looks=True)

    def sketch(self, sums: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """A random projection of a sum of gradients, the same one every time; float64 on the CPU."""
        parts: list[Tensor] = []
        for parameter in self._capture.names:
            total = sums.get(parameter)
            if total is None:
                parts.append(torch.zeros(_PROJECTED + 1, dtype=torch.float64))
                continue
            self.dtype = total.dtype
            flat = total.reshape(-1)
            if not flat.numel():
                continue
            width = -(-flat.numel() // _PROJECTED)
            rows = flat.numel() // width
            direction = self._direction(width).to(flat.device, flat.dtype)
            table = flat[: rows * width].view(rows, width) @ direction
            rest = flat[rows * width :] @ direction[: flat.numel() - rows * width]
            projected = torch.zeros(_PROJECTED + 1, dtype=torch.float64)
            projected[:rows] = table.cpu().double()
            projected[-1] = rest.cpu().double()
            parts.append(projected)
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def _direction(self, width: int) -> Tensor:
        if width not in self._directions:
            # numpy's, for torch's draws are watched here.
            drawn = np.random.default_rng(width).standard_normal(width, dtype=np.float32)
            self._directions[width] = torch.from_numpy(drawn) if width > 1 else torch.ones(1)
        return self._directions[width]

    def _loss(self, stack: ExitStack, batch: object, count: int, *, looks: bool) -> Tensor:
        stack.enter_context(torch.enable_grad())
        with ExitStack() as looking:
            looking.enter_context(PublicDivisor())
            if looks:
                looking.enter_context(NoClassWeights())
                looking.enter_context(IndicesChecked())
                looking.enter_context(self.singled)
            loss = self._run(batch)
        self._check_shape(loss, count)
        return loss

    def _backward(self, total: Tensor, count: int) -> None:
        def run() -> None:
            self._capture.backward(lambda again: total.backward(retain_graph=again))

        backward_into_the_module(total, run, records=count)

    def _check_parameters(self, total: Tensor) -> None:
        names = self._capture.uncaptured_uses(total)
        if names:
            raise UncapturedParameter(
                f"{', '.join(names)} must be used through a captured layer only, got another use. Call the layer "
                "itself rather than reading its parameter, and keep penalties on parameters out of the loss."
            )
        for leaf in foreign_leaves(total):
            if isinstance(leaf, nn.Parameter) and leaf not in self._own:
                raise learner_outside(leaf)

    def _check_shape(self, loss: Tensor, count: int) -> None:
        if self._reduction == "none" and loss.shape != (count,):
            got = tuple("B" if size == count and count > 1 else size for size in loss.shape)
            raise LossShapeError(
                f"loss must have shape (B,), one value per record, got {_written(got)}. Use reduction='none' and sum "
                "or average over everything but the records, for example .flatten(1).mean(1)."
            )
        if self._reduction != "none" and loss.numel() != 1:
            raise LossShapeError("loss must be one number for the whole batch, got several. Take .mean() over records.")


def _has_rows(tensor: Tensor, count: int) -> bool:
    """Whether a tensor has one row a record, or some."""
    return tensor.dim() > 0 and tensor.size(0) > 0 and tensor.size(0) % count == 0 and not tensor.dtype.is_complex


def _in_few_numbers(tensor: Tensor, count: int) -> Tensor:
    """Norm, sum and some entries of each record's rows."""
    rows = tensor.detach().reshape(count, -1)
    some = rows[:, :: max(1, rows.size(1) // _SEEN)]
    rows = rows if rows.dtype.is_floating_point else rows.to(torch.float32)
    whole = torch.stack([torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows)), rows.sum(1, dtype=_wide(rows))], 1)
    return torch.cat([whole.cpu().double(), some.cpu().double()], 1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _plain_gradients(total: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    except RuntimeError:
        # Reentrant checkpoints can be run by backward() only.
        total.backward()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients


class _Norms:
    """Two backward passes that tell the norms on the way, and add up with given weights."""

    def __init__(self, parameters: list[nn.Parameter], weights: Tensor) -> None:
        self.norms = torch.zeros(weights.size(1), dtype=torch.float64)
        self._weights = weights
        self.passes = TwoPasses([parameters], self._factors)

    def _factors(self, squared_bounds: Tensor) -> Tensor:
        self.norms = squared_bounds.sum(0).sqrt()
        chosen = self._weights[:1] if len(self._weights) else torch.zeros(1, self._weights.size(1))
        return chosen.to(squared_bounds.device, squared_bounds.dtype)


def backward_into_the_module(total: Tensor, run: Callable[[], object], *, records: int) -> None:
    """Run a backward pass of `total`; tensors outside the module keep the gradients that they had.

    Raises:
        UncapturedParameter: such a tensor learns, one without a row for each record.
    """
    # Leaves of the capture's own get no gradient.
    others = [leaf for leaf in foreign_leaves(total) if not isinstance(leaf, nn.Parameter)]
    before = [leaf.grad for leaf in others]
    if total.requires_grad:
        run()
    found = [leaf.grad for leaf in others]
    for leaf, gradient in zip(others, before, strict=True):
        leaf.grad = gradient
    for leaf, gradient, got in zip(others, before, found, strict=True):
        by_record = leaf.dim() > 0 and leaf.size(0) == records
        if got is not gradient and got is not None and bool(got.any()) and not by_record:
            raise learner_outside(leaf)


def learner_outside(leaf: Tensor) -> UncapturedParameter:
    """What is raised when a tensor that is not the module's would get a raw gradient."""
    return UncapturedParameter(
        f"loss must send gradients to the private module only, got a trainable tensor of shape {tuple(leaf.shape)} "
        "outside it, which would learn from records without clipping and noise. Make it a part of the module "
        "(one nn.Module that holds both), or freeze it with requires_grad_(False)."
    )


def foreign_leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that backward would write a ``.grad`` to, each once."""
    return past_outputs(loss, ()).leaves


def _nodes(loss: Tensor) -> set[torch.autograd.graph.Node]:
    """The graph of a loss."""
    seen: set[torch.autograd.graph.Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
    return seen


@dataclass(frozen=True, kw_only=True)
class PastOutputs:
    """What backward reaches on ways that don't lead through a module's outputs.

    Args:
        leaves: tensors that it would write a ``.grad`` to, each once.
        captured: whether it reaches a captured layer.
    """

    leaves: list[Tensor]
    captured: bool


def past_outputs(loss: Tensor, outputs: Collection[torch.autograd.graph.Node]) -> PastOutputs:
    """Walk the graph of `loss` without passing the nodes of `outputs`."""
    if loss.is_leaf:
        return PastOutputs(leaves=[loss] if loss.requires_grad else [], captured=False)
    found: dict[int, Tensor] = {}
    captured = False
    seen: set[torch.autograd.graph.Node] = set(outputs)
    pending = [] if loss.grad_fn is None else [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        captured = captured or type(node).__name__ in _CAPTURED
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return PastOutputs(leaves=list(found.values()), captured=captured)


def _written(shape: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
