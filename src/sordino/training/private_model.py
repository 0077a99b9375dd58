"""One model under an engine: its run, its hooks, its loader, and what its optimizer and module show."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino import accounting
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, NotOffered
from sordino.events import NoOp, describe_sampling
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.training.adaptive_budget import FILTER_CAVEAT, AdaptiveBudgetRun, Admitted
from sordino.training.charging import ChargeLog, EpsilonTarget, OpenCharges
from sordino.training.distributed import DistributedContext, get_distributed_context, parameter_shapes, unwrap_ddp
from sordino.training.engine_run_folder import Journal
from sordino.training.exclusions import Option
from sordino.training.loader import PrivateLoader, batch_bound, dataset_size_of, max_batch_size, num_synthetic_records
from sordino.training.loop_hooks import LoopHooks
from sordino.training.loss_tracing.criterion import Criterion, LoopProbe
from sordino.training.optimizer_checks import check_module_and_optimizer
from sordino.training.plan import PerformanceOptions, Plan
from sordino.training.private_run import PrivateRun
from sordino.training.probing.probe_runner import ProbeOptions
from sordino.training.record_source import UnitAssignment
from sordino.training.run_writer import DIAGNOSTICS_CAVEAT

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
    "summed_grad": "After optimizer.step() parameter.grad is the private gradient",
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
        run: where the values come from.
    """

    def __init__(self, optimizer: Optimizer, run: PrivateRun) -> None:
        self._optimizer, self._run = optimizer, run
        self._values: dict[str, object] = {}
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def show(self) -> None:
        """Set the attributes to the values of the coming step."""
        self._optimizer.original_optimizer = self._optimizer  # pyright: ignore[reportAttributeAccessIssue]
        for name, advice in _ADVICE.items():
            setattr(self._optimizer, name, NotThere("optimizer", name, advice))
        self._show_values()

    def _show_values(self) -> None:
        try:
            step = self._run.coming_step
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
            self._show_values()

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

    def __getitem__(self, position: object) -> object:
        raise self._refusal()

    def _refusal(self) -> NotOffered:
        return NotOffered(f"{self._owner} must be used as torch's own, got {self._name}. {self._advice}.")


# ----------------------------------------------------------------------------------------------------------------------
# Names of Opacus's wrapped modules on a module that was made private.
# ----------------------------------------------------------------------------------------------------------------------


