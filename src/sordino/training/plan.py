"""All that changes the guarantee, in one frozen object.

Clip factors, noise scale, divisor and the accountant's event are derived from the plan, never stored with it.

Example:
    >>> plan = Plan(noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.01, steps=10_000,
    ...             expected_batch_size=600.0, delta=1e-5)
    >>> round(plan.guarantee().epsilon, 5)
    0.94687
"""

import ctypes
import json
import math
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Literal, Self, get_args

from torch import nn

from sordino import accounting, checks
from sordino.clipping import (
    Clipping,
    FlatClipping,
    GroupedClipping,
    clipping_from_dict,
    clipping_to_dict,
)
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, NonPrivate, NoOp, SelfComposed, compose
from sordino.gradients import GradientCapture, KernelTimings, OneByOne, Recorder
from sordino.mechanisms import TensorGaussianMechanism
from sordino.mechanisms.correlated import CorrelatedGaussianMechanism
from sordino.mechanisms.integer_noise import GridSumMechanism
from sordino.mechanisms.tensor_noise import idle_threads_ended
from sordino.sampling import (
    CyclicPoissonSampling,
    FixedBatchSampling,
    FixedSizeSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampler,
    ScheduledPoissonSampling,
    ShuffledSampling,
)
from sordino.schedules import Schedule, scale_schedule, schedule_from_dict, schedule_to_dict, schedule_value
from sordino.training.correlated_noise import CorrelatedNoise, choose_noise
from sordino.training.exclusions import Option, check_exclusions
from sordino.training.noisy_releases import LossRelease

# ----------------------------------------------------------------------------------------------------------------------
# A process that does nothing but train: freed memory stays with it, and idle threads leave their processors.
#
# A training step frees and asks for the same large arrays again and again. The C library gives the top of its heap back
# to the system each time, and the system hands out fresh pages, cleared and mapped one by one: on virtual machines that
# can take a fifth of a private step, which needs more such arrays than a plain one.
#
# References:
#     mallopt(3), M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX; malloc_trim(3). OpenMP API 5.0,
#     omp_pause_resource_all.
# ----------------------------------------------------------------------------------------------------------------------


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# From this size on arrays are mapped one by one outside: the largest size that the library allows.
_MAPPED_ARRAYS = 1 << 25
_MOST_MAPPED = 65536
_NEVER = 2**31 - 1

_lock = threading.Lock()
_inside = 0


@contextmanager
def tuned_process() -> Iterator[None]:
    """A block that trains, in a process that does nothing else.

    Memory that was freed is kept for the next array and goes back to the system at the end, and torch's idle threads
    are ended before noise is drawn on several threads. Both are settings of the whole process: the C library's
    thresholds are not those of before afterwards, but those that it arrives at by itself where large arrays are freed.
    `PerformanceOptions(tune_process=True)` does the same for `fit`. Without Linux and glibc memory is not kept.

    Example:
        >>> with tuned_process():
        ...     squares = [step**2 for step in range(3)]
    """
    with idle_threads_ended(), _freed_memory_kept():
        yield


@contextmanager
def _freed_memory_kept() -> Iterator[None]:
    global _inside  # noqa: PLW0603 (the heap is the process's)
    library = _glibc()
    if library is None:
        yield
        return
    with _lock:
        _inside += 1
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_ARRAYS)
        # Even the largest arrays come from the heap: what is mapped for one alone goes back with it.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                # What the library's own rule arrives at once such arrays were freed.
                library.mallopt(_M_MMAP_MAX, _MOST_MAPPED)
                library.mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_ARRAYS)
                library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


# ----------------------------------------------------------------------------------------------------------------------
# What changes speed and memory and never the guarantee or the result.
# ----------------------------------------------------------------------------------------------------------------------


ClippingMode = Literal["fast", "low_memory", "groupwise", "two_pass"]
Gradients = Literal["auto", "captured", "one-by-one"]


@dataclass(frozen=True, kw_only=True)
class PerformanceOptions:
    """What changes speed and memory and never the guarantee or the result.

    Args:
        microbatch_size: most records in one forward and backward; None takes the logical batch whole.
        device: where the model and the batches live; None leaves them where the model is.
        compile: run the steps of `fit` as compiled graphs; it refuses what can't be compiled. Needs a C++ compiler.
            With diagnostics, which show losses, steps stay as they are.
        clipping_mode: "low_memory" keeps per-record gradients only where they are smaller than what is freed for them;
            it is slower.
            "groupwise" clips each group of a `GroupedClipping` while the backward pass runs, and frees its layers then.
            "two_pass" runs the backward pass twice, for norms and then for sums, and keeps nothing of a layer: with
            gradient checkpointing, or where memory is short. A step of BERT-mini takes 1.7 times a plain
            checkpointed one.
        autotune: take the kernels that are fastest by the clock instead of the cost model's. Each shape of a layer is
            timed when it first comes, and remembered in the user's cache folder. Runs then repeat up to rounding only.
        gradients: "captured" has all records of a chunk in one forward and backward pass, with a rule for each layer.
            "one-by-one" runs plain autograd on one record at a time: for every model that runs on one record, whatever
            its layers do; `microbatch_size` is then 1. "auto" is "captured", and in `fit` "one-by-one" where synthetic
            records show that the model can't be captured and has the gradients in a batch that its records have alone.
        tune_process: `fit` runs in a `tuned_process`: it keeps freed memory and ends idle threads, for a process that
            does nothing else.
    """

    microbatch_size: int | None = None
    device: str | None = None
    compile: bool = False
    clipping_mode: ClippingMode = "fast"
    autotune: bool = False
    gradients: Gradients = "auto"
    tune_process: bool = False

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            checks.integer(1, microbatch_size=self.microbatch_size)
        checks.one_of(get_args(ClippingMode), clipping_mode=self.clipping_mode)
        checks.one_of(get_args(Gradients), gradients=self.gradients)
        if self.is_one_by_one:
            self._check_plain()

    def _check_plain(self) -> None:
        """Refuse settings of a capture where there is none."""
        given = {
            "clipping_mode": (self.clipping_mode, "fast"),
            "compile": (self.compile, False),
            "autotune": (self.autotune, False),
        }
        for name, (value, usual) in given.items():
            if value != usual:
                raise InvalidArgument(
                    f'{name} must be {usual!r} with gradients="one-by-one", got {value!r}: there is nothing to spare, '
                    "to compile or to choose where plain autograd runs. Leave it out."
                )

    def options(self) -> set[Option]:
        """What these have of the options that exclude each other."""
        has = {
            Option.COMPILE: self.compile,
            Option.GROUPWISE: self.clipping_mode == "groupwise",
            Option.ONE_BY_ONE: self.is_one_by_one,
            Option.TWO_PASS: self.clipping_mode == "two_pass",
        }
        return {option for option, applies in has.items() if applies}

    @property
    def is_one_by_one(self) -> bool:
        """Whether plain autograd runs on one record at a time."""
        return self.gradients == "one-by-one"

    @property
    def chunk_size(self) -> int | None:
        """Most records in one forward and backward; None takes the logical batch whole."""
        return 1 if self.is_one_by_one else self.microbatch_size

    @property
    def may_change(self) -> bool:
        """Whether one record at a time may be taken where the model can't be captured."""
        return self.gradients == "auto" and self.clipping_mode == "fast" and not self.compile and not self.autotune

    def recorder(self, model: nn.Module, parameters: Iterable[nn.Parameter], *, own_loop: bool = False) -> Recorder:
        """What measures and adds up the gradients, with the kernels that are wanted."""
        if self.is_one_by_one:
            return OneByOne(model, parameters, only_backward=own_loop)
        timings = KernelTimings() if self.autotune else None
        return GradientCapture(model, parameters, low_memory=self.clipping_mode != "fast", timings=timings)

    def keeping(self) -> AbstractContextManager[None]:
        """The block in which `fit` trains."""
        return tuned_process() if self.tune_process else nullcontext()


# ----------------------------------------------------------------------------------------------------------------------
# The plan's values at one step: clip factors, noise, divisor and event come from here.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The values of one step, all fixed before the run.

    Args:
        noise_multiplier: noise standard deviation over sensitivity, ≥ 0.
        max_grad_norm: clipping norm C > 0 of one unit's gradient.
        sample_rate: probability in (0, 1] that a unit joins the batch.
        expected_batch_size: public divisor of the noisy sum, > 0.
        clipping: how gradients are clipped to the bound.
        neighboring_relation: which datasets count as neighbors.
        loss_release: what is released of the losses together with the gradient, or None.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    expected_batch_size: float
    clipping: Clipping
    neighboring_relation: NeighboringRelation
    loss_release: LossRelease | None = None

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(max_grad_norm=self.max_grad_norm)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        checks.positive(expected_batch_size=self.expected_batch_size)

    @cached_property
    def sensitivity(self) -> float:
        """How far one unit moves the clipped sum, in ℓ2 norm."""
        return self.clipping.sensitivity(self.neighboring_relation, max_grad_norm=self.max_grad_norm)

    @cached_property
    def mechanism(self) -> TensorGaussianMechanism:
        """The noise on the clipped sum, and on what is released with it."""
        moved = self.sensitivity if self.loss_release is None else self.loss_release.joint_scale(self.sensitivity)[1]
        return TensorGaussianMechanism(noise_multiplier=self.noise_multiplier, l2_sensitivity=moved)

    @property
    def gradient_noise_multiplier(self) -> float:
        """Noise on the clipped sum over its own sensitivity; a loss curve raises it above `noise_multiplier`."""
        return self.noise_multiplier * (1.0 if self.loss_release is None else self.loss_release.noise_factor)

    def grid_mechanism(self, dimension: int) -> GridSumMechanism:
        """The noise on a clipped sum of whole numbers with `dimension` entries."""
        return GridSumMechanism(
            noise_multiplier=self.noise_multiplier,
            record_norm=self.max_grad_norm,
            dimension=dimension,
            moved=int(self.neighboring_relation.sensitivity_factor),
        )

    @property
    def event(self) -> Event:
        """The event of the step on its batch, before sampling is counted."""
        if self.noise_multiplier == 0:
            return NonPrivate(reason="noise_multiplier is 0")
        return self.clipping.step_event(self.noise_multiplier) or self.mechanism.event()

    @cached_property
    def poisson_event(self) -> Event:
        """The event of the step on a batch that each unit joins with probability `sample_rate`."""
        return PoissonSampling(sample_rate=self.sample_rate).event(self.event)

    @property
    def gradient_noise_stddev(self) -> float:
        """Standard deviation of the noise in each entry of the private gradient: z·Δ/B. AdaClip scales its own."""
        return self.mechanism.stddev / self.expected_batch_size


# ----------------------------------------------------------------------------------------------------------------------
# All that changes the guarantee, in one frozen object.
# ----------------------------------------------------------------------------------------------------------------------


