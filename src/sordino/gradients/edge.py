"""The node in the autograd graph where a layer's output gradient is read (floor 1, gradients).

The node passes values and gradients through unchanged. Kept tensors go through ``save_for_backward``, so torch checks
their versions and non-reentrant checkpointing recomputes them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import (
    _current_graph_task_id,  # pyright: ignore[reportPrivateUsage]
    _will_engine_execute_node,  # pyright: ignore[reportPrivateUsage]
)

from sordino.errors import PrivacyError

__all__ = ["Receiver", "asks_for_parameters", "capture_outputs"]

# The last question, as (number of the backward pass, anchor), and its answer.
_last_asked: tuple[tuple[int, int], bool] = ((-1, 0), False)

# What is called with (kept tensors, gradient at each output) when the backward pass arrives.
Receiver = Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], None]


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, receive: Receiver, anchor: Tensor, outputs: int, *tensors: Tensor):
        ctx.receive = receive
        ctx.anchor = anchor
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[outputs:])
        # detach() shares memory and version counter but is not a tracked view: in-place operations on the result work.
        passed = tuple(output.detach() for output in tensors[:outputs])
        return passed if outputs != 1 else passed[0]

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if asks_for_parameters(ctx.anchor):
            # Detached, or the kept tensors would keep the graph that keeps them.
            saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
            ctx.receive(saved, tuple(None if grad is None else grad.detach() for grad in grads))
        return None, None, None, *grads, *(None for _ in ctx.needs_input_grad[3 + ctx.outputs :])


def asks_for_parameters(anchor: Tensor) -> bool:
    """Whether the backward pass that is running asks for parameter gradients.

    ``autograd.grad(loss, inputs)`` doesn't, and then the anchor isn't visited either.

    Raises:
        PrivacyError: the pass builds a graph of itself.
    """
    if torch.is_grad_enabled():
        raise PrivacyError(
            "backward must be called with create_graph=False on a captured model, got create_graph=True. "
            "Gradients of gradients can't be clipped per record. For a penalty on the slope at the inputs take the "
            "difference of two outputs instead, (model(x + h * v) - model(x)) / h with random directions v of length 1."
        )
    global _last_asked  # noqa: PLW0603 (one answer, whoever asks)
    # All nodes of one pass get the same answer; the pass keeps the anchor alive, and no other has its number.
    asked = (_current_graph_task_id(), id(anchor))
    if _last_asked[0] != asked:
        node = torch.autograd.graph.get_gradient_edge(anchor).node
        _last_asked = (asked, _will_engine_execute_node(node))
    return _last_asked[1]


def capture_outputs(
    receive: Receiver, anchor: Tensor, outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """`outputs`, passed through a node that calls `receive` during the backward pass.

    Args:
        receive: called with the kept tensors and the gradient at each output (None where none arrived); not called
            when only gradients of other tensors were asked for.
        anchor: a scalar that requires grad, so that the first layer's output does too.
        outputs: floating tensors, not aliases of a tensor that the caller still uses.
        saved: tensors to keep until the backward pass.
    """
    passed = _Edge.apply(receive, anchor, len(outputs), *outputs, *saved)
    return (passed,) if isinstance(passed, Tensor) else passed
