"""A model and loss on synthetic records: losses, gradients and outputs as a private step would see them."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from sordino.errors import LossShapeError, SordinoError, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture, Recorder
from sordino.gradients.backward_strategies import TwoPassBackward
from sordino.gradients.interception import CAPTURING_NODES
from sordino.gradients.numerics import product_mode
from sordino.training.probing.snapshots import (
    ModuleSnapshot,
    SeededGenerators,
    generators_used,
    preserve_attributes,
    preserve_rng_state,
)
from sordino.training.probing.synthetic import INTEGER_PATTERNS, SyntheticRecords
from sordino.training.probing.torch_modes import (
    ComparisonConstants,
    GradientCuts,
    GraphWithoutValues,
    IndexBoundsCheck,
    NoClassWeights,
    PublicDivisor,
)
from sordino.training.pytree import map_tensors, tensors_in

T = TypeVar("T")

# Alone or in another batch, a record goes through other kernels: rounding, but far from the factor that a wrong
# reduction makes.
_OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OTHER_SHAPE_HALF, _OTHER_SHAPE_TF32 = 5e-2, 1e-2
# A parameter's gradient that is nothing but rounding, relative to the whole gradient, and how much more it is in half
# precision; and what a parameter's error may be, relative to the whole gradient's.
_NOISE, _HALF_NOISE, _TF32_NOISE, _FLOOR = 1e-6, 1e4, 1e3, 1e-2
# So many entries of a record's outputs are looked at one by one.
_SEEN = 64
# So many numbers, and one for the rest, stand for the gradient of a parameter.
_PROJECTED = 64


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How training reads its records, and how much the probe may do.

    Args:
        reduction: how the loss reduces over records: "none" for one value per record, shape (B,); with "mean" or "sum"
            it is a scalar.
        public_batch: at least five public or invented records in the structure of the batches (or of their first part):
            they are used instead of synthetic ones, for loops that validate their input; or None.
        values_released: losses are released, not only gradients: a record must also have the loss that it has alone.
        is_split: whether a logical batch may come in several microbatches of more than one record, or in several
            processes.
        num_records: the most records that training gives to the model at once: a public number. The probe takes no
            more.
        two_passes: keep nothing of a layer, as a step in two passes does.
        again: it was done before in this state of the module, and is repeated in case a function changes its mind: in
            a small batch, or if `is_thorough` in one as large as training's.
        is_thorough: see `again`.
    """

    reduction: str = "none"
    public_batch: object = None
    values_released: bool = False
    is_split: bool = False
    num_records: int = 16
    two_passes: bool = False
    again: bool = False
    is_thorough: bool = True


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """A model and loss to be probed. Only the structure of `records` (shapes, types, devices) is read.

    Args:
        model: in the mode in which it will be trained.
        recorder: hooks on the model, with no recording in use.
        records: a batch, or a batch with no rows, in the loop's structure, records first; or a tuple whose first part
            is one.
        run: batch ↦ loss.
        options: how training reads its records.
    """

    model: nn.Module
    recorder: Recorder
    records: object
    run: Callable[[object], Tensor]
    options: ProbeOptions = field(default_factory=ProbeOptions)

    def synthetic(self, count: int, pattern: str, *, diverse: bool = False) -> SyntheticRecords:
        """`count` synthetic records in the structure of `records`."""
        sizes = [tensor.size(0) for tensor in tensors_in(self.records) if tensor.dim()]
        rows = 0 if 0 in sizes else next(iter(sizes), 0)
        example = list(tensors_in(self.options.public_batch))
        return SyntheticRecords(self.records, rows=rows, count=count, pattern=pattern, example=example, diverse=diverse)

    def kinds(self, count: int) -> Iterator[SyntheticRecords]:
        """`count` synthetic records of one kind after another, the likeliest to be valid first."""
        return (self.synthetic(count, pattern) for pattern in INTEGER_PATTERNS)

    def scale(self, count: int) -> float:
        """What makes the gradient of a loss of `count` records the sum of the records' gradients."""
        return float(max(count, 1)) if self.options.reduction == "mean" else 1.0


