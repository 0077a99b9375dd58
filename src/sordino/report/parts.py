"""The parts of a report. None means that the run does not state it.

Example:
    >>> from sordino.report.parts import Interval
    >>> Interval(lower=0.9, upper=1.0).width <= 0.1 + 1e-9
    True
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from sordino.definitions import NeighboringRelation, PrivacyUnit

__all__ = [
    "Accounting",
    "Accuracy",
    "Audit",
    "Bin",
    "Calibration",
    "Composition",
    "Curves",
    "Interval",
    "Measurements",
    "Mechanism",
    "Part",
    "Pitfall",
    "Point",
    "Process",
    "Real",
    "Remark",
    "Risk",
    "Share",
    "Statement",
    "Subgroup",
    "Touch",
    "UserLevel",
]


def _from_json(value: object) -> object:
    return math.inf if value == "inf" else value


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


class Part(BaseModel):
    """Frozen; a misspelt field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Statement(Part):
    """The guarantee with everything needed to read it; `sentence` is the formal line."""

    epsilon: Real
    delta: Share
    relation: NeighboringRelation
    unit: PrivacyUnit
    sampler: str
    accountant: str
    caveats: tuple[str, ...]
    sentence: str

    @property
    def is_private(self) -> bool:
        """Whether ε is finite and δ < 1."""
        return math.isfinite(self.epsilon) and self.delta < 1


