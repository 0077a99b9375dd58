"""A step's forward, backward, norms and clipped sums as two recorded graphs.

The same capture runs once on synthetic records while every operation is recorded; hooks, rules and refusals are gone
from the result. The first graph ends with what the rules keep: inputs and output gradients. The second reads norms and
sums from these very tensors: a compiler may compute a value twice, differently rounded, within a graph, but not
across two.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sordino.errors import UnsupportedModule
from sordino.gradients.capture import GradientCapture
from sordino.gradients.captured_gradients import CapturedGradients
from sordino.gradients.numerics import full_precision, tracing_graph
from sordino.gradients.rules.base import LayerCall
from sordino.gradients.rules.composite import DerivedContext
from sordino.shapes import Bool, Float

# (squared bounds [G, B]) ↦ one factor per group and record.
Factors = Callable[[Float[Tensor, "G B"]], Float[Tensor, "G B"]]


# How operations that may drop entries name the probability.
_DROPPING = frozenset(("dropout_p", "dropout", "p"))


@dataclass(frozen=True, eq=False, kw_only=True)
class StepGraphs:
    """Two functions of tensors, for one number of records.

    Args:
        backward: (parameters and buffers of `held`, the batch) ↦ what the rules keep.
        sums: (which records count, what is kept) ↦ (whether all was usual, clipped sums of `parameters`).
        held: tensors of the model, which live between steps, and are read again in each.
        parameters: the parameters with a sum, in its order.
    """

    backward: Callable[..., Sequence[Tensor]]
    sums: Callable[..., Sequence[Tensor]]
    held: tuple[Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    _layouts: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_layouts", tuple(map(_layout, self.held)))

    def fits(self, living: Callable[[], Iterable[Tensor]]) -> bool:
        """Whether the tensors of `held` are as they were recorded, their values aside: code is compiled for these.

        Args:
            living: gives the model's tensors, of which those that are no parameters must still be some.
        """
        if any(_layout(tensor) != layout for tensor, layout in zip(self.held, self._layouts, strict=True)):
            return False
        others = {id(tensor) for tensor in self.held if not isinstance(tensor, nn.Parameter)}
        return not others or others <= set(map(id, living()))

    def run(self, batch: Sequence[Tensor], counted: Bool[Tensor, " B"]) -> dict[nn.Parameter, Tensor] | None:
        """Clipped sums over the records that count; None when something unusual needs the ordinary way."""
        with torch.no_grad():
            kept = self.backward(*(tensor.detach() for tensor in self.held), *batch)
            usual, *sums = self.sums(counted, *kept)
            return dict(zip(self.parameters, sums, strict=True)) if bool(usual) else None


def trace_step(
    capture: GradientCapture,
    losses: Callable[..., Float[Tensor, " B"]],
    batch: Sequence[Tensor],
    factors: Factors,
    groups: Sequence[Sequence[nn.Parameter]],
    compiler: Callable[[GraphModule, Sequence[Tensor]], Callable[..., Sequence[Tensor]]],
    others: Iterable[Tensor] = (),
) -> StepGraphs:
    """Record the step that `losses` and `factors` describe.

    Guarantee: what `StepGraphs.run` returns is what `GradientCapture.add_weighted_sums` adds for the same batch, with
    the factors from `GradientCapture.squared_norm_bounds`, up to the order of additions.

    Args:
        capture: hooks on the model, with no recording in use.
        losses: the batch's tensors ↦ one loss per record.
        batch: synthetic records, with the shapes and types of those to come.
        factors: clips.
        groups: parameters that are clipped together.
        compiler: (graph, inputs that are like those to come) ↦ a fast function.
        others: tensors of the model besides parameters and buffers; their values may change between steps, too.

    Raises:
        UnsupportedModule: something decides by values, draws random numbers, or has results of unforeseen size.
        UncapturedParameter: a parameter is used where no layer rule captures it.
    """
    records = batch[0].shape[0]
    uses: list[LayerCall] = []

    def backward(*tensors: Tensor) -> list[Tensor]:
        with capture.capturing(records=records):
            losses(*tensors).sum().backward()
        # Copies: what is discarded is emptied.
        uses[:] = map(replace, capture.layer_calls())
        kept = _kept(uses)
        capture.discard()
        return kept

    first = _recorded(backward, batch)
    _check_not_pulled(uses)
    kept = [tensor.detach().clone() for tensor in _kept(uses)]
    order: list[nn.Parameter] = []

    def sums(counted: Tensor, *tensors: Tensor) -> list[Tensor]:
        recording = CapturedGradients(records, scale=1.0, device=counted.device)
        rest = iter(tensors)
        for use in uses:
            saved = tuple(next(rest) for _ in use.saved)
            grads = tuple(None if grad is None else next(rest) for grad in use.grads)
            recording.receive(replace(use, saved=(), grads=(), memo={}, versions=()), saved, grads)
        recording.group(groups)
        into: dict[nn.Parameter, Tensor] = {}
        with tracing_graph() as conditions, full_precision(counted.device):
            weights = factors(recording.squared_norm_bounds())
            recording.add_weighted_sums(weights * counted, into, without=~counted)
        order[:] = into
        return [torch.stack([counted.any(), *conditions]).all(), *(into[parameter] for parameter in order)]

    counted = torch.ones(records, dtype=torch.bool, device=batch[0].device)
    second = _recorded(sums, (counted, *kept))
    held = _lift(first, [*capture.model.parameters(), *capture.model.buffers(), *others])
    inputs = [*(tensor.detach() for tensor in held), *batch]
    return StepGraphs(
        backward=compiler(first, inputs),
        sums=compiler(second, [counted, *kept]),
        held=tuple(held),
        parameters=tuple(order),
    )


def _check_not_pulled(uses: Sequence[LayerCall]) -> None:
    """Refuse gradients that go back through what was computed from parameters: a graph of the sums can't hold that."""
    for use in uses:
        context = use.context
        sources = context.sources.values() if isinstance(context, DerivedContext) else ()
        if any(all(source.tensor is not leaf for leaf in source.leaves.values()) for source in sources):
            raise UnsupportedModule(
                f"{next(iter(use.parameters))} must be read as it is to be compiled, got something computed from it "
                "for all records. Leave compile out."
            )


