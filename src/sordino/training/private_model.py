"""One model under an engine: its session, its meter, its budget; what a checkpoint keeps of them."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino import accounting
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, NonPrivateStep, NotOffered
from sordino.events import Event, NoOp, compose, describe_sampling
from sordino.gradients import OneByOne
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.training.adaptive_budget import FILTER_CAVEAT, AdaptiveBudgetRun, Admitted
from sordino.training.charging import BlockCharger, ChargeLog, EpsilonTarget, step_charge
from sordino.training.distributed import DistributedContext, get_distributed_context, parameter_shapes, unwrap_ddp
from sordino.training.engine_run_folder import Journal
from sordino.training.loader import PrivateLoader, batch_bound, dataset_size_of, max_batch_size, num_synthetic_records
from sordino.training.loop_hooks import LoopHooks
from sordino.training.loss_tracing.criterion import (
    Criterion,
    ProbeOptions,
    check_arguments,
    check_criterion,
    check_traced_loss,
    try_forward,
)
from sordino.training.optimizer_checks import check_module_and_optimizer
from sordino.training.plan import PerformanceOptions, Plan
from sordino.training.probing.probe import ProbeSize
from sordino.training.record_source import UnitAssignment
from sordino.training.run_writer import DIAGNOSTICS_CAVEAT

__all__ = [
    "BatchCharger",
    "MakePrivateArguments",
    "ModuleFields",
    "NotThere",
    "OptimizerFields",
    "PrivateModel",
    "engine_guarantee",
    "install_probe",
]


# ----------------------------------------------------------------------------------------------------------------------
# What one logical batch of an engine costs, and its number.
# ----------------------------------------------------------------------------------------------------------------------


class BatchCharger:
    """Charges the next logical batch, before its records are read, and numbers it.

    Guarantee: a batch is handed out only once the ledger, if there is one, and the engine's own charges hold it. Under
    a budget it was admitted by the filter, and the ledger holds the whole budget.

    Args:
        plan: of the batches.
        charges: the engine's own record.
        ready: raises when no batch may be given out.
        ledger: pays, in blocks ahead that end with the epoch; None pays nothing.
        steps: logical batches an epoch.
        adaptive: chooses each step's values under a budget.
        journal: writes a batch down: its number, what it charges, and the ledger's receipt.
        target: what the engine's charges must stay within; None has no end.

    Raises:
        BudgetExceeded: when it is made: `plan`, or its relation or unit, do not fit the ledger's account.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        charges: ChargeLog,
        ready: Callable[[], None],
        ledger: Account | Reservation | None,
        steps: int,
        adaptive: AdaptiveBudgetRun | None = None,
        journal: Callable[[int, Event, str | None], None] | None = None,
        target: EpsilonTarget | None = None,
    ) -> None:
        self._target, self._fitting, self._known = target, 0, -1
        self._unplanned = charges.unplanned
        self._plan, self._ledger, self._adaptive = plan, ledger, adaptive
        self._journal = journal
        self._budget_receipt: str | None = None
        if ledger is not None:
            whole = plan.event() if adaptive is None else adaptive.event()
            ledger.check_charge(whole, neighboring_relation=plan.neighboring_relation, privacy_unit=plan.privacy_unit)
        self._charges, self._ready, self._steps = charges, ready, steps
        # Correlated noise is charged a cycle or a run ahead, as its plan says, whatever an epoch is.
        self._every_batch = plan.poisson_sampling or plan.mechanism is not None
        self._prepaid = BlockCharger(
            ledger if adaptive is None else None,
            self._event_at,
            note="engine",
            neighboring_relation=plan.neighboring_relation,
            privacy_unit=plan.privacy_unit,
        )
        self.reached = self._place = self._first = 0
        self._repeats = self._is_paid = self.has_charged = False

    def __call__(self, begins_epoch: bool) -> int | None:
        """Charge a batch; under shuffled epochs the first of an epoch pays for all of it.

        Returns:
            The batch's number; None when the budget refuses it, and nothing is charged.

        Raises:
            NonPrivateStep: the noise has no more steps.
            BudgetExceeded: the batch does not fit the target; nothing is charged.
        """
        self.prepare()
        number = self.reached
        if self.left == 0:
            raise NonPrivateStep(
                f"loader must be read for at most {self._plan.steps} batches, the steps of the noise's strategy, got "
                "one more. Stop here, or build the strategy for more steps."
            )
        if self._adaptive is not None and not self._adaptive.admit(number):
            return None
        if self._every_batch or begins_epoch:
            self._check_target(number)
        self._place = 0 if begins_epoch else self._place + 1
        event, receipt = NoOp(), None
        if self._every_batch or begins_epoch:
            receipt = self._prepaid.charge(number, coming=self._coming() if self._every_batch else 1)
            event = self._event_at(number)
        if self._journal is not None:
            self._journal(number, event, receipt or self._budget_receipt)
        if not isinstance(event, NoOp):
            self._charges.add(event, planned=self._is_planned(number))
        self.reached, self.has_charged = number + 1, True
        return number

    @property
    def adapts(self) -> bool:
        """Whether batches are admitted by a budget."""
        return self._adaptive is not None

    def prepare(self) -> None:
        """What comes before a batch is admitted: it may be given out, and its budget is paid."""
        self._ready()
        if self._adaptive is not None:
            self._pay_budget(self._adaptive)

    @property
    def left(self) -> int | None:
        """How many steps the noise has left; None when there is no end to them."""
        return None if self._plan.mechanism is None else max(0, self._plan.steps - self.reached)

    def resume(self, step: int, *, repeats: bool) -> None:
        """Number the next batch `step`, or later: no number comes twice.

        Args:
            step: where a checkpoint stopped.
            repeats: whether steps from there on were carried out before; matters under correlated noise only.
        """
        self.reached = max(self.reached, step)
        self._first, self._repeats = self.reached, repeats

    def remaining(self) -> Event:
        """What the target's plan has still to charge: nothing without a target."""
        plan = self._plan
        if self._target is None or self.reached >= plan.steps:
            return NoOp()
        if plan.is_scheduled or plan.mechanism is not None:
            return compose([self._event_at(step) for step in range(self.reached, plan.steps)])
        return plan.event(plan.steps - self.reached)

    def retarget(self, target: EpsilonTarget) -> None:
        """Go over to the target of a later model of the engine, which was calibrated for what is left here as well."""
        if self._target is not None:
            self._target, self._fitting, self._unplanned = target, 0, self._charges.unplanned

    def _is_planned(self, number: int) -> bool:
        return self._target is not None and number < self._plan.steps

    def _check_target(self, number: int) -> None:
        """Refuse a batch beyond the target. Several are looked at together, so that few ask the accountant."""
        if self._target is None or isinstance(self._event_at(number), NoOp):
            return
        charged = self._charges.count
        if self._is_planned(number) and self._charges.unplanned == self._unplanned:
            # The target was calibrated for these steps, together with those that other models have planned.
            return
        if charged != self._known or not self._fitting:
            ahead = self._coming() if self._every_batch else 1
            events = [self._event_at(step) for step in range(number, number + max(1, ahead))]
            self._fitting = self._target.fitting(self._charges, events)
        if not self._fitting:
            raise self._target.refusal()
        self._fitting, self._known = self._fitting - 1, charged + 1

    def _coming(self) -> int:
        epoch = self._steps - self._place
        return epoch if self.left is None else max(1, min(epoch, self.left))

    def _event_at(self, number: int) -> Event:
        if self._adaptive is not None:
            return self._adaptive.charged_at(number)
        if self._plan.mechanism is not None:
            return step_charge(self._plan, number, first=self._first, repeats=self._repeats)
        return self._plan.step_event(number)

    def _pay_budget(self, adaptive: AdaptiveBudgetRun) -> None:
        """Charge the budget to the ledger, once: all that is left of it, whoever else may have gone on from there."""
        if self._is_paid or self._ledger is None:
            return
        neighboring_relation, unit = self._plan.neighboring_relation, self._plan.privacy_unit
        note = "engine with an adaptive budget"
        self._budget_receipt = self._ledger.charge(
            adaptive.remaining_event(), note=note, neighboring_relation=neighboring_relation, privacy_unit=unit
        ).digest
        self._is_paid = True


# ----------------------------------------------------------------------------------------------------------------------
# What scripts read from an optimizer that was made private: the values of the step, and names of Opacus.
# ----------------------------------------------------------------------------------------------------------------------


_ADVICE = {
    "accumulated_iterations": "Leave it out: passes over one batch are added up before clipping",
    "add_noise": "optimizer.step() clips, adds noise and steps",
    "attach_step_hook": "Write optimizer.register_step_post_hook(lambda optimizer, args, kwargs: …)",
    "clip_and_accumulate": "optimizer.step() clips, adds noise and steps",
    "grad_samples": "No per-record gradients are held; after optimizer.step() parameter.grad is the private gradient",
    "pre_step": "optimizer.step() clips, adds noise and steps",
    "scale_grad": "optimizer.step() clips, adds noise and steps",
    "signal_skip_step": "Pass microbatch_size= to make_private: the loader splits each batch",
    "virtual_step": (
        "Pass microbatch_size= to make_private: the loader splits each batch; write optimizer.step() for every part"
    ),
}


class OptimizerFields:
    """``optimizer.noise_multiplier``, ``.max_grad_norm``, ``.expected_batch_size`` of the coming step, to read.

    ``optimizer.original_optimizer`` is the optimizer itself. The values follow the plan. One that was set by hand is
    refused at the next step, because it would change nothing.

    Make it before any other hook on the optimizer's steps, so that nothing has happened when it refuses.

    Args:
        optimizer: gets the attributes; methods of Opacus's optimizers raise `NotOffered` with what to write instead.
        plan: where the values come from.
        last_step: the number of the last step, −1 before the first.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, last_step: Callable[[], int]) -> None:
        self._optimizer, self._plan, self._last_step = optimizer, plan, last_step
        self._values: dict[str, object] = {}
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def show(self) -> None:
        """Set the attributes to the values of the coming step."""
        self._optimizer.original_optimizer = self._optimizer  # pyright: ignore[reportAttributeAccessIssue]
        for name, advice in _ADVICE.items():
            setattr(self._optimizer, name, NotThere("optimizer", name, advice))
        try:
            step = self._plan.step_plan(self._last_step() + 1)
        except InvalidArgument:
            # A schedule that is written out has ended: the values of its last step stay.
            return
        self._values = {
            "noise_multiplier": step.noise_multiplier,
            "max_grad_norm": step.max_grad_norm,
            "expected_batch_size": step.expected_batch_size,
        }
        for name, value in self._values.items():
            setattr(self._optimizer, name, value)

    def _before_step(self) -> None:
        for name, value in self._values.items():
            if getattr(self._optimizer, name, None) != value:
                setattr(self._optimizer, name, value)
                raise InvalidArgument(
                    f"optimizer.{name} must stay as make_private set it, got another value: every step takes it from "
                    f"the plan. Pass a schedule, make_private({name}=ExponentialSchedule(…)) of sordino.schedules."
                )
        if self._values:
            self.show()

    def remove(self) -> None:
        """Take the attributes off."""
        self._handle.remove()
        for name in (*self._values, *_ADVICE, "original_optimizer"):
            self._optimizer.__dict__.pop(name, None)


class NotThere:
    """A method or value that is not there, and says what to write when it is used.

    Args:
        owner: "optimizer", "module" or "parameter".
        name: of the method or value.
        advice: what to write.
    """

    def __init__(self, owner: str, name: str, advice: str) -> None:
        self._owner, self._name, self._advice = owner, name, advice

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Raise `NotOffered`."""
        raise self._refusal()

    def __getattr__(self, name: str) -> object:
        # What copying and pickling ask for is an ordinary "no".
        raise AttributeError(name) if name.startswith("_") else self._refusal()

    def __iter__(self) -> Iterator[object]:
        raise self._refusal()

    def __getitem__(self, place: object) -> object:
        raise self._refusal()

    def _refusal(self) -> NotOffered:
        return NotOffered(f"{self._owner} must be used as torch's own, got {self._name}. {self._advice}.")


# ----------------------------------------------------------------------------------------------------------------------
# Names of Opacus's wrapped modules on a module that was made private.
# ----------------------------------------------------------------------------------------------------------------------


_MODULE_FIELDS_ADVICE = {
    "allow_grad_accumulation": "Leave it out: passes over one batch are added up before clipping",
    "disable_hooks": "Call module.eval() for evaluation, or engine.detach() when training is over",
    "enable_hooks": "Leave it out: make_private puts the hooks on",
    "forbid_grad_accumulation": "Leave it out: every batch of the private loader is stepped",
    "remove_hooks": "Call engine.detach(), which takes all hooks off",
    "to_standard_module": "The module is your own: use it as it is, after engine.detach() without privacy",
}
_PER_RECORD = "No per-record gradients are held; after optimizer.step() parameter.grad is the private gradient"


class ModuleFields:
    """``module._module``, which is the module itself; methods, and ``parameter.grad_sample``, that say what to write.

    A name that the module has already is left alone. They are plain attributes: no parameter, buffer, submodule or name
    in the state changes.

    Args:
        module: gets the attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        given: dict[str, object] = {"_module": module}
        given |= {name: NotThere("module", name, advice) for name, advice in _MODULE_FIELDS_ADVICE.items()}
        self._given = {name: value for name, value in given.items() if not hasattr(module, name)}
        # Past torch, which would make a submodule of it.
        vars(module).update(self._given)
        self._per_record = NotThere("parameter", "grad_sample", _PER_RECORD)
        for parameter in module.parameters():
            if not hasattr(parameter, "grad_sample"):
                setattr(parameter, "grad_sample", self._per_record)  # noqa: B010 (no attribute of torch's)

    def remove(self) -> None:
        """Take the attributes off."""
        for name, value in self._given.items():
            if vars(self._module).get(name) is value:
                del vars(self._module)[name]
        for parameter in self._module.parameters():
            if vars(parameter).get("grad_sample") is self._per_record:
                del vars(parameter)["grad_sample"]


# ----------------------------------------------------------------------------------------------------------------------
# What a session proves about a drop-in loop, and with which records.
# ----------------------------------------------------------------------------------------------------------------------


def install_probe(
    session: LoopHooks,
    loader: PrivateLoader,
    reduction: str,
    criterion: Criterion | None,
    public_batch: object,
    size: ProbeSize,
) -> None:
    """Have model and loss proved independent before the first record is used.

    Args:
        session: of the module.
        loader: gives the batches: what they look like, and how they are padded.
        reduction: "mean" or "sum" over records.
        criterion: the declared loss; without one the loop's own is followed.
        public_batch: records to use instead of synthetic ones, or None.
        size: the most records that the module gets at once.
    """
    # The loop never meets an empty batch: the loader gives it synthetic records in place of none.
    together = 1 if isinstance(session.capture, OneByOne) else min(4, size.records)
    structure = loader.empty_batch
    options = ProbeOptions(
        reduction=reduction,
        may_be_empty=False,
        public_batch=public_batch,
        together=together,
        padding=loader.padding,
        is_split=loader.is_split or session.processes > 1,
        size=size,
    )

    def options_for(times: int) -> ProbeOptions:
        return options.repeated(times) if times else options

    session.follow_padding(loader.padding)
    if criterion is None:
        session.set_loss_check(
            lambda tape, loss, times: check_traced_loss(
                session.module, session.capture, tape, loss, structure, options_for(times)
            ),
            lambda tape, args, kwargs: try_forward(
                session.module, session.capture, tape, args, kwargs, structure, options
            ),
        )
    else:
        session.set_module_check(
            lambda times: check_criterion(session.module, session.capture, criterion, structure, options_for(times)),
            criterion,
            lambda tape, given, times: check_arguments(
                session.module, session.capture, tape, given, criterion, structure, options_for(times)
            ),
        )


# ----------------------------------------------------------------------------------------------------------------------
# One model under an engine: its session, its meter, its budget; what a checkpoint keeps of them.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrivateModel:
    """What an engine keeps of one `make_private`.

    Args:
        number: which call it was, from 0.
        plan: of the model.
        session: turns the user's steps into private ones.
        meter: charges and numbers the batches.
        adaptive: the budget that chooses each step's values, or None.
        fields: what the optimizer shows of the coming step, and what the module has of other engines' modules.
    """

    number: int
    plan: Plan
    session: LoopHooks
    meter: BatchCharger
    adaptive: AdaptiveBudgetRun | None
    fields: tuple[OptimizerFields, ModuleFields]

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        for fields in self.fields:
            fields.remove()
        self.session.detach()

    def facts(self) -> dict[str, object]:
        """Where the model stands, in plain JSON types: which it is, its next step, its budget."""
        stream = self.session.step.next_noise
        return {
            "number": self.number,
            "next_step": self.meter.reached if stream is None else stream,
            "budget": None if self.adaptive is None else self.adaptive.facts(),
        }

    def state(self) -> dict[str, object]:
        """What later steps need of earlier ones: adapted bounds, buffers of correlated noise, the last norm.

        The buffers are secret: with the released gradients they give the clipped sums away.
        """
        return {
            "step": self.session.step.state_dict(),
            "adaptive": None if self.adaptive is None else self.adaptive.state_dict(),
        }

    def check(self, facts: Mapping[str, object]) -> None:
        """Refuse a checkpoint that this model can't go on from.

        Raises:
            InvalidArgument: the budget is not that of the checkpoint.
            NonPrivateStep: noise that later steps take back was given here already.
        """
        if self.plan.mechanism is not None and self.session.step.last_step >= 0:
            raise NonPrivateStep(
                "checkpoint must be loaded before the first step with correlated noise, got an engine that took some: "
                "its noise would come twice. Make a new engine."
            )
        own = self.facts()["budget"]
        if facts["budget"] != own:
            raise InvalidArgument(
                f"budget must be that of the checkpoint, {facts['budget']}, got {own}. Call make_private with it."
            )

    def start_at(self, step: int) -> None:
        """Number the next step `step`, or later: where a training goes on that another library keeps."""
        self.session.resume(step, self.session.step.state_dict())
        self.meter.resume(step, repeats=False)

    def resume(self, facts: Mapping[str, object], state: Mapping[str, object], *, repeats: bool) -> None:
        """Go on from where a checkpoint stopped; what it cost is taken over apart."""
        step = int(str(facts["next_step"]))
        self.session.resume(step, cast("Mapping[str, object]", state["step"]))
        self.meter.resume(step, repeats=repeats)
        if self.adaptive is not None:
            self.adaptive.load_state_dict(cast("Mapping[str, object]", state["adaptive"]))


@dataclass(frozen=True, kw_only=True)
class MakePrivateArguments:
    """The parts of the user's own loop, as `make_private` was given them.

    Args:
        module: to be trained.
        optimizer: holds the parameters to train.
        data_loader: over the private records.
        loss_reduction: "mean" or "sum" over the records of a batch.
        microbatch_size: most records in one forward and backward; None takes batches whole.
        criterion: the loss, to be proved before the first forward, or None.
        public_batch: public or invented records as the loader gives them, or None.
        public_records: public or invented items as the data set gives them, or None.
        units: which records belong together, or None.
        performance: how gradients and sums are taken.
    """

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[object]
    loss_reduction: str
    microbatch_size: int | None
    criterion: Criterion | None
    public_batch: object
    public_records: Sequence[object] | None
    units: UnitAssignment | None
    performance: PerformanceOptions

    def attach(
        self,
        plan: Plan,
        *,
        number: int,
        steps: int,
        rng: KeyedRNG,
        charges: ChargeLog,
        ledger: Account | Reservation | None,
        adaptive: AdaptiveBudgetRun | None,
        journal: Journal,
        target: EpsilonTarget | None = None,
    ) -> tuple[PrivateModel, PrivateLoader]:
        """Hook the private step to module and optimizer, and make the loader; after a refusal all is as it was."""
        alone = self.performance.is_one_by_one
        ranks = get_distributed_context().bind(unwrap_ddp(self.module), plan, adaptive=adaptive, alone=alone)
        microbatch_size = 1 if alone else self.microbatch_size
        rng = ranks.with_shared_key(rng)
        ranks.require_same(
            plan=plan.to_json(),
            records=len(dataset_size_of(self.data_loader)),
            steps=steps,
            model=parameter_shapes(unwrap_ddp(self.module)),
            budget=None if adaptive is None else adaptive.facts(),
        )
        ranks.broadcast_module(unwrap_ddp(self.module))
        public_batch = self.public_batch
        if public_batch is None and self.public_records is not None:
            public_batch = self.data_loader.collate_fn(copy.deepcopy(list(self.public_records)))
        check_module_and_optimizer(self.module, self.optimizer)
        fields = OptimizerFields(self.optimizer, plan, lambda: session.step.last_step)
        try:
            session = LoopHooks(
                module=self.module,
                optimizer=self.optimizer,
                plan=plan,
                rng=rng,
                mean_over_records=self.loss_reduction == "mean",
                adaptive=adaptive,
                by_unit=self.units is not None,
                performance=self.performance,
                ranks=ranks,
            )
        except BaseException:
            fields.remove()
            raise
        try:
            model = ranks.rank_zero_first(lambda: journal.model(number, plan, rng, adaptive))
            meter = ranks.rank_zero_first(
                lambda: BatchCharger(
                    plan,
                    charges=charges,
                    ready=partial(_ready, session, journal if ranks.is_rank_zero else None),
                    ledger=ledger if ranks.is_rank_zero else None,
                    steps=steps,
                    adaptive=adaptive,
                    journal=partial(journal.charge, model) if ranks.is_rank_zero else None,
                    target=target,
                )
            )
            loader = PrivateLoader(
                self.data_loader,
                sampling=plan.sampling if adaptive is None else Admitted(adaptive),
                steps=steps,
                microbatch_size=microbatch_size,
                rng=rng,
                charge=lambda begins: _charged(ranks, meter, begins),
                share=ranks.local_indices,
                rank=ranks.rank,
                set_microbatch=session.set_microbatch,
                let_go=session.let_go,
                substitutes=num_synthetic_records(plan.step_plan(0).expected_batch_size, microbatch_size),
                public_records=self.public_records,
                public_batch=public_batch,
                numbers=meter if adaptive is not None or plan.correlated_noise is not None else None,
                units=self.units,
                largest=self._largest(plan, adaptive, ranks),
                taken=session.parts_taken,
                leave_out=session.leave_out,
            )
            most = max_batch_size(
                plan, microbatch_size, records_each=_records_each(self.units), processes=ranks.world_size
            )
            size = ProbeSize(records=most, two_passes=self.performance.clipping_mode == "two_pass")
            install_probe(session, loader, self.loss_reduction, self.criterion, public_batch, size)
        except BaseException:
            session.detach()
            fields.remove()
            raise
        if adaptive is None:
            fields.show()
        given = fields, ModuleFields(self.module)
        attached = PrivateModel(number=number, plan=plan, session=session, meter=meter, adaptive=adaptive, fields=given)
        return attached, loader

    def _largest(
        self, plan: Plan, adaptive: AdaptiveBudgetRun | None, ranks: DistributedContext
    ) -> Callable[[int], int]:
        """Of a step's number, how many records a batch of it hardly ever exceeds, by what is public."""
        reach = dataset_size_of(self.data_loader)
        # With units the plan names the size of the data set as public.
        public = len(reach) if plan.dataset_size_is_public else None
        at = plan.step_plan if adaptive is None else adaptive.step_plan

        def largest(step: int) -> int:
            now = at(step)
            mean = now.expected_batch_size if public is None else public * now.sample_rate
            whole = batch_bound(mean, public) if plan.poisson_sampling else math.ceil(mean)
            return math.ceil(whole / ranks.world_size)

        return largest


def _ready(session: LoopHooks, journal: Journal | None) -> None:
    """Raise when no batch may be given out; know what others have charged to the run folder before asking for one."""
    session.check_attached()
    if journal is not None:
        journal.catch_up()


def _records_each(units: UnitAssignment | None) -> int:
    """Records of a unit in one forward pass: all of them in a loop of the user's own."""
    return 1 if units is None or units.max_records_per_unit is None else units.max_records_per_unit


def _charged(ranks: DistributedContext, meter: BatchCharger, begins_epoch: bool) -> int | None:
    """Charge a batch in the first process, then in the others. Of a budget they decide together, once it is paid."""
    if not meter.adapts:
        return ranks.rank_zero_first(lambda: meter(begins_epoch))
    ranks.rank_zero_first(meter.prepare)
    return meter(begins_epoch)


def engine_guarantee(
    charges: ChargeLog,
    plans: list[Plan],
    adaptive: AdaptiveBudgetRun | None,
    *,
    stepped: list[Plan],
    delta: float,
    accountant: str,
    reproducible: bool,
    diagnosed: bool = False,
) -> Guarantee:
    """What holds for everything that an engine charged: the composition of its steps, or its budget.

    A plan that no batch was drawn for, one not in `stepped`, is named only where nothing was charged at all.
    """
    neighboring_relation = plans[-1].neighboring_relation if plans else NeighboringRelation.ADD_OR_REMOVE_ONE
    spent = accounting.epsilon(charges.event(), delta, neighboring_relation=neighboring_relation, accountant=accountant)
    caveats = [FIXED_SEED_CAVEAT] if reproducible else []
    caveats += [DIAGNOSTICS_CAVEAT] if diagnosed else []
    is_charged = not isinstance(charges.event(), NoOp)
    named = stepped if is_charged else plans
    caveats += [caveat for plan in named for caveat in plan.guarantee(steps=0).caveats]
    epsilon, name = spent.upper, spent.accountant
    # Charges that were loaded without their plans say by themselves how batches were drawn.
    loaded = describe_sampling(charges.event()) if is_charged and not named else "none"
    sampler = ", ".join(dict.fromkeys(plan.sampling.describe() for plan in named)) or loaded
    if adaptive is not None:
        name, sampler = adaptive.accountant, adaptive.describe()
        caveats.append(FILTER_CAVEAT)
        if is_charged:
            epsilon = max(epsilon, _budget_at(adaptive, plans[-1], delta))
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        accountant=name,
        sampler=sampler,
        neighboring_relation=neighboring_relation,
        privacy_unit=plans[-1].privacy_unit if plans else PrivacyUnit.RECORD,
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _budget_at(adaptive: AdaptiveBudgetRun, plan: Plan, delta: float) -> float:
    """ε of the whole budget at any δ; at its own, what was promised."""
    if delta == plan.delta:
        return adaptive.epsilon
    whole = accounting.epsilon(adaptive.event(), delta, neighboring_relation=plan.neighboring_relation).upper
    return min(whole, adaptive.epsilon) if delta > plan.delta else whole
