"""The server's side of federated learning, without a framework.

A round is a step of a plan whose unit is the client: the cohort is drawn and charged, updates come back, each is
clipped to the bound, summed, noised once and divided by the *planned* cohort. What the server's optimizer does with the
noisy mean is post-processing.

References:
    McMahan, Ramage, Talwar, Zhang 2018, algorithm 1 (DP-FedAvg, fixed denominator); Reddi et al. 2021, algorithm 2
    (adaptive server optimizers); Kairouz et al. 2021, "Practical and private (deep) learning without sampling or
    shuffling" (DP-FTRL).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, PrivacyUnit
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.federated.updates import GivenUpdate, UpdateStack
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.sampling import Microbatch
from sordino.training import Plan
from sordino.training.charging import PlannedCharges
from sordino.training.distributed import require_single_process
from sordino.training.exclusions import Option
from sordino.training.generators import BatchGenerators
from sordino.training.optimizer_checks import register_private_parameters, unregister_private_parameters
from sordino.training.private_run import ChargedBatch, PrivateRun
from sordino.training.run_writer import TrainingState, open_run_writer, require_unused_key

# ----------------------------------------------------------------------------------------------------------------------
# Optimizers of the server: what is done with the noisy mean costs no privacy.
#
# Each is a function from the server's parameters to a torch optimizer; any other function of that kind will do.
#
# References:
#     McMahan et al. 2017 (FedAvg); Hsu, Qi, Brown 2019 (FedAvgM); Reddi et al. 2021, algorithm 2 (FedAdagrad, FedAdam,
#     FedYogi).
# ----------------------------------------------------------------------------------------------------------------------


_MOMENTUM = 0.9
_SECOND = 0.99


def fed_avg(parameters: list[nn.Parameter], *, learning_rate: float = 1.0) -> Optimizer:
    """The model moves by `learning_rate` times the mean update."""
    return torch.optim.SGD(parameters, lr=checks.positive(learning_rate=learning_rate))


def fed_avgm(parameters: list[nn.Parameter], *, learning_rate: float = 1.0) -> Optimizer:
    """FedAvg with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=checks.positive(learning_rate=learning_rate), momentum=_MOMENTUM)


def fed_adagrad(parameters: list[nn.Parameter], *, learning_rate: float = 0.1, adaptivity: float = 1e-3) -> Optimizer:
    """Adagrad on the mean update; `adaptivity` τ > 0 is added to the root of the second moment."""
    rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
    return torch.optim.Adagrad(parameters, lr=rate, eps=floor)


def fed_adam(parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3) -> Optimizer:
    """Adam with β = (0.9, 0.99) on the mean update; `adaptivity` τ > 0 is added to the root of the second moment."""
    rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
    return torch.optim.Adam(parameters, lr=rate, betas=(_MOMENTUM, _SECOND), eps=floor)


def fed_yogi(parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3) -> Optimizer:
    """Yogi on the mean update: a second moment that shrinks slowly."""
    return Yogi(parameters, learning_rate=learning_rate, adaptivity=adaptivity)


class Yogi(Optimizer):
    """m ← β₁m + (1 − β₁)g, v ← v − (1 − β₂)·sign(v − g²)·g², θ ← θ − η·m/(√v + τ), β = (0.9, 0.99).

    Args:
        parameters: what it steps.
        learning_rate: η > 0.
        adaptivity: τ > 0; v starts at τ².

    References:
        Reddi et al. 2021, algorithm 2 (FedYogi); Zaheer et al. 2018.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, learning_rate: float = 0.01, adaptivity: float = 1e-3
    ) -> None:
        rate, floor = checks.positive(learning_rate=learning_rate), checks.positive(adaptivity=adaptivity)
        super().__init__(parameters, {"lr": rate, "adaptivity": floor})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on the gradients that lie in ``.grad``; there is no loss to evaluate again.

        Raises:
            InvalidArgument: a closure is given.
        """
        if closure is not None:
            raise InvalidArgument("closure must be None: the server has no loss. Call step().")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["adaptivity"])

    def _move(self, parameter: Tensor, gradient: Tensor, rate: float, floor: float) -> None:
        state = self.state[parameter]
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.full_like(parameter, floor**2)
        square = gradient.square()
        state["first"].lerp_(gradient, 1 - _MOMENTUM)
        state["second"].sub_((1 - _SECOND) * (state["second"] - square).sign() * square)
        parameter.sub_(rate * state["first"] / (state["second"].sqrt() + floor))


SERVER_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "fedadagrad": fed_adagrad,
    "fedadam": fed_adam,
    "fedavg": fed_avg,
    "fedavgm": fed_avgm,
    "fedyogi": fed_yogi,
}
"""The server's optimizers by their names in the literature, with their default settings."""


# ----------------------------------------------------------------------------------------------------------------------
# The server's side of federated learning, without a framework.
# ----------------------------------------------------------------------------------------------------------------------