def _kept(uses: Sequence[LayerCall]) -> list[Tensor]:
    kept = [tensor for use in uses for tensor in (*use.saved, *use.grads) if tensor is not None]
    # A copy of a tensor with gaps or repetitions has other strides than it, and graphs are recorded for strides.
    return [
        tensor if torch.ops.aten.is_non_overlapping_and_dense.default(tensor) else tensor.contiguous()
        for tensor in kept
    ]


def _recorded(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    try:
        graph = make_fx(function, tracing_mode="real")(*inputs)
    except RuntimeError as error:
        if "tracing" not in str(error):
            raise
        raise UnsupportedModule(
            "model and loss must not decide by values to be compiled, got a Python decision on a tensor. Leave compile "
            "out."
        ) from None
    for node in graph.graph.nodes:
        if _draws(node):
            raise UnsupportedModule(
                f"the model must not draw random numbers to be compiled, got {node.target}. Leave compile out."
            )
        if _has_unknown_size(node):
            raise UnsupportedModule(
                f"the model must have results of known sizes to be compiled, got {node.target}. Leave compile out."
            )
    return graph


def _draws(node: torch.fx.Node) -> bool:
    """Whether the operation draws random numbers: one that may, for dropout, does not at a probability of zero."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name in _DROPPING:
            given = node.kwargs.get(argument.name, argument.default_value)
            given = node.args[position] if position < len(node.args) else given
            return bool(given != 0)
    return True


def _has_unknown_size(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if node.target is torch.ops.aten.index.Tensor:
        chosen = [index for index in cast("Sequence[object]", node.args[1]) if isinstance(index, torch.fx.Node)]
        return any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in chosen)
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _layout(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _lift(graph: GraphModule, living: Iterable[Tensor]) -> list[Tensor]:
    """Make inputs, ahead of the others, of the constants of `graph` that are among `living`; the others are copied.

    A tensor from elsewhere may be changed by a loop, also to what it computed from records.
    """
    by_memory: dict[Hashable, Tensor] = {}
    for tensor in living:
        # Sparse tensors have no memory of their own.
        if tensor.layout is torch.strided:
            by_memory.setdefault((tensor.data_ptr(), _layout(tensor)), tensor)
    found: dict[int, tuple[Tensor, torch.fx.Node]] = {}
    start = next(iter(graph.graph.nodes))
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        constant = getattr(graph, str(node.target))
        has_memory = isinstance(constant, Tensor) and constant.layout is torch.strided
        tensor = by_memory.get((constant.data_ptr(), _layout(constant))) if has_memory else None
        if tensor is None:
            if isinstance(constant, Tensor):
                delattr(graph, str(node.target))
                graph.register_buffer(str(node.target), constant.detach().clone())
            continue
        if id(tensor) not in found:
            with graph.graph.inserting_before(start):
                found[id(tensor)] = tensor, graph.graph.placeholder(f"held_{len(found)}")
        node.replace_all_uses_with(found[id(tensor)][1])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for tensor, _ in found.values()]
