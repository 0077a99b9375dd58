"""The familiar engine: keep your PyTorch loop, change the import line.

Module and optimizer come back as the very objects that went in, with hooks; only the loader is new.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino import checks
from sordino.clipping import Clipping, GroupedClipping, get_clipping
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LossShapeError, NonPrivateStep, NotOffered
from sordino.events import Event, NoOp, compose
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.schedules import Schedule
from sordino.training.adaptive_budget import AdaptiveBudget, AdaptiveBudgetRun
from sordino.training.charging import ChargeLog, EpsilonTarget
from sordino.training.correlated_noise import CorrelatedNoise
from sordino.training.engine_checkpoint import load_checkpoint, name_alike, save_checkpoint
from sordino.training.engine_run_folder import Journal
from sordino.training.exclusions import Option
from sordino.training.loader import PrivateLoader, dataset_size_of, own_loader, steps_per_epoch
from sordino.training.loss_tracing.carried import mark_public
from sordino.training.loss_tracing.criterion import Criterion
from sordino.training.loss_tracing.traced_tensor import TracedTensor
from sordino.training.plan import ClippingMode, Gradients, PerformanceOptions, Plan, StepPlan
from sordino.training.private_model import MakePrivateArguments, PrivateModel, engine_guarantee
from sordino.training.record_source import UnitAssignment

# ----------------------------------------------------------------------------------------------------------------------
# The plan of an engine from what `make_private` is given: every refusal comes before a record is read.
# ----------------------------------------------------------------------------------------------------------------------


# The plan wants a δ; an engine is asked for ε at any δ afterwards and reads only the plan's events.
_ANY_DELTA = 1e-5


def engine_plan(
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
    correlated_noise: CorrelatedNoise | Literal["auto"] | None,
    units: UnitAssignment | None,
    secure: bool,
) -> Plan:
    """The plan of one model.

    Raises:
        InvalidArgument: an option is out of range, or two of them don't go together.
        UnknownSampler: the loader draws in a way that can't be accounted for, or breaks the noise's participation.
    """
    records = len(dataset_size_of(data_loader)) if units is None else units.num_units
    rate = 1 / steps_per_epoch(data_loader, None) if sample_rate is None else sample_rate
    if correlated_noise == "auto":
        if not steps:
            raise InvalidArgument(
                "correlated_noise must be None or CorrelatedNoise, got 'auto'. Use make_private_with_epsilon."
            )
        correlated_noise = None
    plan = Plan(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=rate,
        # Correlated noise has an end: its strategy is one for so many steps.
        steps=correlated_noise.strategy.steps if correlated_noise is not None and not steps else steps,
        expected_batch_size=records * rate if expected_batch_size is None else expected_batch_size,
        delta=delta,
        neighboring_relation=neighboring_relation,
        privacy_unit=PrivacyUnit.RECORD if units is None or units.protects_records else PrivacyUnit.USER,
        dataset_size_is_public=sample_rate is None or expected_batch_size is None,
        poisson_sampling=poisson_sampling,
        clipping=get_clipping(clipping),
        correlated_noise=correlated_noise,
        secure_mode=secure,
    )
    check_plan(plan, units)
    return plan


def check_plan(plan: Plan, units: UnitAssignment | None) -> None:
    """Refuse a plan that a custom training loop can't carry out.

    Raises:
        InvalidArgument: it clips by projections, releases losses, or protects units without unit_ids.
    """
    plan.check_options({Option.CUSTOM_LOOP} | (set() if units is None else {Option.UNITS_IN_LOOP}))
    if units is None and plan.privacy_unit is not PrivacyUnit.RECORD:
        raise InvalidArgument(
            f"units must be given where the privacy unit is {plan.privacy_unit.value}, got None. Pass "
            "UnitAssignment(unit_ids=…), the unit of each record."
        )
    if units is not None:
        units.check(plan)


# With a plan they say nothing, or something else.
_IN_PLAN = {
    "noise_multiplier": None,
    "max_grad_norm": None,
    "expected_batch_size": None,
    "sample_rate": None,
    "poisson_sampling": True,
    "neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "clipping": "flat",
    "correlated_noise": None,
}


def check_only_plan(plan: Plan, *, secure: bool, **given: object) -> None:
    """Refuse settings that are given together with a plan, which has them all.

    Raises:
        InvalidArgument: names the first one.
    """
    for name, value in given.items():
        if value is not _IN_PLAN[name] and value != _IN_PLAN[name]:
            raise InvalidArgument(
                f"{name} must be left out with plan, got one. Use dataclasses.replace(plan, {name}=…)."
            )
    if secure and not plan.secure_mode:
        raise InvalidArgument(
            "secure_mode must be the plan's, False, got True for the engine. Use dataclasses.replace(plan, "
            "secure_mode=True)."
        )


def calibrate_plan(
    plan: Plan, target: EpsilonTarget, *, correlated_noise: CorrelatedNoise | Literal["auto"] | None, before: Event
) -> Plan:
    """`plan` with the least noise that stays within `target` on top of `before`; "auto" also chooses its correlation.

    Raises:
        BudgetExceeded: `before` alone reaches the target.
    """
    target.check_left(before)
    if correlated_noise == "auto":
        best = Plan.for_epsilon(
            target_epsilon=target.epsilon,
            delta=plan.delta,
            sample_rate=plan.sample_rate,
            steps=plan.steps,
            max_grad_norm=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size,
            neighboring_relation=plan.neighboring_relation,
            poisson_sampling=plan.poisson_sampling,
            clipping=plan.clipping,
            secure_mode=plan.secure_mode,
            correlated_noise="auto",
        )
        plan = replace(plan, correlated_noise=best.correlated_noise)
    earlier = None if isinstance(before, NoOp) else before
    return plan.with_target_epsilon(target.epsilon, accountant=target.accountant, before=earlier)


def get_delta(budget: AdaptiveBudget | None, delta: float | None = None) -> float:
    """δ for the plan; `delta` is the engine's own.

    Raises:
        InvalidArgument: a budget that names none, where the engine names none.
    """
    if budget is None or (budget.delta is None and delta is not None):
        return _ANY_DELTA if delta is None else delta
    if budget.delta is None:
        raise InvalidArgument("delta must be given in the budget of an engine, got None. Give AdaptiveBudget(delta=…).")
    return budget.delta


def check_budget(data_loader: DataLoader[object], others: Sequence[Plan]) -> None:
    """Refuse a budget where it could not be kept.

    Raises:
        InvalidArgument: worker processes would read ahead of the filter, or the engine has another model.
    """
    checks.one_of(
        (0,),
        num_workers=data_loader.num_workers,
        hint="With a budget a batch is chosen after the step before it; workers would read ahead of the filter.",
    )
    if others:
        raise InvalidArgument(
            "budget must be all that its engine spends, got one together with another model. Use one engine for each."
        )


def check_compatible_plans(plan: Plan, others: Sequence[Plan], *, budgeted: bool) -> None:
    """Refuse a model whose guarantee could not be stated together with those of an engine's other models.

    Raises:
        InvalidArgument: another relation or unit, or a budget that the other one holds for itself.
    """
    for name in ("neighboring_relation", "privacy_unit"):
        here = getattr(plan, name)
        if any(here is not getattr(other, name) for other in others):
            raise InvalidArgument(
                f"{name} must be the same for everything one engine makes private, got {here.value!r} besides "
                "another. Use one engine for each."
            )
    if budgeted:
        raise InvalidArgument(
            "budget must be all that its engine spends, got another model with it. Use one engine for each."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Options that scripts written for other engines pass: accepted where they change nothing, else refused.
# ----------------------------------------------------------------------------------------------------------------------


_ACCOUNTANTS = {"auto": "auto", "prv": "auto", "rdp": "rdp"}
_GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew")


def opacus_accountant(name: str) -> str:
    """Our name of the accountant that is called `name` elsewhere."""
    if name == "gdp":
        raise InvalidArgument(
            "accountant must be auto, prv or rdp, got 'gdp': its central limit approximation can understate ε. "
            "Use 'prv'."
        )
    checks.one_of(_ACCOUNTANTS, accountant=name)
    return _ACCOUNTANTS[name]


# What engines elsewhere have, and what to write here.
_NOT_OFFERED = {
    "DEFAULT_ALPHAS": "Leave it out: PrivacyEngine(accountant='rdp') chooses the orders",
    "attach": "Write model, optimizer, loader = engine.make_private(module=…, optimizer=…, data_loader=…, …)",
    "get_compatible_module": "Nothing rewrites a model: replace BatchNorm by GroupNorm yourself; other layers stay",
    "get_privacy_spent": "Write engine.get_epsilon(delta)",
    "get_optimizer_hook_fn": "Leave it out: every batch is charged when the loader draws it",
    "get_renyi_divergence": "Write sordino.accounting.renyi_divergence(engine.event(), order)",
    "history": "Write engine.event(), everything charged so far",
    "is_compatible": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
    "module": "make_private returns the module, which is your own object",
    "mechanism": "Write engine.guarantee(delta).accountant",
    "sample_rate": "Write 1 / len(loader), the probability that a record joins a batch",
    "step": "Leave it out: every batch is charged when the loader draws it",
    "steps": "Write engine.next_steps, one number for each private model",
    "to": "Leave it out: noise is added where the model is",
    "validate": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
}


# Arguments of engines elsewhere, or of earlier versions of them, that are taken by no method here.
_OLD_ARGUMENTS = frozenset(
    {
        "alphas",
        "batch_size",
        "clip_per_layer",
        "epsilon_tolerance",
        "experimental",
        "loss_reduction",
        "max_grad_norm",
        "module",
        "model",
    }
    | {"max_per_sample_grad_norm", "misc_settings", "noise_multiplier", "poisson", "sample_rate", "sample_size"}
    | {"secure_rng", "target_delta", "target_epsilon", "epochs", "total_steps", "normalize_clipping"}
    | {"target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound", "unclipped_num_std"}
)
_ADAPTIVE = frozenset({"target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound"})

P = ParamSpec("P")
R = TypeVar("R")


def with_old_signatures(method: Callable[P, R]) -> Callable[P, R]:
    """Have arguments by position, and those of other engines by name, refused with what to write instead.

    Any other unknown argument is a TypeError, as ever.
    """
    names = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in names and name in _OLD_ARGUMENTS]
        # The first one is the engine.
        if len(args) > 1 or unknown:
            raise _old_signature(method.__name__, unknown)
        return method(*args, **kwargs)

    return checked


def with_old_epsilon_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Have arguments of accountants elsewhere refused with what to write instead."""

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name in {"alphas", "eps_error", "delta_error"}]
        if unknown:
            raise InvalidArgument(
                f"get_epsilon must get delta alone, got {', '.join(unknown)}. Write engine.get_epsilon(delta): the "
                "accountant chooses its orders and grid, and its bounds hold for any."
            )
        return method(*args, **kwargs)

    return checked


