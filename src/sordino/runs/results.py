"""What a run says of its end: the guarantee, and measured values that are public or private."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sordino import checks
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, from_dict, to_dict
from sordino.runs.transcript import decode_number, encode_number


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured value.

    Args:
        value: the number.
        public: True only when it was computed from public data, or from the private model on public data.
        what: what was measured, in words.
    """

    value: float
    public: bool
    what: str = ""


def guarantee_body(guarantee: Guarantee) -> dict[str, object]:
    """The guarantee as numbers and as a sentence, in plain JSON types."""
    return {
        "epsilon": encode_number(guarantee.epsilon),
        "delta": guarantee.delta,
        "neighboring_relation": guarantee.neighboring_relation.value,
        "privacy_unit": guarantee.privacy_unit.value,
        "sampler": guarantee.sampler,
        "accountant": guarantee.accountant,
        "caveats": list(guarantee.caveats),
        "description": guarantee.describe(),
    }


def read_guarantee(body: Mapping[str, object]) -> Guarantee:
    """The guarantee that `guarantee_body` described."""
    try:
        epsilon, caveats = decode_number(body["epsilon"]), body["caveats"]
        return Guarantee(
            epsilon=math.inf if epsilon is None else epsilon,
            delta=float(str(body["delta"])),
            neighboring_relation=NeighboringRelation(str(body["neighboring_relation"])),
            privacy_unit=PrivacyUnit(str(body["privacy_unit"])),
            sampler=str(body["sampler"]),
            accountant=str(body["accountant"]),
            caveats=tuple(map(str, caveats)) if isinstance(caveats, list) else (),
        )
    except KeyError as missing:
        raise InvalidArgument(f"guarantee.json must hold {missing}, got none. The run folder was changed.") from missing


def metrics_body(metrics: Mapping[str, Metric]) -> dict[str, object]:
    """The values in plain JSON types; every one says whether it is public."""
    return {
        name: {"value": encode_number(metric.value), "visibility": "public" if metric.public else "private"}
        | ({"what": metric.what} if metric.what else {})
        for name, metric in metrics.items()
    }


def read_metrics(body: Mapping[str, object]) -> dict[str, Metric]:
    """The values that `metrics_body` described. Anything not marked public is private."""
    found: dict[str, Metric] = {}
    for name, entry in body.items():
        value = decode_number(entry.get("value")) if isinstance(entry, dict) else None
        if isinstance(entry, dict) and value is not None:
            public = entry.get("visibility") == "public"
            found[name] = Metric(value=value, public=public, what=str(entry.get("what", "")))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The noisy losses that a run released: values that were released step by step, and the noise on each.
# ----------------------------------------------------------------------------------------------------------------------


_FIELDS = {"schema", "max_loss", "budget_fraction", "points"}


@dataclass(frozen=True, kw_only=True)
class ReleasedLoss:
    """One released value of a loss curve.

    Args:
        step: number of the step, from 0.
        loss: noisy sum of the bounded losses of the step's batch over the expected batch size; may be negative.
        stddev: standard deviation of the noise on `loss`, known in advance.
    """

    step: int
    loss: float
    stddev: float


@dataclass(frozen=True, kw_only=True)
class ReleasedLosses:
    """What a run folder holds of a loss curve.

    Args:
        max_loss: what each record's loss was cut to, from 0.
        budget_fraction: of the step's budget that went to the losses, in (0, 1).
        points: in the order of steps.
    """

    max_loss: float
    budget_fraction: float
    points: tuple[ReleasedLoss, ...]


