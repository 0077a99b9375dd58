"""Evaluation on private records that was paid for: noisy counts of right and wrong predictions.

A record lies in one cell of each table: right or wrong, by confidence, by class, by subgroup. Each table is one private
histogram with its share of the budget. See ``docs/proofs/private-evaluation.md``.

Example:
    >>> found = private_utility(lambda: ([[0.9, 0.1]] * 500, [0] * 500), classes=("no", "yes"), epsilon=50.0)
    >>> found.table("all").right[0] in range(480, 521), found.epsilon
    (True, 50.0)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, compose
from sordino.ledger import Account, Reservation
from sordino.mechanisms import PrivateHistogram, PureBudget, budget
from sordino.mechanisms.values import Numbers, numeric
from sordino.randomness import Randomness
from sordino.runs import Evaluation, NoisyTable, RunFolder

__all__ = ["Predictions", "private_utility"]

Predictions: TypeAlias = tuple[Numbers, Numbers] | tuple[Numbers, Numbers, Mapping[str, Sequence[object]]]
"""Probabilities [records, classes], right classes [records], and each record's value in every column of groups."""

_OTHER = "other"
_ALL, _CONFIDENCE, _CLASS = "all", "confidence", "class"


def private_utility(
    read: Callable[[], Predictions],
    *,
    classes: Sequence[str],
    epsilon: float,
    delta: float = 0.0,
    groups: Mapping[str, Sequence[str]] | None = None,
    bins: int = 15,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    records: str = "private records",
    disjoint: bool = False,
    ledger: Account | Reservation | None = None,
    run: RunFolder | None = None,
    randomness: Randomness | None = None,
) -> Evaluation:
    """Accuracy, calibration and subgroups of a model on private records, bought with a budget of their own.

    When: there are no public records of the kind. With public ones use `utility`, which costs nothing.

    Guarantee: (ε, δ)-differentially private for one record of `read()` under `relation`: what is returned, written and
    raised depends on the records through the noisy counts alone. All of it is charged to the ledger, and noted in the
    run folder, before `read` is called; a failure after that leaves the charge. A record that is not finite, or whose
    class is none, counts nowhere.

    Args:
        read: reads the records and predicts; called once. It must treat records alone.
        classes: names of the classes, in the order of the probabilities. Declared, never read from the records.
        epsilon: > 0.
        delta: in [0, 1); 0 adds discrete Laplace noise, more adds Gaussian noise, which is less for many subgroups.
        groups: for each column the values it may have; any other value counts as ``other``. Each column is one more
            table, and shares the budget.
        bins: equal parts of confidence from 1 / classes to 1, ≥ 1.
        relation: which sets of records are neighbours; with a run, the run's own.
        records: what the records are, in public words, for the report.
        disjoint: declares that nobody's data are both here and in the records that the model was trained on; what is
            spent here is then not added to what training spent.
        ledger: the account of these records.
        run: of the model; the answer is written into its folder, for reports.
        randomness: of the noise; None takes a fresh key.

    Raises:
        BudgetExceeded: it does not fit the ledger's account; nothing was read.
        InvalidArgument: an argument is out of its range, the run protects more than single records, or `read` gave
            something else than predictions.

    References:
        Guo, Pleiss, Sun and Weinberger 2017, equation 3, for the bins.
    """
    layout = _Layout(classes=tuple(classes), groups={k: tuple(v) for k, v in (groups or {}).items()}, bins=bins)
    relation = relation if run is None else _relation_of(run)
    shares = budget(epsilon=epsilon, delta=delta).split(*(1 for _ in layout.tables))
    key = Randomness() if randomness is None else randomness
    mechanisms = [
        PrivateHistogram(budget=share, categories=tuple(range(2 * len(values))), relation=relation, randomness=key)
        for share, values in zip(shares, layout.tables.values(), strict=True)
    ]
    event = compose([mechanism.event() for mechanism in mechanisms])
    evaluation = Evaluation(
        records=records,
        event=event,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        stddev=max(map(_stddev, mechanisms)),
        disjoint=disjoint,
        charge=_charged(ledger, event=event, records=records, run=run, relation=relation),
        head="" if run is None else run.chain_head,
    )
    earlier = () if run is None else run.evaluations
    if run is not None:
        # Before the records are read: what was paid for and gave no answer is counted all the same.
        run.write_evaluations((*earlier, evaluation))
    cells = layout.cells(read())
    noisy = [mechanism.release(cells[name]) for mechanism, name in zip(mechanisms, layout.tables, strict=True)]
    evaluation = replace(evaluation, tables=layout.told(noisy))
    if run is not None:
        run.write_evaluations((*earlier, evaluation))
    return evaluation


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The tables, fixed before anything is read; cell 2k holds the right ones of value k, cell 2k + 1 the others."""

    classes: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    bins: int

    def __post_init__(self) -> None:
        checks.integer(1, bins=self.bins)
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise InvalidArgument(f"classes must be at least two different names, got {self.classes!r}. Declare them.")
        for column, values in self.groups.items():
            if column in (_ALL, _CONFIDENCE, _CLASS) or _OTHER in values or len(set(values)) != len(values):
                raise InvalidArgument(
                    f"groups must hold different values other than 'other', by columns not called 'all', 'confidence' "
                    f"or 'class', got {column!r}: {values!r}. Rename the column, or declare each value once."
                )

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The values of each table, in order."""
        low = 1 / len(self.classes)
        edges = [low + (1 - low) * k / self.bins for k in range(self.bins + 1)]
        parts = tuple(f"{a:.6f} to {b:.6f}" for a, b in pairwise(edges))
        columns = {name: (*values, _OTHER) for name, values in self.groups.items()}
        return {_ALL: (_ALL,), _CONFIDENCE: parts, _CLASS: self.classes, **columns}

    def cells(self, predictions: Predictions) -> dict[str, NDArray[np.int64]]:
        """For each table the cell of every record; −1 for a record that counts nowhere."""
        chances, labels = numeric(predictions[0], "probabilities"), numeric(predictions[1], "labels")
        chances = chances.reshape(0, len(self.classes)) if not chances.size else chances
        if chances.ndim != 2 or chances.shape[1] != len(self.classes):
            raise InvalidArgument(f"probabilities must have shape (records, {len(self.classes)}), got another.")
        if labels.shape != (len(chances),):
            raise InvalidArgument("labels must be one class per record, got another shape. Give numbers from 0.")
        known = np.isfinite(chances).all(axis=1) & np.isin(labels, np.arange(len(self.classes)))
        # What is not finite is in no cell; zeros only keep the arithmetic below quiet.
        chances, right = np.where(known[:, None], chances, 0.0), np.where(known, labels, 0).astype(np.int64)
        wrong = (chances.argmax(axis=1) != right).astype(np.int64)
        low = 1 / len(self.classes)
        place = np.ceil((np.clip(chances.max(axis=1), low, 1.0) - low) / (1 - low) * self.bins).astype(np.int64) - 1
        found = {_ALL: np.zeros_like(right), _CONFIDENCE: np.clip(place, 0, self.bins - 1), _CLASS: right}
        for column, values in self.groups.items():
            found[column] = _positions(predictions, column, values, len(right))
        return {name: np.where(known, 2 * value + wrong, -1) for name, value in found.items()}

    def told(self, noisy: Sequence[NDArray[np.int64]]) -> tuple[NoisyTable, ...]:
        """The noisy cells of all tables, by name."""
        return tuple(
            NoisyTable(name=name, values=values, right=tuple(counts[0::2].tolist()), wrong=tuple(counts[1::2].tolist()))
            for (name, values), counts in zip(self.tables.items(), noisy, strict=True)
        )


