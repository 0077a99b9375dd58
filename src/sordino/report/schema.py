"""The parts of a report. None means that the run does not state it.

Example:
    >>> from sordino.report.schema import EpsilonInterval
    >>> EpsilonInterval(lower=0.9, upper=1.0).width <= 0.1 + 1e-9
    True
"""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.runs import ReleasedLosses, average_adjacent


def _from_json(value: object) -> object:
    return math.inf if value == "inf" else value


_Z95 = 1.959963984540054


def wilson_interval(share: float, records: int) -> tuple[float, float]:
    """95 % interval of a share that was measured on `records` records, each ≥ 1: Wilson 1927."""
    z2 = _Z95**2 / records
    center = (share + z2 / 2) / (1 + z2)
    half = _Z95 * math.sqrt(share * (1 - share) / records + z2 / (4 * records)) / (1 + z2)
    return max(0.0, center - half), min(1.0, center + half)


def _to_json(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


Real = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(_from_json),
    PlainSerializer(_to_json, return_type=float | str, when_used="json"),
]
"""A number ≥ 0; JSON has no ∞, so it is the string "inf" there."""

Share = Annotated[float, Field(ge=0, le=1)]

HazardStatus = Literal["met", "limitation", "not applicable", "not stated"]

NotApplicable = Literal["not applicable"]
"""What a method does not have: an estimator has no clipping norm of its plan. None is "not stated"."""


class ReportModel(BaseModel):
    """Frozen; a misspelt field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GuaranteeSection(ReportModel):
    """The guarantee with everything needed to read it; `description` is the formal line."""

    epsilon: Real
    delta: Share
    neighboring_relation: NeighboringRelation
    privacy_unit: PrivacyUnit
    sampler: str
    accountant: str
    caveats: tuple[str, ...]
    description: str

    @property
    def is_private(self) -> bool:
        """Whether ε is finite and δ < 1."""
        return math.isfinite(self.epsilon) and self.delta < 1


class EpsilonInterval(ReportModel):
    """An interval that contains the true ε."""

    lower: Real
    upper: Real

    @property
    def width(self) -> float:
        """How far the reported ε can be above the true one."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower


class Accounting(ReportModel):
    """How ε was found when the report was made.

    Args:
        accountant: the accountant that answered now.
        version: of sordino when the report was made.
        interval: around the true ε of the transcript.
        claimed_epsilon: ε as the run wrote it when it ended, or None when it did not end.
        without_amplification: ε as if every record took part in every step, or None where it can't be computed.
        sampled: whether the sampling of batches makes a difference at all.
    """

    accountant: str
    version: str
    interval: EpsilonInterval
    claimed_epsilon: Real | None
    without_amplification: Real | None
    sampled: bool

    @property
    def agrees(self) -> bool:
        """Whether the transcript bears out what the run claimed."""
        return self.claimed_epsilon is None or self.interval.upper <= self.claimed_epsilon * (1 + 1e-9)


class UserLevel(ReportModel):
    """ε for a user who owns `size` of the units, at the same δ."""

    size: Annotated[int, Field(ge=1)]
    epsilon: Real


class EpsilonPoint(ReportModel):
    """ε after `steps` steps."""

    steps: Annotated[int, Field(ge=0)]
    epsilon: Real


class Curves(ReportModel):
    """Everything the mechanism says, of which (ε, δ) is one point.

    Args:
        spent: ε over the steps.
        profile: pairs (ε, δ): upper bounds on δ at each ε.
        trade_off: pairs (false positive rate, least false negative rate) of any test.
        gaussian_mu: μ of the smallest Gaussian trade-off curve that covers the run's at the ε tried, or None.
        gaussian_regret: how much that curve overstates an attacker's true positive rate at most, where tried.
    """

    spent: tuple[EpsilonPoint, ...] = ()
    profile: tuple[tuple[float, Share], ...] = ()
    trade_off: tuple[tuple[Share, Share], ...] = ()
    gaussian_mu: Real | None = None
    gaussian_regret: Real | None = None


class AttackBounds(ReportModel):
    """The most any attacker can do, whatever he knows and computes.

    Args:
        question: what he wants to know, in the words of unit and relation.
        found: pairs (false positive rate, greatest true positive rate).
        advantage: greatest difference between the two.
        right_guesses: greatest share of right guesses when membership is a fair coin.
        reconstruction: pairs (chance of a blind guess, greatest chance of reconstructing the record).
        from_mechanism: whether the whole mechanism was asked, or only its ε and δ, which is looser.
    """

    question: str
    found: tuple[tuple[Share, Share], ...]
    advantage: Share
    right_guesses: Share
    reconstruction: tuple[tuple[Share, Share], ...]
    from_mechanism: bool


class Mechanism(ReportModel):
    """What was planned and what was charged; a text describes a schedule, None is "not stated".

    An estimator sets noise, clipping and steps itself: these are "not applicable" then, and `parameters` says what it
    was given.

    Args:
        method: name of the estimator or the recipe whose plan this is, or None for a plan of gradient steps.
        parameters: of the estimator, in words.
        noise_multiplier, max_grad_norm, sample_rate, expected_batch_size: σ, C, q and the public divisor.
        clipping: the method, in words.
        noise: how the noises of the steps hang together, in words.
        steps_planned, steps_charged: steps that were repeated are charged again.
        dataset_size_is_public: whether the size of the dataset is treated as public.
        sampler_claimed: how batches are drawn, as the guarantee says.
        sampler_charged: how they were drawn, as each step of the transcript charged it.
        committed_steps: steps that hold a keyed hash of the records drawn, by which the draw can be checked later.
    """

    method: str | None
    parameters: tuple[tuple[str, str], ...]
    noise_multiplier: Real | str | None
    max_grad_norm: Real | str | None
    clipping: str | None
    noise: str | None
    sample_rate: Real | str | None
    expected_batch_size: Real | str | None
    steps_planned: int | NotApplicable | None
    steps_charged: int
    dataset_size_is_public: bool | None
    sampler_claimed: str
    sampler_charged: str
    committed_steps: int


class Process(ReportModel):
    """Randomness, arithmetic and processes of the run; None is "not stated".

    Args:
        rng: class of the generator, in words.
        seeded: whether any process drew from a chosen seed, as the run, its transcript or its claim say.
        arithmetic: what kind of numbers the noise is drawn in, in words.
        segments: processes that worked on the run.
        repeated_steps: steps that were charged again after a crash or a fork.
        fresh_keys: whether every segment committed to a key of its own.
        head: hash at the end of the transcript's chain, which stands for plan, facts and every line.
    """

    rng: str | None
    seeded: bool | None
    arithmetic: str | None
    segments: int | None
    repeated_steps: int
    fresh_keys: bool | None
    head: str


class DataAccess(ReportModel):
    """One use of the records outside the mechanism, as the run states it."""

    name: str
    title: str
    text: str | None


class Composition(ReportModel):
    """Other uses of the same records, as a ledger knows them or the run states them; None is "not stated".

    Args:
        account: the ledger's name of the dataset.
        text: what is known of other uses, in words.
        spent: ε of everything on the account.
        budget: ε that may be spent on it.
    """

    account: str | None = None
    text: str | None = None
    spent: Real | None = None
    budget: Real | None = None


class Audit(ReportModel):
    """A lower bound on ε that somebody measured by attacking.

    Args:
        method: name of the audit.
        canaries: m, planted records (or runs).
        guesses: r ≤ m, those the attacker guessed on.
        alpha: 1 − confidence.
        epsilon_lower: what the audit proves ε to be at least, with confidence 1 − alpha.
        attacker: what the attacker was assumed to see.
        correct: right guesses, if known.
    """

    method: str
    canaries: Annotated[int, Field(ge=0)]
    guesses: Annotated[int, Field(ge=0)]
    alpha: Annotated[float, Field(gt=0, lt=1)]
    epsilon_lower: Real
    attacker: str
    correct: Annotated[int, Field(ge=0)] | None = None


class Attack(ReportModel):
    """One membership attack that was carried out on the model.

    Args:
        name: of the attack.
        knowledge: what the attacker knows besides the record.
        auc: area under its ROC curve; 0.5 is chance.
        lower, upper: 95 % interval of `auc`.
    """

    name: str
    knowledge: str
    auc: Share
    lower: Share
    upper: Share


class AttackResults(ReportModel):
    """Membership attacks on public records, as `sordino attack` wrote them.

    Args:
        attacks: the strongest first.
        bound: the largest AUC that the claimed guarantee allows.
        members, non_members: records that were attacked.
        above_bound: names of the attacks that refute the claim.
    """

    attacks: Annotated[tuple[Attack, ...], Field(min_length=1)]
    bound: Share
    members: Annotated[int, Field(ge=1)]
    non_members: Annotated[int, Field(ge=1)]
    above_bound: tuple[str, ...]


