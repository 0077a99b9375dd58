"""Federated learning simulated in one process: local training, cohort by cohort.

References:
    McMahan et al. 2017, algorithm 1 (ClientUpdate); Li et al. 2020 (the proximal term of FedProx).
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import Optimizer

from sordino import checks
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.federated.server import PrivateServer, fed_avg
from sordino.federated.updates import model_update, shared_parameters
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG, RandomStream
from sordino.runs import RunFolder
from sordino.training import Plan

Loss = Callable[..., Tensor]


class _LossOf(nn.Module):
    """The mean loss of a batch as a function of all parameters and buffers, by name."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, *batch).mean()


def _repeated(value: Tensor, count: int) -> Tensor:
    return value.detach().expand(count, *value.shape).clone()


# ----------------------------------------------------------------------------------------------------------------------
# Federated learning simulated in one process: local training, cohort by cohort.
# ----------------------------------------------------------------------------------------------------------------------


Records = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What a client does with the model that it gets: plain SGD on its own records. No privacy of its own.

    Args:
        learning_rate: > 0.
        epochs: passes over the client's records, ≥ 1.
        batch_size: records a step, ≥ 1; None takes all at once.
        proximal: μ ≥ 0 of FedProx: adds μ/2 · ‖θ − θ_server‖² to the loss.
    """

    learning_rate: float = 0.1
    epochs: int = 1
    batch_size: int | None = None
    proximal: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate)
        checks.integer(1, epochs=self.epochs)
        checks.non_negative(proximal=self.proximal)
        if self.batch_size is not None:
            checks.integer(1, batch_size=self.batch_size)

    def update(self, model: nn.Module, loss: Loss, records: Records, *, order: RandomStream) -> dict[str, Tensor]:
        """Train `model` in place on `records`, and return how far its shared parameters moved.

        Args:
            model: the client's own copy, holding the server's parameters.
            loss: ``loss(model, *records)``, one value per record or their mean.
            records: equally long tensors.
            order: shuffles the records of an epoch.
        """
        shared = shared_parameters(model)
        start = {name: parameter.detach().clone() for name, parameter in shared.items()}
        optimizer = torch.optim.SGD(shared.values(), lr=self.learning_rate)
        for positions in self._turns(len(records[0]), order):
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, *(tensor[positions] for tensor in records)).mean()
            if self.proximal:
                value = value + self.proximal / 2 * sum((shared[name] - start[name]).square().sum() for name in shared)
            value.backward()
            optimizer.step()
        return model_update(model, start)

    def updates(
        self, model: nn.Module, loss: Loss, clients: Sequence[Records], *, orders: Sequence[RandomStream]
    ) -> Iterator[dict[str, Tensor]]:
        """The updates of clients with equally many records, trained side by side; `model` stays as it is.

        The same as `update` for each, up to rounding: faster where a model is small, since many small products become
        one.

        Args:
            model: holds the server's parameters; must be fit for `torch.func.vmap`.
            loss: as for `update`.
            clients: the records of each.
            orders: shuffles the records of each.
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
            if self.proximal:
                value = value + self.proximal / 2 * sum((own[name] - start[name]).square().sum() for name in start)
            return value

        slopes = vmap(grad(objective), randomness="different")
        for positions in zip(*(self._turns(len(clients[0][0]), order) for order in orders), strict=True):
            steps = slopes(now, buffers, *[tensor[rows, torch.stack(positions)] for tensor in records])
            for name, value in now.items():
                value.sub_(steps[name], alpha=self.learning_rate)
        for client in range(len(clients)):
            yield {
                name.removeprefix("model."): (value[client] - start[name]).to(value.dtype)
                for name, value in now.items()
            }

    def _turns(self, count: int, order: RandomStream) -> Iterator[Tensor]:
        size = count if self.batch_size is None else self.batch_size
        for _ in range(self.epochs if count else 0):
            turn = torch.from_numpy(np.argsort(order.integers64(count), kind="stable"))
            for begin in range(0, count, size):
                yield turn[begin : begin + size]


@dataclass(frozen=True, kw_only=True)
class FederatedResult:
    """The result of a simulated run.

    Args:
        model: the server's, trained in place.
        plan: what was run; its steps are rounds.
        guarantee: what holds for one client.
        rounds: rounds that were finished.
        seconds: wall-clock time.
    """

    model: nn.Module
    plan: Plan
    guarantee: Guarantee
    rounds: int
    seconds: float


def split_clients(
    records: Records, client_ids: Sequence[int] | Tensor | np.ndarray, *, num_clients: int
) -> list[list[Tensor]]:
    """Each client's own records: those whose entry in `client_ids` is its number; some clients may have none.

    Args:
        records: equally long tensors.
        client_ids: the client of each record, 0 … num_clients − 1; records of other numbers are left out.
        num_clients: number of clients, public.
    """
    numbers = np.asarray(client_ids)
    num_clients = checks.integer(1, num_clients=num_clients)
    if numbers.ndim != 1 or len(numbers) != len(records[0]):
        raise InvalidArgument("client_ids must be one integer per record, got another shape. Number clients from 0.")
    sorted_by = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[sorted_by], np.arange(num_clients + 1))
    positions = [torch.from_numpy(sorted_by[edges[client] : edges[client + 1]]) for client in range(num_clients)]
    return [[tensor[own] for tensor in records] for own in positions]


def _alike(clients: Sequence[Records], asked: np.ndarray, most: int) -> Iterator[list[int]]:
    """The clients that were asked, at most `most` at a time, all with equally many records."""
    by_size = sorted(map(int, asked), key=lambda client: len(clients[client][0])) if most > 1 else map(int, asked)
    for _, alike in groupby(by_size, key=lambda client: len(clients[client][0])):
        waiting = list(alike)
        yield from (waiting[begin : begin + most] for begin in range(0, len(waiting), most))


def simulate(
    model: nn.Module,
    loss: Loss,
    clients: Sequence[Records],
    plan: Plan,
    *,
    local: LocalTraining | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = fed_avg,
    rng: KeyedRNG | None = None,
    ledger: Account | Reservation | None = None,
    run_folder: RunFolder | str | Path | None = None,
    resume_from: str | Path | None = None,
    checkpoint_every: int | None = None,
    on_round: Callable[[int], None] | None = None,
    clients_per_batch: int = 1,
) -> FederatedResult:
    """Train `model` over simulated clients with client-level privacy.

    Guarantee: that of `PrivateServer`. Every client trains a copy that starts from the server's parameters and from the
    buffers that `model` had at the beginning; buffers never come back.

    Args:
        model: trained in place.
        loss: ``loss(model, *records)``, one value per record or their mean.
        clients: the records of each client; `split_clients` makes them.
        plan: its unit is the client; see `PrivateServer`.
        local: what clients do; one epoch of SGD by default.
        optimizer: the server's.
        rng: fresh for every run.
        ledger: the clients' account.
        run_folder: a new folder for the run, or a `RunFolder` that is open.
        resume_from: the folder of a run that was cut off.
        checkpoint_every: rounds between checkpoints.
        on_round: called after every finished round with the number of rounds done, for evaluation on public records.
        clients_per_batch: clients that are trained side by side, ≥ 1: several times faster for small models, with as
            many copies of the parameters in memory. Changes rounding alone; model and loss must be fit for
            `torch.func.vmap`.

    Example:
        >>> from sordino.definitions import PrivacyUnit
        >>> clients = [[torch.ones(3, 2), torch.ones(3, 1)] for _ in range(20)]
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=0.1, sample_rate=0.5, steps=3, expected_batch_size=10.0,
        ...             delta=1e-5, privacy_unit=PrivacyUnit.CLIENT)
        >>> def loss(model, x, y):
        ...     return (model(x) - y).square()
        >>> simulate(nn.Linear(2, 1), loss, clients, plan).rounds
        3
    """
    started = time.monotonic()
    checks.integer(1, clients_per_batch=clients_per_batch)
    local = LocalTraining() if local is None else local
    rng = KeyedRNG() if rng is None else rng
    worker = copy.deepcopy(model)
    fresh = {name: buffer.clone() for name, buffer in worker.named_buffers()}
    server = PrivateServer(
        model,
        plan,
        num_clients=len(clients),
        optimizer=optimizer,
        rng=rng,
        ledger=ledger,
        run_folder=run_folder,
        resume_from=resume_from,
        checkpoint_every=checkpoint_every,
    )

    def answers(number: int, asked: np.ndarray) -> Iterator[tuple[int, dict[str, Tensor]]]:
        worker.load_state_dict({**model.state_dict(), **fresh})
        for group in _alike(clients, asked, clients_per_batch):
            orders = [rng.stream("local order", step=number, tensor=client) for client in group]
            if clients_per_batch > 1:
                found = local.updates(worker, loss, [clients[client] for client in group], orders=orders)
                yield from zip(group, found, strict=True)
                continue
            worker.load_state_dict({**model.state_dict(), **fresh})
            yield group[0], local.update(worker, loss, clients[group[0]], order=orders[0])

    with server:
        for cohort in server.rounds():
            server.finish_round(cohort, answers(cohort.number, cohort.clients))
            if on_round is not None:
                on_round(server.done)
    return FederatedResult(
        model=model,
        plan=plan,
        guarantee=server.guarantee(),
        rounds=server.done,
        seconds=time.monotonic() - started,
    )