def first_that_runs(
    kinds: Iterable[SyntheticRecords], act: Callable[[SyntheticRecords], T | None]
) -> tuple[SyntheticRecords | None, T | None, Exception | None]:
    """The first kind of synthetic records for which `act` gives something, and what it gives.

    Where there is none, the first kind on which the code fails, None, and that failure; None of all where none fails.
    """
    failed: tuple[SyntheticRecords | None, None, Exception | None] = None, None, None
    for records in kinds:
        try:
            found = act(records)
        except SordinoError:
            raise
        except Exception as failure:
            failed = failed if failed[0] is not None else (records, None, failure)
            continue
        if found is not None:
            return records, found, None
    return failed


def attempt(act: Callable[[], T]) -> T | None:
    """What `act` returns; None where the user's code raises on the values that it gets."""
    try:
        return act()
    except SordinoError:
        raise
    except Exception:
        return None


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
        task: what is probed; its recorder is a `GradientCapture`.

    Attributes:
        generators: the generators of random numbers that were used so far.
        singled: what tensors were compared with so far.
        dtype: in which gradients were summed.
        gradients_follow: whether all that `look` saw with gradients was derivatives of what it reads, and nothing else.
    """

    def __init__(self, task: ProbeTask) -> None:
        assert isinstance(task.recorder, GradientCapture)
        self.generators: set[str] = set()
        self.singled = ComparisonConstants()
        self.dtype = torch.float32
        self.gradients_follow = True
        self._task, self._capture = task, task.recorder
        self._reduction = task.options.reduction
        self._own = set(self._capture.model.parameters())
        self._direction = cache(_direction)
        # Whether model or loss may take derivatives themselves.
        self._derives = False
        # Outputs of the model, by their number, that no loss was made of so far.
        self._idle: set[int] | None = None

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
        reduced = {"half": _OTHER_SHAPE_HALF, "tf32": _OTHER_SHAPE_TF32}.get(self.precision)
        return _OTHER_SHAPE.get(dtype or self.dtype, _OTHER_SHAPE_HALF) if reduced is None else reduced

    def observe(
        self,
        batch: object,
        weights: Tensor,
        *,
        chance: SeededGenerators | None = None,
        large: bool = False,
        looks: bool = True,
        outputs: bool = False,
        sums: dict[nn.Parameter, Tensor] | None = None,
    ) -> ProbeResult:
        """One forward and backward.

        Args:
            batch: synthetic records.
            weights: rows of one for each record, in sums of gradients; a record of weight 0 adds nothing, not even NaN.
            chance: the course of random numbers.
            large: the batch is as large as one of training: spare memory where the step does.
            looks: look into operations and graph, which a smaller batch needn't have shown already.
            outputs: also tell what the forward pass gave for each record.
            sums: gets the sum of gradients with the last row of weights.

        Raises:
            LossShapeError: the loss doesn't have the shape of its reduction.
            UncapturedParameter: a parameter would get an ordinary gradient.
        """
        count = weights.size(1)
        norms = torch.zeros(count, dtype=torch.float64)

        def factors(squared_bounds: Tensor) -> Tensor:
            nonlocal norms
            norms = squared_bounds.sum(0).sqrt()
            chosen = weights[:1] if len(weights) else torch.zeros(1, count)
            return chosen.to(squared_bounds.device, squared_bounds.dtype)

        # Two backward passes tell the norms on the way, and add up with given weights.
        in_two_passes = large and self._task.options.two_passes
        passes = TwoPassBackward([self._capture.trainable()], factors) if in_two_passes else None
        (chance or SeededGenerators()).start()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if looks or outputs:
                stack.enter_context(generators_used(self.generators))
            scale = self._task.scale(count)
            stack.enter_context(self._capture.capturing(count, scale=scale, backward_strategy=passes))
            noted = stack.enter_context(self._outputs_noted())[0] if outputs else None
            loss = self._loss(batch, count, looks=looks)
            total = loss.sum()
            rows = None if noted is None else self._rows(noted, loss, count)
            if looks:
                self._check_parameters(total)
                self._backward(total, count)
            else:
                self._capture.backward(lambda again: total.backward(retain_graph=again))
        if passes is None:
            norms = self._capture.squared_norms().sqrt()
        sketches: list[Tensor] = []
        total_of: dict[nn.Parameter, Tensor] = {}
        for row in weights:
            total_of = {}
            if passes is None:
                self._capture.add_weighted_sums(row.to(norms.device, norms.dtype), into=total_of)
            else:
                self._capture.add_backward_sums(total_of)
            sketches.append(self._sketch(total_of))
        if sums is not None:
            sums.update(total_of)
        self._capture.discard()
        return ProbeResult(
            losses=loss.detach().cpu().double() if self._reduction == "none" else None,
            norms=norms.cpu(),
            sketches=tuple(sketches),
            weights=weights,
            outputs=rows,
        )

    def compare_with_autograd(
        self, batch: object, weights: Tensor, sums: Mapping[nn.Parameter, Tensor], *, least: float = 0.0
    ) -> None:
        """Compare the captured sum of gradients with what torch's autograd gives, for every trained parameter.

        Args:
            batch: synthetic records, on which chance decides nothing.
            weights: one for each record; all 1 for a loss that is reduced.
            sums: the captured gradients of the batch, added up with these weights.
            least: a whole gradient with a smaller norm is nothing but rounding.

        Raises:
            UncapturedParameter: names the parameters with another gradient.
        """
        count, trained = len(weights), self._capture.trainable()
        scale = self._task.scale(count)
        SeededGenerators().start()
        with torch.enable_grad(), self._capture.ordinary():
            loss = self._loss(batch, count)
            by_record = self._reduction == "none"
            total = (loss * weights.to(loss.device, loss.dtype)).sum() if by_record else loss.sum() * scale
            plain = _plain_gradients(total, trained) if total.requires_grad else ()
        gradients = dict(zip(trained, plain, strict=False))
        whole = sum(_norm(gradient) ** 2 for gradient in plain if gradient is not None) ** 0.5
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
        size = 0.0 if plain is None else _norm(plain)
        if captured is None or not bool(captured.any()):
            # What a layer passes on may be rounding only: a bias that a softmax takes out again.
            return size <= _NOISE * whole * {"half": _HALF_NOISE, "tf32": _TF32_NOISE}.get(self.precision, 1.0)
        difference = _norm(captured if plain is None else captured - plain.detach().to(captured.dtype))
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
        large: bool = False,
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
            large: the batch is as large as one of training: its graph keeps no values where nothing is derived by them.
        """
        if large and gradients and not self._derives:
            graph = GraphWithoutValues()
            try:
                rows = self._look(batch, count, chance=chance, gradients=True, looks=looks, graph=graph)
                if not graph.is_read:
                    return rows
            except SordinoError:
                raise
            except Exception:  # noqa: S110 (code that takes derivatives itself, or refuses the batch: seen below)
                pass
            self._derives = True
        return self._look(batch, count, chance=chance, gradients=gradients, looks=looks)

    def _look(
        self,
        batch: object,
        count: int,
        *,
        chance: SeededGenerators | None,
        gradients: bool,
        looks: bool,
        graph: GraphWithoutValues | None = None,
    ) -> Tensor:
        (chance or SeededGenerators()).start()
        cuts = GradientCuts()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(gradients))
            if looks:
                stack.enter_context(generators_used(self.generators))
            # Cut off also where nothing is derived by them: a loop that writes into its output then changes a copy.
            noted, given = stack.enter_context(self._outputs_noted(as_leaves=True))
            stack.enter_context(self._capture.ordinary())
            if gradients:
                stack.enter_context(cuts)
            if graph is not None:
                # From the outputs on, a loss that is reduced has its gradients by them taken.
                graph.keeps = lambda: self._reduction != "none" and bool(noted)
                stack.enter_context(graph)
            loss = self._loss(batch, count, looks=looks)
        slopes: list[Tensor] = []
        if gradients:
            self._study(noted, given, loss, count, cuts)
        if gradients and self._reduction != "none":
            leaves = [tensor for tensor in self._used(noted) if tensor.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if loss.requires_grad and leaves:
                found = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True)
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
    def _outputs_noted(self, *, as_leaves: bool = False) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The tensors that calls of the model return in the block, without what the loop writes into them.

        Of a loss that is reduced they are copies; `as_leaves` cuts them off the graph, and then the second list has
        them as they were before.
        """
        noted: list[Tensor] = []
        given: list[Tensor] = []

        def note(module: nn.Module, _args: object, output: object) -> object:
            if module is not self._capture.model:
                return None
            given.extend(tensors_in(output))
            if self._reduction == "none" or not as_leaves:
                is_plain = self._reduction == "none"
                noted.extend(one if is_plain else one.detach().clone() for one in tensors_in(output))
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

    def _rows(self, noted: Sequence[Tensor], loss: Tensor, count: int, slopes: Sequence[Tensor] = ()) -> Tensor:
        tensors = (*self._used(noted), *slopes)
        rows = [_in_few_numbers(tensor, count) for tensor in tensors if _has_rows(tensor, count)]
        if loss.shape == (count,):
            rows.append(loss.detach().cpu().double()[:, None])
        return torch.cat(rows, 1) if rows else torch.zeros(count, 0, dtype=torch.float64)

    def plain_run(self, batch: object, count: int) -> None:
        """Run model and loss without capturing anything: whatever it raises is not the capture's doing."""
        SeededGenerators().start()
        with torch.enable_grad(), self._capture.ordinary():
            self._loss(batch, count)

    def _sketch(self, sums: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """A random projection of a sum of gradients, the same one every time; float64 on the CPU."""
        parts = [torch.zeros(0, dtype=torch.float64)]
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
            parts.append(F.pad(torch.cat([rest[None], table]).cpu().double(), (0, _PROJECTED - rows)))
        return torch.cat(parts)

    def _loss(self, batch: object, count: int, *, looks: bool = True) -> Tensor:
        with ExitStack() as stack:
            for mode in (PublicDivisor(), *((NoClassWeights(), IndexBoundsCheck(), self.singled) if looks else ())):
                stack.enter_context(mode)
            loss = self._task.run(batch)
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


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _direction(width: int) -> Tensor:
    """On what parts of this width are projected."""
    # numpy's, for torch's draws are watched here.
    drawn = np.random.default_rng(width).standard_normal(width, dtype=np.float32)
    return torch.from_numpy(drawn) if width > 1 else torch.ones(1)


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


def graph_nodes(loss: Tensor) -> set[Node]:
    """The graph of a loss."""
    return set(_nodes(loss, ()))


def _nodes(loss: Tensor, outputs: Collection[Node]) -> list[Node]:
    """The nodes of the graph of `loss` that are reached without passing those of `outputs`."""
    seen: dict[Node, None] = {}
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and node not in outputs:
            seen[node] = None
            pending.extend(parent for parent, _ in node.next_functions)
    return list(seen)


def _is_of_the_user(node: Node) -> bool:
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


def graph_bypassing_outputs(loss: Tensor, outputs: Collection[Node]) -> PastOutputs:
    """Walk the graph of `loss` without passing the nodes of `outputs`."""
    if loss.is_leaf:
        return PastOutputs(leaves=[loss] if loss.requires_grad else [], captured=False)
    nodes = _nodes(loss, outputs)
    variables = (getattr(node, "variable", None) for node in nodes)
    leaves = {id(variable): variable for variable in variables if isinstance(variable, Tensor)}
    return PastOutputs(
        leaves=list(leaves.values()), captured=any(type(node).__name__ in CAPTURING_NODES for node in nodes)
    )


def _written(shape: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield
