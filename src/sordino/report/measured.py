"""What a model is good for, from its predictions on public records: accuracy, calibration, subgroups.

`utility` turns predictions into metrics that a run folder stores; `utility_of` reads them back for the report.

Example:
    >>> metrics = utility([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]], [0, 1, 1, 1], public=True)
    >>> metrics["test_accuracy"].value, round(metrics["test_ece"].value, 3)
    (0.75, 0.3)
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.report.parts import Accuracy, Bin, Calibration, Measurements, Subgroup
from sordino.runs import Metric

__all__ = ["utility", "utility_of"]

_ACCURACIES = {
    "test_accuracy": "this model, private",
    "twin_test_accuracy": "its twin, not private",
    "majority_accuracy": "always the commonest label",
}
_BIN, _GROUP = "calibration", "subgroup"
_Z95 = 1.959963984540054
_FEWEST_IN_GROUP = 1


def utility(
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
        Metrics for `RunFolder.write_metrics`: `test_accuracy`, `test_ece`, `test_mce`, and what the reliability
        diagram and the table of subgroups need.

    Raises:
        InvalidArgument: the records are not public, or the shapes do not fit.

    References:
        Guo, Pleiss, Sun and Weinberger 2017, "On calibration of modern neural networks", equations 3 and 5.
    """
    if not public:
        raise InvalidArgument(
            "public must be True, got False: what is measured on private records is a release of its own. Pay for one "
            "with sordino.report.private_utility, or measure on public records."
        )
    checks.integer(1, bins=bins)
    chances, right = _checked(probabilities, labels)
    confidence = chances.max(axis=1)
    correct = (chances.argmax(axis=1) == right).astype(np.float64)
    # Bins are (k/bins, (k+1)/bins], as in the reference; confidence is never 0.
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    metrics = {"test_accuracy": _public(correct.mean(), "private model, public test records")}
    gaps, weights = [], []
    for k in range(bins):
        inside = place == k
        if inside.any():
            means = correct[inside].mean(), confidence[inside].mean()
            gaps.append(abs(means[0] - means[1]))
            weights.append(inside.mean())
            for what, value in zip(("records", "accuracy", "confidence"), (inside.sum(), *means), strict=True):
                metrics[f"{_BIN}:{k}:{what}"] = _public(value, "reliability diagram, public test records")
    metrics["test_ece"] = _public(min(1.0, np.dot(gaps, weights)), "expected calibration error")
    metrics["test_mce"] = _public(max(gaps), "maximum calibration error")
    for column, values in (groups or {}).items():
        _same_length(values, right, column)
        names = np.asarray([str(value) for value in values])
        for name in dict.fromkeys(names.tolist()):
            inside = names == name
            metrics[f"{_GROUP}:{column}:{name}:records"] = _public(inside.sum(), "public test records")
            metrics[f"{_GROUP}:{column}:{name}:accuracy"] = _public(correct[inside].mean(), "public test records")
    return metrics


def utility_of(metrics: Mapping[str, Metric]) -> Measurements:
    """What a report may show of a run's metrics: public values only."""
    shown = {name: metric.value for name, metric in metrics.items() if metric.public}
    accuracy = tuple(
        Accuracy(
            name=words,
            value=shown[name],
            is_private_model=name == "test_accuracy",
            is_twin=name == "twin_test_accuracy",
        )
        for name, words in _ACCURACIES.items()
        if name in shown
    )
    return Measurements(
        accuracy=accuracy,
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
            lower, upper = _wilson(accuracy, int(records))
            found.append(
                Subgroup(column=column, value=value, records=int(records), accuracy=accuracy, lower=lower, upper=upper)
            )
    return tuple(found)


def _wilson(share: float, records: int) -> tuple[float, float]:
    """95 % interval of a share: Wilson 1927."""
    z2 = _Z95**2 / records
    centre = (share + z2 / 2) / (1 + z2)
    half = _Z95 * math.sqrt(share * (1 - share) / records + z2 / (4 * records)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


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


def _same_length(values: Sequence[str], labels: NDArray[np.int64], column: str) -> None:
    if len(values) != len(labels):
        raise InvalidArgument(
            f"groups must have one value a record, got {len(values)} for {len(labels)} records in {column!r}."
        )
    if ":" in column:
        raise InvalidArgument(f"a column of groups must be named without a colon, got {column!r}. Rename it.")


def _public(value: float, what: str) -> Metric:
    return Metric(value=float(value), public=True, what=what)
