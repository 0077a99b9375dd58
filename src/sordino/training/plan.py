"""All that changes the guarantee, in one frozen object; and all that doesn't, in another (floor 3).

Clip factors, noise scale, divisor and the accountant's event are derived from the plan, never stored beside it.

Example:
    >>> plan = Plan(noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.01, steps=10_000,
    ...             expected_batch_size=600.0, delta=1e-5)
    >>> round(plan.guarantee().epsilon, 5)
    0.94687
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from sordino import accounting, checks
from sordino.clipping import FlatClipping
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import Event, NoPrivacy, Nothing, SelfComposed
from sordino.mechanisms import GaussianMechanism
from sordino.sampling import PoissonSampling, ShuffledEpochs

__all__ = ["Performance", "Plan"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """DP-SGD as it will run: sampler, clipping, noise, steps, and what the guarantee speaks about.

    Guarantee: a run of `steps` steps under this plan is (ε, δ)-differentially private with the ε that
    `guarantee()` states, for the named unit and relation.

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
            amplification; not under add-or-remove-one.

    Raises:
        UnknownSampler: `poisson_sampling` is False under add-or-remove-one.

    References:
        Abadi et al. 2016, algorithm 1.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    steps: int
    expected_batch_size: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE
    dataset_size_is_public: bool = False
    poisson_sampling: bool = True

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(max_grad_norm=self.max_grad_norm)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        checks.integer(0, steps=self.steps)
        checks.positive(expected_batch_size=self.expected_batch_size)
        checks.probability(zero=False, one=False, delta=self.delta)
        object.__setattr__(self, "neighboring_relation", NeighboringRelation(self.neighboring_relation))
        object.__setattr__(self, "privacy_unit", PrivacyUnit(self.privacy_unit))
        if not self.poisson_sampling and self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnknownSampler(
                "poisson_sampling must be True when neighbours add or remove a record, got False: one record less "
                "moves the borders of every later batch. Pass neighboring_relation='replace_one' (noise for twice the "
                "clipping norm) or 'replace_special', or sample with Poisson sampling."
            )

    @classmethod
    def for_epsilon(
        cls,
        *,
        target_epsilon: float,
        delta: float,
        sample_rate: float,
        steps: int,
        max_grad_norm: float,
        expected_batch_size: float,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE,
        dataset_size_is_public: bool = False,
        poisson_sampling: bool = True,
    ) -> Self:
        """The plan with the least noise whose ε is at most `target_epsilon` (never above it)."""
        draft = cls(
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            sample_rate=sample_rate,
            steps=steps,
            expected_batch_size=expected_batch_size,
            delta=delta,
            neighboring_relation=neighboring_relation,
            privacy_unit=privacy_unit,
            dataset_size_is_public=dataset_size_is_public,
            poisson_sampling=poisson_sampling,
        )
        return draft.with_noise_for(target_epsilon)

    def with_noise_for(self, target_epsilon: float, *, accountant: str = "auto") -> Self:
        """This plan with the least noise whose ε, by the accountant named, is at most `target_epsilon` > 0."""
        noise_multiplier = accounting.calibrate_noise_multiplier(
            lambda z: replace(self, noise_multiplier=z).event(),
            target_epsilon=checks.positive(target_epsilon=target_epsilon),
            target_delta=self.delta,
            relation=self.neighboring_relation,
            accountant=accountant,
        )
        return replace(self, noise_multiplier=noise_multiplier)

    @property
    def clipping(self) -> FlatClipping:
        """The clipping method, which knows its sensitivity."""
        return FlatClipping(max_grad_norm=self.max_grad_norm)

    @property
    def sampling(self) -> PoissonSampling | ShuffledEpochs:
        """The sampler, which knows its event."""
        if self.poisson_sampling:
            return PoissonSampling(sample_rate=self.sample_rate)
        return ShuffledEpochs(steps_per_epoch=max(1, round(1 / self.sample_rate)))

    @property
    def mechanism(self) -> GaussianMechanism:
        """The noise on the clipped sum of one step."""
        return GaussianMechanism(
            noise_multiplier=self.noise_multiplier,
            l2_sensitivity=self.clipping.sensitivity(self.neighboring_relation),
        )

    def step_event(self) -> Event:
        """The event that is charged at once: one step under Poisson sampling, otherwise one epoch."""
        if self.noise_multiplier == 0:
            return NoPrivacy(reason="noise_multiplier is 0")
        return self.sampling.event(self.mechanism.event())

    def event(self, steps: int | None = None) -> Event:
        """The event of the first `steps` steps, or of all of them."""
        steps = self.steps if steps is None else checks.integer(0, steps=steps)
        count = self.sampling.charges(steps)
        return SelfComposed(event=self.step_event(), count=count) if count else Nothing()

    def guarantee(self, *, steps: int | None = None, caveats: tuple[str, ...] = ()) -> Guarantee:
        """What the first `steps` steps, or the whole run, guarantee."""
        if self.noise_multiplier == 0:
            caveats = ("noise_multiplier is 0: for debugging only", *caveats)
        if self.dataset_size_is_public:
            caveats = (*caveats, "the size of the data set is treated as public")
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
        return json.dumps({"schema": 1, **asdict(self)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote; unknown or missing fields raise `InvalidArgument`."""
        body = json.loads(text)
        expected = {"schema", *(item.name for item in fields(cls))}
        if not isinstance(body, dict) or set(body) != expected or body["schema"] != 1:
            raise InvalidArgument(f"plan must be JSON with the fields {sorted(expected)}, schema 1. Check the file.")
        return cls(**{name: value for name, value in body.items() if name != "schema"})


@dataclass(frozen=True, kw_only=True)
class Performance:
    """What changes speed and memory and never the guarantee or the result.

    Args:
        microbatch_size: most records in one forward and backward; None takes the logical batch whole.
        device: where the model and the batches live; None leaves them where the model is.
    """

    microbatch_size: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            checks.integer(1, microbatch_size=self.microbatch_size)