class Interval(Part):
    """An interval that contains the true ε."""

    lower: Real
    upper: Real

    @property
    def width(self) -> float:
        """How far the reported ε can be above the true one."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower


class Accounting(Part):
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
    interval: Interval
    claimed_epsilon: Real | None
    without_amplification: Real | None
    sampled: bool

    @property
    def agrees(self) -> bool:
        """Whether the transcript bears out what the run claimed."""
        return self.claimed_epsilon is None or self.interval.upper <= self.claimed_epsilon * (1 + 1e-9)


class UserLevel(Part):
    """ε for a user who owns `size` of the units, at the same δ."""

    size: Annotated[int, Field(ge=1)]
    epsilon: Real


class Point(Part):
    """ε after `steps` steps."""

    steps: Annotated[int, Field(ge=0)]
    epsilon: Real


class Curves(Part):
    """Everything the mechanism says, of which (ε, δ) is one point.

    Args:
        spent: ε over the steps.
        profile: pairs (ε, δ): upper bounds on δ at each ε.
        trade_off: pairs (false positive rate, least false negative rate) of any test.
        gaussian_mu: μ of the smallest Gaussian trade-off curve that covers the run's at the ε tried, or None.
        gaussian_regret: how much that curve overstates an attacker's true positive rate at most, where tried.
    """

    spent: tuple[Point, ...]
    profile: tuple[tuple[float, Share], ...]
    trade_off: tuple[tuple[Share, Share], ...]
    gaussian_mu: Real | None
    gaussian_regret: Real | None


class Risk(Part):
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


class Mechanism(Part):
    """What was planned and what was charged; a text describes a schedule, None is "not stated".

    Args:
        noise_multiplier, max_grad_norm, sample_rate, expected_batch_size: σ, C, q and the public divisor.
        clipping: the method, in words.
        noise: how the noises of the steps hang together, in words.
        steps_planned, steps_charged: steps that were repeated are charged again.
        dataset_size_is_public: whether the size of the data set is treated as public.
        sampler_claimed: how batches are drawn, as the guarantee says.
        sampler_charged: how they were drawn, as each step of the transcript charged it.
        committed_steps: steps that hold a keyed hash of the records drawn, by which the draw can be checked later.
    """

    noise_multiplier: Real | str | None
    max_grad_norm: Real | str | None
    clipping: str | None
    noise: str | None
    sample_rate: Real | str | None
    expected_batch_size: Real | str | None
    steps_planned: int | None
    steps_charged: int
    dataset_size_is_public: bool | None
    sampler_claimed: str
    sampler_charged: str
    committed_steps: int


class Process(Part):
    """Randomness, arithmetic and processes of the run; None is "not stated".

    Args:
        randomness: class of the generator, in words.
        seeded: whether any process drew from a chosen seed, as the run, its transcript or its claim say.
        arithmetic: what kind of numbers the noise is drawn in, in words.
        segments: processes that worked on the run.
        repeated_steps: steps that were charged again after a crash or a fork.
        fresh_keys: whether every segment committed to a key of its own.
        head: hash at the end of the transcript's chain, which stands for plan, facts and every line.
    """

    randomness: str | None
    seeded: bool | None
    arithmetic: str | None
    segments: int | None
    repeated_steps: int
    fresh_keys: bool | None
    head: str


class Touch(Part):
    """One way in which the records were touched outside the mechanism, as the run states it."""

    name: str
    title: str
    text: str | None


class Composition(Part):
    """Other uses of the same records, as a ledger knows them or the run states them; None is "not stated".

    Args:
        account: the ledger's name of the data set.
        text: what is known of other uses, in words.
        spent: ε of everything on the account.
        budget: ε that may be spent on it.
    """

    account: str | None = None
    text: str | None = None
    spent: Real | None = None
    budget: Real | None = None


class Audit(Part):
    """A lower bound on ε that somebody measured by attacking.

    Args:
        method: name of the audit.
        canaries: m, planted records (or runs).
        guesses: r ≤ m, those the attacker guessed on.
        alpha: 1 − confidence.
        epsilon_lower: what the audit proves ε to be at least, with confidence 1 − alpha.
        attacker: what the attacker was assumed to see.
        correct: right guesses, if told.
    """

    method: str
    canaries: Annotated[int, Field(ge=0)]
    guesses: Annotated[int, Field(ge=0)]
    alpha: Annotated[float, Field(gt=0, lt=1)]
    epsilon_lower: Real
    attacker: str
    correct: Annotated[int, Field(ge=0)] | None = None


class Accuracy(Part):
    """One measured share of right answers, in [0, 1], on public records."""

    name: str
    value: Share
    is_private_model: bool = False
    is_twin: bool = False


class Bin(Part):
    """Predictions whose confidence lies in one interval."""

    records: Annotated[int, Field(ge=1)]
    confidence: Share
    accuracy: Share


class Calibration(Part):
    """Whether the model's confidence is its share of right answers.

    Args:
        expected_error: ECE, the mean gap between confidence and accuracy over the bins, weighted by records.
        maximum_error: MCE, the largest gap.
        bins: those that hold records, in rising order of confidence.
    """

    expected_error: Share
    maximum_error: Share
    bins: tuple[Bin, ...]


class Subgroup(Part):
    """Accuracy on the public test records of one subgroup, with a 95 % interval (Wilson)."""

    column: str
    value: str
    records: Annotated[int, Field(ge=1)]
    accuracy: Share
    lower: Share
    upper: Share


class Measurements(Part):
    """What the model is good for, measured on public records only."""

    accuracy: tuple[Accuracy, ...]
    calibration: Calibration | None
    subgroups: tuple[Subgroup, ...]
    withheld: int

    @property
    def has_twin(self) -> bool:
        """Whether a twin trained without privacy was measured."""
        return any(item.is_twin for item in self.accuracy)


class Pitfall(Part):
    """One way in which such runs go wrong, and whether this one did.

    Args:
        title: the property that should hold.
        status: ok, violated or unknown, as far as the run folder tells.
        severity: what a violation means: critical (the guarantee can be false), theoretical (only for attackers that
            are not known in practice), negligible.
        text: why.
    """

    title: str
    status: Literal["ok", "violated", "unknown"]
    severity: Literal["critical", "theoretical", "negligible"]
    text: str


class Remark(Part):
    """One line of what is, or is not, covered."""

    title: str
    text: str
