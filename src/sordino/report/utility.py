"""What a model is good for, from its predictions on public records: accuracy, calibration, subgroups.

`utility` turns predictions into metrics that a run folder stores; `read_utility` reads them back for the report.

Example:
    >>> metrics = compute_utility([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]], [0, 1, 1, 1], public=True)
    >>> metrics["test_accuracy"].value, round(metrics["test_ece"].value, 3)
    (0.75, 0.3)
    >>> found = measure_private_utility(lambda: ([[0.9, 0.1]] * 500, [0] * 500), classes=("no", "yes"), epsilon=50.0)
    >>> found.table("all").right[0] in range(480, 521), found.epsilon
    (True, 50.0)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import Event, Gaussian, NoOp, SelfComposed, compose
from sordino.ledger import Account, Reservation
from sordino.mechanisms import PrivateHistogram, PureBudget, make_budget
from sordino.mechanisms.base import Numbers, to_float_array
from sordino.randomness import KeyedRNG
from sordino.report.schema import (
    Accuracy,
    Bin,
    Calibration,
    Measurements,
    NoisyAccuracy,
    PrivateEvaluation,
    Subgroup,
    wilson_interval,
)
from sordino.runs import Evaluation, Metric, NoisyTable, RunFolder

_ACCURACIES = {
    "test_accuracy": "this model, private",
    "baseline_test_accuracy": "non-private baseline",
    "majority_accuracy": "always the majority class",
}
# What is shown with accuracy, or in its place: words, and whether it is a share.
_FIGURES = {
    "test_balanced_accuracy": ("balanced accuracy", True),
    "test_auc": ("area under the ROC curve", False),
    "test_r2": ("R², share of the variance that is predicted", False),
    "test_rmse": ("root mean squared error", False),
    "test_mae": ("mean absolute error", False),
    "baseline_test_rmse": ("root mean squared error, non-private baseline", False),
    "trivial_rmse": ("root mean squared error, always the mean", False),
}
_BIN, _GROUP, _CONFUSION = "calibration", "subgroup", "confusion"
# The most classes that a table of true and predicted ones is kept of.
_MOST_CLASSES = 10
_FEWEST_IN_GROUP = 1


def compute_utility(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    public: bool,
    groups: Mapping[str, Sequence[str]] | None = None,
    bins: int = 15,
) -> dict[str, Metric]:
    """Accuracy, calibration and accuracy by subgroup of predictions on public records.

    Guarantee: none beyond the model's, and none for the records measured on: so they must be declared public. A
    statistic of private records is a release of its own.

    Args:
        probabilities: (records, classes), each row ≥ 0 and summing to 1.
        labels: (records,), each the index of the right class.
        public: whether everybody may see the records measured on. Must be True.
        groups: for each column the value of every record, for instance ``{"sex": [...]}``.
        bins: equal parts of [0, 1] into which confidence is sorted, ≥ 1.

    Returns:
        Metrics for `RunFolder.write_metrics`: those of `compute_label_utility`, `test_ece`, `test_mce`, and what the
        reliability diagram and the table of subgroups need.

    Raises:
        InvalidArgument: the records are not public, or the shapes do not fit.

    References:
        Guo, Pleiss, Sun and Weinberger 2017, "On calibration of modern neural networks", equations 3 and 5.
    """
    _require_public(public)
    checks.integer(1, bins=bins)
    chances, right = _checked(probabilities, labels)
    confidence = chances.max(axis=1)
    predicted = chances.argmax(axis=1)
    correct = (predicted == right).astype(np.float64)
    # Bins are (k/bins, (k+1)/bins], as in the reference; confidence is never 0.
    position = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    metrics = compute_label_utility(predicted, right, classes=chances.shape[1], scores=chances, public=public)
    gaps, weights = [], []
    for k in range(bins):
        inside = position == k
        if inside.any():
            means = correct[inside].mean(), confidence[inside].mean()
            gaps.append(abs(means[0] - means[1]))
            weights.append(inside.mean())
            for what, value in zip(("records", "accuracy", "confidence"), (inside.sum(), *means), strict=True):
                metrics[f"{_BIN}:{k}:{what}"] = _public(value, "reliability diagram, public test records")
    metrics["test_ece"] = _public(min(1.0, np.dot(gaps, weights)), "expected calibration error")
    metrics["test_mce"] = _public(max(gaps), "maximum calibration error")
    return metrics | _group_metrics(groups or {}, correct)


def _group_metrics(groups: Mapping[str, Sequence[str]], correct: NDArray[np.float64]) -> dict[str, Metric]:
    metrics = {}
    for column, values in groups.items():
        if len(values) != len(correct):
            raise InvalidArgument(
                f"groups must have one value a record, got {len(values)} for {len(correct)} records in {column!r}."
            )
        if ":" in column:
            raise InvalidArgument(f"a column of groups must be named without a colon, got {column!r}. Rename it.")
        names = np.asarray([str(value) for value in values])
        for name in dict.fromkeys(names.tolist()):
            inside = names == name
            metrics[f"{_GROUP}:{column}:{name}:records"] = _public(inside.sum(), "public test records")
            metrics[f"{_GROUP}:{column}:{name}:accuracy"] = _public(correct[inside].mean(), "public test records")
    return metrics


def _require_public(public: bool) -> None:
    if not public:
        raise InvalidArgument(
            "public must be True, got False: what is measured on private records is a release of its own. Pay for one "
            "with sordino.report.measure_private_utility, or measure on public records."
        )


def compute_label_utility(
    predicted: ArrayLike,
    labels: ArrayLike,
    *,
    classes: int,
    public: bool,
    scores: ArrayLike | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Metric]:
    """What predicted classes, without probabilities, are good for on public records.

    Guarantee: that of `compute_utility`: the records must be declared public.

    Args:
        predicted: (records,), each the index of a class.
        labels: (records,), each the index of the right class.
        classes: number of classes, ≥ 2.
        public: whether everybody may see the records measured on. Must be True.
        scores: (records, classes), larger for likelier classes; None leaves the area under the curve out.
        groups: as in `compute_utility`.

    Returns:
        `test_accuracy`; `test_balanced_accuracy`, the mean over the classes of the share that is found (the recall);
        `majority_accuracy`, of always predicting the majority class of these records, without which no accuracy can be
        judged; with scores `test_auc`, the chance that a record of a class scores above one that is not, mean over the
        classes, ties half; and counts of true and predicted classes, for ten classes at most.

    Example:
        >>> found = compute_label_utility([0, 0, 1], [0, 1, 1], classes=2, public=True)
        >>> round(found["test_accuracy"].value, 3), found["test_balanced_accuracy"].value
        (0.667, 0.75)
    """
    _require_public(public)
    guessed, right = np.asarray(predicted, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    checks.integer(1, records=len(right))
    present = np.unique(right)
    recalls = [float(np.mean(guessed[right == k] == k)) for k in present]
    correct = (guessed == right).astype(np.float64)
    what = "private model, public test records"
    metrics = {
        "test_accuracy": _public(correct.mean(), what),
        "test_balanced_accuracy": _public(float(np.mean(recalls)), what),
        "majority_accuracy": _public(
            np.bincount(right).max() / len(right), "share of the majority class among the public test records"
        ),
    }
    if scores is not None and len(present) > 1:
        values = np.asarray(scores, dtype=np.float64)
        # With two classes both areas are the same.
        ranked = [_area(values[:, k], right == k) for k in (present if classes > 2 else present[-1:])]
        metrics["test_auc"] = _public(float(np.mean(ranked)), what)
    if classes <= _MOST_CLASSES:
        for true, guess in np.ndindex(classes, classes):
            count = int(np.sum((right == true) & (guessed == guess)))
            metrics[f"{_CONFUSION}:{true}:{guess}"] = _public(count, "public test records")
    return metrics | _group_metrics(groups or {}, correct)


def _area(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the share of pairs in which the positive record scores higher, ties half."""
    many = int(positive.sum())
    _, rank, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Ranks from 1; equal scores share the mean of theirs.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[rank]
    return float((ranks[positive].sum() - many * (many + 1) / 2) / (many * (len(scores) - many)))


