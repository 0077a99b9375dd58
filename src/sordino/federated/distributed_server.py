"""A server that never sees an update (floor 4, federated): rounds of sums from secure aggregation."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from torch import nn
from torch.optim import Optimizer

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnprivateStep
from sordino.events import Event, SelfComposed
from sordino.federated.distributed import DistributedGaussian, Integers
from sordino.federated.optimizers import fed_avg
from sordino.federated.server import Round
from sordino.federated.updates import shared_parameters
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.training.bills.prepaid import Prepaid
from sordino.training.generators import BatchGenerators
from sordino.training.processes.ranks import refuse_several

__all__ = ["DistributedServer"]

_RELATION = NeighboringRelation.REPLACE_SPECIAL


class DistributedServer:
    """Asks cohorts, decodes the sums of their messages, steps the model, and keeps the bill, in a ``with`` block.

    Guarantee: all rounds together are (ε, δ)-differentially private for one client, as `guarantee` states, against the
    server and all other clients, if in every round at least ``mechanism.honest`` clients added their noise and the
    aggregation showed only sums. Every round is charged to every client: nothing is gained from who is asked.

    Args:
        model: holds the shared parameters; changed in place.
        mechanism: what clients and server agreed on.
        rounds: ≥ 1.
        delta: δ in (0, 1).
        population: public number of clients, at least ``mechanism.clients``.
        optimizer: the server's; `fed_avg` by default.
        randomness: draws the cohorts.
        ledger: the clients' account; its relation must be zero out.

    Example:
        >>> from sordino.federated import SimulatedSecureSum
        >>> model = nn.Linear(3, 1, bias=False)
        >>> mechanism = DistributedGaussian(shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0,
        ...     clients=5, honest=4)
        >>> with DistributedServer(model, mechanism, rounds=1, delta=1e-5, population=20) as server:
        ...     for cohort in server.rounds():
        ...         asked, update = cohort.clients.tolist(), {"weight": model.weight.detach() * 0}
        ...         masks = SimulatedSecureSum(clients=asked, size=mechanism.size, bits=mechanism.bits, least=4)
        ...         sent = {client: masks.mask(client, mechanism.encode(
        ...             update, round_number=cohort.number, randomness=Randomness())) for client in asked}
        ...         server.finish_round(cohort, masks.open(sent))
        >>> round(server.guarantee().epsilon, 2)
        4.73
    """

    def __init__(
        self,
        model: nn.Module,
        mechanism: DistributedGaussian,
        *,
        rounds: int,
        delta: float,
        population: int,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] = fed_avg,
        randomness: Randomness | None = None,
        ledger: Account | Reservation | None = None,
    ) -> None:
        refuse_several("server")
        self._shared = shared_parameters(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._shared.items()}
        if {name: tuple(shape) for name, shape in mechanism.shapes.items()} != shapes:
            raise InvalidArgument(
                "mechanism must have the shapes of the model's shared parameters. Build it from them."
            )
        self.model, self.mechanism = model, mechanism
        self._planned = checks.integer(1, rounds=rounds)
        self._delta = checks.probability(zero=False, one=False, delta=delta)
        self._population = checks.integer(mechanism.clients, population=population)
        self._optimizer = optimizer(list(self._shared.values()))
        self._randomness = Randomness() if randomness is None else randomness
        self._generators = BatchGenerators(self._randomness)
        self._ledger = ledger
        self._within: ExitStack | None = None
        self._open: Round | None = None
        self._charged = self.done = 0

    def __enter__(self) -> Self:
        """Reserve all rounds on the ledger."""
        with ExitStack() as stack:
            purse = self._ledger
            if purse is not None:
                purse = stack.enter_context(
                    purse.reserve(
                        self._events(self._planned), note="federated", relation=_RELATION, unit=PrivacyUnit.CLIENT
                    )
                )
            self._paid = Prepaid(
                purse,
                lambda _step: self.mechanism.event(),
                note="federated",
                relation=_RELATION,
                unit=PrivacyUnit.CLIENT,
            )
            self._within = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what was not drawn."""
        assert self._within is not None
        within, self._within = self._within, None
        self._generators.close()
        within.__exit__(kind, error, trace)

    def _events(self, rounds: int) -> Event:
        return SelfComposed(event=self.mechanism.event(), count=rounds)

    def rounds(self) -> Iterator[Round]:
        """The rounds, each charged before its clients are asked; who is asked is no secret.

        Until a round's end, clients that are trained in this process draw torch's, NumPy's and Python's random numbers
        from secret states.
        """
        for number in range(self._charged, self._planned):
            self._check_running()
            self._generators.close()
            self._paid.pay(number, coming=self._planned - number)
            self._charged = number + 1
            self._open = Round(number=number, clients=self._cohort(number))
            self._generators.open(number)
            yield self._open
        self._generators.close()
        self._open = None

    def _cohort(self, number: int) -> np.ndarray:
        """``mechanism.clients`` different clients, each set of them equally likely.

        The first different ones of independent draws where the cohort is a small part of the population, in time and
        memory of the cohort; otherwise those with the least random keys.
        """
        stream, wanted = self._randomness.stream("cohort", step=number), self.mechanism.clients
        if 4 * wanted > self._population:
            keys = stream.integers64(self._population)
            return np.sort(np.argsort(keys, kind="stable")[:wanted]).astype(np.int64)
        drawn = np.empty(0, dtype=np.int64)
        while len(drawn) < wanted:
            more = (stream.uniform(2 * wanted) * self._population).astype(np.int64)
            drawn = np.concatenate([drawn, more])
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return np.sort(drawn[:wanted])

    def finish_round(self, cohort: Round, total: Integers) -> None:
        """Decode the sum of the cohort's messages and step the optimizer on minus the mean.

        Args:
            cohort: what `rounds` gave last.
            total: what the secure aggregation opened.

        Raises:
            UnprivateStep: the round is not the open one.
            InvalidArgument: `total` is no sum of messages.
        """
        self._check_running()
        if cohort is not self._open:
            raise UnprivateStep("cohort must be the one that rounds() gave last, got another. Ask for the next round.")
        mean = self.mechanism.decode(total, round_number=cohort.number)
        self._open = None
        self._generators.close()
        for name, parameter in self._shared.items():
            parameter.grad = -mean[name].to(parameter.device, parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done = cohort.number + 1

    def _check_running(self) -> None:
        if self._within is None:
            raise UnprivateStep("server must be used in a with block, got a call outside. Write `with server:`.")

    def guarantee(self) -> Guarantee:
        """What the rounds charged so far guarantee for one client."""
        spent = accounting.epsilon(self._events(self._charged), self._delta, relation=_RELATION)
        seeded = (FIXED_SEED,) if self._randomness.reproducible else ()
        return Guarantee(
            epsilon=spent.upper,
            delta=self._delta,
            accountant=spent.accountant,
            sampler="none",
            relation=_RELATION,
            unit=PrivacyUnit.CLIENT,
            caveats=(
                *seeded,
                f"at least {self.mechanism.honest} clients of every round add their noise and keep it secret",
                "the server sees sums only: the aggregation is taken to be secure",
            ),
        )