class Declarations(ReportModel):
    """What the people who are responsible for a run declare; None is "not stated". It is not checked.

    Args:
        purpose: what the model is for.
        owner: the person or organization that is responsible for the records.
        contact: where questions go.
        legal_basis: why the records may be used.
        approved_by: who approved the release with this ε.
    """

    purpose: str | None = None
    owner: str | None = None
    contact: str | None = None
    legal_basis: str | None = None
    approved_by: str | None = None


class ReleaseDecision(ReportModel):
    """Whether the results may be released, as far as the run folder shows.

    Args:
        verdict: "yes, on conditions"; "not yet", while a critical limitation is open; or "no".
        text: the same as a sentence, with the reason.
        conditions: what must hold for a release, or what must be resolved first.
    """

    verdict: Literal["yes, on conditions", "not yet", "no"]
    text: str
    conditions: tuple[str, ...]


class Accuracy(ReportModel):
    """One measured share of right answers, in [0, 1], on public records."""

    name: str
    value: Share
    is_private_model: bool = False
    is_baseline: bool = False


class Bin(ReportModel):
    """Predictions whose confidence lies in one interval."""

    records: Annotated[int, Field(ge=1)]
    confidence: Share
    accuracy: Share


class Calibration(ReportModel):
    """Whether the model's confidence is its share of right answers.

    Args:
        expected_error: ECE, the mean gap between confidence and accuracy over the bins, weighted by records.
        maximum_error: MCE, the largest gap.
        bins: those that hold records, in rising order of confidence.
    """

    expected_error: Share
    maximum_error: Share
    bins: tuple[Bin, ...]


class Subgroup(ReportModel):
    """Accuracy on the public test records of one subgroup, with a 95 % interval (Wilson)."""

    column: str
    value: str
    records: Annotated[int, Field(ge=1)]
    accuracy: Share
    lower: Share
    upper: Share


class Measurements(ReportModel):
    """What the model is good for, measured on public records only.

    Args:
        accuracy: shares of right answers, of the model and of what it is compared with.
        figures: other figures in words: balanced accuracy, errors of a predicted number.
        calibration: of its confidence.
        subgroups: accuracy on parts of the records.
        withheld: how many values are marked private.
    """

    accuracy: tuple[Accuracy, ...]
    figures: tuple[tuple[str, str], ...] = ()
    calibration: Calibration | None
    subgroups: tuple[Subgroup, ...]
    withheld: int

    @property
    def has_baseline(self) -> bool:
        """Whether a baseline trained without privacy was measured."""
        return any(item.is_baseline for item in self.accuracy)


class PrivacyHazard(ReportModel):
    """One way in which such runs fail, and what the run folder says of it.

    Args:
        title: the property that must hold.
        status: "met"; "limitation" (the property does not hold); "not applicable" (the method has no such property);
            "not stated" (the run folder does not say).
        severity: what a limitation means: critical (the guarantee can be false, or does not cover what was shown),
            theoretical (no practical attack is known), negligible.
        text: why.
    """

    title: str
    status: HazardStatus
    severity: Literal["critical", "theoretical", "negligible"]
    text: str


class Remark(ReportModel):
    """One line of what is, or is not, covered."""

    title: str
    text: str


# ----------------------------------------------------------------------------------------------------------------------
# Parts of a report that somebody paid for: noisy losses, and evaluations on private records.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_POINTS = 60


class NoisyLoss(ReportModel):
    """Mean of the noisy losses of some neighboring steps.

    Args:
        steps: finished after the last of them.
        loss: noisy mean; may be negative.
        noise: its standard deviation.
    """

    steps: Annotated[int, Field(ge=1)]
    loss: Annotated[float, Field(allow_inf_nan=False)]
    noise: Real


class NoisyLosses(ReportModel):
    """The loss curve that the plan releases.

    Args:
        max_loss: what each record's loss was cut to.
        budget_fraction: of each step's budget.
        released: values released, one a step.
        points: at most 60 of them; more are means of neighbors.
    """

    max_loss: Real
    budget_fraction: Share
    released: Annotated[int, Field(ge=0)]
    points: tuple[NoisyLoss, ...]

    @property
    def noise_factor(self) -> float:
        """By how much the noise on the gradient grew for it."""
        return 1 / math.sqrt(1 - self.budget_fraction)


def losses_shown(losses: ReleasedLosses | None) -> NoisyLosses | None:
    """The curve as a report shows it, or None."""
    if losses is None:
        return None
    points = tuple(
        NoisyLoss(steps=point.step + 1, loss=point.loss, noise=point.stddev)
        for point in average_adjacent(losses.points, _MOST_POINTS)
    )
    return NoisyLosses(
        max_loss=losses.max_loss, budget_fraction=losses.budget_fraction, released=len(losses.points), points=points
    )