def _positions(predictions: Predictions, column: str, values: tuple[str, ...], records: int) -> NDArray[np.int64]:
    told = predictions[2] if len(predictions) == 3 else {}
    if column not in told or len(told[column]) != records:
        raise InvalidArgument(f"groups must hold one value per record for {column!r}, got none or another number.")
    number = {value: place for place, value in enumerate(values)}
    return np.array([number.get(str(value), len(values)) for value in told[column]], dtype=np.int64)


def _charged(
    ledger: Account | Reservation | None,
    *,
    event: Event,
    records: str,
    run: RunFolder | None,
    relation: NeighboringRelation,
) -> str | None:
    if ledger is None:
        return None
    name = "" if run is None else run.path.name
    note = f"evaluation on {records}"
    paid = ledger.charge(event, note=note, run=name, relation=relation, unit=PrivacyUnit.EXAMPLE)
    return paid.digest


def _relation_of(run: RunFolder) -> NeighboringRelation:
    """The run's own relation; its unit must be one record, for a user's records may lie in many cells."""
    claim = run.guarantee
    unit = PrivacyUnit(str(run.plan.get("privacy_unit", "example"))) if claim is None else claim.unit
    if unit is not PrivacyUnit.EXAMPLE:
        raise InvalidArgument(
            f"run must protect single records to be evaluated on private ones, got one that protects a {unit.value}: "
            f"how many records a {unit.value} has here is not bounded. Measure on public records."
        )
    if claim is not None:
        return claim.relation
    return NeighboringRelation(str(run.plan.get("neighboring_relation", "add_or_remove_one")))


def _stddev(mechanism: PrivateHistogram) -> float:
    """Standard deviation of the noise on each cell."""
    scale = float(mechanism.noise.scales[0])
    if not isinstance(mechanism.budget, PureBudget):
        return scale
    # Discrete Laplace of ratio e^(−1/b): variance 2r/(1 − r)² = 1/(2 sinh²(1/2b)).
    return 1 / (math.sqrt(2) * math.sinh(1 / (2 * scale)))