def _old_signature(method: str, unknown: Sequence[str]) -> InvalidArgument:
    got = ", ".join(f"{name}=" for name in unknown) or "arguments by position"
    if _ADAPTIVE.intersection(unknown):
        return InvalidArgument(
            f"{method} must get its own arguments, got {got}. For a clipping norm that adapts pass "
            "clipping=QuantileClipping(…) of sordino.clipping."
        )
    where = "PrivacyEngine" if method == "__init__" else method
    return InvalidArgument(
        f"{where} must get its own arguments by name, got {got}. Write engine = PrivacyEngine(), then "
        "model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, "
        "noise_multiplier=…, max_grad_norm=…), and engine.get_epsilon(delta); instead of noise_multiplier= "
        "make_private_with_epsilon takes target_epsilon=, target_delta= and epochs=."
    )


def not_offered(name: str) -> AttributeError:
    """What is raised for an attribute that the engine doesn't have."""
    if name in _NOT_OFFERED:
        return NotOffered(f"engine must be used by its own methods, got {name}. {_NOT_OFFERED[name]}.")
    return AttributeError(f"'PrivacyEngine' object has no attribute {name!r}")


def check_own_objects(module: nn.Module, optimizer: Optimizer, data_loader: object) -> None:
    """Refuse what Opacus wrapped already.

    Raises:
        InvalidArgument: the module, the optimizer or the loader is one of Opacus's.
    """
    given = {
        "module": (module, "Pass your own module: module._module"),
        "optimizer": (optimizer, "Pass your own optimizer: optimizer.original_optimizer"),
        "data_loader": (data_loader, "Pass the DataLoader you would train with"),
    }
    for name, (value, advice) in given.items():
        origin = next((kind for kind in type(value).__mro__ if kind.__module__.split(".")[0] == "opacus"), None)
        if origin is not None:
            raise InvalidArgument(
                f"{name} must not be wrapped by another engine, got {origin.__module__.split('.')[0]}'s "
                f"{origin.__name__}. {advice}."
            )