_SCHEMA = 1
# What may change from step to step.
_PLANNED = ("noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch_size")
_OBJECTS = ("clipping", "correlated_noise", "loss_release")
Sampling = Literal["without_replacement", "with_replacement", "balls_in_bins"]
"""How batches are drawn where they are neither Poisson samples nor shuffled epochs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """DP-SGD as it will run: sampler, clipping, noise, steps, and what the guarantee speaks about.

    Guarantee: a run of `steps` steps under this plan is (ε, δ)-differentially private with the ε that
    `guarantee()` states, for the named unit and relation.

    Noise multiplier, clipping norm, sample rate and batch size are each a number or a `Schedule`: the step's values,
    its noise and its event are all read from ``at(step)``, and the accountant composes the steps one by one.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity of the clipped sum under
            `neighboring_relation`; 0 only for debugging (ε = ∞, the run is marked not private).
        max_grad_norm: clipping norm C > 0 of one unit's gradient.
        sample_rate: probability in (0, 1] that a unit joins a batch.
        steps: number of steps, ≥ 0.
        expected_batch_size: public divisor of the noisy sum, > 0; usually sample_rate × a public size.
        delta: δ in (0, 1).
        neighboring_relation: which datasets count as neighbors.
        privacy_unit: whose contribution is protected.
        dataset_size_is_public: True when `sample_rate` or `expected_batch_size` came from the size of the data
            set; the guarantee then treats that size as public, and says so.
        poisson_sampling: False deals each epoch into round(1 / sample_rate) disjoint batches instead, and claims no
            amplification; not under add-or-remove-one, and not with schedules.
        sampling: None draws as `poisson_sampling` says. "without_replacement" and "with_replacement" draw batches of
            exactly sample_rate × dataset_size records, for neighbors that replace or zero out a record;
            "balls_in_bins" lets each record fall into one of round(1 / sample_rate) batches of each epoch.
        dataset_size: number of records, or of units, that batches of fixed size are drawn from; it is then public.
            None, which it must be, with other samplers.
        clipping: how gradients are clipped to `max_grad_norm`, flat by default.
        correlated_noise: how the steps' noises hang together: None is independent noise, `CorrelatedNoise` draws
            batches as its participation says, from record numbers that stay the same in neighboring datasets.
        secure_mode: True rounds each record's clipped gradient to whole numbers and adds whole-number Gaussian noise,
            so that no low bit of a released float tells anything (see ``docs/secure-mode.md`` for what it costs).
        loss_release: releases each batch's mean loss with noise, paid for with more noise on the gradient; None
            releases nothing of the losses.

    Raises:
        InvalidArgument: a value is out of its range, or correlated noise meets a schedule, bounds that adapt, or
            another number of steps or rate than its own, or a loss curve meets noise or clipping that can't carry it.
        UnknownSampler: `poisson_sampling` is False under add-or-remove-one or with a schedule, or the batches would
            break the participation of the noise.

    Example:
        >>> from sordino.schedules import ExponentialSchedule
        >>> noise = ExponentialSchedule(start=6.0, end=3.0)
        >>> plan = Plan(noise_multiplier=noise, max_grad_norm=1.0, sample_rate=0.01, steps=100,
        ...             expected_batch_size=600.0, delta=1e-5)
        >>> plan.step_plan(0).noise_multiplier, plan.step_plan(99).noise_multiplier
        (6.0, 3.0)

    References:
        Abadi et al. 2016, algorithm 1.
    """

    noise_multiplier: float | Schedule
    max_grad_norm: float | Schedule
    sample_rate: float | Schedule
    steps: int
    expected_batch_size: float | Schedule
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD
    dataset_size_is_public: bool = False
    poisson_sampling: bool = True
    sampling: Sampling | None = None
    dataset_size: int | None = None
    clipping: Clipping = field(default_factory=FlatClipping)
    correlated_noise: CorrelatedNoise | None = None
    secure_mode: bool = False
    loss_release: LossRelease | None = None

    def __post_init__(self) -> None:
        checks.integer(0, steps=self.steps)
        checks.probability(zero=False, one=False, delta=self.delta)
        object.__setattr__(self, "neighboring_relation", NeighboringRelation(self.neighboring_relation))
        object.__setattr__(self, "privacy_unit", PrivacyUnit(self.privacy_unit))
        if not isinstance(self.clipping, Clipping):
            raise InvalidArgument(
                f"clipping must be an object of sordino.clipping, got {self.clipping!r}. Give FlatClipping()."
            )
        for name, kind in (("loss_release", LossRelease), ("correlated_noise", CorrelatedNoise)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidArgument(
                    f"{name} must be None or {kind.__name__}, got {type(value).__name__}. See sordino.training."
                )
        checks.one_of((True, False), secure_mode=self.secure_mode)
        self._settle_sampling()
        self.check_options()
        for step in {0, max(self.steps - 1, 0)} if self.is_scheduled else {0}:
            self.step_plan(step)
        if self.correlated_noise is not None:
            # Batches that keep the noise's participation, or an exception that names it.
            assert isinstance(self.sampler, CyclicPoissonSampling | FixedBatchSampling)
            assert self.mechanism is not None

    def _settle_sampling(self) -> None:
        """Make the fields that follow from `sampling` agree with it."""
        if self.sampling is not None:
            checks.one_of(get_args(Sampling), sampling=self.sampling, hint="See docs/training-options.md.")
            object.__setattr__(self, "poisson_sampling", False)
        if (self.dataset_size is not None) is not self.has_fixed_size:
            needed = "the number of records" if self.has_fixed_size else "None"
            raise InvalidArgument(
                f"dataset_size must be {needed} with sampling={self.sampling!r}, got {self.dataset_size!r}. Only "
                "batches of fixed size are drawn from a public number of records."
            )
        if self.dataset_size is None or isinstance(self.sample_rate, Schedule):
            return
        size = self.sample_rate * checks.integer(1, dataset_size=self.dataset_size)
        if abs(size - round(size)) > 1e-6 or round(size) < 1:
            raise InvalidArgument(
                f"sample_rate must be batch size / dataset_size with sampling={self.sampling!r}, got "
                f"{self.sample_rate!r}, which is {size:g} records. Pass sample_rate={max(1, round(size))} / "
                f"{self.dataset_size}."
            )
        object.__setattr__(self, "dataset_size_is_public", True)

    @property
    def has_fixed_size(self) -> bool:
        """Whether every batch has the same number of records, drawn from a public number of them."""
        return self.sampling in ("without_replacement", "with_replacement")

    @property
    def has_random_batch_size(self) -> bool:
        """Whether the number of records in a batch is random, and secret."""
        return self.poisson_sampling or self.sampling == "balls_in_bins"

    @property
    def charges_epochs(self) -> bool:
        """Whether the steps of an epoch are charged together, before its first batch."""
        return not (self.poisson_sampling or self.has_fixed_size)

    def check_dataset_size(self, num_drawn_from: int) -> None:
        """Refuse a dataset of another size than batches of fixed size are planned for.

        Raises:
            InvalidArgument: it differs.
        """
        if isinstance(self.sampler, FixedSizeSampling):
            self.sampler.check_dataset_size(num_drawn_from)

    def check_options(self, more: Collection[Option] = ()) -> None:
        """Refuse a plan whose options exclude each other, or one of `more`: how it is trained.

        Raises:
            InvalidArgument: names both, and what to do.
            UnknownSampler: the sampler is the one to change.
        """
        check_exclusions({*self.options(), *more}, clipping=type(self.clipping).__name__)

    def options(self) -> set[Option]:
        """What the plan has of the options that exclude each other."""
        clipping = self.clipping
        is_shuffled = not self.poisson_sampling and self.sampling is None and self.correlated_noise is None
        has = {
            Option.ADAPTIVE_NORM: clipping.adapts,
            Option.BALLS_IN_BINS: self.sampling == "balls_in_bins",
            Option.FIXED_SIZE: self.has_fixed_size,
            Option.ADD_OR_REMOVE_ONE: self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE,
            Option.CORRELATED_NOISE: self.correlated_noise is not None,
            Option.ESTIMATED_NORMS: not clipping.exact_norms,
            Option.LOSS_RELEASE: self.loss_release is not None,
            Option.REPLACE_ONE: self.neighboring_relation is NeighboringRelation.REPLACE_ONE,
            Option.SCHEDULE: self.is_scheduled,
            Option.SCHEDULED_NORM: isinstance(self.max_grad_norm, Schedule),
            Option.SECURE_MODE: self.secure_mode,
            Option.SHUFFLED: is_shuffled,
            Option.TRANSFORMED_SUMS: clipping.exact_norms and not clipping.plain_sums,
            Option.UNGROUPED: not isinstance(clipping, GroupedClipping),
        }
        return {option for option, applies in has.items() if applies}

    @classmethod
    def for_epsilon(
        cls,
        *,
        target_epsilon: float,
        delta: float,
        sample_rate: float | Schedule,
        steps: int,
        max_grad_norm: float | Schedule,
        expected_batch_size: float | Schedule,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
        dataset_size_is_public: bool = False,
        poisson_sampling: bool = True,
        sampling: Sampling | None = None,
        dataset_size: int | None = None,
        clipping: Clipping | None = None,
        noise_shape: Schedule | None = None,
        correlated_noise: CorrelatedNoise | Literal["auto"] | None = None,
        secure_mode: bool = False,
        loss_release: LossRelease | None = None,
    ) -> Self:
        """The plan with the least noise whose ε is at most `target_epsilon` (never above it).

        `noise_shape` is a schedule of which only the shape counts: it is scaled as a whole. `correlated_noise` "auto"
        takes independent noise or bands of correlated noise, whichever leaves less noise in the model's position.
        """
        draft = cls(
            noise_multiplier=1.0 if noise_shape is None else noise_shape,
            max_grad_norm=max_grad_norm,
            sample_rate=sample_rate,
            steps=steps,
            expected_batch_size=expected_batch_size,
            delta=delta,
            neighboring_relation=neighboring_relation,
            privacy_unit=privacy_unit,
            dataset_size_is_public=dataset_size_is_public,
            poisson_sampling=poisson_sampling,
            sampling=sampling,
            dataset_size=dataset_size,
            clipping=FlatClipping() if clipping is None else clipping,
            correlated_noise=None if correlated_noise == "auto" else correlated_noise,
            secure_mode=secure_mode,
            loss_release=loss_release,
        )
        if correlated_noise == "auto":
            return draft._with_best_noise(target_epsilon)
        return draft.with_target_epsilon(target_epsilon)

    def with_target_epsilon(
        self, target_epsilon: float, *, accountant: str = "auto", before: Event | None = None
    ) -> Self:
        """This plan with the least noise whose ε, by the accountant named, is at most `target_epsilon` > 0.

        A schedule of the noise keeps its shape. With `before`, something that was charged already, both together stay
        within the target.
        """
        earlier = [] if before is None else [before]
        shape = self.noise_multiplier if isinstance(self.noise_multiplier, Schedule) else 1.0
        factor = accounting.calibrate_noise_multiplier(
            lambda factor: compose([*earlier, replace(self, noise_multiplier=scale_schedule(shape, factor)).event()]),
            target_epsilon=checks.positive(target_epsilon=target_epsilon),
            delta=self.delta,
            neighboring_relation=self.neighboring_relation,
            accountant=accountant,
        )
        return replace(self, noise_multiplier=scale_schedule(shape, factor))

    def _with_best_noise(self, target_epsilon: float) -> Self:
        adapts = self.clipping.adapts or not self.clipping.plain_sums or self.loss_release is not None
        if self.is_scheduled or not self.poisson_sampling or adapts or self.secure_mode:
            raise InvalidArgument(
                "correlated_noise must be None with schedules, bounds that adapt, secure noise, a loss curve, or "
                "without Poisson "
                'sampling, got "auto". Leave it out.'
            )

        def calibrate(event: Callable[[float], Event]) -> float:
            return accounting.calibrate_noise_multiplier(
                event,
                target_epsilon=checks.positive(target_epsilon=target_epsilon),
                delta=self.delta,
                neighboring_relation=self.neighboring_relation,
            )

        now = self.step_plan(0)
        noise, multiplier = choose_noise(
            steps=self.steps, sample_rate=now.sample_rate, l2_sensitivity=now.sensitivity, calibrate=calibrate
        )
        return replace(self, correlated_noise=noise, noise_multiplier=multiplier)

    @cached_property
    def is_scheduled(self) -> bool:
        """Whether anything changes from step to step."""
        return any(isinstance(getattr(self, name), Schedule) for name in _PLANNED)

    @property
    def is_private(self) -> bool:
        """Whether there is any noise at all."""
        return self.noise_multiplier != 0

    def step_plan(self, step: int) -> StepPlan:
        """The values of step `step`, from 0."""
        return _at(self, step) if self.is_scheduled else self._every_step

    @cached_property
    def _every_step(self) -> StepPlan:
        """The values of all steps, where nothing changes."""
        return _at(self, 0)

    @property
    def mechanism(self) -> CorrelatedGaussianMechanism | None:
        """The noise of the whole run when it is correlated, otherwise None: each step has its own, in ``at(step)``."""
        return None if self.correlated_noise is None else _mechanism(self)

    @property
    def sampler(self) -> Sampler:
        """The sampler, which knows its event."""
        if self.correlated_noise is not None:
            rate = self.step_plan(0).sample_rate
            return self.correlated_noise.sampling(
                sample_rate=rate, steps=self.steps, poisson_sampling=self.poisson_sampling
            )
        if isinstance(self.sample_rate, Schedule):
            return ScheduledPoissonSampling(rate=lambda step: self.step_plan(step).sample_rate)
        if self.poisson_sampling:
            return PoissonSampling(sample_rate=self.sample_rate)
        if self.has_fixed_size:
            assert self.dataset_size is not None
            return FixedSizeSampling(
                dataset_size=self.dataset_size,
                batch_size=round(self.sample_rate * self.dataset_size),
                with_replacement=self.sampling == "with_replacement",
            )
        steps_per_epoch = max(1, round(1 / self.sample_rate))
        if self.sampling == "balls_in_bins":
            return RandomAllocationSampling(steps_per_epoch=steps_per_epoch)
        return ShuffledSampling(steps_per_epoch=steps_per_epoch)

    def step_event(self, step: int = 0) -> Event:
        """The event that is charged before `step`: that step's, or one epoch's with `charges_epochs`.

        Under correlated noise a cycle is charged before its first step, and a run without cycles before step 0.
        """
        now = self.step_plan(step)
        if self.mechanism is not None:
            return self._correlated_event(self.mechanism, step)
        if not self.is_private:
            return now.event
        if self.poisson_sampling:
            return now.poisson_event
        sampler = self.sampler
        assert not isinstance(sampler, ScheduledPoissonSampling)
        return sampler.event(now.event)

    def max_step_event(self) -> Event:
        """An event that costs at least as much as any one step: what a torn line of a transcript is taken for."""
        if self.mechanism is not None and self.steps and self.is_private:
            return self.mechanism.branch_event(0)
        if not self.is_scheduled:
            return self.step_event()
        if not self.steps:
            return NonPrivate(reason="a line is torn, and the schedule has no last step")
        steps = [self.step_plan(step) for step in range(self.steps)]
        noise, rate = min(step.noise_multiplier for step in steps), max(step.sample_rate for step in steps)
        return replace(self, noise_multiplier=noise, sample_rate=rate).step_event()

    def _correlated_event(self, mechanism: CorrelatedGaussianMechanism, step: int) -> Event:
        sampler = self.sampler
        if step % sampler.groups if isinstance(sampler, CyclicPoissonSampling) else step:
            return NoOp()
        if not self.is_private:
            return self.step_plan(0).event
        return (
            sampler.event(self.step_plan(0).event) if isinstance(sampler, CyclicPoissonSampling) else mechanism.event()
        )

    def event(self, steps: int | None = None) -> Event:
        """The event of the first `steps` steps, or of all of them."""
        steps = self.steps if steps is None else checks.integer(0, steps=steps)
        if self.mechanism is not None:
            private = self.is_private or not steps
            return self.mechanism.event(steps) if private else NonPrivate(reason="noise_multiplier is 0")
        if self.is_scheduled:
            return compose([self.step_event(step) for step in range(steps)])
        count = self.sampler.num_charges(steps)
        return SelfComposed(event=self.step_event(), count=count) if count else NoOp()

    def guarantee(self, *, steps: int | None = None, caveats: tuple[str, ...] = ()) -> Guarantee:
        """What the first `steps` steps, or the whole run, guarantee."""
        if not self.is_private:
            caveats = ("noise_multiplier is 0: for debugging only", *caveats)
        if self.dataset_size_is_public:
            caveats = (*caveats, "the size of the dataset is treated as public")
        if self.correlated_noise is not None and self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            caveats = (*caveats, "records keep their numbers when one is added or removed")
        if self.secure_mode:
            caveats = (*caveats, "secure noise holds to the last bit with microbatch_size=1")
        spent = accounting.epsilon(self.event(steps), self.delta, neighboring_relation=self.neighboring_relation)
        return Guarantee(
            epsilon=spent.upper,
            delta=self.delta,
            accountant=spent.accountant,
            sampler=self.sampler.describe(),
            neighboring_relation=self.neighboring_relation,
            privacy_unit=self.privacy_unit,
            caveats=caveats,
        )

    def to_json(self) -> str:
        """The plan as JSON, one field a line, with its schema version."""
        body = {item.name: schedule_to_dict(getattr(self, item.name)) for item in fields(self) if item.name in _PLANNED}
        rest = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _PLANNED}
        rest["clipping"] = clipping_to_dict(self.clipping)
        rest["correlated_noise"] = None if self.correlated_noise is None else self.correlated_noise.to_dict()
        rest["loss_release"] = None if self.loss_release is None else self.loss_release.to_dict()
        return json.dumps({"schema": _SCHEMA, **body, **rest}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote; unknown or missing fields raise `InvalidArgument`."""
        body = json.loads(text)
        expected = {"schema", *(item.name for item in fields(cls))}
        if not isinstance(body, dict) or set(body) != expected or body["schema"] != _SCHEMA:
            raise InvalidArgument(
                f"plan must be JSON with the fields {sorted(expected)}, schema {_SCHEMA}. Check the file."
            )
        planned = {name: schedule_from_dict(body[name]) for name in _PLANNED}
        rest = {name: value for name, value in body.items() if name not in ("schema", *_OBJECTS, *_PLANNED)}
        noise = None if body["correlated_noise"] is None else CorrelatedNoise.from_dict(body["correlated_noise"])
        curve = None if body["loss_release"] is None else LossRelease.from_dict(body["loss_release"])
        clipping = clipping_from_dict(body["clipping"])
        return cls(**planned, **rest, clipping=clipping, correlated_noise=noise, loss_release=curve)


def noise_limited_learning_rate(plan: Plan, noise_per_weight: float, *, momentum: float = 0.0) -> float:
    """The largest learning rate for which the noise that adds up in one weight over all steps stays below a bound."""
    a_step = plan.step_plan(0).gradient_noise_stddev / (1 - momentum)
    return noise_per_weight / (a_step * math.sqrt(plan.steps))


@lru_cache(maxsize=256)
def _at(plan: Plan, step: int) -> StepPlan:
    """The values of one step; they are asked for several times a step."""
    values = {name: schedule_value(getattr(plan, name), step, plan.steps or None) for name in _PLANNED}
    shared = {"neighboring_relation": plan.neighboring_relation, "loss_release": plan.loss_release}
    return StepPlan(**values, **shared, clipping=plan.clipping)


@lru_cache(maxsize=64)
def _mechanism(plan: Plan) -> CorrelatedGaussianMechanism:
    """Its sensitivity may be the result of a long search."""
    assert plan.correlated_noise is not None
    now = plan.step_plan(0)
    return plan.correlated_noise.mechanism(noise_multiplier=now.noise_multiplier, l2_sensitivity=now.sensitivity)
