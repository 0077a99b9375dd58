"""The familiar engine (floor 3): keep your PyTorch loop, change the import line.

Module and optimizer come back as the very objects that went in, with hooks; only the loader is new.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino import accounting, checks
from sordino.clipping import Clipping, clipping_called
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.schedules import Schedule
from sordino.training.charges import Charges
from sordino.training.criterion import Criterion
from sordino.training.engine_checkpoint import load_checkpoint, save_checkpoint
from sordino.training.loader import PrivateLoader, population_of
from sordino.training.meter import Meter
from sordino.training.options import accountant_called, check_options
from sordino.training.plan import Plan
from sordino.training.provenance import mark_public
from sordino.training.proving import set_probe
from sordino.training.session import Session
from sordino.training.sizes import steps_per_epoch, substitutes

__all__ = ["PrivacyEngine"]

# The plan wants a δ; an engine is asked for ε at any δ afterwards and reads only the plan's events.
_ANY_DELTA = 1e-5

T = TypeVar("T")


class PrivacyEngine:
    """Makes a module, an optimizer and a data loader train with differential privacy (DP-SGD).

    When: you have a PyTorch loop and want to keep it. If you start afresh, `sordino.fit` is shorter.

    Guarantee: every step of the returned optimizer is the plan's event on the data set, for the neighbouring relation
    and unit that `guarantee` names, and is charged before its records are read. A step that is not private raises and
    changes nothing.

    Args:
        accountant: "auto" or "prv" (tight numerical accounting), or "rdp".
        reproducible: with `seed`, noise and sampling repeat from run to run; the guarantee is then marked not for
            release.
        seed: only with `reproducible=True`.
        ledger: the data set's account, charged in blocks ahead of the batches; a batch that does not fit is not drawn.
        secure_mode: True makes sums and noise whole numbers, against attacks on the low bits of floats. Noise and
            sampling come from a cryptographic generator either way. It costs a gradient of the model per record.

    Raises:
        InvalidArgument: an option that would promise something this engine doesn't do.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model, data = torch.nn.Linear(3, 2), TensorDataset(torch.ones(64, 3), torch.zeros(64).long())
        >>> optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, max_grad_norm=1.0,
        ...     data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0)
        >>> len(loader), engine.get_epsilon(1e-5)
        (4, 0.0)

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        *,
        accountant: str = "auto",
        reproducible: bool = False,
        seed: int | None = None,
        ledger: Account | Reservation | None = None,
        secure_mode: bool = False,
    ) -> None:
        self._accountant = accountant_called(accountant)
        self._secure = bool(checks.one_of((True, False), secure_mode=secure_mode))
        Randomness(seed=seed, reproducible=reproducible)
        self._seed, self._reproducible, self._ledger = seed, reproducible, ledger
        self._sessions: list[Session] = []
        self._plans: list[Plan] = []
        self._charges = Charges()

    # --- making private ------------------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[object],
        noise_multiplier: float | Schedule,
        max_grad_norm: float | Schedule,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        microbatch_size: int | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        clipping: str | Clipping = "flat",
        batch_first: bool = True,
        criterion: Criterion | None = None,
        public_batch: object = None,
        public_records: Sequence[object] | None = None,
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Attach a private step to your own module and optimizer, and get the loader that draws private batches.

        Guarantee: one step of `optimizer` is a Gaussian of `noise_multiplier` on a Poisson sample of the data set.

        Args:
            module: in training mode when you train; called on the loader's batches.
            optimizer: holds the parameters to train, all of them `module`'s.
            data_loader: a DataLoader with a map-style data set, with or without shuffling.
            noise_multiplier: noise standard deviation over the sensitivity of the clipped sum, ≥ 0, or a schedule of
                it over the steps; 0 is for debugging (ε = ∞).
            max_grad_norm: clipping norm > 0 of one record's gradient, or a schedule of it.
            expected_batch_size: public divisor of the noisy sum; by default sample_rate × size of the data set.
            sample_rate: probability that a record joins a batch; by default 1 / len(data_loader). Declare both this
                and `expected_batch_size` when the size of the data set is not public.
            loss_reduction: "mean" or "sum" over the records of the batch, as your loss does it.
            poisson_sampling: False keeps shuffled epochs of disjoint batches, with no amplification, and needs a
                `neighboring_relation` that replaces a record.
            microbatch_size: most records in one forward and backward; the loader then splits a batch and the
                optimizer only changes parameters at its last part. Memory only.
            neighboring_relation: which data sets count as neighbours.
            clipping: "flat", "per_layer", "automatic", "psac", "global", or an object of `sordino.clipping`.
            batch_first: must be True: records come first in every input.
            criterion: your loss as a function of (output, target), for batches (*inputs, target). Then it is proved
                before the first forward; otherwise the first batch's loss is followed to its backward pass.
            public_batch: at least five public or invented records, as the loader would give them: for a loop that does
                not run on made-up features in (0, 1) and labels 0 and 1.
            public_records: at least five public or invented items, as the data set would give them: for a `collate_fn`
                that does not run on made-up items. They also serve as `public_batch`.
            noise_generator: must be None: the noise is keyed by run and step and can't be taken from outside.
            grad_sample_mode: "hooks", "functorch", "ew" or "ghost": accepted, makes no difference.

        Returns:
            `module` and `optimizer`, the same objects, and the private loader.

        Raises:
            InvalidArgument: an option outside its range.
            UnknownSampler: the loader draws in a way that can't be accounted for.
            UnsupportedModule: a layer mixes records.
            CoupledRecords: `collate_fn`, `criterion` or the module couples records.
        """
        plan = self._plan(
            data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            steps=0,
            delta=_ANY_DELTA,
            poisson_sampling=poisson_sampling,
            neighboring_relation=neighboring_relation,
            clipping=clipping,
        )
        check_options(batch_first, noise_generator, grad_sample_mode, loss_reduction)
        return self._attach(
            plan,
            steps=steps_per_epoch(data_loader, sample_rate),
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            loss_reduction=loss_reduction,
            microbatch_size=microbatch_size,
            criterion=criterion,
            public_batch=public_batch,
            public_records=public_records,
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[object],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Schedule,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        microbatch_size: int | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        clipping: str | Clipping = "flat",
        batch_first: bool = True,
        criterion: Criterion | None = None,
        public_batch: object = None,
        public_records: Sequence[object] | None = None,
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """`make_private` with the least noise for which `epochs` epochs stay within (target_epsilon, target_delta).

        Guarantee: `get_epsilon(target_delta)` is at most `target_epsilon` after `epochs` epochs.

        `target_epsilon` is > 0 and never exceeded by rounding, `target_delta` in (0, 1), `epochs` ≥ 1 passes over the
        loader. The other arguments, returns and errors are those of `make_private`.
        """
        plan = self._plan(
            data_loader,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            steps=0,
            delta=checks.probability(zero=False, one=False, target_delta=target_delta),
            poisson_sampling=poisson_sampling,
            neighboring_relation=neighboring_relation,
            clipping=clipping,
        )
        check_options(batch_first, noise_generator, grad_sample_mode, loss_reduction)
        steps = steps_per_epoch(data_loader, sample_rate)
        plan = replace(plan, steps=steps * checks.integer(1, epochs=epochs)).with_noise_for(
            target_epsilon, accountant=self._accountant
        )
        return self._attach(
            plan,
            steps=steps,
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            loss_reduction=loss_reduction,
            microbatch_size=microbatch_size,
            criterion=criterion,
            public_batch=public_batch,
            public_records=public_records,
        )

    def _plan(
        self,
        data_loader: DataLoader[object],
        *,
        noise_multiplier: float | Schedule,
        max_grad_norm: float | Schedule,
        expected_batch_size: float | None,
        sample_rate: float | None,
        steps: int,
        delta: float,
        poisson_sampling: bool,
        neighboring_relation: NeighboringRelation,
        clipping: str | Clipping,
    ) -> Plan:
        records = len(population_of(data_loader))
        rate = 1 / steps_per_epoch(data_loader, None) if sample_rate is None else sample_rate
        plan = Plan(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sample_rate=rate,
            steps=steps,
            expected_batch_size=records * rate if expected_batch_size is None else expected_batch_size,
            delta=delta,
            neighboring_relation=neighboring_relation,
            dataset_size_is_public=sample_rate is None or expected_batch_size is None,
            poisson_sampling=poisson_sampling,
            clipping=clipping_called(clipping),
            secure_noise=self._secure,
        )
        if any(plan.neighboring_relation is not other.neighboring_relation for other in self._plans):
            raise InvalidArgument(
                f"neighboring_relation must be the same for everything one engine makes private, got "
                f"{plan.neighboring_relation.value!r} besides another. Use one engine for each relation."
            )
        return plan

    def _attach(
        self,
        plan: Plan,
        *,
        steps: int,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[object],
        loss_reduction: str,
        microbatch_size: int | None,
        criterion: Criterion | None,
        public_batch: object,
        public_records: Sequence[object] | None,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        randomness = self._new_randomness()
        mean = loss_reduction == "mean"
        if public_batch is None and public_records is not None:
            public_batch = data_loader.collate_fn(copy.deepcopy(list(public_records)))
        session = Session(module=module, optimizer=optimizer, plan=plan, randomness=randomness, mean_over_records=mean)
        try:
            loader = PrivateLoader(
                data_loader,
                sampling=plan.sampling,
                steps=steps,
                microbatch_size=microbatch_size,
                randomness=randomness,
                charge=Meter(
                    plan, charges=self._charges, ready=session.check_attached, ledger=self._ledger, steps=steps
                ),
                hand_out=session.hand_out,
                substitutes=substitutes(plan.at(0).expected_batch_size, microbatch_size),
                public_records=public_records,
                public_batch=public_batch,
            )
            set_probe(session, loader.empty_batch, loss_reduction, criterion, public_batch)
        except BaseException:
            session.detach()
            raise
        self._sessions.append(session)
        self._plans.append(plan)
        return module, optimizer, loader

    def _new_randomness(self) -> Randomness:
        """One master key for each model: two of one engine never share a draw or a noise value."""
        seed = None if self._seed is None else self._seed + len(self._plans)
        return Randomness(seed=seed, reproducible=self._reproducible)

    def detach(self) -> None:
        """Take all hooks off: modules and optimizers are ordinary again, the private loaders are at their end.

        What was spent stays on the record.
        """
        for session in self._sessions:
            session.detach()
        self._sessions.clear()

    def public(self, batch: T) -> T:
        """Mark tensors as made without private records: a model in training may then be called on them.

        When: a critic sees invented records beside real ones. Each row is clipped together with the private record in
        the same place.

        Args:
            batch: tensors that depend on private records only through what private training released.

        Returns:
            `batch` itself.
        """
        mark_public(batch)
        return batch

    # --- accounting ----------------------------------------------------------------------------------------------

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        return self._charges.event()

    def guarantee(self, delta: float) -> Guarantee:
        """What holds for everything charged so far, with all that is needed to read it.

        Args:
            delta: in [0, 1].
        """
        relation = self._plans[-1].neighboring_relation if self._plans else NeighboringRelation.ADD_OR_REMOVE_ONE
        spent = accounting.epsilon(self.event(), delta, relation=relation, accountant=self._accountant)
        caveats: list[str] = []
        if self._reproducible:
            caveats.append("made with a chosen seed: not for release")
        if not all(plan.is_private for plan in self._plans):
            caveats.append("noise_multiplier is 0: for debugging only")
        if any(plan.dataset_size_is_public for plan in self._plans):
            caveats.append("the size of the data set is treated as public")
        return Guarantee(
            epsilon=spent.upper,
            delta=delta,
            accountant=spent.accountant,
            sampler=", ".join(dict.fromkeys(plan.sampling.words for plan in self._plans)) or "none",
            relation=relation,
            caveats=tuple(caveats),
        )

    def get_epsilon(self, delta: float) -> float:
        """The ε at `delta` of everything charged so far, 0 before the first batch, ∞ without noise."""
        return self.guarantee(delta).epsilon

    @property
    def accountant(self) -> Self:
        """The engine itself: ``engine.accountant.get_epsilon(delta=…)`` works as it does elsewhere."""
        return self

    def state_dict(self) -> dict[str, object]:
        """What was charged, as plain JSON types. Noise and sampling are never saved: a resumed run draws anew."""
        return self._charges.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what `state_dict` saved; it is added to what this engine has charged itself."""
        self._charges.load_state_dict(state)

    save_checkpoint, load_checkpoint = save_checkpoint, load_checkpoint