class NoisyAccuracy(ReportModel):
    """A share of right answers among private records, from noisy counts.

    Args:
        column, value: whose share; ``all`` for all records.
        records: noisy number of records, and `records_noise` the standard deviation of its noise.
        accuracy: of them, and the 95 % interval for chance and noise together.
    """

    column: str
    value: str
    records: Annotated[int, Field(ge=0)]
    records_noise: Real
    accuracy: Share
    lower: Share
    upper: Share

    @property
    def is_known(self) -> bool:
        """Whether noise leaves anything to be said."""
        return (self.lower, self.upper) != (0.0, 1.0)

    def describe(self) -> str:
        """The share in words."""
        return f"{100 * self.accuracy:.1f} %" if self.is_known else "not known"


class PrivateEvaluation(ReportModel):
    """One evaluation on private records.

    Args:
        records: what they are, as stated.
        epsilon, delta: what was paid for it.
        disjoint: declared: no person has data both here and in the training records.
        charged: whether a ledger was charged.
        noise: standard deviation of the noise on each count.
        shares: all records first; empty when it was paid for and gave no answer.
        calibration: from noisy counts, with the middle of each bin as its confidence.
        calibration_noise: about what ECE noise alone would make.
    """

    records: str
    epsilon: Real
    delta: Share
    disjoint: bool
    charged: bool
    noise: Real
    shares: tuple[NoisyAccuracy, ...]
    calibration: Calibration | None
    calibration_noise: Real | None


# ----------------------------------------------------------------------------------------------------------------------
# What a report says, as one versioned model. Page, Markdown, JSON, registry entry and picture all come from it.
# ----------------------------------------------------------------------------------------------------------------------


class Report(ReportModel):
    """Everything a report says. Whatever a run does not say is None, and listed in `missing`.

    Args:
        schema_version: 1.
        name: the run's name.
        started: when the run began, ISO 8601 without a place.
        released: what is released, or None.
        trust: who has to be trusted with the records, in words.
        not_for_release: why the run must not be released, or an empty string.
        release: whether the results may be released, and on which conditions.
        declarations: what the people who are responsible declare.
        attacks: membership attacks that were carried out on public records, or None.
        losses: the noisy losses that the plan releases, or None.
        evaluations: those on private records that were paid for.
        epsilon_together: ε of training and all evaluations at the run's δ; None without any, or where none composes.
        training, data, environment: names and values in words.
        registry: what the user says for the public registry of deployments.
        missing: names of required things that the run does not state.
    """

    schema_version: Literal[1] = 1
    name: str
    started: str
    released: str | None
    trust: str
    declarations: Declarations
    release: ReleaseDecision
    guarantee: GuaranteeSection
    target_epsilon: Real | None
    accounting: Accounting
    user_level: tuple[UserLevel, ...]
    mechanism: Mechanism
    process: Process
    curves: Curves
    attack_bounds: AttackBounds | None
    data_accesses: tuple[DataAccess, ...]
    composition: Composition
    audits: tuple[Audit, ...]
    attacks: AttackResults | None
    utility: Measurements
    losses: NoisyLosses | None
    evaluations: tuple[PrivateEvaluation, ...]
    epsilon_together: Real | None
    privacy_hazards: tuple[PrivacyHazard, ...]
    covered: tuple[Remark, ...]
    not_covered: tuple[Remark, ...]
    training: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    registry: dict[str, str]
    not_for_release: str
    missing: tuple[str, ...]

    def count_hazards(self, status: HazardStatus) -> int:
        """How many privacy hazards have this status."""
        return sum(item.status == status for item in self.privacy_hazards)

    @property
    def headline_epsilon(self) -> float:
        """ε of everything that was released: training and all private evaluations together, where that is known."""
        together = self.epsilon_together
        return self.guarantee.epsilon if together is None else max(together, self.guarantee.epsilon)

    @property
    def critical_limitations(self) -> tuple[PrivacyHazard, ...]:
        """The limitations with which the guarantee can be false, or does not cover what was shown."""
        return tuple(
            item for item in self.privacy_hazards if item.status == "limitation" and item.severity == "critical"
        )

    def to_json(self) -> str:
        """The report as JSON; ∞ is the string "inf"."""
        return self.model_dump_json(indent=2)

    def to_dict(self) -> dict[str, object]:
        """The report as plain JSON types."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote.

        Raises:
            InvalidArgument: it is not one, or was written by another version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise InvalidArgument(
                f"report must be JSON of schema version 1, got one that fails at {where}: {first['msg']}. "
                "Make it again with `sordino report RUN --format json`."
            ) from error