_CLIPPING_ELSEWHERE = {
    "adaptive": "Pass clipping=QuantileClipping(…) of sordino.clipping",
    "ghost": "Leave it out: no per-record gradients are held by default either",
}


def norm_and_clipping(
    max_grad_norm: float | Schedule | Sequence[float], clipping: str | Clipping
) -> tuple[float | Schedule, str | Clipping]:
    """One clipping norm and the method; a list of norms, one per parameter, becomes `GroupedClipping`.

    Raises:
        InvalidArgument: a list of norms without ``clipping="per_layer"``, or a name that other engines have for it.
    """
    if isinstance(clipping, str) and clipping in _CLIPPING_ELSEWHERE:
        raise InvalidArgument(
            f"clipping must be one of this library's methods, got {clipping!r}. {_CLIPPING_ELSEWHERE[clipping]}."
        )
    if not isinstance(max_grad_norm, list | tuple):
        return max_grad_norm, clipping  # pyright: ignore[reportReturnType]
    if clipping != "per_layer":
        raise InvalidArgument(
            f"max_grad_norm must be one number for all parameters, got {len(max_grad_norm)} numbers. For a norm for "
            "each parameter pass clipping='per_layer'."
        )
    norms = tuple(checks.positive(max_grad_norm=norm) for norm in max_grad_norm)
    return math.hypot(*norms), GroupedClipping(by="parameter", weights=norms)


