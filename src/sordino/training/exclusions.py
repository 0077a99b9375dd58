"""Options of a private training that exclude each other: one table, for the checks and for the documentation.

Each row has a reason: a proof that is missing, or sums that are not made. `docs/training-options.md` shows the
table; a test compares the two.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from sordino.errors import InvalidArgument, SordinoError, UnknownSampler


class Option(Enum):
    """What a training may have, in the words of messages and of the documentation."""

    # The plan.
    ADAPTIVE_NORM = "a clipping norm that adapts"
    ADD_OR_REMOVE_ONE = "neighbors that add or remove one record"
    BALLS_IN_BINS = "balls in bins"
    CORRELATED_NOISE = "correlated noise"
    ESTIMATED_NORMS = "clipping by estimated norms"
    FIXED_SIZE = "batches of fixed size"
    LOSS_RELEASE = "released losses"
    REPLACE_ONE = "neighbors that replace one record"
    SCHEDULE = "a schedule"
    SCHEDULED_NORM = "a schedule of max_grad_norm"
    SECURE_MODE = "secure mode"
    SHUFFLED = "shuffled epochs"
    TRANSFORMED_SUMS = "clipping of transformed gradients"
    UNGROUPED = "clipping other than GroupedClipping"
    # How it is trained.
    BUDGET = "a budget that adapts"
    BUDGET_NORM = "a norm released under a budget"
    COMPILE = "compiled steps"
    CUSTOM_LOOP = "a custom training loop"
    FEDERATED = "federated learning"
    FULLY_SHARD = "fully_shard"
    GROUPWISE = 'clipping_mode="groupwise"'
    ONE_BY_ONE = 'gradients="one-by-one"'
    SEVERAL_PROCESSES = "several processes"
    TWO_PASS = 'clipping_mode="two_pass"'  # noqa: S105 (no password)
    UNITS_IN_LOOP = "units in a custom training loop"


# Options that a clipping method brings, and one that does.
_EXAMPLES = {
    Option.ADAPTIVE_NORM: "QuantileClipping",
    Option.ESTIMATED_NORMS: "ProjectedClipping",
    Option.TRANSFORMED_SUMS: "AdaClip",
}


@dataclass(frozen=True)
class Exclusion:
    """An option that does not go with any of some others.

    Args:
        option: the one that the message asks to give up.
        others: what it does not go with.
        parameter: the argument that chooses `option`, and what it must be.
        reason: why.
        advice: what to do instead.
        error: the exception that is raised.
    """

    option: Option
    others: tuple[Option, ...]
    parameter: str
    reason: str
    advice: str
    error: type[SordinoError] = InvalidArgument

    def refusal(self, other: Option, clipping: str = "") -> SordinoError:
        """The exception for `option` together with `other`; `clipping` is the name of the clipping method."""
        got, against = (
            f"{option.value} ({clipping})" if clipping and option in _EXAMPLES else option.value
            for option in (self.option, other)
        )
        return self.error(f"{self.parameter} with {against}, got {got}: {self.reason}. {self.advice}.")


_SPECIAL = (Option.TRANSFORMED_SUMS, Option.ESTIMATED_NORMS)

EXCLUSIONS = (
    Exclusion(
        Option.LOSS_RELEASE,
        (Option.CORRELATED_NOISE, Option.SECURE_MODE, *_SPECIAL),
        "loss_release must be None",
        "losses are released as one Gaussian vector with gradients that are clipped by their exact norms",
        "Leave it out, or use independent noise and clipping by exact norms",
    ),
    Exclusion(
        Option.LOSS_RELEASE,
        (Option.CUSTOM_LOOP, Option.FEDERATED),
        "loss_release must be None",
        "only sordino.fit sees every record's loss",
        "Train with sordino.fit, or leave it out",
    ),
    Exclusion(
        Option.SECURE_MODE,
        (Option.CORRELATED_NOISE, Option.ADAPTIVE_NORM, *_SPECIAL),
        "secure_mode must be False",
        "what these carry over from step to step, or add up, is made of floating-point numbers",
        "Use independent noise and FlatClipping, or floating-point noise",
    ),
    Exclusion(
        Option.CORRELATED_NOISE,
        (Option.SCHEDULE, Option.ADAPTIVE_NORM, *_SPECIAL),
        "correlated_noise must be None",
        "later steps subtract noise that earlier ones added, so scale and clipping norm must stay the same",
        "Give numbers and a fixed clipping norm, FlatClipping for example, or leave it out",
    ),
    Exclusion(
        Option.SHUFFLED,
        (Option.ADD_OR_REMOVE_ONE,),
        "poisson_sampling must be True",
        "one record less moves the borders of every later batch",
        "Pass neighboring_relation='replace_one' (noise for twice the clipping norm) or 'replace_special', or sample "
        "with Poisson sampling",
        UnknownSampler,
    ),
    Exclusion(
        Option.SHUFFLED,
        (Option.SCHEDULE,),
        "poisson_sampling must be True",
        "an epoch is charged as a whole, at the cost of its most expensive batch",
        "Sample with Poisson sampling, or give numbers",
        UnknownSampler,
    ),
    Exclusion(
        Option.FIXED_SIZE,
        (Option.ADD_OR_REMOVE_ONE,),
        "sampling must be None",
        "batches of fixed size are drawn from a public number of records, which must be that of both neighbors",
        "Pass neighboring_relation='replace_one' (noise for twice the clipping norm) or 'replace_special', or sample "
        "with Poisson sampling",
        UnknownSampler,
    ),
    Exclusion(
        Option.FIXED_SIZE,
        (Option.SCHEDULE, Option.CORRELATED_NOISE, Option.ESTIMATED_NORMS),
        "sampling must be None",
        "its amplification is known for one Gaussian of the same noise and rate in every step",
        "Sample with Poisson sampling, or give numbers and clip by exact norms",
        UnknownSampler,
    ),
    Exclusion(
        Option.BALLS_IN_BINS,
        (Option.SCHEDULE, Option.CORRELATED_NOISE, Option.ESTIMATED_NORMS),
        "sampling must be None",
        "an epoch is charged as a whole, as one Gaussian in a secret step",
        "Sample with Poisson sampling, or give numbers and clip by exact norms",
        UnknownSampler,
    ),
    Exclusion(
        Option.ESTIMATED_NORMS,
        (Option.REPLACE_ONE,),
        "clipping must be by exact norms",
        "what two estimated norms cost together is not known",
        "Use FlatClipping, or another neighboring_relation",
    ),
    Exclusion(
        Option.ESTIMATED_NORMS,
        (Option.CUSTOM_LOOP, Option.FEDERATED, Option.SEVERAL_PROCESSES),
        "clipping must be by exact norms",
        "the estimates are made from projections of a loss that sordino.fit calls itself",
        "Use FlatClipping, or sordino.fit in one process",
    ),
    Exclusion(
        Option.UNITS_IN_LOOP,
        (Option.SECURE_MODE, *_SPECIAL),
        "units must be None",
        "these sums are made record by record",
        "Use FlatClipping and floating-point noise, or train with sordino.fit",
    ),
    Exclusion(
        Option.BUDGET,
        (Option.CORRELATED_NOISE, Option.SHUFFLED, Option.BALLS_IN_BINS),
        "budget must be None",
        "steps are charged together, so none can be refused alone",
        "Use independent noise and Poisson sampling, or sample_rate=1",
    ),
    Exclusion(
        Option.BUDGET,
        (Option.FIXED_SIZE,),
        "budget must be None",
        "its batches are Poisson samples at the rate that was chosen",
        "Use Poisson sampling, or sample_rate=1",
    ),
    Exclusion(
        Option.BUDGET,
        (Option.ESTIMATED_NORMS,),
        "budget must be None",
        "an estimate can be too small by any factor, so a step has no Rényi divergence that a filter could add up",
        "Use FlatClipping",
    ),
    Exclusion(
        Option.BUDGET_NORM,
        (Option.SECURE_MODE, *_SPECIAL),
        "norm_budget_fraction must be None",
        "the norm is released as one Gaussian vector with the clipped sum",
        "Use FlatClipping and floating-point noise, or leave it out",
    ),
    Exclusion(
        Option.GROUPWISE,
        (Option.UNGROUPED, Option.SECURE_MODE, Option.UNITS_IN_LOOP),
        'clipping_mode must not be "groupwise"',
        "each group of parameters is clipped by a fixed norm as soon as its gradients are there",
        'Use GroupedClipping, or clipping_mode="low_memory"',
    ),
    Exclusion(
        Option.TWO_PASS,
        (Option.TRANSFORMED_SUMS, Option.SECURE_MODE, Option.UNITS_IN_LOOP),
        'clipping_mode must not be "two_pass"',
        "it reads norms alone, and these need every record's gradient",
        'Use clipping_mode="low_memory"',
    ),
    Exclusion(
        Option.COMPILE,
        (
            Option.SECURE_MODE,
            Option.LOSS_RELEASE,
            *_SPECIAL,
            Option.ADAPTIVE_NORM,
            Option.SCHEDULED_NORM,
            Option.FULLY_SHARD,
        ),
        "compile must be False",
        "the graphs hold one clipping norm and the sums of one process",
        "Leave it out",
    ),
    Exclusion(
        Option.FULLY_SHARD,
        (Option.CORRELATED_NOISE, Option.SECURE_MODE, *_SPECIAL, Option.BUDGET, Option.ONE_BY_ONE),
        "the model must not be sharded",
        "these need whole sums, whole noise or plain gradients in every process",
        "Leave them out, or train the model without fully_shard",
    ),
)
"""Every pair of options that is refused, with its reason. Whatever is not here, is not refused here."""


def check_exclusions(options: Collection[Option], *, clipping: str = "") -> None:
    """Refuse options that exclude each other; `clipping` is the name of the clipping method, for the message.

    Raises:
        InvalidArgument: names both, and what to do.
        UnknownSampler: the sampler is the one to change.
    """
    for row in EXCLUSIONS:
        if row.option in options:
            for other in row.others:
                if other in options:
                    raise row.refusal(other, clipping)


def exclusions_table() -> str:
    """The table in Markdown."""
    rows = ["| option | not with | because | instead |", "|---|---|---|---|"]
    words = {
        option: f"{option.value} ({_EXAMPLES[option]})" if option in _EXAMPLES else option.value for option in Option
    }
    for row in EXCLUSIONS:
        others = "; ".join(words[other] for other in row.others)
        rows.append(f"| {words[row.option]} | {others} | {row.reason} | {row.advice} |")
    return "\n".join(rows) + "\n"