DROPOUT_CAVEAT = "which clients drop out is taken not to depend on their data"
TRUSTED_SERVER_CAVEAT = "the server sees each update: it is trusted"

# Updates that lie in memory together.
_CHUNK = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedRound:
    """Who is asked in one round.

    Args:
        number: from 0; never used twice in a run.
        clients: numbers of the clients to ask, int64, sorted, maybe none. Under Poisson sampling they are secret:
            only the clients themselves and the server may learn who or how many they are.
    """

    number: int
    clients: np.ndarray


class RoundsOfServer:
    """What every server keeps of its rounds: which is open, and that it runs in a ``with`` block.

    Attributes:
        done: number of rounds that were finished.
    """

    done: int
    _optimizer: Optimizer
    _generators: BatchGenerators
    _open: FederatedRound | None = None
    _within: ExitStack | None = None

    def _check_running(self) -> None:
        if self._within is None:
            raise NonPrivateStep("server must be used in a with block, got a call outside. Write `with server:`.")

    def _give_out(self, number: int, clients: np.ndarray) -> FederatedRound:
        """Open a round: until its end, clients trained in this process draw random numbers from secret states."""
        self._open = FederatedRound(number=number, clients=clients)
        self._generators.open(number)
        return self._open

    def _check_open(self, cohort: FederatedRound) -> None:
        self._check_running()
        if cohort is not self._open:
            raise NonPrivateStep("cohort must be the one that rounds() gave last, got another. Ask for the next round.")

    def _step(self, cohort: FederatedRound) -> None:
        """The optimizer's step on the gradients that lie in ``.grad``."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done = cohort.number + 1


class PrivateServer(RoundsOfServer):
    """Draws cohorts, turns their updates into one noisy mean, and keeps the charges. Use it in a ``with`` block.

    Guarantee: the model after every round, the transcript and the guarantee together are (ε, δ)-differentially private
    for one client, as `guarantee` states, if an update is a function of that client's data, of what was released, and
    of randomness of its own. The server sees the updates and is trusted. An update that is not finite or has other
    names or shapes than the model's parameters contributes exactly zero, and so does a client that does not answer;
    the divisor is the planned cohort either way.

    Args:
        model: holds the shared parameters (those that require gradients); it is changed in place, round by round.
        plan: `steps` are rounds, `sample_rate` and `expected_batch_size` speak of clients, `max_grad_norm` bounds one
            update; its unit must be ``client`` or ``user``. Clipping methods, adaptive bounds, schedules, secure noise
            and correlated noise (DP-FTRL) are the plan's.
        num_clients: public number of clients, or a public bound of it; they are numbered from 0.
        optimizer: makes the server's optimizer from its parameters; `fed_avg` by default. It steps on minus the mean.
        rng: fresh for every run; None draws a new key.
        ledger: the clients' account, charged ahead of the rounds.
        run_folder: a new folder for plan, transcript, model and guarantee, which `sordino report` and `verify` read; or
            one that is open.
        resume_from: the folder of a run that was cut off.
        checkpoint_every: rounds between checkpoints.

    Raises:
        InvalidArgument: the plan's unit is one record, or it clips by projections of a loss.

    Example:
        >>> import torch
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=2, expected_batch_size=50.0,
        ...             delta=1e-5, privacy_unit=PrivacyUnit.CLIENT)
        >>> with PrivateServer(torch.nn.Linear(3, 1), plan, num_clients=100) as server:
        ...     for cohort in server.rounds():
        ...         zero = {name: torch.zeros_like(value) for name, value in server.model.named_parameters()}
        ...         server.finish_round(cohort, ((int(client), zero) for client in cohort.clients))
        >>> server.guarantee().privacy_unit.value, server.done
        ('client', 2)
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
        resume_from: str | Path | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        if plan.privacy_unit is PrivacyUnit.RECORD:
            raise InvalidArgument(
                "privacy_unit must be client or user in federated learning, got 'record': a client's update holds all "
                "of its records. Pass privacy_unit='client'."
            )
        plan.check_options({Option.FEDERATED})
        require_single_process("server")
        self.model, self.plan = model, plan
        self._population = checks.integer(1, num_clients=num_clients)
        self._stack = UpdateStack(model)
        self._shared = self._stack.trainable()
        self._optimizer = optimizer(self._shared)
        self._randomness = require_unused_key(KeyedRNG() if rng is None else rng)
        self._generators = BatchGenerators(self._randomness)
        self._ledger = ledger
        self._parts = TrainingState(model=model, optimizer=self._optimizer, schedule=None, average=None)
        writer = open_run_writer(plan, run_folder=run_folder, resume_from=resume_from, every=checkpoint_every)
        if writer is not None:
            writer.start(self._parts, self._randomness)
        self._writer = writer
        first, repeats = (0, False) if writer is None else (writer.first_step, writer.repeats)
        self._charges = PlannedCharges(
            plan, first_step=first, repeats=repeats, run="" if writer is None else writer.folder.path.name
        )
        self._run = PrivateRun(
            plan,
            rng=self._randomness,
            charges=self._charges,
            record=None if writer is None else self._write,
            log=None if writer is None else writer.earlier.copy(),
            first_step=first,
            repeats=repeats,
        )
        self._run.attach(self._stack)
        if writer is not None and writer.run_state is not None:
            self._run.load_state_dict(writer.run_state)
        self.done = first

    # --- the run -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Reserve the whole plan on the ledger; no other code may step the shared parameters from here on."""
        with ExitStack() as stack:
            stack.push(self._after_failure)
            stack.enter_context(self._charges.reserve(self._ledger))
            register_private_parameters(self._shared, self._optimizer)
            stack.callback(unregister_private_parameters, self._shared)
            self._within = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what was not charged, and write the end of the run."""
        assert self._within is not None
        self._generators.close()
        self._run.abandon()
        try:
            self._within.__exit__(kind, error, trace)
        finally:
            self._within = None
            if self._writer is not None and error is None:
                self._writer.finish(self.model, self.guarantee(), complete=self.done == self.plan.steps)

    def _after_failure(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is not None and self._writer is not None:
            self._writer.abort()

    def rounds(self) -> Iterator[FederatedRound]:
        """The rounds that are left, each charged before it is given out.

        A round that is not finished before the next one is asked for is lost: it stays charged, its number is not used
        again, and the model stays as it is. Until its end, clients that are trained in this process draw torch's,
        NumPy's and Python's random numbers from secret states.

        Raises:
            BudgetExceeded: the next round does not fit the account; nothing was asked of any client.
            NonPrivateStep: outside a ``with`` block.
        """
        self._check_running()
        # Anyone who asks again goes on: a round that was charged is never charged or numbered again.
        batches = self._run.batches(dataset_size=self._population)
        while True:
            self._check_running()
            self._generators.close()
            batch = next(batches, None)
            if batch is None:
                break
            assert batch.indices is not None
            yield self._give_out(batch.step, batch.indices)
        self._open = None

    def _write(self, batch: ChargedBatch) -> None:
        assert self._writer is not None
        self._writer.charge(batch, epsilon=self._run.epsilon())

    def finish_round(self, cohort: FederatedRound, updates: Iterable[tuple[int, GivenUpdate]]) -> None:
        """Clip, sum, noise and divide the updates of `cohort`, and step the server's optimizer.

        Args:
            cohort: what `rounds` gave last.
            updates: (client's number, update), in any order, each client of the cohort at most once; read a few at a
                time. Clients that don't answer are left out, or answer None. An update is a mapping of names, or a
                list in the order of `shared`; tensors, NumPy arrays and lists of numbers count alike.

        Raises:
            NonPrivateStep: the round is not the open one.
            InvalidArgument: a client was not asked, or answers twice; an update is of a type that holds no numbers,
                so that the transport's form must be converted first. The round is lost, the model stays as it is.
        """
        self._check_open(cohort)
        self._open = None
        waiting = set(map(int, cohort.clients))
        answers, chunk = iter(updates), 0
        try:
            while True:
                some = list(islice(answers, _CHUNK))
                last = len(some) < _CHUNK
                for client, _ in some:
                    if client not in waiting:
                        raise InvalidArgument(
                            "updates must come from clients of the round, each at most once, got another. Match "
                            "answers to the clients that were asked."
                        )
                    waiting.discard(client)
                rows = self._stack.add_update([update for _, update in some])
                part = Microbatch(step=cohort.number, index=chunk, is_last=last, indices=np.arange(rows))
                self._run.step.begin(part)
                self._run.step.add(part)
                chunk += 1
                if last:
                    break
            self._run.release(self._shared)
        except BaseException:
            self._run.abandon()
            raise
        finally:
            self._generators.close()
        for parameter in self._shared:
            # A server moves along the mean update; an optimizer moves against a gradient.
            parameter.grad = None if parameter.grad is None else parameter.grad.neg_()
        self._step(cohort)
        if self._writer is not None:
            self._writer.after_step(self._parts, self._run, self.done)

    # --- what holds ----------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, nn.Parameter]:
        """The shared parameters by name, as they are now."""
        return {self._stack.names[parameter]: parameter for parameter in self._shared}

    @property
    def bounds(self) -> tuple[float, ...]:
        """The bounds of the round under way or of the last one; adaptive ones were released."""
        return getattr(self._run.step.bounds, "values", ())

    def guarantee(self) -> Guarantee:
        """What the rounds charged so far guarantee for one client."""
        seeded = self._randomness.reproducible if self._writer is None else self._writer.seeded
        caveats = (*((FIXED_SEED_CAVEAT,) if seeded else ()), TRUSTED_SERVER_CAVEAT, DROPOUT_CAVEAT)
        planned = self._run.guarantee(caveats=caveats)
        return planned if self._writer is None else self._writer.guarantee(planned)