def check_options(
    batch_first: bool,
    noise_generator: None,
    grad_sample_mode: str,
    loss_reduction: str,
    wrap_model: bool,
    rand_on_empty: bool,
) -> None:
    """Refuse what `make_private` can't do; "hooks", "functorch" and "ew" are all the same here."""
    checks.one_of((True,), batch_first=batch_first, hint="Move the records to the first dimension.")
    if "ghost" in grad_sample_mode:
        raise InvalidArgument(
            f"grad_sample_mode must be left out, got {grad_sample_mode!r}, with which other engines return the "
            "criterion as a fourth object. Write model, optimizer, loader = engine.make_private(…) without "
            "grad_sample_mode= and criterion=: no per-record gradients are held by default either, and the loop calls "
            "its own loss, on outputs.logits for example."
        )
    checks.one_of(_GRAD_SAMPLE_MODES, grad_sample_mode=grad_sample_mode)
    checks.one_of(("mean", "sum"), loss_reduction=loss_reduction)
    checks.one_of((True, False), rand_on_empty=rand_on_empty)
    checks.one_of(
        (True,),
        wrap_model=wrap_model,
        hint="Leave it out: make_private returns your own module; engine.detach() takes its hooks off.",
    )
    if noise_generator is not None:
        raise InvalidArgument(
            "noise_generator must be None, got a generator: noise is drawn from a cryptographic generator keyed by run "
            "and step. For a repeatable test run use PrivacyEngine(seed=…, reproducible=True)."
        )


# ----------------------------------------------------------------------------------------------------------------------
# The familiar engine: keep your PyTorch loop, change the import line.
# ----------------------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class _EngineNames(type):
    """Has names of other engines, read from the class, refused with what to write instead."""

    if not TYPE_CHECKING:  # which would take it for any name

        def __getattr__(cls, name: str) -> object:
            raise not_offered(name)