_MODULE_FIELDS_ADVICE = {
    "add_hooks": "Leave it out: make_private puts the hooks on",
    "del_grad_sample": "Leave it out: no per-record gradients are held",
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
# One model under an engine.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrivateModel:
    """What an engine keeps of one `make_private`.

    Args:
        number: which call it was, from 0.
        run: order, numbers, charges and noise of its steps.
        charges: of the run: what its target has still to charge.
        hooks: turn the user's forward, backward and step into private ones.
        fields: what the optimizer shows of the coming step, and what the module has of other engines' modules.
    """

    number: int
    run: PrivateRun
    charges: OpenCharges
    hooks: LoopHooks
    fields: tuple[OptimizerFields, ModuleFields]

    @property
    def plan(self) -> Plan:
        """Of the run."""
        return self.run.plan

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        for fields in self.fields:
            fields.remove()
        self.hooks.detach()


@dataclass(frozen=True, kw_only=True)
class MakePrivateArguments:
    """The parts of the user's custom loop, as `make_private` was given them.

    Args:
        module: to be trained.
        optimizer: holds the parameters to train.
        data_loader: over the private records.
        loss_reduction: "mean" or "sum" over the records of a batch.
        microbatch_size: most records in one forward and backward; None takes batches whole.
        criterion: the loss, to be checked before the first forward, or None.
        public_batch: public or invented records as the loader gives them, or None.
        public_records: public or invented items as the dataset gives them, or None.
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
        log: ChargeLog,
        ledger: Account | Reservation | None,
        adaptive: AdaptiveBudgetRun | None,
        journal: Journal,
        target: EpsilonTarget | None = None,
        max_steps: int | None = None,
    ) -> tuple[PrivateModel, PrivateLoader]:
        """Hook the private step to module and optimizer, and make the loader; after a refusal all is as it was."""
        alone = self.performance.is_one_by_one
        options = self.performance.options() | (set() if adaptive is None else {Option.BUDGET})
        ranks = get_distributed_context().bind(unwrap_ddp(self.module), plan, options)
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
        charges = ranks.rank_zero_first(
            lambda: OpenCharges(
                plan,
                log=log,
                ledger=ledger if ranks.is_rank_zero else None,
                epoch_steps=steps,
                adaptive=adaptive,
                target=target,
                catch_up=journal.catch_up if ranks.is_rank_zero else None,
                by_number=max_steps is not None,
            )
        )
        entries = ranks.rank_zero_first(lambda: journal.model(number, plan, rng, adaptive))
        run = PrivateRun(
            plan,
            rng=rng,
            charges=charges,
            record=partial(journal.charge, entries) if ranks.is_rank_zero else None,
            log=log,
            adaptive=adaptive,
            ranks=ranks,
            max_steps=max_steps,
        )
        fields = OptimizerFields(self.optimizer, run)
        try:
            hooks = LoopHooks(
                module=self.module,
                optimizer=self.optimizer,
                run=run,
                mean_over_records=self.loss_reduction == "mean",
                by_unit=self.units is not None,
                performance=self.performance,
            )
        except BaseException:
            fields.remove()
            raise
        reach = dataset_size_of(self.data_loader)
        plan.check_dataset_size(len(reach) if self.units is None else self.units.num_units)
        try:
            loader = PrivateLoader(
                self.data_loader,
                sampling=plan.sampler if adaptive is None else Admitted(adaptive),
                steps=steps,
                microbatch_size=microbatch_size,
                rng=rng,
                charge=partial(_charged, run),
                share=ranks.local_indices,
                rank=ranks.rank,
                set_microbatch=hooks.set_microbatch,
                let_go=hooks.let_go,
                substitutes=num_synthetic_records(plan.step_plan(0).expected_batch_size, microbatch_size),
                public_records=self.public_records,
                public_batch=public_batch,
                numbers=run if run.draws_by_number else None,
                units=self.units,
                largest=self._largest(plan, adaptive, ranks),
                taken=hooks.parts_taken,
                leave_out=hooks.leave_out,
            )
            most = max_batch_size(
                plan, microbatch_size, records_each=_records_each(self.units), processes=ranks.world_size
            )
            probed = ProbeOptions(
                reduction=self.loss_reduction,
                public_batch=public_batch,
                is_split=loader.is_split or hooks.processes > 1,
                num_records=most,
                two_passes=self.performance.clipping_mode == "two_pass",
            )
            # The loop never meets an empty batch: the loader gives it synthetic records in place of none.
            probe = LoopProbe(
                self.module,
                lambda: hooks.capture,
                loader.empty_batch,
                criterion=self.criterion,
                padding=loader.padding,
                options=probed,
            )
            hooks.set_probe(probe)
        except BaseException:
            hooks.detach()
            fields.remove()
            raise
        if adaptive is None:
            fields.show()
        given = fields, ModuleFields(self.module)
        return PrivateModel(number=number, run=run, charges=charges, hooks=hooks, fields=given), loader

    def _largest(
        self, plan: Plan, adaptive: AdaptiveBudgetRun | None, ranks: DistributedContext
    ) -> Callable[[int], int]:
        """Of a step's number, how many records a batch of it hardly ever exceeds, by what is public."""
        reach = dataset_size_of(self.data_loader)
        # With units the plan names the size of the dataset as public.
        public = len(reach) if plan.dataset_size_is_public else None
        at = plan.step_plan if adaptive is None else adaptive.step_plan

        def largest(step: int) -> int:
            now = at(step)
            mean = now.expected_batch_size if public is None else public * now.sample_rate
            whole = batch_bound(mean, public) if plan.has_random_batch_size else math.ceil(mean)
            return math.ceil(whole / ranks.world_size)

        return largest


def _records_each(units: UnitAssignment | None) -> int:
    """Records of a unit in one forward pass: all of them in a loop of the user's own."""
    return 1 if units is None or units.max_records_per_unit is None else units.max_records_per_unit


def _charged(run: PrivateRun, begins_epoch: bool) -> int | None:
    """Charge the next batch; its number, or None when the budget refuses it."""
    batch = run.begin_batch(begins_epoch=begins_epoch)
    return None if batch is None else batch.step


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
    sampler = ", ".join(dict.fromkeys(plan.sampler.describe() for plan in named)) or loaded
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
