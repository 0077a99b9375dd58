"""Local training of several simulated clients at once (floor 4, federated): one product in place of many small ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sordino.federated.updates import shared_parameters

__all__ = ["trained_side_by_side"]

Loss = Callable[..., Tensor]


class _LossOf(nn.Module):
    """The mean loss of a batch as a function of all parameters and buffers, by name."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, *batch).mean()


def trained_side_by_side(
    model: nn.Module,
    loss: Loss,
    clients: Sequence[Sequence[Tensor]],
    turns: Sequence[Tensor],
    *,
    learning_rate: float,
    proximal: float = 0.0,
) -> Iterator[dict[str, Tensor]]:
    """How far SGD moves the shared parameters on each client's records; every client starts from `model`.

    The same steps as one client after the other, up to rounding. `model` stays as it is.

    Args:
        model: holds the server's parameters; must be fit for `torch.func.vmap`.
        loss: ``loss(model, *records)``, one value per record or their mean.
        clients: the records of each; all have the same number.
        turns: for each step the places of each client's batch, (clients, batch).
        learning_rate: > 0.
        proximal: μ ≥ 0 of FedProx.

    Yields:
        One update a client, in their order.
    """
    whole = _LossOf(model, loss)
    start = {f"model.{name}": parameter.detach() for name, parameter in shared_parameters(model).items()}
    fixed = {name: value.detach() for name, value in whole.named_parameters() if name not in start}
    now = {name: _repeated(value, len(clients)) for name, value in start.items()}
    buffers = {name: _repeated(value, len(clients)) for name, value in whole.named_buffers()}
    records = [torch.stack(list(tensors)) for tensors in zip(*clients, strict=True)]
    rows = torch.arange(len(clients))[:, None]

    def objective(own: Mapping[str, Tensor], kept: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        value = functional_call(whole, {**fixed, **kept, **own}, batch)
        if proximal:
            value = value + proximal / 2 * sum((own[name] - start[name]).square().sum() for name in start)
        return value

    slopes = vmap(grad(objective), randomness="different")
    for places in turns:
        steps = slopes(now, buffers, *[tensor[rows, places] for tensor in records])
        for name, value in now.items():
            value.sub_(steps[name], alpha=learning_rate)
    for client in range(len(clients)):
        yield {
            name.removeprefix("model."): (value[client] - start[name]).to(value.dtype) for name, value in now.items()
        }


def _repeated(value: Tensor, count: int) -> Tensor:
    return value.detach().expand(count, *value.shape).clone()