class PrivacyEngine(metaclass=_EngineNames):
    """Makes a module, an optimizer and a data loader train with differential privacy (DP-SGD).

    When: you have a PyTorch loop and want to keep it. If you start afresh, `sordino.fit` is shorter.

    Guarantee: every step of the returned optimizer is the plan's event on the dataset, for the neighboring relation
    and unit that `guarantee` names, and is charged before its records are read. A step that is not private raises and
    changes nothing.

    Args:
        accountant: "auto" or "prv" (tight numerical accounting), or "rdp".
        reproducible: with `seed`, noise and sampling repeat from run to run; the guarantee is then marked not for
            release.
        seed: only with `reproducible=True`.
        ledger: the dataset's account, charged in blocks ahead of the batches; a batch that does not fit is not drawn.
        run_folder: where every step is written before its records are read: a new folder, or that of a run to go on
            with, whose charges then count here too, whatever checkpoint is loaded. None writes nothing.
        delta: δ in (0, 1) at which the run folder states its guarantee; None takes ``target_delta``, or 1e-5.
        clipping_mode: how clipped sums are taken, as in `PerformanceOptions`: "fast", "low_memory", "groupwise" or
            "two_pass". With one of the last two ``loss.backward()`` runs once in a batch.
        gradients: "one-by-one" runs plain autograd on one record at a time, as in `PerformanceOptions`: for every model
            that runs on one record. The loader then splits batches into single records. "auto" and "captured" are the
            same here: how a batch is split is settled before its loss is seen.
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

    @with_old_signatures
    def __init__(
        self,
        *,
        accountant: str = "auto",
        reproducible: bool = False,
        seed: int | None = None,
        ledger: Account | Reservation | None = None,
        secure_mode: bool = False,
        clipping_mode: ClippingMode = "fast",
        gradients: Gradients = "auto",
        run_folder: str | Path | None = None,
        delta: float | None = None,
    ) -> None:
        self._accountant = opacus_accountant(accountant)
        self._secure = bool(checks.one_of((True, False), secure_mode=secure_mode))
        self._performance = PerformanceOptions(clipping_mode=clipping_mode, gradients=gradients)
        KeyedRNG(seed=seed, reproducible=reproducible)
        self._seed, self._reproducible, self._ledger = seed, reproducible, ledger
        self._attached: list[PrivateModel] = []
        self._plans: list[Plan] = []
        # Of models that were detached: those that took a batch.
        self._stepped: list[Plan] = []
        self._adaptive: AdaptiveBudgetRun | None = None
        self._charges = ChargeLog()
        self._delta = None if delta is None else checks.probability(zero=False, one=False, delta=delta)
        self.journal = Journal(self._charges)
        if run_folder is not None:
            self.journal.open(run_folder)

    # --- making private ------------------------------------------------------------------------------------------

    @with_old_signatures
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[object],
        noise_multiplier: float | Schedule | None = None,
        max_grad_norm: float | Schedule | Sequence[float] | None = None,
        plan: Plan | None = None,
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        microbatch_size: int | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        clipping: str | Clipping = "flat",
        correlated_noise: CorrelatedNoise | None = None,
        units: UnitAssignment | None = None,
        budget: AdaptiveBudget | None = None,
        batch_first: bool = True,
        criterion: Criterion | None = None,
        public_batch: object = None,
        public_records: Sequence[object] | None = None,
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Attach a private step to your own module and optimizer, and get the loader that draws private batches.

        Guarantee: one step of `optimizer` is a Gaussian of `noise_multiplier` on a Poisson sample of the dataset,
        with `correlated_noise` or `budget` a step of those.

        Args:
            module: in training mode when you train; called on the loader's batches. A module that this engine made
                private already is made private again: what was spent stays counted, its earlier loader ends.
            optimizer: holds the parameters to train, all of them `module`'s.
            data_loader: a DataLoader with a map-style dataset, with or without shuffling. Of a loader that
                `make_private` returned, the DataLoader that it was made from is taken.
            noise_multiplier: noise standard deviation over the sensitivity of the clipped sum, ≥ 0, or a schedule of
                it over the steps; 0 is for debugging (ε = ∞). Required without `plan`.
            max_grad_norm: clipping norm > 0 of one record's gradient, or a schedule of it. Required without `plan`.
                With clipping="per_layer" also a list, one norm > 0 for each trained parameter in the order of
                ``module.named_parameters()``.
            plan: every setting that affects the guarantee, in place of all arguments that name one: for a plan made
                with `Plan.for_epsilon`, or read from a file. The loader ends after the plan's steps; with 0 steps it
                has no end.
            expected_batch_size: public divisor of the noisy sum; by default sample_rate × size of the dataset.
            sample_rate: probability that a record joins a batch; by default 1 / len(data_loader). Declare both this
                and `expected_batch_size` when the size of the dataset is not public.
            loss_reduction: "mean" or "sum" over the records of the batch, as your loss does it.
            poisson_sampling: False keeps shuffled epochs of disjoint batches, with no amplification, and needs a
                `neighboring_relation` that replaces a record.
            microbatch_size: most records in one forward and backward; the loader then splits a batch and the
                optimizer only changes parameters at its last part. Memory only.
            neighboring_relation: which datasets count as neighbors.
            clipping: "flat", "per_layer", "automatic", "psac", "global", "adaclip", or an object of `sordino.clipping`.
            correlated_noise: `CorrelatedNoise`: batches then come as its participation says, for as many as its
                strategy has.
            units: which user each record of the dataset belongs to: users are drawn, batches hold all their records,
                and a user's records are clipped and protected together.
            budget: chooses each step's noise from what was released, within its ε; `noise_multiplier` is then what it
                expects. A batch that does not fit is not drawn: the loader ends, and `budget_exhausted` says why.
            batch_first: must be True: records come first in every input.
            criterion: your loss as a function of (output, target), for batches (*inputs, target). Then it is checked
                before the first forward; otherwise the first batch's loss is followed to its backward pass.
            public_batch: at least five public or invented records, as the loader would give them: for a loop that does
                not run on synthetic features in (0, 1) and labels 0 and 1.
            public_records: at least five public or invented items, as the dataset would give them: for a `collate_fn`
                that does not run on synthetic items. They also serve as `public_batch`.
            noise_generator: must be None: the noise is keyed by run and step and can't be taken from outside.
            grad_sample_mode: "hooks", "functorch" or "ew": accepted, makes no difference.
            wrap_model: must be True, which makes no difference: your own module comes back.
            rand_on_empty: accepted, makes no difference: an empty batch comes as synthetic records.

        Returns:
            `module` and `optimizer`, the same objects, and the private loader.

        Raises:
            InvalidArgument: an option outside its range.
            UnknownSampler: the loader draws in a way that can't be accounted for.
            UnsupportedModule: a layer mixes records.
            CoupledRecords: `collate_fn`, `criterion` or the module couples records.
        """
        data_loader = own_loader(data_loader)
        check_own_objects(module, optimizer, data_loader)
        if budget is not None:
            check_budget(data_loader, self._plans)
        is_limited = plan is not None and plan.steps > 0
        if plan is not None:
            check_only_plan(
                plan,
                secure=self._secure,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                expected_batch_size=expected_batch_size,
                sample_rate=sample_rate,
                poisson_sampling=poisson_sampling,
                neighboring_relation=neighboring_relation,
                clipping=clipping,
                correlated_noise=correlated_noise,
            )
            check_plan(plan, units)
            sample_rate = plan.step_plan(0).sample_rate
        elif noise_multiplier is None or max_grad_norm is None:
            name = "noise_multiplier" if noise_multiplier is None else "max_grad_norm"
            raise InvalidArgument(
                f"{name} must be given, got None. Pass noise_multiplier= and max_grad_norm=, or plan=."
            )
        else:
            norm, method = norm_and_clipping(max_grad_norm, clipping)
            plan = engine_plan(
                data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=norm,
                expected_batch_size=expected_batch_size,
                sample_rate=sample_rate,
                steps=0,
                delta=get_delta(budget, self._delta),
                poisson_sampling=poisson_sampling,
                neighboring_relation=neighboring_relation,
                clipping=method,
                correlated_noise=correlated_noise,
                units=units,
                secure=self._secure,
            )
        check_options(batch_first, noise_generator, grad_sample_mode, loss_reduction, wrap_model, rand_on_empty)
        loop = MakePrivateArguments(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            loss_reduction=loss_reduction,
            microbatch_size=microbatch_size,
            criterion=criterion,
            public_batch=public_batch,
            public_records=public_records,
            units=units,
            performance=self._performance,
        )
        return self._attach(
            plan,
            loop,
            steps=steps_per_epoch(data_loader, sample_rate),
            adaptive=None if budget is None else AdaptiveBudgetRun(budget, plan),
            max_steps=plan.steps if is_limited else None,
        )

    @with_old_signatures
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[object],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Schedule | Sequence[float],
        expected_batch_size: float | None = None,
        sample_rate: float | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        microbatch_size: int | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        clipping: str | Clipping = "flat",
        correlated_noise: CorrelatedNoise | Literal["auto"] | None = None,
        units: UnitAssignment | None = None,
        batch_first: bool = True,
        criterion: Criterion | None = None,
        public_batch: object = None,
        public_records: Sequence[object] | None = None,
        exceed_target: bool = False,
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """`make_private` with the least noise for which `epochs` epochs stay within (target_epsilon, target_delta).

        Guarantee: `get_epsilon(target_delta)` is at most `target_epsilon`: what the engine charged before, and what
        other models of it have yet to charge within targets of their own, is part of it; the last call's target is
        that of the engine. A batch beyond it raises `BudgetExceeded` before a record is read.

        `target_epsilon` is > 0 and never exceeded by rounding, `target_delta` in (0, 1), `epochs` ≥ 1 passes over the
        loader; `correlated_noise` "auto" takes independent or correlated noise, whichever leaves less in the model's
        position.
        `exceed_target` True goes on past the epochs, and `get_epsilon` grows beyond the target. The other arguments,
        returns and errors are those of `make_private`; an engine that has spent the target raises `BudgetExceeded`.
        """
        check_options(batch_first, noise_generator, grad_sample_mode, loss_reduction, wrap_model, rand_on_empty)
        data_loader = own_loader(data_loader)
        check_own_objects(module, optimizer, data_loader)
        norm, method = norm_and_clipping(max_grad_norm, clipping)
        steps = steps_per_epoch(data_loader, sample_rate)
        plan = engine_plan(
            data_loader,
            noise_multiplier=1.0,
            max_grad_norm=norm,
            expected_batch_size=expected_batch_size,
            sample_rate=sample_rate,
            steps=steps * checks.integer(1, epochs=epochs),
            delta=self._same_delta(checks.probability(zero=False, one=False, target_delta=target_delta)),
            poisson_sampling=poisson_sampling,
            neighboring_relation=neighboring_relation,
            clipping=method,
            correlated_noise=correlated_noise,
            units=units,
            secure=self._secure,
        )
        check_compatible_plans(plan, self._plans, budgeted=self._adaptive is not None)
        target = EpsilonTarget(
            epsilon=checks.positive(target_epsilon=target_epsilon),
            delta=plan.delta,
            neighboring_relation=plan.neighboring_relation,
            accountant=self._accountant,
        )
        others = [one for one in self._attached if one.hooks.module is not module]
        earlier = [self.event(), *(one.charges.remaining(one.run.next_step) for one in others)]
        before = compose([event for event in earlier if not isinstance(event, NoOp)])
        plan = calibrate_plan(plan, target, correlated_noise=correlated_noise, before=before)
        loop = MakePrivateArguments(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            loss_reduction=loss_reduction,
            microbatch_size=microbatch_size,
            criterion=criterion,
            public_batch=public_batch,
            public_records=public_records,
            units=units,
            performance=self._performance,
        )
        checks.one_of((True, False), exceed_target=exceed_target)
        made = self._attach(plan, loop, steps=steps, target=None if exceed_target else target)
        for attached in self._attached:
            attached.charges.retarget(target)
        return made

    def _attach(
        self,
        plan: Plan,
        loop: MakePrivateArguments,
        *,
        steps: int,
        adaptive: AdaptiveBudgetRun | None = None,
        target: EpsilonTarget | None = None,
        max_steps: int | None = None,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        if loop.units is not None and loop.microbatch_size is not None:
            # How many parts a batch has follows from the number of records, which that of units says nothing of.
            plan = replace(plan, dataset_size_is_public=True)
        check_compatible_plans(plan, [*self.journal.plans, *self._plans], budgeted=self._adaptive is not None)
        earlier = self._charges.runs() if self.journal.path is not None else ()
        position = self._index_of(loop.module)
        if position < len(self._attached):
            # The module is made private again; its earlier loader gives no more batches.
            self._attached[position].detach()
        attached, loader = loop.attach(
            plan,
            number=position,
            steps=steps,
            rng=self._new_randomness(),
            log=self._charges,
            ledger=self._ledger,
            adaptive=adaptive,
            journal=self.journal,
            target=target,
            max_steps=max_steps,
        )
        name_alike(self)
        if adaptive is not None:
            for event, times in earlier:
                adaptive.take_over(event, times)
        self._adaptive = adaptive
        self._attached[position:] = [attached, *self._attached[position + 1 :]]
        self._plans.append(plan)
        return loop.module, loop.optimizer, loader

    def _index_of(self, module: nn.Module) -> int:
        """Where the engine keeps `module`, or will keep it."""
        positions = (position for position, attached in enumerate(self._attached) if attached.hooks.module is module)
        return next(positions, len(self._attached))

    def _same_delta(self, delta: float) -> float:
        if self._delta not in (None, delta):
            raise InvalidArgument(
                f"target_delta must be the engine's delta, {self._delta!r}, got {delta!r}. Leave delta out where the "
                "engine is made."
            )
        return delta

    def _new_randomness(self) -> KeyedRNG:
        """One master key for each model: two of one engine never share a draw or a noise value."""
        seed = None if self._seed is None else self._seed + len(self._plans)
        return KeyedRNG(seed=seed, reproducible=self._reproducible)

    def detach(self) -> None:
        """Take all hooks off: modules and optimizers are ordinary again, the private loaders are at their end.

        What was spent stays on the record. A run folder gets its guarantee and is closed.
        """
        self._release()
        self.close_run_folder()

    def _release(self) -> None:
        self._stepped += _stepped(self._attached)
        for attached in self._attached:
            attached.detach()
        self._attached.clear()

    def close_run_folder(self, model: nn.Module | None = None) -> None:
        """Write into the run folder what holds for everything charged so far, and let other processes have it.

        It is opened again when a further batch is charged. Without a run folder nothing happens.

        Args:
            model: whose parameters are written too, to ``model.safetensors``, or None.
        """
        if self.journal.path is not None:
            state = None if model is None else model.state_dict()
            self.journal.finish(self._claim(self.delta, accountant="auto"), state)

    def mark_public(self, batch: T) -> T:
        """Mark tensors as made without private records: a model in training may then be called on them.

        When: a critic sees synthetic records and real ones. Each row is clipped together with the private record in
        the same position.

        Args:
            batch: tensors that depend on private records only through what private training released.

        Returns:
            `batch` itself.
        """
        mark_public(batch)
        return batch

    def backward(self, losses: Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass of one loss per record: the form that a loop of your own should prefer.

        When: in place of ``loss.backward()``. The sum or mean over the records (`loss_reduction`) is taken here, so
        that no divisor, weight or mask can tie the records of a batch to each other by accident; and the same losses
        work with `sordino.fit`. A scalar with ``loss.backward()`` is checked just as well.

        Args:
            losses: shape (records,), made of a private model's output on the batch at hand
                (``F.cross_entropy(model(x), y, reduction="none")``).
            retain_graph: whether the graph is kept for another backward pass on the batch.

        Raises:
            LossShapeError: not one loss per record.
            CoupledRecords: a record's loss or gradient depends on other records; checked on synthetic records.
            NonPrivateStep: the losses are not those of a private model on the batch at hand.

        Example:
            >>> import torch
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> model, data = torch.nn.Linear(3, 1), TensorDataset(torch.ones(64, 3))
            >>> optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine()
            >>> model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, max_grad_norm=1.0,
            ...     data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0)
            >>> for (x,) in loader:
            ...     engine.backward(model(x).square().sum(1))
            ...     optimizer.step()
        """
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            got = f"{losses.dim()} dimensions" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise LossShapeError(
                f"losses must be a tensor of shape (records,), one loss per record, got {got}. Use reduction='none' "
                "and average over everything but the records (.flatten(1).mean(1)); a sum or mean over the records "
                "takes loss.backward()."
            )
        models = [one.hooks for one in self._attached]
        owners = [hooks for hooks in models if hooks.owns(losses)]
        # Losses that could not be followed are judged by the gradients that arrive at the module's output.
        if not owners and not isinstance(losses, TracedTensor):
            owners = models[:1] if len(models) == 1 else []
        if not owners:
            raise NonPrivateStep(
                "losses must be made of a private model's output on the batch that the loader gave last, got others. "
                "Take a batch from the private loader, call the model on it, and pass one loss for each of its records."
            )
        owners[0].backward(losses, retain_graph=retain_graph)

    def compiled_backward(self, module: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., None]:
        """Make a function that runs forward pass, loss, backward pass and clipping of a batch as compiled graphs.

        When: a small model in a long run, in place of the module's call, the loss and `backward`. The function takes
        the tensors of a batch as the loader gave them; ``optimizer.step()`` adds the noise as always. Each public size
        of batches is recorded at its first use, which takes seconds to a minute. Its first batch runs uncompiled,
        which checks the loss, and so does a batch with a record that is not finite.

        Guarantee: that of `backward`; the clipped sums are the same up to the order of additions.

        Args:
            module: made private by this engine.
            loss: ``loss(module, *batch)``, one value per record, as for `sordino.fit`. Values that it reads from
                outside the batch and the module are fixed when a graph is recorded.

        Returns:
            A function of a batch's tensors.

        Raises:
            InvalidArgument: plan or engine has an option that can't be compiled, or there is no C++ compiler.
            NotOffered: `module` is not private.

        Example:
            >>> import torch
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> model, data = torch.nn.Linear(3, 1), TensorDataset(torch.ones(64, 3))
            >>> optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine()
            >>> model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, max_grad_norm=1.0,
            ...     data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0)
            >>> backward = engine.compiled_backward(model, lambda model, x: model(x).square().sum(1))
            >>> for (x,) in loader:
            ...     backward(x)
            ...     optimizer.step()
        """
        private = self.private_model(module)
        if private is None:
            raise NotOffered("module must be made private to be compiled, got another. Call make_private first.")
        hooks = private.hooks
        compiled = hooks.compiled_step(loss)

        def backward(*batch: object) -> None:
            if hooks.compiled_pass(compiled, batch):
                return
            try:
                self.backward(loss(module, *batch))
            except BaseException:
                compiled.forget()
                raise

        return backward

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over sensitivity in the coming step of the model made private last."""
        return self._coming_step().noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """Clipping norm in the coming step of the model made private last."""
        return self._coming_step().max_grad_norm

    @property
    def expected_batch_size(self) -> float:
        """The divisor of the noisy sum in the coming step of the model made private last."""
        return self._coming_step().expected_batch_size

    def _coming_step(self) -> StepPlan:
        if not self._attached:
            raise NotOffered(
                "engine must have a private model to have these values, got none. Call make_private first."
            )
        return self._attached[-1].run.coming_step

    def __getattr__(self, name: str) -> object:
        raise not_offered(name)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "PrivacyEngine can't be pickled or copied: a copy would repeat its noise. Save engine.state_dict(), and "
            "load it into a new engine with load_state_dict()."
        )

    # --- accounting ----------------------------------------------------------------------------------------------

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        return self._charges.event()

    def guarantee(self, delta: float) -> Guarantee:
        """What holds for everything charged so far, with all that is needed to read it; under a budget, the budget.

        Args:
            delta: in [0, 1].
        """
        return self._claim(delta, accountant=self._accountant)

    def _claim(self, delta: float, *, accountant: str) -> Guarantee:
        return engine_guarantee(
            self._charges,
            [*self.journal.plans, *self._plans],
            self._adaptive,
            stepped=[*self.journal.plans, *self._stepped, *_stepped(self._attached)],
            delta=delta,
            accountant=accountant,
            reproducible=self._reproducible or self.journal.seeded,
            diagnosed=self.journal.diagnosed,
        )

    @property
    def delta(self) -> float:
        """δ at which the run folder, and files next to saved weights, state the guarantee."""
        if self._delta is not None:
            return self._delta
        plans = [*self.journal.plans, *self._plans]
        return plans[-1].delta if plans else get_delta(None)

    @property
    def budget_exhausted(self) -> bool:
        """Whether a budget refused a batch, and so ended the loader."""
        return self._adaptive is not None and self._adaptive.is_spent

    @with_old_epsilon_arguments
    def get_epsilon(self, delta: float) -> float:
        """The ε at `delta` of everything charged so far, 0 before the first batch, ∞ without noise."""
        return self.guarantee(delta).epsilon

    @property
    def accountant(self) -> Self:
        """The engine itself: ``engine.accountant.get_epsilon(delta=…)`` works as it does elsewhere."""
        return self

    def state_dict(self) -> dict[str, object]:
        """What was charged, as plain JSON types. Noise and sampling are never saved: a resumed run draws again."""
        return self._charges.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what `state_dict` saved: it is added to what was charged here, and taken from the budget.

        Raises:
            InvalidArgument: a run folder holds what this engine charged.
        """
        if self.journal.is_set:
            raise InvalidArgument(
                "state must not be loaded into an engine with a run folder, which holds all that was charged. Leave "
                "load_state_dict out, or make the engine without run_folder=."
            )
        self.journal.has_foreign_charges = True
        saved = ChargeLog()
        saved.load_state_dict(state)
        for event, times in saved.runs():
            self._charges.add(event, times)
            if self._adaptive is not None:
                self._adaptive.take_over(event, times)

    def private_model(self, module: nn.Module) -> PrivateModel | None:
        """What the engine keeps of `module`; None when it did not make it private."""
        return next((one for one in self._attached if one.hooks.module is module), None)

    @property
    def next_steps(self) -> tuple[int, ...]:
        """The number of the next step of each model that is private now, in the order of `make_private`."""
        return tuple(one.run.next_step for one in self._attached)

    def start_at(self, steps: Sequence[int]) -> None:
        """Number each model's next step as `next_steps` said when its weights were saved: schedules go on there."""
        for one, step in zip(self._attached, steps, strict=False):
            one.run.resume(checks.integer(0, step=step))

    save_checkpoint, load_checkpoint = save_checkpoint, load_checkpoint


def _stepped(attached: Sequence[PrivateModel]) -> list[Plan]:
    """The plans of models that took a batch."""
    return [one.plan for one in attached if one.run.has_charged]
