"""Evaluations on private records that were paid for (floor 2): what was charged, and the noisy counts that came out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, from_dict, to_dict

__all__ = ["Evaluation", "NoisyTable", "evaluations_body", "evaluations_of"]


@dataclass(frozen=True, kw_only=True)
class NoisyTable:
    """Noisy counts of right and wrong predictions for each value of one thing; a record is counted in one place.

    Args:
        name: what the values are of: ``all``, ``confidence``, ``class``, or a column.
        values: declared beforehand; the last one of a column is ``other``.
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
        epsilon, delta: that the event was bought with.
        relation: for which the event holds.
        stddev: standard deviation of the noise on each count.
        disjoint: declared by whoever asked: nobody's data are both in these records and in those trained on.
        charge: the ledger's name of the charge, or None.
        head: end of the transcript's chain when the model was evaluated.
        tables: the noisy counts; None when the evaluation was paid for and gave no answer.
    """

    records: str
    event: Event
    epsilon: float
    delta: float
    relation: NeighboringRelation
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
    tables = None
    if evaluation.tables is not None:
        tables = [
            {
                "name": table.name,
                "values": list(table.values),
                "right": list(table.right),
                "wrong": list(table.wrong),
            }
            for table in evaluation.tables
        ]
    return {
        "records": evaluation.records,
        "event": to_dict(evaluation.event),
        "epsilon": evaluation.epsilon,
        "delta": evaluation.delta,
        "relation": evaluation.relation.value,
        "stddev": evaluation.stddev,
        "disjoint": evaluation.disjoint,
        "charge": evaluation.charge,
        "head": evaluation.head,
        "tables": tables,
    }


def evaluations_of(body: Mapping[str, object]) -> tuple[Evaluation, ...]:
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
        relation=NeighboringRelation(str(body["relation"])),
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