def average_adjacent(points: Sequence[ReleasedLoss], most: int) -> tuple[ReleasedLoss, ...]:
    """At most `most` means of neighboring points: noise is independent from step to step, so a mean has less of it.

    Example:
        >>> points = [ReleasedLoss(step=k, loss=float(k), stddev=2.0) for k in range(8)]
        >>> [(point.step, point.loss, point.stddev) for point in average_adjacent(points, 2)]
        [(3, 1.5, 1.0), (7, 5.5, 1.0)]
    """
    checks.integer(1, most=most)
    size = max(1, -(-len(points) // most))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        spread = math.sqrt(math.fsum(point.stddev**2 for point in part)) / len(part)
        mean = math.fsum(point.loss for point in part) / len(part)
        found.append(ReleasedLoss(step=part[-1].step, loss=mean, stddev=spread))
    return tuple(found)


def losses_body(losses: ReleasedLosses) -> dict[str, object]:
    """The curve in plain JSON types. Losses are texts of one length, so that the size of the file tells nothing."""
    points = [[point.step, f"{point.loss:+.16e}", point.stddev] for point in losses.points]
    return {"schema": 1, "max_loss": losses.max_loss, "budget_fraction": losses.budget_fraction, "points": points}


def read_released_losses(body: Mapping[str, object]) -> ReleasedLosses:
    """The curve that `losses_body` described.

    Raises:
        InvalidArgument: it is another body.
    """
    points = body.get("points")
    try:
        if set(body) != _FIELDS or body["schema"] != 1 or not isinstance(points, list):
            raise ValueError
        found = tuple(
            ReleasedLoss(step=checks.integer(0, step=step), loss=_finite(float(str(loss))), stddev=_finite(stddev))
            for step, loss, stddev in points
        )
        return ReleasedLosses(
            max_loss=_finite(body["max_loss"]), budget_fraction=_finite(body["budget_fraction"]), points=found
        )
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"loss_curve.json must hold {', '.join(sorted(_FIELDS))}, schema 1, got another body. "
            "The run folder was changed."
        ) from error


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


# ----------------------------------------------------------------------------------------------------------------------
# Evaluations on private records that were paid for: what was charged, and the noisy counts that came out.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoisyTable:
    """Noisy counts of right and wrong predictions for each value of one thing; a record is counted in one place.

    Args:
        name: what the values are of: ``all``, ``confidence``, ``class``, or a column.
        values: declared in advance; the last one of a column is ``other``.
        right, wrong: noisy whole numbers, one for each value; may be negative.
    """

    name: str
    values: tuple[str, ...]
    right: tuple[int, ...]
    wrong: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of a run's model on private records.

    Args:
        records: what they are, in words; public.
        event: what was charged, before the records were read.
        epsilon, delta: that were charged for the event.
        neighboring_relation: for which the event holds.
        stddev: standard deviation of the noise on each count.
        disjoint: declared by the caller: no person has data both in these records and in those trained on.
        charge: the ledger's name of the charge, or None.
        head: end of the transcript's chain when the model was evaluated.
        tables: the noisy counts; None when the evaluation was paid for and gave no answer.
    """

    records: str
    event: Event
    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation
    stddev: float
    disjoint: bool
    charge: str | None
    head: str
    tables: tuple[NoisyTable, ...] | None = None

    def table(self, name: str) -> NoisyTable | None:
        """The table called `name`, or None."""
        return next((table for table in self.tables or () if table.name == name), None)


def evaluations_body(evaluations: Sequence[Evaluation]) -> dict[str, object]:
    """The evaluations in plain JSON types."""
    return {"schema": 1, "evaluations": [_body(evaluation) for evaluation in evaluations]}


def _body(evaluation: Evaluation) -> dict[str, object]:
    relation = evaluation.neighboring_relation.value
    return {**asdict(evaluation), "event": to_dict(evaluation.event), "neighboring_relation": relation}


def read_evaluations(body: Mapping[str, object]) -> tuple[Evaluation, ...]:
    """The evaluations that `evaluations_body` described.

    Raises:
        InvalidArgument: it is another body.
    """
    found = body.get("evaluations")
    try:
        if set(body) != {"schema", "evaluations"} or body["schema"] != 1 or not isinstance(found, list):
            raise ValueError
        return tuple(_evaluation(one) for one in found)
    except (ValueError, TypeError, KeyError, SordinoError) as error:
        raise InvalidArgument(
            "evaluations.json must hold evaluations, schema 1, got another body. The run folder was changed."
        ) from error


def _evaluation(body: Mapping[str, object]) -> Evaluation:
    tables, charge, disjoint = body["tables"], body["charge"], body["disjoint"]
    if not (tables is None or isinstance(tables, list)) or not isinstance(disjoint, bool):
        raise ValueError
    return Evaluation(
        records=str(body["records"]),
        event=from_dict(body["event"]),
        epsilon=float(str(body["epsilon"])),
        delta=float(str(body["delta"])),
        neighboring_relation=NeighboringRelation(str(body["neighboring_relation"])),
        stddev=float(str(body["stddev"])),
        disjoint=disjoint,
        charge=None if charge is None else str(charge),
        head=str(body["head"]),
        tables=None if tables is None else tuple(map(_table, tables)),
    )


def _table(body: Mapping[str, object]) -> NoisyTable:
    values, right, wrong = body["values"], body["right"], body["wrong"]
    if not (isinstance(values, list) and isinstance(right, list) and isinstance(wrong, list)):
        raise TypeError
    if not len(values) == len(right) == len(wrong):
        raise ValueError
    return NoisyTable(
        name=str(body["name"]), values=tuple(map(str, values)), right=_counts(right), wrong=_counts(wrong)
    )


def _counts(body: list[object]) -> tuple[int, ...]:
    return tuple(checks.integer(count=count) for count in body)
