"""All that changes the guarantee, in one frozen object (floor 3).

Clip factors, noise scale, divisor and the accountant's event are derived from the plan, never stored beside it.

Example:
    >>> plan = Plan(noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.01, steps=10_000,
    ...             expected_batch_size=600.0, delta=1e-5)
    >>> round(plan.guarantee().epsilon, 5)
    0.94687
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal, Self

from sordino import accounting, checks
from sordino.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    ProjectedClipping,
    PsacClipping,
    QuantileClipping,
    clipping_from_dict,
    clipping_to_dict,
)
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import Event, NoPrivacy, Nothing, SelfComposed, compose
from sordino.mechanisms.correlated import CorrelatedGaussianMechanism
from sordino.sampling import (
    CyclicPoissonSampling,
    FixedEpochs,
    PoissonSampling,
    Sampling,
    ShuffledEpochs,
    VaryingPoissonSampling,
)
from sordino.schedules import Schedule, scaled, schedule_from_dict, schedule_to_dict, value_at
from sordino.training.loss_curve import LossCurve, check_loss_curve
from sordino.training.noise import CorrelatedNoise, best_noise
from sordino.training.performance import Performance
from sordino.training.step_plan import StepPlan

__all__ = ["Performance", "Plan"]

_SCHEMA = 5
# Schema 4 had no loss curve.
_READ = (4, _SCHEMA)
# What may change from step to step.
_PLANNED = ("noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch_size")
_OBJECTS = ("clipping", "noise", "loss_curve")
# Methods whose clipped sum is of plain gradients and has the plan's own sensitivity in every step.
_FIXED = (AutomaticClipping, FlatClipping, GlobalClipping, GroupedClipping, PsacClipping)


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
        neighboring_relation: which data sets count as neighbours.
        privacy_unit: whose contribution is protected.
        dataset_size_is_public: True when `sample_rate` or `expected_batch_size` came from the size of the data
            set; the guarantee then treats that size as public, and says so.
        poisson_sampling: False deals each epoch into round(1 / sample_rate) disjoint batches instead, and claims no
            amplification; not under add-or-remove-one, and not with schedules.
        clipping: how gradients are clipped to `max_grad_norm`, flat by default.
        noise: how the steps' noises hang together: None is independent noise, `CorrelatedNoise` draws batches as its
            participation says, from record numbers that stay the same in neighbouring data sets.
        secure_noise: True rounds each record's clipped gradient to whole numbers and adds whole-number Gaussian noise,
            so that no low bit of a released float tells anything (see ``docs/secure-noise.md`` for what it costs).
        loss_curve: releases each batch's mean loss with noise, paid for with more noise on the gradient; None releases
            nothing of the losses.

    Raises:
        InvalidArgument: a value is out of its range, or correlated noise meets a schedule, bounds that adapt, or
            another number of steps or rate than its own, or a loss curve meets noise or clipping that can't carry it.
        UnknownSampler: `poisson_sampling` is False under add-or-remove-one or with a schedule, or the batches would
            break the participation of the noise.

    Example:
        >>> from sordino.schedules import Exponential
        >>> noise = Exponential(start=6.0, end=3.0)
        >>> plan = Plan(noise_multiplier=noise, max_grad_norm=1.0, sample_rate=0.01, steps=100,
        ...             expected_batch_size=600.0, delta=1e-5)
        >>> plan.at(0).noise_multiplier, plan.at(99).noise_multiplier
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
    privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE
    dataset_size_is_public: bool = False
    poisson_sampling: bool = True
    clipping: Clipping = field(default_factory=FlatClipping)
    noise: CorrelatedNoise | None = None
    secure_noise: bool = False
    loss_curve: LossCurve | None = None

    def __post_init__(self) -> None:
        checks.integer(0, steps=self.steps)
        checks.probability(zero=False, one=False, delta=self.delta)
        object.__setattr__(self, "neighboring_relation", NeighboringRelation(self.neighboring_relation))
        object.__setattr__(self, "privacy_unit", PrivacyUnit(self.privacy_unit))
        if not isinstance(self.clipping, Clipping):
            raise InvalidArgument(
                f"clipping must be an object of sordino.clipping, got {self.clipping!r}. Give FlatClipping()."
            )
        if self.loss_curve is not None:
            check_loss_curve(
                self.loss_curve, clipping=self.clipping, correlated=self.noise is not None, secure=self.secure_noise
            )
        for step in {0, max(self.steps - 1, 0)} if self.is_scheduled else {0}:
            self.at(step)
        if self.secure_noise:
            self._check_secure_noise()
        if self.noise is not None:
            self._check_noise()
            return
        if not self.poisson_sampling and self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnknownSampler(
                "poisson_sampling must be True when neighbours add or remove a record, got False: one record less "
                "moves the borders of every later batch. Pass neighboring_relation='replace_one' (noise for twice the "
                "clipping norm) or 'replace_special', or sample with Poisson sampling."
            )
        if not self.poisson_sampling and self.is_scheduled:
            raise UnknownSampler(
                "poisson_sampling must be True with a schedule, got False: the batches of an epoch cost as much as the "
                "dearest of them. Sample with Poisson sampling, or give numbers."
            )
        projected = isinstance(self.clipping, ProjectedClipping)
        if projected and self.neighboring_relation is NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                "neighboring_relation must be add_or_remove_one or replace_special with ProjectedClipping, got "
                "'replace_one': what two estimated norms cost together is not known. Use FlatClipping."
            )

    def _check_noise(self) -> None:
        """Noise over many steps needs one bound, one scale and batches that keep its participation."""
        if not isinstance(self.noise, CorrelatedNoise):
            raise InvalidArgument(
                f"noise must be None or CorrelatedNoise, got {type(self.noise).__name__}. See sordino.training."
            )
        scheduled = [name for name in _PLANNED if isinstance(getattr(self, name), Schedule)]
        if scheduled:
            raise InvalidArgument(
                f"{scheduled[0]} must be a number with correlated noise, got a schedule: later steps take "
                "back what earlier ones added. Give a number, or leave noise out."
            )
        if not isinstance(self.clipping, _FIXED):
            raise InvalidArgument(
                f"clipping must have a fixed bound with correlated noise, got {type(self.clipping).__name__}. Use "
                "FlatClipping or AutomaticClipping, or leave noise out."
            )
        assert isinstance(self.sampling, CyclicPoissonSampling | FixedEpochs)
        assert self.mechanism is not None

    def _check_secure_noise(self) -> None:
        """Whole numbers are noised once a step; what hangs over from step to step is floating point."""
        checks.one_of((True, False), secure_noise=self.secure_noise)
        if self.noise is not None or isinstance(self.clipping, QuantileClipping):
            raise InvalidArgument(
                "secure_noise must be False with correlated noise or bounds that adapt, got True: what they carry over "
                "is made of floating-point numbers. Use independent noise and fixed bounds."
            )

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
        privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE,
        dataset_size_is_public: bool = False,
        poisson_sampling: bool = True,
        clipping: Clipping | None = None,
        noise_shape: Schedule | None = None,
        noise: CorrelatedNoise | Literal["auto"] | None = None,
        secure_noise: bool = False,
        loss_curve: LossCurve | None = None,
    ) -> Self:
        """The plan with the least noise whose ε is at most `target_epsilon` (never above it).

        `noise_shape` is a schedule of which only the shape counts: it is scaled as a whole. `noise` "auto" takes
        independent noise or bands of correlated noise, whichever leaves less noise in the model's position.
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
            clipping=FlatClipping() if clipping is None else clipping,
            noise=None if noise == "auto" else noise,
            secure_noise=secure_noise,
            loss_curve=loss_curve,
        )
        if noise == "auto":
            return draft._with_best_noise(target_epsilon)
        return draft.with_noise_for(target_epsilon)

    def with_noise_for(self, target_epsilon: float, *, accountant: str = "auto", before: Event | None = None) -> Self:
        """This plan with the least noise whose ε, by the accountant named, is at most `target_epsilon` > 0.

        A schedule of the noise keeps its shape. With `before`, something that was charged already, both together stay
        within the target.
        """
        earlier = [] if before is None else [before]
        shape = self.noise_multiplier if isinstance(self.noise_multiplier, Schedule) else 1.0
        factor = accounting.calibrate_noise_multiplier(
            lambda factor: compose([*earlier, replace(self, noise_multiplier=scaled(shape, factor)).event()]),
            target_epsilon=checks.positive(target_epsilon=target_epsilon),
            target_delta=self.delta,
            relation=self.neighboring_relation,
            accountant=accountant,
        )
        return replace(self, noise_multiplier=scaled(shape, factor))

    def _with_best_noise(self, target_epsilon: float) -> Self:
        adapts = not isinstance(self.clipping, _FIXED) or self.loss_curve is not None
        if self.is_scheduled or not self.poisson_sampling or adapts or self.secure_noise:
            raise InvalidArgument(
                "noise must be None with schedules, bounds that adapt, secure noise, a loss curve, or without Poisson "
                'sampling, got "auto". Leave it out.'
            )

        def calibrate(event: Callable[[float], Event]) -> float:
            return accounting.calibrate_noise_multiplier(
                event,
                target_epsilon=checks.positive(target_epsilon=target_epsilon),
                target_delta=self.delta,
                relation=self.neighboring_relation,
            )

        now = self.at(0)
        noise, multiplier = best_noise(
            steps=self.steps, sample_rate=now.sample_rate, l2_sensitivity=now.sensitivity, calibrate=calibrate
        )
        return replace(self, noise=noise, noise_multiplier=multiplier)

    @property
    def is_scheduled(self) -> bool:
        """Whether anything changes from step to step."""
        return any(isinstance(getattr(self, name), Schedule) for name in _PLANNED)

    @property
    def is_private(self) -> bool:
        """Whether there is any noise at all."""
        return self.noise_multiplier != 0

    def at(self, step: int) -> StepPlan:
        """The values of step `step`, from 0."""
        return _at(self, step if self.is_scheduled else 0)

    @property
    def mechanism(self) -> CorrelatedGaussianMechanism | None:
        """The noise of the whole run when it is correlated, otherwise None: each step has its own, in ``at(step)``."""
        return None if self.noise is None else _mechanism(self)

    @property
    def sampling(self) -> Sampling:
        """The sampler, which knows its event."""
        if self.noise is not None:
            rate = self.at(0).sample_rate
            return self.noise.sampling(sample_rate=rate, steps=self.steps, poisson_sampling=self.poisson_sampling)
        if isinstance(self.sample_rate, Schedule):
            return VaryingPoissonSampling(rate=lambda step: self.at(step).sample_rate)
        if self.poisson_sampling:
            return PoissonSampling(sample_rate=self.sample_rate)
        return ShuffledEpochs(steps_per_epoch=max(1, round(1 / self.sample_rate)))

    def step_event(self, step: int = 0) -> Event:
        """The event that is charged before `step`: that step's under Poisson sampling, otherwise one epoch's.

        Under correlated noise a cycle is charged before its first step, and a run without cycles before step 0.
        """
        now = self.at(step)
        if self.mechanism is not None:
            return self._correlated_event(self.mechanism, step)
        if not self.is_private:
            return now.event
        return PoissonSampling(sample_rate=now.sample_rate).event(now.event) if self.poisson_sampling else now.event

    def _correlated_event(self, mechanism: CorrelatedGaussianMechanism, step: int) -> Event:
        sampler = self.sampling
        if step % sampler.groups if isinstance(sampler, CyclicPoissonSampling) else step:
            return Nothing()
        if not self.is_private:
            return self.at(0).event
        return sampler.event(self.at(0).event) if isinstance(sampler, CyclicPoissonSampling) else mechanism.event()

    def event(self, steps: int | None = None) -> Event:
        """The event of the first `steps` steps, or of all of them."""
        steps = self.steps if steps is None else checks.integer(0, steps=steps)
        if self.mechanism is not None:
            private = self.is_private or not steps
            return self.mechanism.event(steps) if private else NoPrivacy(reason="noise_multiplier is 0")
        if self.is_scheduled:
            return compose([self.step_event(step) for step in range(steps)])
        count = self.sampling.charges(steps)
        return SelfComposed(event=self.step_event(), count=count) if count else Nothing()

    def guarantee(self, *, steps: int | None = None, caveats: tuple[str, ...] = ()) -> Guarantee:
        """What the first `steps` steps, or the whole run, guarantee."""
        if not self.is_private:
            caveats = ("noise_multiplier is 0: for debugging only", *caveats)
        if self.dataset_size_is_public:
            caveats = (*caveats, "the size of the data set is treated as public")
        if self.noise is not None and self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            caveats = (*caveats, "records keep their numbers when one is added or removed")
        if self.secure_noise:
            caveats = (*caveats, "secure noise holds to the last bit with microbatch_size=1")
        spent = accounting.epsilon(self.event(steps), self.delta, relation=self.neighboring_relation)
        return Guarantee(
            epsilon=spent.upper,
            delta=self.delta,
            accountant=spent.accountant,
            sampler=self.sampling.words,
            relation=self.neighboring_relation,
            unit=self.privacy_unit,
            caveats=caveats,
        )

    def to_json(self) -> str:
        """The plan as JSON, one field a line, with its schema version."""
        body = {item.name: schedule_to_dict(getattr(self, item.name)) for item in fields(self) if item.name in _PLANNED}
        rest = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _PLANNED}
        rest["clipping"] = clipping_to_dict(self.clipping)
        rest["noise"] = None if self.noise is None else self.noise.to_dict()
        rest["loss_curve"] = None if self.loss_curve is None else self.loss_curve.to_dict()
        return json.dumps({"schema": _SCHEMA, **body, **rest}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote; unknown or missing fields raise `InvalidArgument`."""
        body = json.loads(text)
        expected = {"schema", *(item.name for item in fields(cls))}
        if isinstance(body, dict) and body.get("schema") == _READ[0] and "loss_curve" not in body:
            body |= {"schema": _SCHEMA, "loss_curve": None}
        if not isinstance(body, dict) or set(body) != expected or body["schema"] != _SCHEMA:
            raise InvalidArgument(
                f"plan must be JSON with the fields {sorted(expected)}, schema {_SCHEMA}. Check the file."
            )
        planned = {name: schedule_from_dict(body[name]) for name in _PLANNED}
        rest = {name: value for name, value in body.items() if name not in ("schema", *_OBJECTS, *_PLANNED)}
        noise = None if body["noise"] is None else CorrelatedNoise.from_dict(body["noise"])
        curve = None if body["loss_curve"] is None else LossCurve.from_dict(body["loss_curve"])
        clipping = clipping_from_dict(body["clipping"])
        return cls(**planned, **rest, clipping=clipping, noise=noise, loss_curve=curve)


@lru_cache(maxsize=256)
def _at(plan: Plan, step: int) -> StepPlan:
    """The values of one step; they are asked for several times a step."""
    values = {name: value_at(getattr(plan, name), step, plan.steps or None) for name in _PLANNED}
    shared = {"neighboring_relation": plan.neighboring_relation, "loss_curve": plan.loss_curve}
    return StepPlan(**values, **shared, clipping=plan.clipping)


@lru_cache(maxsize=64)
def _mechanism(plan: Plan) -> CorrelatedGaussianMechanism:
    """Its sensitivity may be the result of a long search."""
    assert plan.noise is not None
    now = plan.at(0)
    return plan.noise.mechanism(noise_multiplier=now.noise_multiplier, l2_sensitivity=now.sensitivity)
