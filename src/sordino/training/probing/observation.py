"""One look at a model and loss on made-up records (floor 3): losses, gradient norms, a weighted sum of gradients."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.errors import LossShapeError, UncapturedParameter
from sordino.gradients import GradientCapture
from sordino.training.probing.determinism import Chance, generators_used
from sordino.training.probing.indices import IndicesChecked
from sordino.training.probing.losses import NoClassWeights, PublicDivisor
from sordino.training.probing.singled import SingledOut

__all__ = ["Observation", "Observer", "PastOutputs", "foreign_leaves", "learner_outside", "past_outputs"]

# Nodes at which captured layers read gradients.
_CAPTURED = frozenset({"_EdgeBackward", "_DirectionBackward"})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one forward and backward gave.

    Args:
        losses: one value per record, or None for a loss that is reduced.
        norms: of the records' gradients.
        sums: the weighted sum of the records' gradients, by parameter.
        scale: the weighted sum of the norms.
    """

    losses: Tensor | None
    norms: Tensor
    sums: Mapping[nn.Parameter, Tensor]
    scale: float

    @property
    def finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return bool(self.norms.isfinite().all()) and (self.losses is None or bool(self.losses.isfinite().all()))

    @property
    def dtype(self) -> torch.dtype:
        """The type in which gradients were summed."""
        return next((total.dtype for total in self.sums.values()), torch.float32)


class Observer:
    """Runs model and loss on batches of made-up records and reads the gradients that a private step would read.

    Args:
        capture: hooks on the model, with no recording in use.
        run: batch ↦ loss.
        reduction: "none", "mean" or "sum" over records.

    Attributes:
        generators: the generators of random numbers that were used so far.
        singled: what tensors were compared with so far.
    """

    def __init__(self, capture: GradientCapture, run: Callable[[object], Tensor], reduction: str) -> None:
        self.generators: set[str] = set()
        self.singled = SingledOut()
        self._capture = capture
        self._run = run
        self._reduction = reduction
        self._own = set(capture.model.parameters())

    def observe(self, batch: object, weights: Tensor, *, chance: Chance | None = None) -> Observation:
        """One forward and backward.

        Args:
            batch: made-up records.
            weights: one for each record, in the sum of gradients; a record of weight 0 adds nothing, not even NaN.
            chance: the course of random numbers.

        Raises:
            LossShapeError: the loss doesn't have the shape of its reduction.
            UncapturedParameter: a parameter would get an ordinary gradient.
        """
        count = len(weights)
        (chance or Chance()).start()
        with ExitStack() as stack:
            stack.enter_context(generators_used(self.generators))
            stack.enter_context(
                self._capture.recording(count, scale=float(max(count, 1)) if self._reduction == "mean" else 1.0)
            )
            stack.enter_context(torch.enable_grad())
            with PublicDivisor(), NoClassWeights(), IndicesChecked(), self.singled:
                loss = self._run(batch)
            self._check_shape(loss, count)
            total = loss.sum()
            self._check_parameters(total)
            # Leaves of the capture's own get no gradient; another tensor that gets one learns.
            others = [leaf for leaf in foreign_leaves(total) if not isinstance(leaf, nn.Parameter)]
            before = [leaf.grad for leaf in others]
            if total.requires_grad:
                total.backward()
            for leaf, gradient in zip(others, before, strict=True):
                got, leaf.grad = leaf.grad, gradient
                by_record = leaf.dim() > 0 and leaf.size(0) == count
                if got is not gradient and got is not None and bool(got.any()) and not by_record:
                    raise learner_outside(leaf)
        norms = self._capture.squared_norms().sqrt()
        sums: dict[nn.Parameter, Tensor] = {}
        self._capture.add_weighted_sums(weights.to(norms.device, norms.dtype), into=sums)
        self._capture.discard()
        return Observation(
            losses=loss.detach() if self._reduction == "none" else None,
            norms=norms,
            sums=sums,
            scale=float((norms.cpu() * weights)[weights != 0].sum()),
        )

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
