"""The independence probe: experiments on synthetic records before any private record is used.

Some records of a batch are replaced, made extreme, or taken away; no other record's gradient may change. What is found
this way is found whatever its cause: batch normalization in any disguise, ``x - x.mean(0)``, contrastive losses, losses
that divide by the tokens, class weights or valid labels of the whole batch, thresholds and branches that one record can
set off, experts with room for so many records, order, and what a module stores.

Which records are replaced follows a code: each record has a word of N bits, all with as many ones, and in experiment t
those whose bit t is set are replaced. Of two words neither covers the other, so for every ordered pair of records there
is an experiment in which the first is replaced and the second is not.
"""

import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sordino.errors import (
    CoupledRecords,
    LossShapeError,
    RecordCountMismatch,
    SordinoError,
    UncapturedParameter,
    UnsupportedModule,
)
from sordino.gradients import GradientCapture
from sordino.gradients.backward_strategies import TwoPassBackward
from sordino.gradients.interception import CAPTURING_NODES
from sordino.gradients.numerics import product_mode
from sordino.training.probing.snapshots import (
    GENERATORS,
    DisableRandomness,
    ModuleSnapshot,
    SeededGenerators,
    generators_used,
    preserve_attributes,
    preserve_rng_state,
)
from sordino.training.probing.synthetic import INTEGER_PATTERNS, AdversarialValue, SyntheticRecords
from sordino.training.probing.torch_modes import (
    ComparisonConstants,
    GradientCuts,
    IndexBoundsCheck,
    NoClassWeights,
    PublicDivisor,
)
from sordino.training.pytree import map_tensors, tensors_in

__all__ = [
    "OTHER_SHAPE",
    "OTHER_SHAPE_HALF",
    "PastOutputs",
    "ProbeResult",
    "ProbeRunner",
    "ProbeSize",
    "backward_into_the_module",
    "check_no_max_norm_embeddings",
    "check_record_independence",
    "external_parameter_error",
    "graph_bypassing_outputs",
    "graph_leaves",
    "graph_nodes",
    "preserve_model_state",
]


# ----------------------------------------------------------------------------------------------------------------------
# One look at a model and loss on synthetic records: losses, gradient norms, a weighted sum of gradients.
# ----------------------------------------------------------------------------------------------------------------------


# Alone or in another batch, a record goes through other kernels: rounding, but far from the factor that a wrong
# reduction makes.
OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-3}
OTHER_SHAPE_HALF, OTHER_SHAPE_TF32 = 5e-2, 1e-2
# A parameter's gradient that is nothing but rounding, relative to the whole gradient, and how much more it is in half
# precision; and what a parameter's error may be, relative to the whole gradient's.
_NOISE, _HALF_NOISE, _TF32_NOISE, _FLOOR = 1e-6, 1e4, 1e3, 1e-2
# So many entries of a record's outputs are looked at one by one.
_SEEN = 64
# So many numbers, and one for the rest, stand for the gradient of a parameter.
_PROJECTED = 64


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
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


class ProbeRunner:
    """Runs model and loss on batches of synthetic records and reads the gradients that a private step would read.

    Args:
        capture: hooks on the model, with no recording in use.
        run: batch ↦ loss.
        reduction: "none", "mean" or "sum" over records.
        two_passes: run backward passes as the step does, twice, keeping nothing of a layer.

    Attributes:
        generators: the generators of random numbers that were used so far.
        singled: what tensors were compared with so far.
        dtype: in which gradients were summed.
        gradients_follow: whether all that `look` saw with gradients was derivatives of what it reads, and nothing else.
    """

    def __init__(
        self, capture: GradientCapture, run: Callable[[object], Tensor], reduction: str, *, two_passes: bool = False
    ) -> None:
        self.generators: set[str] = set()
        self.singled = ComparisonConstants()
        self._capture = capture
        self._run = run
        self._reduction = reduction
        self._two_passes = two_passes
        self._own = set(capture.model.parameters())
        self._directions: dict[int, Tensor] = {}
        # Outputs of the model, by their number, that no loss was made of so far.
        self._idle: set[int] | None = None
        self.dtype = torch.float32
        self.gradients_follow = True

    @property
    def precision(self) -> Literal["half", "tf32", "single"]:
        """The least precise numbers that were multiplied so far, double precision aside."""
        if self.singled.is_half:
            return "half"
        device = next(iter(self._own)).device if self._own else torch.device("cpu")
        mode = product_mode(device, convolutions=self.singled.convolves) if self.dtype == torch.float32 else "full"
        return "half" if mode == "bf16" else "tf32" if mode == "tf32" else "single"

    def other_shape(self, dtype: torch.dtype | None = None) -> float:
        """The tolerance for what other kernels computed, with sums of this type."""
        reduced = {"half": OTHER_SHAPE_HALF, "tf32": OTHER_SHAPE_TF32}.get(self.precision)
        return OTHER_SHAPE.get(dtype or self.dtype, OTHER_SHAPE_HALF) if reduced is None else reduced

    def observe(
        self,
        batch: object,
        weights: Tensor,
        *,
        chance: SeededGenerators | None = None,
        large: bool = False,
        looks: bool = True,
        outputs: bool = False,
    ) -> ProbeResult:
        """One forward and backward.

        Args:
            batch: synthetic records.
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
        (chance or SeededGenerators()).start()
        with ExitStack() as stack:
            if looks or outputs:
                stack.enter_context(generators_used(self.generators))
            scale = float(max(count, 1)) if self._reduction == "mean" else 1.0
            stack.enter_context(
                self._capture.capturing(count, scale=scale, backward_strategy=None if taking is None else taking.passes)
            )
            # As `look` has them: without what the loop writes into them, where it looks at leaves.
            as_copies = self._reduction != "none"
            noted = stack.enter_context(self._outputs_noted(as_copies=as_copies)) if outputs else None
            loss = self._loss(stack, batch, count, looks=looks)
            total = loss.sum()
            rows = None if noted is None else self._rows(noted[0], loss, count, ())
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
                self._capture.add_backward_sums(sums)
            sketches.append(self.sketch(sums))
        self._capture.discard()
        return ProbeResult(
            losses=loss.detach().cpu().double() if self._reduction == "none" else None,
            norms=norms.cpu(),
            sketches=tuple(sketches),
            weights=weights,
            outputs=rows,
        )

    def compare_with_autograd(self, batch: object, weights: Tensor, *, least: float = 0.0) -> None:
        """Compare the captured sum of gradients with what torch's autograd gives, for every trained parameter.

        Args:
            batch: synthetic records, on which chance decides nothing.
            weights: one for each record; all 1 for a loss that is reduced.
            least: a whole gradient with a smaller norm is nothing but rounding.

        Raises:
            UncapturedParameter: names the parameters with another gradient.
        """
        count = len(weights)
        sums: dict[nn.Parameter, Tensor] = {}
        SeededGenerators().start()
        with ExitStack() as stack:
            scale = float(max(count, 1)) if self._reduction == "mean" else 1.0
            stack.enter_context(self._capture.capturing(count, scale=scale))
            self._backward(self._loss(stack, batch, count, looks=True).sum(), count)
        self._capture.add_weighted_sums(weights.double(), into=sums)
        self._capture.discard()
        SeededGenerators().start()
        trained = self._capture.trainable()
        with ExitStack() as stack:
            stack.enter_context(self._capture.ordinary())
            loss = self._loss(stack, batch, count, looks=True)
            by_record = self._reduction == "none"
            total = (loss * weights.to(loss.device, loss.dtype)).sum() if by_record else loss.sum() * scale
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
            return size <= _NOISE * whole * {"half": _HALF_NOISE, "tf32": _TF32_NOISE}.get(self.precision, 1.0)
        got = captured.double()
        difference = float(torch.linalg.vector_norm(got if wanted is None else got - wanted))
        tolerance = self.other_shape(captured.dtype)
        return difference <= tolerance * size + _FLOOR * tolerance * whole

    def look(
        self,
        batch: object,
        count: int,
        *,
        chance: SeededGenerators | None = None,
        gradients: bool = False,
        looks: bool = False,
    ) -> Tensor:
        """What the forward pass gives for each record, in a few numbers: float64 on the CPU, shape (count, numbers).

        They are made of the rows of the model's outputs, and of the losses where there is one for each record; not of
        outputs that no loss is made of. Nothing is captured, and no gradient of a parameter computed.

        Args:
            batch: synthetic records.
            count: how many.
            chance: the course of random numbers.
            gradients: find out on the way which outputs the loss is made of, and whether `gradients_follow`; a loss
                that is reduced adds the rows of its gradients by these outputs.
            looks: see `observe`.
        """
        (chance or SeededGenerators()).start()
        by_outputs = gradients and self._reduction != "none"
        cuts = GradientCuts()
        with ExitStack() as stack:
            if looks:
                stack.enter_context(generators_used(self.generators))
            # Cut off also where nothing is derived by them: a loop that writes into its output then changes a copy.
            noted, given = stack.enter_context(self._outputs_noted(as_leaves=self._reduction != "none"))
            stack.enter_context(self._capture.ordinary())
            if gradients:
                stack.enter_context(cuts)
            loss = self._loss(stack, batch, count, looks=looks, gradients=gradients)
        if gradients:
            self._study(noted, given, loss, count, cuts)
        if not by_outputs:
            return self._rows(noted, loss, count, ())
        leaves = [tensor for tensor in self._used(noted) if tensor.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad and leaves:
            found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        scale = count if self._reduction == "mean" else 1
        slopes = [
            torch.zeros_like(leaf) if gradient is None else gradient * scale
            for leaf, gradient in zip(leaves, found, strict=True)
        ]
        return self._rows(noted, loss, count, slopes)

    def _study(
        self, noted: Sequence[Tensor], given: Sequence[Tensor], loss: Tensor, count: int, cuts: GradientCuts
    ) -> None:
        """Find out which outputs a loss is made of, and whether gradients are derivatives of what is read.

        They are not where code cuts or rules gradients, or where a loss that is reduced leads past the outputs' rows.
        """
        nodes = graph_nodes(loss)
        reached = {id(leaf) for leaf in graph_leaves(loss)}
        idle = {
            number
            for number, tensor in enumerate(noted)
            if tensor.requires_grad and id(tensor) not in reached and tensor.grad_fn not in nodes
        }
        self._idle = idle if self._idle is None else self._idle & idle
        nodes = nodes.union(*(graph_nodes(tensor) for tensor in given))
        past = self._reduction != "none" and (
            any(id(parameter) in reached for parameter in self._own)
            or any(id(tensor) in reached and not _has_rows(tensor, count) for tensor in noted)
        )
        if (
            past
            or cuts.found
            or any(_is_of_the_user(node) for node in nodes)
            or any(isinstance(module, torch.jit.ScriptModule) for module in self._capture.model.modules())
        ):
            self.gradients_follow = False

    @contextmanager
    def _outputs_noted(
        self, *, as_leaves: bool = False, as_copies: bool = False
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The tensors that calls of the model return in the block, and before `as_leaves` cut them off.

        `as_copies` notes them as they are when they are returned.
        """
        noted: list[Tensor] = []
        given: list[Tensor] = []

        def note(module: nn.Module, _args: object, output: object) -> object:
            if module is not self._capture.model:
                return None
            given.extend(tensors_in(output))
            if not as_leaves:
                noted.extend(one.detach().clone() if as_copies else one for one in tensors_in(output))
                return None
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                cut = map_tensors(lambda one: one.detach().requires_grad_(one.is_floating_point()), output)
                # The loop may write into what it gets, which a leaf does not allow.
                written = map_tensors(Tensor.clone, cut)
            noted.extend(tensors_in(cut))
            return written

        # One for all modules leaves the hooks of the model itself alone, which the capture's must be the outermost of.
        handle = register_module_forward_hook(cast("Callable[..., None]", note))
        try:
            with warnings.catch_warnings():
                # Of a compiled wrapper torch says that it calls the hook once for each of the two modules.
                warnings.filterwarnings("ignore", "Using `torch.compile")
                yield noted, given
        finally:
            handle.remove()

    def _used(self, noted: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that a loss is made of."""
        return [tensor for number, tensor in enumerate(noted) if number not in (self._idle or ())]

    def _rows(self, noted: Sequence[Tensor], loss: Tensor, count: int, slopes: Sequence[Tensor]) -> Tensor:
        tensors = (*self._used(noted), *slopes)
        rows = [_in_few_numbers(tensor, count) for tensor in tensors if _has_rows(tensor, count)]
        if loss.shape == (count,):
            rows.append(loss.detach().cpu().double()[:, None])
        return torch.cat(rows, 1) if rows else torch.zeros(count, 0, dtype=torch.float64)

    def plain_run(self, batch: object, count: int) -> None:
        """Run model and loss without capturing anything: whatever it raises is not the capture's doing."""
        SeededGenerators().start()
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

    def _loss(self, stack: ExitStack, batch: object, count: int, *, looks: bool, gradients: bool = True) -> Tensor:
        stack.enter_context(torch.set_grad_enabled(gradients))
        with ExitStack() as looking:
            looking.enter_context(PublicDivisor())
            if looks:
                looking.enter_context(NoClassWeights())
                looking.enter_context(IndexBoundsCheck())
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
        for leaf in graph_leaves(total):
            if isinstance(leaf, nn.Parameter) and leaf not in self._own:
                raise external_parameter_error(leaf)

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
        self.passes = TwoPassBackward([parameters], self._factors)

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
    others = [leaf for leaf in graph_leaves(total) if not isinstance(leaf, nn.Parameter)]
    before = [leaf.grad for leaf in others]
    if total.requires_grad:
        run()
    found = [leaf.grad for leaf in others]
    for leaf, gradient in zip(others, before, strict=True):
        leaf.grad = gradient
    for leaf, gradient, got in zip(others, before, found, strict=True):
        by_record = leaf.dim() > 0 and leaf.size(0) == records
        if got is not gradient and got is not None and bool(got.any()) and not by_record:
            raise external_parameter_error(leaf)


def external_parameter_error(leaf: Tensor) -> UncapturedParameter:
    """What is raised when a tensor that is not the module's would get a raw gradient."""
    return UncapturedParameter(
        f"loss must send gradients to the private module only, got a trainable tensor of shape {tuple(leaf.shape)} "
        "outside it, which would learn from records without clipping and noise. Make it a part of the module "
        "(one nn.Module that holds both), or freeze it with requires_grad_(False)."
    )


def graph_leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that backward would write a ``.grad`` to, each once."""
    return graph_bypassing_outputs(loss, ()).leaves


def graph_nodes(loss: Tensor) -> set[torch.autograd.graph.Node]:
    """The graph of a loss."""
    seen: set[torch.autograd.graph.Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
    return seen


def _is_of_the_user(node: torch.autograd.graph.Node) -> bool:
    """Whether a backward formula is not torch's own: an autograd function of the user, a module's backward hook."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or "::" in type(node).__name__


@dataclass(frozen=True, kw_only=True)
class PastOutputs:
    """What backward reaches on ways that don't lead through a module's outputs.

    Args:
        leaves: tensors that it would write a ``.grad`` to, each once.
        captured: whether it reaches a captured layer.
    """

    leaves: list[Tensor]
    captured: bool


def graph_bypassing_outputs(loss: Tensor, outputs: Collection[torch.autograd.graph.Node]) -> PastOutputs:
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
        captured = captured or type(node).__name__ in CAPTURING_NODES
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return PastOutputs(leaves=list(found.values()), captured=captured)


def _written(shape: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


# ----------------------------------------------------------------------------------------------------------------------
# The independence probe: experiments on synthetic records before any private record is used.
# ----------------------------------------------------------------------------------------------------------------------


# Batches of everything; a larger one, of training's own size, is for what begins with more records.
_RECORDS = 8
_MANY_RECORDS = 16
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
_FLOATS = (torch.nan, _EXTREME, -_EXTREME)
# Marks of missing labels, then ids: small ones are often special tokens.
_MARKS = (-1, -100)
_IDS = (*range(2, 13), 100, 999, "range")
_MARKS_ALONE = (*_MARKS, 2, 999)
# A batch of many tensors is poisoned as a whole and in its first parts.
_PARTS = 4
# So many experiments with ordinary records in a small batch; so many numbers, besides 0 and 1, that all others hold.
_ORDINARY, _ALIKE = 2, 3
_REMEDY = "Look for batch statistics, sums over dimension 0 and losses that compare records; see LayerNorm, GroupNorm"
_CHANGED = f"one record changes another record's gradient. {_REMEDY}"
_UNUSUAL = f"an unusual record changes the others' gradients. {_REMEDY}"


@dataclass(frozen=True, kw_only=True)
class ProbeSize:
    """How much the probe may do.

    Args:
        records: the most records that training gives to the model at once: a public number. The probe takes no more.
        two_passes: keep nothing of a layer, as a step in two passes does.
        again: it was done before in this state of the module, and is repeated in case a function changes its mind: in
            a small batch, or if `is_thorough` in one as large as training's.
        is_thorough: see `again`.
    """

    records: int = _MANY_RECORDS
    two_passes: bool = False
    again: bool = False
    is_thorough: bool = True


def check_record_independence(
    model: nn.Module,
    capture: GradientCapture,
    records: object,
    run: Callable[[object], Tensor],
    *,
    reduction: str = "none",
    may_be_empty: bool = False,
    public_batch: object = None,
    values_released: bool = False,
    size: ProbeSize | None = None,
) -> None:
    """Refuse a model and loss in which one record changes another record's loss or gradient.

    Also refuses gradients that are captured wrongly or in part: they are compared with those of plain autograd.

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
            the experiment uses them instead of synthetic ones, for loops that validate their input.
        values_released: losses are released, not only gradients: a record must also have the loss that it has alone.
        size: how many records at once, and how much.

    Raises:
        CoupledRecords: a record changes another one, the module stores something, or the loss is not the declared
            reduction.
        LossShapeError: the loss doesn't have the shape expected.
        UncapturedParameter: a parameter is used where no layer rule captures it, or lies outside the model.
        UnsupportedModule: model and loss fail on synthetic records, or an empty batch doesn't run, though it may come.
    """
    rows = next((tensor.size(0) for tensor in tensors_in(records) if tensor.dim()), 0)
    if any(tensor.dim() and tensor.size(0) == 0 for tensor in tensors_in(records)):
        rows = 0
    size = ProbeSize() if size is None else size
    check_no_max_norm_embeddings(model)
    with preserve_model_state(model):
        observer = ProbeRunner(capture, run, reduction, two_passes=size.two_passes)
        probe = _Probe(observer, records, rows, list(tensors_in(public_batch)), reduction, size)
        probe.start()
        if size.again:
            probe.try_again()
            return
        probe.repeat()
        probe.replace_ordinary()
        probe.check_adversarial_values()
        probe.check_random_outcomes()
        probe.compare_with_autograd()
        probe.fill_up(values=values_released)
        probe.check_statelessness()
        if may_be_empty:
            probe.check_empty_batch()


@contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Leave the model and chance as they were, and refuse a model that was written to in the block."""
    with preserve_rng_state(), _gradients_kept(model), preserve_attributes(model):
        state = ModuleSnapshot(model)
        try:
            yield
        except BaseException:
            state.restore()
            raise
        state.refuse_changes()


def check_no_max_norm_embeddings(model: nn.Module) -> None:
    """Refuse embeddings with ``max_norm``: they rewrite the rows that a batch looks up."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModule(
                f"{name or 'the model'} ({type(module).__name__}) must have max_norm=None, got a limit: the rows that "
                "a batch looks up are rewritten in its forward pass. Normalize the output instead."
            )


class _Probe:
    """The experiments, in two batches: a small one for everything, and one as large as training's."""

    def __init__(
        self,
        observer: ProbeRunner,
        structure: object,
        rows: int,
        example: Sequence[Tensor],
        reduction: str,
        size: ProbeSize,
    ) -> None:
        self._observer, self._reduction, self._size = observer, reduction, size
        self._structure, self._rows, self._example = structure, rows, example
        self._is_cuda = any(tensor.is_cuda for tensor in tensors_in(structure))
        self._count = min(_RECORDS, size.records)
        self._sets = _replaced_sets(self._count)
        self._weights = _rows_of_weights(self._count, self._sets)
        # For the sums that experiments with ordinary records read, and for the one of all records.
        self._read = torch.cat([*([self._weights[:_ORDINARY]] if self._sets else []), _evenly(self._count)])
        # With the sums of all experiments, once one reads them.
        self._further: ProbeResult | None = None
        self._ran: list[AdversarialValue] = []
        self._least_refused: dict[int | None, int] = {}
        # How far two equal passes are apart, relative to the norms.
        self._unrepeated = 0.0
        self._pattern = INTEGER_PATTERNS[0]
        # What the forward pass gives for the small batch.
        self._seen = torch.zeros(0, 0, dtype=torch.float64)

    def start(self) -> None:
        """Find synthetic records that model and loss run on, and look at them."""
        self._records, self._first = self._workable()
        self._seen = self._observer.look(self._records.batch(range(self._count)), self._count, gradients=True)

    def _workable(self) -> tuple[SyntheticRecords, ProbeResult]:
        """The first kind of synthetic records that the loop runs on, and what it gives on them."""
        failed: tuple[SyntheticRecords, Exception] | None = None
        for pattern in INTEGER_PATTERNS:
            made_up = self._made_up(self._count, pattern)
            try:
                read = self._read[: 0 if self._size.again else None]
                observed = self._observer.observe(made_up.batch(range(self._count)), read)
                # Stand-ins are those of the first time.
                others = made_up.batch(range(self._count, 2 * self._count))
                again = observed if self._size.again else self._observer.observe(others, self._weights[:0])
            except SordinoError:
                raise
            except Exception as error:
                failed = failed or (made_up, error)
                continue
            if observed.finite and again.finite:
                self._pattern = pattern
                return made_up, observed
        raise self._does_not_run(failed)

    def _does_not_run(self, failed: tuple[SyntheticRecords, Exception] | None) -> SordinoError:
        remedy = "Pass public_batch=, five public or invented records that it runs on"
        if failed is None:
            return UnsupportedModule(
                "model and loss must have finite losses and gradients on synthetic records, got none that are: random "
                f"features with labels 0 and 1. {remedy}."
            )
        made_up, failure = failed
        # The records are synthetic, so the failure may be shown in full.
        shown = f"{type(failure).__name__}: {failure}"
        try:
            self._observer.plain_run(made_up.batch(range(self._count)), self._count)
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

    def _made_up(self, count: int, pattern: str, *, diverse: bool = False) -> SyntheticRecords:
        return SyntheticRecords(
            self._structure, rows=self._rows, count=count, pattern=pattern, example=self._example, diverse=diverse
        )

    # --- one batch, twice ----------------------------------------------------------------------------------------

    def repeat(self) -> None:
        """Measure how far two equal passes are apart: rounding, where a kernel adds up in any order."""
        apart = self._distance(self._first, self._again())
        # In half precision few entries may differ, and none by chance.
        if apart > _SAME_SHAPE / 10 or self._is_half:
            apart = max(apart, *(self._distance(self._first, self._again()) for _ in range(3)))
        self._unrepeated = apart
        self._refuse_unrepeated()

    def _again(self) -> ProbeResult:
        return self._observer.observe(self._records.batch(range(self._count)), _evenly(self._count))

    def _refuse_unrepeated(self) -> None:
        """What is more than rounding comes from a state, or from random numbers that can't be repeated."""
        most = _UNREPEATED_CUDA if self._is_cuda else _UNREPEATED
        if not self._unrepeated <= _UNREPEATED_REDUCED.get(self._observer.precision, most):
            raise _forgets_nothing()

    def _distance(self, one: ProbeResult, other: ProbeResult) -> float:
        """The largest relative difference in norms, losses and sums; those of `other` are the last ones of `one`."""
        rows = range(-len(other.weights), 0)
        apart = [_far(one.sketches[row], other.sketches[row], one.scale(row)) for row in rows]
        apart.append(_far_rows(one.norms, other.norms))
        if one.losses is not None and other.losses is not None:
            apart.append(_far_rows(one.losses.abs(), other.losses.abs()))
        return max(apart)

    def check_statelessness(self) -> None:
        """The same records must have the same gradients after all the others that came meanwhile."""
        if not self._distance(self._first, self._again()) <= self._tolerance():
            raise _forgets_nothing()

    def _tolerance(self) -> float:
        """For batches of one shape."""
        singled = self._observer.singled
        floor = _SAME_SHAPE
        if singled.sizes_follow_values or self._unrepeated > 0:
            floor = _UNSTEADY.get(self._observer.precision, _UNSTEADY["single"])
        return max(floor, _SPREAD * self._unrepeated)

    # --- once more, in case a function changes its mind ----------------------------------------------------------

    def try_again(self) -> None:
        """Repeat a few experiments in a small batch, or in one as large as training's.

        What may have changed since is the user's code. Where gradients are derivatives of what the forward pass gives,
        that is looked at; elsewhere gradients are compared.
        """
        count = self._size.records
        odd, first = list(range(1, count, 2)), self._sets[0] if self._sets else []
        if not self._size.is_thorough:
            if self._look_again(self._records, self._seen, (self._places(first), {}), first):
                return
            self._first = self._observer.observe(self._records.batch(range(self._count)), self._read)
            self.repeat()
            self.replace_ordinary()
        elif count > 1 and not self._look_again_large(odd):
            self._compare_large(self._filled(count, _evenly(count)), *self._extremes(odd, 0), odd)

    def _look_again_large(self, replaced: list[int]) -> bool:
        count = self._size.records
        for diverse in (True, False):
            self._large = self._made_up(count, self._pattern, diverse=diverse)
            try:
                seen = self._observer.look(self._large.batch(range(count)), count, gradients=True)
            except SordinoError:
                raise
            except Exception:
                seen = torch.full((1,), torch.nan)
            if bool(seen.isfinite().all()):
                return self._look_again(self._large, seen, self._extremes(replaced, 0), replaced)
        return False

    def _look_again(
        self,
        records: SyntheticRecords,
        seen: Tensor,
        changes: tuple[list[int], dict[int, AdversarialValue]],
        replaced: list[int],
    ) -> bool:
        """Compare what the forward pass gives with what it gave, then with some records replaced.

        Returns:
            Whether gradients are derivatives of it, so that they need not be compared themselves.
        """
        count = records.count
        if self._observer.gradients_follow and (records is self._records or self._is_unsteady()):
            for _ in range(3 if self._is_unsteady() else 1):
                again = self._observer.look(records.batch(range(count)), count, gradients=True)
                self._unrepeated = max(self._unrepeated, _apart(seen, again))
            self._refuse_unrepeated()
        if self._observer.gradients_follow and replaced:
            try:
                changed = self._observer.look(records.batch(*changes), count, gradients=True)
            except SordinoError:
                raise
            except Exception:
                return False
            self._compare_rows(seen, changed, replaced, _UNUSUAL if changes[1] else _CHANGED)
        return self._observer.gradients_follow

    @property
    def _is_half(self) -> bool:
        return self._observer.precision == "half"

    def _is_unsteady(self) -> bool:
        """Whether two equal passes may be apart: kernels that add up in any order, half precision."""
        return self._is_cuda or self._is_half

    # --- some records replaced -----------------------------------------------------------------------------------

    def replace_ordinary(self) -> None:
        """Other ordinary records in the places of some must leave the rest as they are."""
        for row, replaced in enumerate(self._sets[: 1 if self._size.again else _ORDINARY]):
            self._compare(row, self._replaced(replaced, {}, row=row), replaced, _CHANGED)

    def _replaced(self, replaced: Sequence[int], poisons: dict[int, AdversarialValue], *, row: int) -> ProbeResult:
        batch = self._records.batch(self._places(replaced), poisons)
        return self._observer.observe(batch, self._weights[row : row + 1])

    def _places(self, replaced: Sequence[int]) -> list[int]:
        """The records of the small batch, stand-ins for those that are replaced."""
        return [self._count + place if place in replaced else place for place in range(self._count)]

    def _compare_rows(self, one: Tensor, other: Tensor, replaced: Collection[int], reason: str) -> None:
        """Refuse a difference in what the forward pass gives for the records that stayed."""
        kept = sorted(set(range(len(one))) - set(replaced))
        if not _same_looks(one[kept], other[kept], max(self._tolerance(), _NORMS)):
            raise _coupled(reason)

    def _compare(self, row: int, changed: ProbeResult, replaced: Sequence[int], reason: str) -> None:
        """Refuse a difference in what the batch gives for the records that stayed."""
        kept = [place for place in range(self._count) if place not in set(replaced)]
        first = self._first
        if row >= _ORDINARY:
            if self._further is None:
                self._further = self._observer.observe(self._records.batch(range(self._count)), self._weights)
            first = self._further
        sums = (first.sketches[row], changed.sketches[0], first.scale(row))
        if not _same(self._first, changed, kept, self._tolerance(), sums=sums):
            raise _coupled(reason)

    def check_adversarial_values(self) -> None:
        """Whatever some records hold, the others' gradients stay as they are: extremes, NaN, marks, ids.

        Each replaced record holds another kind. Where code refuses one of them, each is tried by itself.
        """
        tried: set[AdversarialValue] = set()
        fill = (
            [AdversarialValue(floats=_EXTREME), AdversarialValue(floats=-_EXTREME)]
            if self._records.places(floating=True)
            else []
        )
        for turn in range(_MOST_TURNS if self._sets else 0):
            row = turn % len(self._sets)
            replaced = self._sets[row]
            # What code compares with shows on the way, and is tried too.
            some = [kind for kind in self._kinds() if kind not in tried and not self._is_refused(kind)][: len(replaced)]
            if not some and (turn >= len(self._sets) or not fill):
                return
            tried.update(some)
            if fill and len(some) < len(replaced):
                some += [fill[place % 2] for place in range(len(replaced) - len(some))]
            self._try_together(row, dict(zip(replaced, some, strict=False)))

    def _try_together(self, row: int, poisons: dict[int, AdversarialValue]) -> None:
        if self._try(row, poisons):
            return
        runs: dict[int, AdversarialValue] = {}
        for place, poison in poisons.items():
            if not self._is_refused(poison) and self._runs(place, poison):
                runs[place] = poison
        if not runs or (len(runs) < len(poisons) and self._try(row, runs)):
            return
        for place, poison in runs.items():
            self._try(row, {place: poison})

    def _runs(self, place: int, poison: AdversarialValue) -> bool:
        """Whether code runs with this one record and another; nothing is captured."""
        try:
            self._observer.plain_run(self._records.batch([place, (place + 1) % self._count], {0: poison}), 2)
        except SordinoError:
            return True
        except Exception:
            if isinstance(poison.integers, int) and poison.integers > 1:
                least = self._least_refused.get(poison.place, poison.integers)
                self._least_refused[poison.place] = min(poison.integers, least)
            return False
        return True

    def _try(self, row: int, poisons: dict[int, AdversarialValue]) -> bool:
        """Whether code runs on these values; what refuses them can't be asked in this way."""
        replaced = list(poisons)
        try:
            seen, changed = self._seen, None
            if self._observer.gradients_follow:
                batch = self._records.batch(self._places(replaced), poisons)
                seen = self._observer.look(batch, self._count, gradients=True, looks=True)
            if not self._observer.gradients_follow:
                changed = self._replaced(replaced, poisons, row=row)
        except SordinoError:
            raise
        except Exception:
            return False
        self._ran.extend(poisons.values())
        self._compare_rows(self._seen, seen, replaced, _UNUSUAL)
        if changed is not None:
            self._compare(row, changed, replaced, _UNUSUAL)
        return True

    def _is_refused(self, poison: AdversarialValue) -> bool:
        """Whether a smaller number was refused there: it is no id, and no larger one is."""
        least = self._least_refused.get(poison.place)
        return least is not None and isinstance(poison.integers, int) and poison.integers >= least

    def _kinds(self) -> Iterator[AdversarialValue]:
        floating, integer = (self._records.places(floating=kind) for kind in (True, False))
        for value in _FLOATS if floating else ():
            yield AdversarialValue(floats=value)
            for place in floating[:_PARTS] if len(floating) > 1 else ():
                yield AdversarialValue(floats=value, place=place)
        for mark in (*_MARKS, *_IDS) if integer else ():
            yield AdversarialValue(integers=mark)
            for place in integer[:_PARTS] if len(integer) > 1 and mark in _MARKS_ALONE else ():
                yield AdversarialValue(integers=mark, place=place)
        if floating and integer:
            for mark in _MARKS:
                yield AdversarialValue(floats=_EXTREME, integers=mark)
        yield from self._singled_out(floating, integer)

    def _singled_out(self, floating: Sequence[int], integer: Sequence[int]) -> Iterator[AdversarialValue]:
        """What the code itself compares with: padding, labels to be ignored, special tokens."""
        for mark in list(self._observer.singled.integers) if integer else ():
            if mark not in (*_MARKS, *_IDS):
                yield AdversarialValue(integers=mark)
                for place in integer[:_PARTS] if len(integer) > 1 else ():
                    yield AdversarialValue(integers=mark, place=place)
        for value in list(self._observer.singled.floats) if floating else ():
            yield AdversarialValue(floats=value)
            for place in floating[:_PARTS] if len(floating) > 1 else ():
                yield AdversarialValue(floats=value, place=place)

    def check_random_outcomes(self) -> None:
        """Whatever chance decides, one record must not change the others: also what it decides rarely."""
        if not self._sets:
            return
        # What no Python code reads decides within tensors, for which the extremes of chance stand.
        unread = self._observer.generators <= {"torch"} and not self._observer.singled.reads_values
        courses = [SeededGenerators(seed=seed) for seed in range(1, _SEEDS_UNREAD if unread else _SEEDS)]
        courses += [SeededGenerators(forced=name, high=high) for name in GENERATORS for high in (False, True)]
        for chance in courses:
            # Draws that come only behind a branch of chance are noticed once that branch was taken.
            used = self._observer.generators
            if used if chance.forced is None else chance.forced in used:
                self._vary(chance)

    def _vary(self, chance: SeededGenerators) -> None:
        """The others' gradients with some ordinary and some extreme records."""
        replaced = self._sets[0]
        places = self._places(replaced)
        extreme = {
            place: AdversarialValue(floats=_EXTREME if number % 2 else -_EXTREME)
            for number, place in enumerate(replaced)
        }
        weights = self._weights[:1]
        ordinary, unusual = self._records.batch(range(self._count)), self._records.batch(places, extreme)
        try:
            if self._observer.gradients_follow:
                one, other = (
                    self._observer.look(batch, self._count, chance=chance, gradients=True, looks=True)
                    for batch in (ordinary, unusual)
                )
                if bool(one.isfinite().all()):
                    self._compare_rows(one, other, replaced, _CHANGED)
            if self._observer.gradients_follow:
                return
            plain = self._observer.observe(ordinary, weights, chance=chance)
            changed = self._observer.observe(unusual, weights, chance=chance)
        except SordinoError:
            raise
        except Exception:
            return
        kept = [place for place in range(self._count) if place not in set(replaced)]
        sums = (plain.sketches[0], changed.sketches[0], plain.scale(0))
        if plain.finite and not _same(plain, changed, kept, self._tolerance(), sums=sums):
            raise _coupled(_CHANGED)

    # --- other numbers of records --------------------------------------------------------------------------------

    def check_single_records(self, first: ProbeResult, *, values: bool) -> None:
        """In a batch a record must have the gradient, and if asked for the loss, that it has in any smaller one.

        The same records come in batches of half the size, a quarter, and so on down to one, the last record first.
        Chance decides nothing in any of them.
        """
        count = self._size.records
        weights = _evenly(count)
        order = range(count - 1, -1, -1)
        parts: list[ProbeResult] = []
        usual = float(self._first.norms.mean())
        for size in _smaller(count):
            places, order = order[:size], order[size:]
            parts.append(self._part(list(places), weights[:, list(places)]))
        tolerance = self._other_shape()
        wanted = {"none": "made of records alone", "mean": "the mean over records", "sum": "the sum over records"}
        total = torch.stack([part.sketches[0] for part in parts]).sum(0)
        if (
            not _far(first.sketches[0], total, max(first.scale(0), _VANISHING * usual * float(weights.sum())))
            <= tolerance
        ):
            raise _coupled(
                f"a batch's loss must be {wanted[self._reduction]}, and this one is not. Set loss_reduction to what "
                "the loss does ('mean' or 'sum'), and divide by nothing that counts tokens, weights or records by hand"
            )
        self._compare_parts(first, parts, values=values, least=_VANISHING * usual)
        self._look_at_sizes(first)

    def _look_at_sizes(self, first: ProbeResult) -> None:
        """What the forward pass gives for a record, in batches of sizes between the halves."""
        count, whole = self._size.records, first.outputs
        assert whole is not None
        sizes = sorted({count * eighths // 8 for eighths in _EIGHTHS} - {0, 1})
        parts = [(size, self._observer.look(self._large.batch(range(size)), size)) for size in sizes]
        for size, part in parts:
            if part.shape[1] != whole.shape[1]:
                continue
            ties = _TIES if self._is_half else 0.0
            if not _same_looks(whole[:size], part, 4 * self._other_shape(), ties=ties):
                raise _coupled(f"a record's result depends on how many others there are. {_REMEDY}")

    def _part(self, places: list[int], weights: Tensor) -> ProbeResult:
        try:
            return self._observe_large(places, {}, weights, outputs=False)
        except SordinoError:
            raise
        except Exception as failure:
            if len(places) > 1:
                raise _too_many(failure, len(places)) from failure
            raise RecordCountMismatch(
                "model and loss must run on a batch of one record, which sampling and microbatch_size give now and "
                f"then, got {type(failure).__name__}. A bare .squeeze() drops the records there: write .squeeze(1)."
            ) from failure

    def _compare_parts(self, whole: ProbeResult, parts: Sequence[ProbeResult], *, values: bool, least: float) -> None:
        tolerance = self._other_shape()
        norms = torch.cat([part.norms for part in parts]).flip(0)
        wrong = ~_near(whole.norms, norms, 4 * tolerance, floor=_SMALL_ELSEWHERE, least=least)
        ties = _TIES * len(wrong) if self._is_half else 0
        if int(wrong.sum()) > ties:
            raise _coupled(f"a record's gradient depends on which others there are, or on their order. {_REMEDY}")
        alone = [part.losses for part in parts if part.losses is not None]
        if values and whole.losses is not None and len(alone) == len(parts):
            here = whole.losses
            if not torch.allclose(
                here, torch.cat(alone).flip(0), rtol=tolerance, atol=tolerance * float(here.abs().max())
            ):
                raise CoupledRecords(
                    "records must be independent of each other in the value of the loss, which is released, got a "
                    "coupling: a record's loss depends on how many others there are. Add nothing that counts records."
                )

    def _other_shape(self) -> float:
        """The tolerance for batches of other shapes."""
        return max(self._observer.other_shape(), _SPREAD * self._unrepeated)

    def fill_up(self, *, values: bool) -> None:
        """All this in a batch as large as training's, in which thresholds are exceeded and order shows.

        Gradients, and what the forward pass gives, are looked at with every other record replaced, for every ordered
        pair of records, and in smaller batches. Where gradients are derivatives of what the forward pass gives, every
        ordered pair is looked at in that, and gradients in one of these experiments and in smaller batches.
        """
        count = self._size.records
        if count < 2:
            return
        even = list(range(0, count, 2))
        sets = [even, *_replaced_sets(count)]
        # Every fifth becomes a copy of its neighbor.
        others = list(range(count))
        for number, place in enumerate(even):
            others[place] = (place + 1) % count if number % 5 == 4 else count + place
        # Smaller batches are compared with one in which chance decides nothing. Where gradients follow from what the
        # forward pass gives, chance is looked at in that, and one such batch stands for all that is observed.
        follows = self._observer.gradients_follow
        calm = follows and bool(self._observer.generators)
        # Two passes read one sum.
        rows = [] if self._size.two_passes or follows else sets
        with DisableRandomness() if calm else nullcontext():
            first = self._filled(count, torch.cat([_evenly(count), *([_rows_of_weights(count, rows)] if rows else [])]))
        changes: list[tuple[list[int], dict[int, AdversarialValue]]] = [(others, {})]
        changes += [self._extremes(replaced, turn) for turn, replaced in enumerate(sets) if turn]
        whole = first.outputs
        assert whole is not None
        if follows and (calm or self._reduction != "none"):
            whole = self._observer.look(self._large.batch(range(count)), count, gradients=True)
        left = [
            turn
            for turn, (change, replaced) in enumerate(zip(changes, sets, strict=True))
            if not follows or turn == _WITH_GRADIENTS or not self._compare_looks(whole, *change, replaced)
        ]
        if follows and not self._observer.gradients_follow:
            left = list(range(len(sets)))
        reference = first
        # Without chance a loss may vanish up to rounding, such as one of a model with itself.
        if calm and (not self._observer.gradients_follow or self._vanishes(first)):
            calm, reference = False, self._observe_large(list(range(count)), {}, first.weights[:0])
        with DisableRandomness() if calm else nullcontext():
            for turn in left:
                self._compare_large(reference, *changes[turn], sets[turn], row=turn + 1 if rows else None)
        # After a look with gradients, whose outputs are copies of their own, one without may show what the loop wrote.
        if self._reduction != "none":
            whole = reference.outputs
            assert whole is not None
            if calm:
                whole = self._observer.look(self._large.batch(range(count)), count)
        self._look_at_missing(whole, sets[-1], len(sets))
        self._look_at_alike(whole)
        if self._observer.generators or not self._is_same_in_parts(first, values=values):
            with DisableRandomness():
                if reference is first and not calm:
                    first = self._observe_large(list(range(count)), {}, _evenly(count))
                self.check_single_records(first, values=values)

    def _is_same_in_parts(self, first: ProbeResult, *, values: bool) -> bool:
        """`check_single_records` where nothing was drawn so far; False where it fails and something is drawn in it."""
        refusal: CoupledRecords | None = None
        with generators_used(self._observer.generators):
            try:
                self.check_single_records(first, values=values)
            except CoupledRecords as failure:
                refusal = failure
        if refusal is not None and not self._observer.generators:
            raise refusal
        return refusal is None

    def _vanishes(self, first: ProbeResult) -> bool:
        """Whether gradients of the large batch are only rounding relative to those of the small one."""
        return not float(first.norms.mean()) > _VANISHING * float(self._first.norms.mean())

    def _observe_large(
        self, places: list[int], poisons: dict[int, AdversarialValue], weights: Tensor, *, outputs: bool = True
    ) -> ProbeResult:
        batch = self._large.batch(places, poisons)
        return self._observer.observe(batch, weights, large=True, looks=False, outputs=outputs)

    def _look_at_missing(self, whole: Tensor, replaced: list[int], turn: int) -> None:
        """What the forward pass gives for a record must be the same where some of the others are NaN, too."""
        missing = self._extremes(replaced, turn, last=True)
        # Where nothing stands for what is missing, this was the last of the experiments before.
        if missing != self._extremes(replaced, turn - 1):
            self._compare_looks(whole, *missing, replaced, gradients=False)

    def _compare_looks(
        self,
        whole: Tensor,
        places: list[int],
        poisons: dict[int, AdversarialValue],
        replaced: Sequence[int],
        *,
        gradients: bool = True,
    ) -> bool:
        """Compare what the forward pass gives for records that stay; with `gradients` the loss's by it, too.

        Returns:
            Whether gradients are derivatives of it in this batch, so that they need not be compared themselves.
        """
        count = self._large.count
        try:
            changed = self._observer.look(self._large.batch(places, poisons), count, gradients=gradients)
        except SordinoError:
            raise
        except Exception:
            return True
        self._compare_rows(whole, changed, replaced, _UNUSUAL if poisons else _CHANGED)
        return self._observer.gradients_follow

    def _look_at_alike(self, whole: Tensor) -> None:
        """What the forward pass gives for a record must be the same where all others are alike: thresholds on counts.

        The others are copies of one record, and then hold one number, also one that the code compares with.
        """
        numbers = [AdversarialValue(integers=number) for number in (0, 1) if self._large.places(floating=False)]
        ran = dict.fromkeys(
            kind.integers for kind in self._ran[::-1] if kind.place is None and kind.integers is not None
        )
        # Those that the code compares with come first.
        further = sorted(ran, key=lambda number: number not in self._observer.singled.integers)[:_ALIKE]
        seen: list[list[Tensor]] = []
        for kind in dict.fromkeys([*numbers, *(AdversarialValue(integers=number) for number in further), None]):
            held = {} if kind is None else dict.fromkeys(range(1, self._large.count), kind)
            one = list(tensors_in(self._large.batch([1], {0: kind} if kind is not None else {})))
            if not any(all(map(torch.equal, one, other)) for other in seen):
                self._look_beside(whole, [0] + [1] * (self._large.count - 1), held)
            seen.append(one)

    def _look_beside(self, whole: Tensor, places: list[int], poisons: dict[int, AdversarialValue]) -> None:
        """Compare what the forward pass gives for the first record; values that the code refuses can't be asked."""
        try:
            changed = self._observer.look(self._large.batch(places, poisons), self._large.count)
        except SordinoError:
            raise
        except Exception:
            return
        # One record alone does not tell how large a number usually is.
        if not _same_looks(whole[:1], changed[:1], max(self._tolerance(), _NORMS), scale=_scale(whole)):
            raise _coupled(_UNUSUAL)

    def _extremes(
        self, replaced: Sequence[int], turn: int, *, last: bool = False
    ) -> tuple[list[int], dict[int, AdversarialValue]]:
        """Places of a large batch, and what the replaced records hold; where nothing, they are copies."""
        count = self._large.count
        places, poisons = list(range(count)), {}
        for number, place in enumerate(replaced):
            kind = self._extreme(turn, number, last=last)
            places[place] = (place + 1) % count if kind is None else count + place
            if kind is not None:
                poisons[place] = kind
        return places, poisons

    def _filled(self, count: int, weights: Tensor) -> ProbeResult:
        """A large batch of diverse records, or if model and loss don't run on them of ordinary ones."""
        failure: Exception | None = None
        for diverse in (True, False):
            self._large = self._made_up(count, self._pattern, diverse=diverse)
            try:
                first = self._observe_large(list(range(count)), {}, weights)
            except SordinoError:
                raise
            except Exception as error:
                failure = error
                continue
            if first.finite:
                self._measure_large(first)
                return first
        if failure is None:
            raise self._does_not_run(None)
        raise _too_many(failure, count) from failure

    def _measure_large(self, first: ProbeResult) -> None:
        """How far equal passes are apart, where they were apart before or may be."""
        if self._unrepeated > 0 or (self._size.again and self._is_unsteady()):
            for _ in range(2):
                again = self._observe_large(list(range(self._large.count)), {}, first.weights, outputs=False)
                self._unrepeated = max(self._unrepeated, self._distance(first, again))
            self._refuse_unrepeated()

    def _extreme(self, turn: int, number: int, *, last: bool) -> AdversarialValue | None:
        """What a replaced record of a large batch holds; None for a copy of another one."""
        kinds: list[AdversarialValue | None] = [AdversarialValue(floats=_EXTREME), AdversarialValue(floats=-_EXTREME)]
        if not self._large.places(floating=True):
            # Those that the code compares with come last.
            kinds = []
            kinds += list(dict.fromkeys(kind for kind in self._ran[::-1] if kind.place is None))[:_PARTS]
        if not kinds or (last and number % 5 == 4):
            return None
        # NaN hides thresholds: it is in one of the experiments only.
        is_nan = last and number % 5 == 3 and self._large.places(floating=True)
        return AdversarialValue(floats=torch.nan) if is_nan else kinds[(number + turn) % len(kinds)]

    def _compare_large(
        self,
        first: ProbeResult,
        places: list[int],
        poisons: dict[int, AdversarialValue],
        replaced: Sequence[int],
        *,
        row: int | None = None,
    ) -> None:
        """Compare the records that stay, and the sum of their gradients if `row` is that of their weights."""
        weights = first.weights[:0] if row is None else first.weights[row : row + 1]
        try:
            changed = self._observe_large(places, poisons, weights)
        except SordinoError:
            raise
        except Exception:
            return
        kept = sorted(set(range(len(places))) - set(replaced))
        if (
            first.outputs is not None
            and changed.outputs is not None
            and not _same_looks(first.outputs[kept], changed.outputs[kept], max(self._tolerance(), _NORMS))
        ):
            raise _coupled(_UNUSUAL if poisons else _CHANGED)
        sums = None if row is None else (first.sketches[row], changed.sketches[0], first.scale(row))
        if not _same(first, changed, kept, self._tolerance(), sums=sums):
            raise _coupled(_UNUSUAL if poisons else _CHANGED)

    def compare_with_autograd(self) -> None:
        """The captured gradients must be those of plain autograd."""
        weights = _evenly(self._count)[0] if self._reduction == "none" else torch.ones(self._count)
        with DisableRandomness():
            self._observer.compare_with_autograd(
                self._records.batch(range(self._count)), weights, least=_VANISHING * float(self._first.norms.sum())
            )

    def check_empty_batch(self) -> None:
        """A batch of no records is a real step and must run."""
        try:
            self._observer.observe(self._records.batch([]), torch.zeros(1, 0))
        except SordinoError:
            raise
        except Exception as error:
            raise UnsupportedModule(
                "module must accept a batch of no records, which Poisson sampling draws now and then, got "
                f"{type(error).__name__}. Replace x.view(x.size(0), -1) by x.flatten(1), or expect larger batches."
            ) from error


def _replaced_sets(count: int) -> list[list[int]]:
    """Sets of records such that for every ordered pair one of them holds the first and not the second."""
    if count < 2:
        return []
    bits = next(bits for bits in range(2, 65) if math.comb(bits, bits // 2) >= count)
    words = list(combinations(range(bits), bits - bits // 2))
    # In an order that nothing else follows.
    random.Random(_WORDS_SEED).shuffle(words)  # noqa: S311
    return [[place for place, word in enumerate(words[:count]) if bit in word] for bit in range(bits)]


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


def _far_rows(one: Tensor, other: Tensor, *, floor: float = _SMALL) -> float:
    """The largest relative difference of two rows of numbers ≥ 0; what is small relative to the mean counts less."""
    if not len(one) or torch.equal(one, other):
        return 0.0
    size = torch.maximum(one, other) + floor * one.mean() + 1e-30
    apart = ((one - other).abs() / size).max()
    return float(apart) if bool(apart.isfinite()) else math.inf


def _near(one: Tensor, other: Tensor, tolerance: float, *, floor: float, least: float = 0.0) -> Tensor:
    """By record, whether two norms are the same."""
    return (one - other).abs() <= tolerance * (torch.maximum(one, other) + floor * one.mean() + least) + 1e-30


def _same(
    one: ProbeResult,
    other: ProbeResult,
    kept: Sequence[int],
    tolerance: float,
    *,
    sums: tuple[Tensor, Tensor, float] | None,
) -> bool:
    """Whether records that stayed have the norms, the losses and the sum of gradients that they had.

    Args:
        one: before.
        other: after.
        kept: the records that stayed.
        tolerance: relative.
        sums: of the records that stayed, before and after, and what they are relative to.
    """
    if sums is not None and not _far(*sums) <= tolerance:
        return False
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


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield
