# pyright: reportMissingImports=false
"""Flower on `PrivateServer` (needs the extra `federated`): a strategy, client mods, an accountant.

Transport, nodes, simulation and command line are Flower's. The strategy draws the cohort itself, never weighs by what a
client reports, reads nothing of a reply but the shared parameters, and hands the noisy mean to the server's optimizer.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import accounting, checks
from sordino.definitions import Guarantee
from sordino.definitions import NeighboringRelation as Relation
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import (
    Event,
    Gaussian,
    PoissonSampled,
    SampledWithoutReplacement,
    SelfComposed,
    compose,
    from_dict,
    to_dict,
)
from sordino.federated.server import FederatedRound, PrivateServer, fed_avg
from sordino.federated.updates import LocalPrivacy, Update, clipped_update
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.training import Plan
from sordino.training.generators import PrivateGenerators

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import (
        GaussianPrivacyEvent,
        Grid,
        NeighboringRelation,
        PrivacyConfig,
        PrivacySpent,
        SamplingMethod,
    )
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise SordinoError(
        f"sordino.federated.flower must find Flower, got {type(error).__name__}. Install sordino[federated]."
    ) from None

__all__ = ["CertifiedAccountant", "PrivateStrategy", "clipping_mod", "local_privacy_mod"]

ClientCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientCallable], Message]

_SENT = "sordino.sent"
_SCHEMA = 1


class PrivateStrategy(Strategy):
    """Federated learning with client-level differential privacy on a trusted server.

    Guarantee: that of `PrivateServer`. Nodes get client numbers 0, 1, … in the order in which they are first seen; a
    client whose node is not connected counts as one that did not answer. Replies with errors, from nodes that were not
    asked, or after the first of a node are left out; metrics that clients report are never read, aggregated or logged.

    Args:
        model: on the server; all of its state goes out, only its shared parameters come back.
        plan: rounds, cohort, bound and noise; its unit is the client.
        num_clients: public number of clients. More connected nodes than that are refused.
        optimizer: the server's.
        rng: fresh for every run.
        ledger: the clients' account.
        run_folder: a new folder for the run.
        arrays_key: where client and server find the parameters in a message.
        config_key: where they find the configuration.

    Example (in a ``ServerApp``):
        ``strategy = PrivateStrategy(model, plan, num_clients=1000); strategy.start(grid)``

    References:
        McMahan, Ramage, Talwar, Zhang 2018, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        num_clients: int,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] = fed_avg,
        rng: KeyedRNG | None = None,
        ledger: Account | Reservation | None = None,
        run_folder: RunFolder | str | Path | None = None,
        arrays_key: str = "arrays",
        config_key: str = "config",
    ) -> None:
        self.server = PrivateServer(
            model, plan, num_clients=num_clients, optimizer=optimizer, rng=rng, ledger=ledger, run_folder=run_folder
        )
        self._population = checks.integer(1, num_clients=num_clients)
        self._keys = arrays_key, config_key
        self._clients: dict[int, int] = {}
        self._rounds: Iterator[FederatedRound] | None = None
        self._cohort: FederatedRound | None = None
        self._given: dict[str, Tensor] = {}

    def summary(self) -> None:
        """Nothing: Flower's log is no place for a guarantee; ask `guarantee` afterwards."""

    def start(  # noqa: D417 (the other arguments are Flower's)
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds of the plan, charged to the ledger one by one.

        Args:
            initial_arrays: parameters to begin with, public; the model's own when None.
            num_rounds: at most the plan's rounds; all of them when None.
            evaluate_fn: evaluates the model on public records on the server; clients never evaluate, since what
                they would report is not covered by any noise.

        Raises:
            InvalidArgument: more rounds than were planned.
        """
        planned = self.server.plan.steps
        wanted = planned if num_rounds is None else checks.integer(1, num_rounds=num_rounds)
        if wanted > planned:
            raise InvalidArgument(f"num_rounds must be at most the plan's {planned}, got {wanted}. Plan more steps.")
        if initial_arrays is not None:
            self.server.model.load_state_dict(initial_arrays.to_torch_state_dict())
        with self.server:
            return super().start(
                grid, self._arrays(), wanted, timeout, train_config, evaluate_config, evaluate_fn=evaluate_fn
            )

    def guarantee(self) -> Guarantee:
        """What the rounds so far guarantee for one client."""
        return self.server.guarantee()

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord(torch_state_dict=dict(self.server.model.state_dict()))

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 (the server's own model is what goes out)
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Draw and charge the round's cohort; one message for each of its clients that is connected."""
        if self._rounds is None:
            self._rounds = self.server.rounds()
        nodes = self._numbered(grid)
        self._cohort = next(self._rounds)
        self._given = {name: value.detach().clone() for name, value in self.server.shared().items()}
        config["server-round"] = server_round
        content = RecordDict({self._keys[0]: self._arrays(), self._keys[1]: config})
        asked = [nodes[client] for client in map(int, self._cohort.clients) if client in nodes]
        return [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node) for node in asked]

    def _numbered(self, grid: Grid) -> dict[int, int]:
        """Client number ↦ node, of the connected nodes."""
        connected = set(grid.get_node_ids())
        for node in sorted(connected - self._clients.keys()):
            self._clients[node] = len(self._clients)
        if len(self._clients) > self._population:
            raise InvalidArgument(
                f"num_clients must count every node that ever connects, got {self._population} and more nodes. "
                "Declare the public number of clients."
            )
        return {number: node for node, number in self._clients.items() if node in connected}

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002 (rounds are numbered by the server)
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, sum, noise and divide what came back; the server's model after its optimizer's step."""
        if self._cohort is None:
            raise InvalidArgument("replies must belong to a round, got none open. Call configure_train first.")
        cohort, self._cohort = self._cohort, None
        self.server.finish_round(cohort, self._updates(cohort, replies))
        return self._arrays(), None

    def _updates(self, cohort: FederatedRound, replies: Iterable[Message]) -> Iterator[tuple[int, Update]]:
        waiting = set(map(int, cohort.clients))
        for reply in replies:
            client = self._clients.get(reply.metadata.src_node_id)
            if client in waiting and not reply.has_error():
                waiting.discard(client)
                yield client, self._update(reply)

    def _update(self, reply: Message) -> Update:
        """Parameters of the reply minus those that were given; of another form if the reply is."""
        try:
            record = cast("ArrayRecord", reply.content[self._keys[0]])
            returned = record.to_torch_state_dict()
            return {name: returned[name].to(value) - value for name, value in self._given.items()}
        except Exception:  # (whatever is wrong with the reply of one client must not end the round)
            return {}

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,  # noqa: ARG002
        config: ConfigRecord,  # noqa: ARG002
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """No client is asked: what clients measure on their records is theirs."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:  # noqa: ARG002
        """Nothing."""
        return None


def clipping_mod(*, max_update_norm: float, arrays_key: str = "arrays") -> Mod:
    """A client mod that clips the difference between what a client returns and what it got.

    When: with `PrivateStrategy` and a fixed bound, so that no client sends a larger update; the server clips again.

    Args:
        max_update_norm: bound > 0.
        arrays_key: where the parameters are.
    """
    bound = checks.positive(max_update_norm=max_update_norm)
    return _changing(arrays_key, lambda update, _context: clipped_update(update, max_update_norm=bound))


def local_privacy_mod(
    *, epsilon: float, delta: float, max_update_norm: float, rounds: int, arrays_key: str = "arrays"
) -> Mod:
    """A client mod that clips and noises on the client: local privacy, against the server too.

    Guarantee: that of `LocalPrivacy` for all `rounds` updates of a client together, within one run of the server and
    for training messages; how many it sent is kept in the client's Flower state, which belongs to the run. An update
    beyond that is not sent: the reply is what the server already knows. What a failed client says is withheld.

    Args:
        epsilon: ε > 0 over all rounds.
        delta: δ in (0, 1).
        max_update_norm: bound > 0 of one update.
        rounds: the most updates that a client will send, ≥ 1.
        arrays_key: where the parameters are.
    """
    LocalPrivacy(epsilon=epsilon, delta=delta, max_update_norm=max_update_norm, rounds=rounds)

    def change(update: Update, context: Context) -> Update:
        state = context.state.config_records.get(_SENT)
        sent = int(cast("int", state["count"])) if state is not None else 0
        if sent >= rounds:
            return {name: torch.zeros_like(value) for name, value in update.items()}
        context.state[_SENT] = ConfigRecord({"count": sent + 1})
        local = LocalPrivacy(epsilon=epsilon, delta=delta, max_update_norm=max_update_norm, rounds=rounds)
        return local.privatize(update)

    return _changing(arrays_key, change)


def _changing(arrays_key: str, change: Callable[[Update, Context], Update]) -> Mod:
    """A mod that applies `change` to the floating-point difference of every training reply, and drops its metrics."""

    def mod(message: Message, context: Context, call_next: ClientCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        given = cast("ArrayRecord", message.content[arrays_key]).to_torch_state_dict()
        # Clients that share a process would otherwise share the order of its random numbers.
        generators = PrivateGenerators(KeyedRNG().stream("client", step=0))
        try:
            reply = call_next(message, context)
        finally:
            generators.close()
        if reply.has_error():
            # A reason may quote a record.
            return Message(Error(code=reply.error.code, reason="the client failed"), reply_to=message)
        returned = cast("ArrayRecord", reply.content[arrays_key]).to_torch_state_dict()
        update = {
            name: returned[name].to(value) - value
            for name, value in given.items()
            if value.is_floating_point() and name in returned
        }
        changed = change(update, context)
        # What is no floating-point parameter goes back as it came: counters and the like are not covered by noise.
        sent = {name: value + changed[name] if name in changed else value for name, value in given.items()}
        reply.content = RecordDict({arrays_key: ArrayRecord(torch_state_dict=sent)})
        return reply

    return mod


class CertifiedAccountant:
    """Flower's `PrivacyAccountant` protocol, filled by sordino: ε is the upper end of a certified interval.

    When: with Flower's own strategies that take an accountant. `PrivateStrategy` needs none.

    For sampling without replacement under replace-one, Flower's noise multiplier is taken to be over the clipping norm:
    one client moves the sum by twice that.

    Args:
        config: Flower's; its δ, relation, sampling method and budget.
    """

    schema_version: ClassVar[int] = _SCHEMA

    def __init__(self, config: PrivacyConfig) -> None:
        self.config = config
        self._events: list[Event] = []
        self.num_releases = 0

    @property
    def _relation(self) -> Relation:
        replaces = self.config.neighboring_relation is NeighboringRelation.REPLACE_ONE
        return Relation.REPLACE_ONE if replaces else Relation.ADD_OR_REMOVE_ONE

    def _event(self, event: GaussianPrivacyEvent, count: int) -> Event:
        if event.population_size != self.config.population_size:
            raise InvalidArgument(
                f"population_size must be {self.config.population_size}, got {event.population_size}. Use one of them."
            )
        if self.config.sampling_method is SamplingMethod.POISSON:
            rate = event.sample_size / event.population_size
            step: Event = PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=event.noise_multiplier))
        elif self.config.sampling_method is SamplingMethod.WITHOUT_REPLACEMENT:
            half = Gaussian(noise_multiplier=event.noise_multiplier / 2)
            step = SampledWithoutReplacement(
                dataset_size=event.population_size, sample_size=event.sample_size, event=half
            )
        else:
            step = Gaussian(noise_multiplier=event.noise_multiplier)
        return SelfComposed(event=step, count=checks.integer(1, count=count))

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Charge `count` releases."""
        self._events.append(self._event(event, count))
        self.num_releases += count

    def get_epsilon(self, delta: float) -> float:
        """ε at `delta` of everything charged, never below the truth."""
        return accounting.epsilon(compose(self._events), delta, neighboring_relation=self._relation).upper

    def get_delta(self, epsilon: float) -> float:
        """δ at `epsilon` of everything charged, never below the truth."""
        return accounting.delta(compose(self._events), epsilon, neighboring_relation=self._relation).upper

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """All that was charged, as Flower tells it."""
        given = self.config.target_delta if delta is None else delta
        found = accounting.epsilon(compose(self._events), given, neighboring_relation=self._relation)
        return PrivacySpent(
            epsilon=found.upper, delta=given, num_releases=self.num_releases, accounting_method=found.accountant
        )

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Whether `count` more releases would take ε above the budget."""
        limit = self.config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise InvalidArgument("max_epsilon must be given here or in the configuration, got neither. Give one.")
        whole = compose([*self._events, self._event(event, count)])
        return accounting.epsilon(whole, self.config.target_delta, neighboring_relation=self._relation).upper > limit

    def state_dict(self) -> dict[str, object]:
        """What was charged, as plain JSON types."""
        events = json.dumps([to_dict(event) for event in self._events])
        return {"schema_version": _SCHEMA, "events": events, "num_releases": self.num_releases}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from `state_dict`, in the place of what was charged here."""
        if state.get("schema_version") != _SCHEMA:
            raise InvalidArgument("state must be what state_dict returned, got something else. Check the checkpoint.")
        self._events = [from_dict(event) for event in json.loads(str(state["events"]))]
        self.num_releases = checks.integer(0, num_releases=state["num_releases"])