def compute_regression_utility(predicted: ArrayLike, targets: ArrayLike, *, public: bool) -> dict[str, Metric]:
    """What predicted numbers are good for on public records.

    Guarantee: that of `compute_utility`: the records must be declared public.

    Args:
        predicted: (records,), in the target's unit.
        targets: (records,), finite.
        public: whether everybody may see the records measured on. Must be True.

    Returns:
        `test_rmse` and `test_mae`, root mean squared and mean absolute error; `trivial_rmse`, of always naming the mean
        of these targets; `test_r2` = 1 − (test_rmse / trivial_rmse)², if the targets differ.

    Example:
        >>> found = compute_regression_utility([1.0, 3.0], [0.0, 4.0], public=True)
        >>> found["test_rmse"].value, found["test_mae"].value, found["test_r2"].value
        (1.0, 1.0, 0.75)
    """
    _require_public(public)
    guessed, right = np.asarray(predicted, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    checks.integer(1, records=len(right))
    errors = guessed - right
    rmse, trivial = math.sqrt(np.mean(np.square(errors))), float(np.std(right))
    what = "private model, public test records"
    metrics = {
        "test_rmse": _public(rmse, what),
        "test_mae": _public(float(np.mean(np.abs(errors))), what),
        "trivial_rmse": _public(trivial, "always the mean of the public test targets"),
    }
    if trivial > 0:
        metrics["test_r2"] = _public(1 - (rmse / trivial) ** 2, what)
    return metrics


def describe_figures(metrics: Mapping[str, Metric], labels: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The public figures shown with accuracy, or in its place, each with its words; the records of each label last.

    Args:
        metrics: of a run.
        labels: names of the labels, in their order; without names a label's number is shown.

    Example:
        >>> found = compute_label_utility([0, 0, 1], [0, 1, 1], classes=2, public=True)
        >>> describe_figures(found, ["ill", "well"])[-2:]
        [('label ill', '1 right, 0 not'), ('label well', '1 right, 1 not')]
    """
    shown = {name: metric.value for name, metric in metrics.items() if metric.public}
    found = [
        (words, f"{100 * shown[name]:.1f} %" if is_share else f"{shown[name]:.4g}")
        for name, (words, is_share) in _FIGURES.items()
        if name in shown
    ]
    pairs = [tuple(map(int, name.split(":")[1:])) for name in shown if name.startswith(f"{_CONFUSION}:")]
    counts = {pair: int(shown[f"{_CONFUSION}:{pair[0]}:{pair[1]}"]) for pair in pairs}
    classes = sorted({true for true, _ in pairs})
    if classes:
        names = labels if len(labels) == len(classes) else [str(true) for true in classes]
        for true, name in zip(classes, names, strict=True):
            wrong = sum(counts[true, guess] for guess in classes if guess != true)
            found.append((f"label {name}", f"{counts[true, true]:,} right, {wrong:,} not"))
    return found


def label_names(run: RunFolder) -> tuple[str, ...]:
    """The labels that a run's model tells apart, in their order; empty where the run does not say."""
    labels = run.model_description.get("labels")
    return tuple(map(str, labels)) if isinstance(labels, list) else ()


def read_utility(metrics: Mapping[str, Metric], labels: Sequence[str] = ()) -> Measurements:
    """What a report may show of a run's metrics: public values only; `labels` are the names of the run's labels."""
    shown = {name: metric.value for name, metric in metrics.items() if metric.public}
    accuracy = tuple(
        Accuracy(
            name=words,
            value=shown[name],
            is_private_model=name == "test_accuracy",
            is_baseline=name == "baseline_test_accuracy",
        )
        for name, words in _ACCURACIES.items()
        if name in shown
    )
    return Measurements(
        accuracy=accuracy,
        figures=tuple(describe_figures(metrics, labels)),
        calibration=_calibration(shown),
        subgroups=_subgroups(shown),
        withheld=sum(not metric.public for metric in metrics.values()),
    )


def _calibration(shown: Mapping[str, float]) -> Calibration | None:
    if "test_ece" not in shown or "test_mce" not in shown:
        return None
    numbers = sorted(
        int(name.split(":")[1]) for name in shown if name.startswith(f"{_BIN}:") and name.endswith(":records")
    )
    found = [
        Bin(
            records=int(shown[f"{_BIN}:{k}:records"]),
            confidence=shown[f"{_BIN}:{k}:confidence"],
            accuracy=shown[f"{_BIN}:{k}:accuracy"],
        )
        for k in numbers
    ]
    return Calibration(expected_error=shown["test_ece"], maximum_error=shown["test_mce"], bins=tuple(found))


def _subgroups(shown: Mapping[str, float]) -> tuple[Subgroup, ...]:
    found = []
    for name, records in shown.items():
        if name.startswith(f"{_GROUP}:") and name.endswith(":records") and records >= _FEWEST_IN_GROUP:
            stem = name.removesuffix(":records")
            column, value = stem.removeprefix(f"{_GROUP}:").split(":", 1)
            accuracy = shown[f"{stem}:accuracy"]
            lower, upper = wilson_interval(accuracy, int(records))
            found.append(
                Subgroup(column=column, value=value, records=int(records), accuracy=accuracy, lower=lower, upper=upper)
            )
    # Labels that are numbers come in their order; other groups as they were measured.
    if all(one.value.isdigit() for one in found):
        found.sort(key=lambda one: (one.column, int(one.value)))
    return tuple(found)


def _checked(probabilities: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    chances, right = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if chances.ndim != 2 or right.shape != chances.shape[:1] or not len(right):
        raise InvalidArgument(
            f"probabilities and labels must have shapes (records, classes) and (records,), got {chances.shape} and "
            f"{right.shape}. Give one row and one label a record."
        )
    if not np.isfinite(chances).all() or (chances < 0).any() or (abs(chances.sum(axis=1) - 1) > 1e-4).any():
        raise InvalidArgument(
            "probabilities must be ≥ 0 and sum to 1 in every row, got others. Apply a softmax to the model's outputs."
        )
    if not np.issubdtype(right.dtype, np.integer) or right.min() < 0 or right.max() >= chances.shape[1]:
        raise InvalidArgument(f"labels must be whole numbers below {chances.shape[1]}, got others. Give class indices.")
    return np.minimum(chances, 1.0), right.astype(np.int64)


def _public(value: float, what: str) -> Metric:
    return Metric(value=float(value), public=True, what=what)


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation on private records that was paid for: noisy counts of right and wrong predictions.
#
# A record lies in one cell of each table: right or wrong, by confidence, by class, by subgroup. Each table is one
# private histogram with its share of the budget. See ``docs/proofs/private-evaluation.md``.
# ----------------------------------------------------------------------------------------------------------------------


Predictions: TypeAlias = tuple[Numbers, Numbers] | tuple[Numbers, Numbers, Mapping[str, Sequence[object]]]
"""Probabilities [records, classes], right classes [records], and each record's value in every column of groups."""

_OTHER = "other"
_ALL, _CONFIDENCE, _CLASS = "all", "confidence", "class"


def measure_private_utility(
    read: Callable[[], Predictions],
    *,
    classes: Sequence[str],
    epsilon: float,
    delta: float = 0.0,
    groups: Mapping[str, Sequence[str]] | None = None,
    bins: int = 15,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    records: str = "private records",
    disjoint: bool = False,
    ledger: Account | Reservation | None = None,
    run: RunFolder | None = None,
    rng: KeyedRNG | None = None,
) -> Evaluation:
    """Accuracy, calibration and subgroups of a model on private records, with a separate budget.

    When: there are no public records of the kind. With public ones use `utility`, which costs nothing.

    Guarantee: (ε, δ)-differentially private for one record of `read()` under `neighboring_relation`: what is returned,
    written and raised depends on the records through the noisy counts alone. All of it is charged to the ledger, and
    noted in the run folder, before `read` is called; a failure after that leaves the charge. A record that is not
    finite, or whose class is none, counts nowhere.

    Args:
        read: reads the records and predicts; called once. It must treat records alone.
        classes: names of the classes, in the order of the probabilities. Declared, never read from the records.
        epsilon: > 0.
        delta: in [0, 1); 0 adds discrete Laplace noise, more adds Gaussian noise, which is less for many subgroups.
        groups: for each column the values it may have; any other value counts as ``other``. Each column is one more
            table, and shares the budget.
        bins: equal parts of confidence from 1 / classes to 1, ≥ 1.
        neighboring_relation: which sets of records are neighbors; with a run, the run's own.
        records: what the records are, in public words, for the report.
        disjoint: declares that no person has data both here and in the records that the model was trained on; what is
            spent here is then not added to what training spent.
        ledger: the account of these records.
        run: of the model; the answer is written into its folder, for reports.
        rng: of the noise; None takes a fresh key.

    Raises:
        BudgetExceeded: it does not fit the ledger's account; nothing was read.
        InvalidArgument: an argument is out of its range, the run protects more than single records, or `read` gave
            something else than predictions.

    References:
        Guo, Pleiss, Sun and Weinberger 2017, equation 3, for the bins.
    """
    layout = _Layout(classes=tuple(classes), groups={k: tuple(v) for k, v in (groups or {}).items()}, bins=bins)
    neighboring_relation = neighboring_relation if run is None else _relation_of(run)
    shares = make_budget(epsilon=epsilon, delta=delta).split(*(1 for _ in layout.tables))
    key = KeyedRNG() if rng is None else rng
    mechanisms = [
        PrivateHistogram(
            budget=share, categories=tuple(range(2 * len(values))), neighboring_relation=neighboring_relation, rng=key
        )
        for share, values in zip(shares, layout.tables.values(), strict=True)
    ]
    event = compose([mechanism.event() for mechanism in mechanisms])
    evaluation = Evaluation(
        records=records,
        event=event,
        epsilon=epsilon,
        delta=delta,
        neighboring_relation=neighboring_relation,
        stddev=max(map(_stddev, mechanisms)),
        disjoint=disjoint,
        charge=_charged(ledger, event=event, records=records, run=run, neighboring_relation=neighboring_relation),
        head="" if run is None else run.chain_head,
    )
    earlier = () if run is None else run.evaluations
    if run is not None:
        # Before the records are read: what was paid for and gave no answer is counted all the same.
        run.write_evaluations((*earlier, evaluation))
    cells = layout.cells(read())
    noisy = [mechanism.release(cells[name]) for mechanism, name in zip(mechanisms, layout.tables, strict=True)]
    evaluation = replace(evaluation, tables=layout.noisy_tables(noisy))
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
        chances, labels = to_float_array(predictions[0], "probabilities"), to_float_array(predictions[1], "labels")
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
        part = np.ceil((np.clip(chances.max(axis=1), low, 1.0) - low) / (1 - low) * self.bins).astype(np.int64) - 1
        found = {_ALL: np.zeros_like(right), _CONFIDENCE: np.clip(part, 0, self.bins - 1), _CLASS: right}
        for column, values in self.groups.items():
            found[column] = _positions(predictions, column, values, len(right))
        return {name: np.where(known, 2 * value + wrong, -1) for name, value in found.items()}

    def noisy_tables(self, noisy: Sequence[NDArray[np.int64]]) -> tuple[NoisyTable, ...]:
        """The noisy cells of all tables, by name."""
        return tuple(
            NoisyTable(name=name, values=values, right=tuple(counts[0::2].tolist()), wrong=tuple(counts[1::2].tolist()))
            for (name, values), counts in zip(self.tables.items(), noisy, strict=True)
        )


def _positions(predictions: Predictions, column: str, values: tuple[str, ...], records: int) -> NDArray[np.int64]:
    attributes = predictions[2] if len(predictions) == 3 else {}
    if column not in attributes or len(attributes[column]) != records:
        raise InvalidArgument(f"groups must hold one value per record for {column!r}, got none or another number.")
    number = {value: index for index, value in enumerate(values)}
    return np.array([number.get(str(value), len(values)) for value in attributes[column]], dtype=np.int64)


def _charged(
    ledger: Account | Reservation | None,
    *,
    event: Event,
    records: str,
    run: RunFolder | None,
    neighboring_relation: NeighboringRelation,
) -> str | None:
    if ledger is None:
        return None
    return ledger.charge(
        event,
        note=f"evaluation on {records}",
        run="" if run is None else run.path.name,
        neighboring_relation=neighboring_relation,
        privacy_unit=PrivacyUnit.RECORD,
    ).digest


def _relation_of(run: RunFolder) -> NeighboringRelation:
    """The run's own relation; its unit must be one record, for a user's records may lie in many cells."""
    claim = run.guarantee
    unit = PrivacyUnit(str(run.plan.get("privacy_unit", "record"))) if claim is None else claim.privacy_unit
    if unit is not PrivacyUnit.RECORD:
        raise InvalidArgument(
            f"run must protect single records to be evaluated on private ones, got one that protects a {unit.value}: "
            f"how many records a {unit.value} has here is not bounded. Measure on public records."
        )
    if claim is not None:
        return claim.neighboring_relation
    return NeighboringRelation(str(run.plan.get("neighboring_relation", "add_or_remove_one")))


def _stddev(mechanism: PrivateHistogram) -> float:
    """Standard deviation of the noise on each cell."""
    scale = float(mechanism.noise.scales[0])
    if not isinstance(mechanism.budget, PureBudget):
        return scale
    # Discrete Laplace of ratio e^(−1/b): variance 2r/(1 − r)² = 1/(2 sinh²(1/2b)).
    return 1 / (math.sqrt(2) * math.sinh(1 / (2 * scale)))


# ----------------------------------------------------------------------------------------------------------------------
# What noisy counts say: shares with intervals for chance and noise together, calibration, and what all of it cost.
#
#     right − p·(right + wrong) has mean 0 and variance n p (1 − p) + σ² (p² + (1 − p)²)                          (1)
#
# An interval holds every p for which (1) explains what was seen; without noise it is Wilson's.
# ----------------------------------------------------------------------------------------------------------------------


_NORMAL = 1.959963984540054
# The 95 % interval of a Laplace variable, in its standard deviations: ln 20 / √2.
_LAPLACE = math.log(20) / math.sqrt(2)


def proportion_interval(right: float, wrong: float, *, stddev: float, width: float = _NORMAL) -> tuple[float, float]:
    """The 95 % interval of a share of right answers, for chance and noise together, by (1).

    Args:
        right: noisy count of right ones.
        wrong: noisy count of wrong ones.
        stddev: standard deviation of the noise on each, ≥ 0.
        width: of the interval in standard deviations; more than 1.96 for noise with heavier tails.

    Returns:
        Lower and upper end in [0, 1]; (0, 1) where the counts say nothing.

    Example:
        >>> low, high = proportion_interval(80, 20, stddev=0.0)
        >>> round(low, 4), round(high, 4)
        (0.7112, 0.8666)
    """
    total = right + wrong
    # The number of records in (1) is only known with noise: more of them are more variance.
    records = max(total, 0.0) + width * math.sqrt(2) * stddev
    square, noise = width**2, (width * stddev) ** 2
    # (right − p·total)² ≤ width² (records p (1 − p) + σ² (1 − 2p + 2p²)), as a p² + b p + c ≤ 0.
    a = total**2 + square * records - 2 * noise
    b = -2 * right * total - square * records + 2 * noise
    c = right**2 - noise
    inside = b * b - 4 * a * c
    if total <= 0 or a <= 0 or inside < 0:
        return 0.0, 1.0
    root = math.sqrt(inside)
    low, high = (-b - root) / (2 * a), (-b + root) / (2 * a)
    return (0.0, 1.0) if low > 1 or high < 0 else (max(0.0, low), min(1.0, high))


def joint_epsilon(
    evaluations: Sequence[Evaluation],
    trained: Event,
    *,
    claimed: float,
    delta: float,
    neighboring_relation: NeighboringRelation,
) -> float | None:
    """ε at `delta` of training and all evaluations; None where no accountant composes them.

    `trained` are the events of training and `claimed` its ε. Where the claim is more than the events come to (a budget
    that was spent step by step), pure ε of evaluations are added to the claim.

    Those on records that are declared disjoint from the training records are composed among themselves: no person is in
    both, so the larger of the two sums holds.
    """
    ours = [one.event for one in evaluations if not one.disjoint]
    others = [one.event for one in evaluations if one.disjoint]
    try:
        spent = partial(accounting.epsilon, neighboring_relation=neighboring_relation)
        apart = spent(compose(others), delta).upper
        if claimed <= spent(trained, delta).upper * (1 + 1e-9):
            return max(apart, spent(compose([trained, *ours]), delta).upper)
        return max(apart, claimed + spent(compose(ours), 0.0).upper)
    except (AccountingError, UnsupportedEvent):
        return None


def summarize_evaluation(evaluation: Evaluation) -> PrivateEvaluation:
    """What a report says of one evaluation."""
    width = _NORMAL if _is_gaussian(evaluation.event) else _LAPLACE
    calibration, noise = _paid_calibration(evaluation)
    return PrivateEvaluation(
        records=evaluation.records,
        epsilon=evaluation.epsilon,
        delta=evaluation.delta,
        disjoint=evaluation.disjoint,
        charged=evaluation.charge is not None,
        noise=evaluation.stddev,
        shares=tuple(_shares(evaluation.tables or (), evaluation.stddev, width)),
        calibration=calibration,
        calibration_noise=noise,
    )


def _is_gaussian(event: Event) -> bool:
    inner = event.event if isinstance(event, SelfComposed) else event
    return isinstance(inner, Gaussian | NoOp)


def _shares(tables: Sequence[NoisyTable], stddev: float, width: float) -> Iterator[NoisyAccuracy]:
    """All records first, then every value of classes and columns."""
    if tables:
        right, wrong, variance = _of_all(tables)
        yield _share("all", "all", right, wrong, stddev * math.sqrt(variance), width)
    for table in tables:
        if table.name not in ("all", "confidence"):
            for value, right, wrong in zip(table.values, table.right, table.wrong, strict=True):
                yield _share(table.name, value, right, wrong, stddev, width)


def _of_all(tables: Sequence[NoisyTable]) -> tuple[float, float, float]:
    """Noisy numbers of right and wrong ones, and the variance of their noise, in that of one count.

    Every table counts the same records, so their sums are averaged, each by the inverse of its noise.
    """
    weights = [1 / len(table.values) for table in tables]
    total = math.fsum(weights)
    right = math.fsum(weight * sum(table.right) for weight, table in zip(weights, tables, strict=True)) / total
    wrong = math.fsum(weight * sum(table.wrong) for weight, table in zip(weights, tables, strict=True)) / total
    return right, wrong, 1 / total


def _share(column: str, value: str, right: float, wrong: float, stddev: float, width: float) -> NoisyAccuracy:
    total = right + wrong
    low, high = proportion_interval(right, wrong, stddev=stddev, width=width)
    share = right / total if total > 0 else 0.5
    return NoisyAccuracy(
        column=column,
        value=value,
        records=max(0, round(total)),
        records_noise=math.sqrt(2) * stddev,
        accuracy=min(max(share, low), high),
        lower=low,
        upper=high,
    )


def _paid_calibration(evaluation: Evaluation) -> tuple[Calibration | None, float | None]:
    """ECE, and about what it would be from noise alone: the mean of |noise| over all bins; None without an answer.

    The middles of the bins stand for the confidences in them. Where noise hides all records there is no ECE.
    """
    table = evaluation.table("confidence")
    if table is None or evaluation.tables is None:
        return None, None
    middles = [sum(map(float, value.split(" to "))) / 2 for value in table.values]
    total = sum(_of_all(evaluation.tables)[:2])
    spreads = [evaluation.stddev * math.hypot(1 - middle, middle) for middle in middles]
    noise = min(1.0, math.sqrt(2 / math.pi) * math.fsum(spreads) / max(1.0, total))
    if total <= 0:
        return None, noise
    gaps, bins = [], []
    for middle, right, wrong in zip(middles, table.right, table.wrong, strict=True):
        gaps.append(abs(right - middle * (right + wrong)))
        # Bins in which noise hides whether there is anybody are not drawn.
        if right + wrong > 3 * math.sqrt(2) * evaluation.stddev:
            share = min(1.0, max(0.0, right / (right + wrong)))
            bins.append(Bin(records=round(right + wrong), confidence=middle, accuracy=share))
    largest = max((abs(part.accuracy - part.confidence) for part in bins), default=0.0)
    calibration = Calibration(
        expected_error=min(1.0, math.fsum(gaps) / total), maximum_error=min(1.0, largest), bins=tuple(bins)
    )
    return calibration, noise
