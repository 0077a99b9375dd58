"""Estimators by name, with everything they want declared taken from a table's public facts (floor 6).

Their other parameters are the estimators' defaults, which were chosen once on public data and are frozen: so choosing a
method *beforehand* costs no privacy. Trying several on private records does; `sordino compare` puts that on the bill.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
from sklearn.base import is_regressor

from sordino import checks, estimators
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator
from sordino.recipes.tables import Facts, Rows, Table

__all__ = ["FittedTable", "METHODS", "TableMethod", "applicable", "fit_to", "method_called", "non_private"]

Declared: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class TableMethod:
    """One way to learn a table.

    Args:
        name: as the command line calls it.
        words: what it does, in a few words.
        classifier: (estimator's name, its own parameters) for classes, or None.
        regressor: the same for numbers, or None; for two classes a regressor is used on ±1, by the sign.
        wants: the public facts it wants declared.
    """

    name: str
    words: str
    classifier: tuple[str, Declared] | None
    regressor: tuple[str, Declared] | None
    wants: tuple[str, ...]

    def estimator(self, facts: Facts, *, epsilon: float, delta: float, **changes: object) -> PrivateEstimator:
        """The estimator, with everything declared.

        Raises:
            InvalidArgument: the method does not fit the table.
        """
        chosen = self._chosen(facts)
        if chosen is None:
            raise InvalidArgument(
                f"model must suit the table, got {self.name!r} for "
                f"{'a number' if facts.classes is None else f'{facts.classes} classes'}. "
                f"Choose one of {', '.join(method.name for method in applicable(facts))}."
            )
        kind = getattr(estimators, chosen[0])
        given = {name: _FACTS[name](facts) for name in self.wants}
        if facts.classes is not None and chosen is self.regressor:
            given["target_bounds"] = (-1.0, 1.0)
        known = kind().get_params()
        given = {name: value for name, value in given.items() if name in known}
        return kind(epsilon=epsilon, delta=delta, **given, **chosen[1], **changes)

    def _chosen(self, facts: Facts) -> tuple[str, Declared] | None:
        if facts.classes is None:
            chosen = self.regressor
        else:
            chosen = self.classifier or (self.regressor if facts.classes == 2 else None)
        if chosen is None or chosen[0] not in estimators.__all__:
            return None
        return chosen

    def suits(self, facts: Facts) -> bool:
        """Whether it can learn such a table."""
        return self._chosen(facts) is not None

    def fit(self, table: Table, *, epsilon: float, delta: float, **changes: object) -> "FittedTable":
        """Fit to the training records: (epsilon, delta)-differentially private, as the estimator's `privacy_` says."""
        return fit_to(self.estimator(table.facts, epsilon=epsilon, delta=delta, **changes), table)


_FACTS: dict[str, Callable[[Facts], object]] = {
    "data_norm": lambda facts: facts.data_norm,
    "classes": lambda facts: tuple(range(facts.classes or 0)),
    "bounds": lambda facts: (-1.0, 1.0),  # noqa: ARG005 (rows are scaled to them)
    "target_bounds": lambda facts: facts.target_bounds,
    "population": lambda facts: facts.population,
    "one_hot": lambda facts: facts.one_hot or None,
}
_LINEAR = ("data_norm", "classes", "target_bounds")


def _linear(name: str, words: str, *, classes: str | None, numbers: bool) -> TableMethod:
    return TableMethod(
        name=name,
        words=words,
        classifier=None if classes is None else (classes, {"method": name}),
        regressor=("LinearRegression", {"method": name}) if numbers else None,
        wants=(*_LINEAR, "population") if name in {"dp-gd", "dp-sgd"} else _LINEAR,
    )


METHODS: Mapping[str, TableMethod] = {
    method.name: method
    for method in (
        _linear("objective", "linear, noisy objective", classes="LogisticRegression", numbers=True),
        _linear("output", "linear, noisy minimiser", classes="LogisticRegression", numbers=True),
        _linear("dp-gd", "linear, noisy gradients", classes="LogisticRegression", numbers=True),
        _linear("dp-sgd", "linear, noisy batches", classes="LogisticRegression", numbers=False),
        _linear("adassp", "least squares, adaptive ridge", classes=None, numbers=True),
        _linear("sufficient-statistics", "least squares, noisy moments", classes=None, numbers=True),
        TableMethod(
            name="svm",
            words="hinge, noisy objective",
            classifier=("LinearSVC", {}),
            regressor=None,
            wants=_LINEAR,
        ),
        TableMethod(
            name="naive-bayes",
            words="noisy moments a class",
            classifier=("GaussianNB", {}),
            regressor=None,
            wants=("bounds", "classes"),
        ),
        TableMethod(
            name="network",
            words="64 hidden units, DP-SGD",
            classifier=("DPClassifier", {}),
            regressor=("DPRegressor", {}),
            wants=("classes", "target_bounds", "population"),
        ),
        TableMethod(
            name="boosting",
            words="a curve a feature",
            classifier=("HistGradientBoostingClassifier", {}),
            regressor=("HistGradientBoostingRegressor", {}),
            wants=("bounds", "classes", "target_bounds", "one_hot"),
        ),
    )
}
"""Methods that learn tables, by name."""


def applicable(facts: Facts) -> list[TableMethod]:
    """The methods that can learn such a table."""
    return [method for method in METHODS.values() if method.suits(facts)]


def method_called(name: str) -> TableMethod:
    """The method of this name."""
    checks.one_of(METHODS, model=name)
    return METHODS[name]


@dataclass(frozen=True, kw_only=True)
class FittedTable:
    """A fitted estimator, and what its numbers mean for the table.

    Args:
        estimator: fitted.
        signs: whether it is a regressor that learned ±1 for two classes.
    """

    estimator: PrivateEstimator
    signs: bool

    def predict(self, rows: Rows) -> npt.NDArray[np.generic]:
        """Class positions, or numbers in the target's unit [n]."""
        found = self.estimator.predict(rows)  # pyright: ignore[reportAttributeAccessIssue]
        return (found > 0).astype(np.int64) if self.signs else found

    def score(self, rows: Rows, targets: npt.NDArray[np.generic]) -> float:
        """Accuracy in [0, 1], or the root mean squared error in the target's unit.

        Guarantee: none beyond the model's; measure on public records.
        """
        checks.integer(1, records=len(rows))
        return measured(self.predict(rows), targets, classes=self.signs or not is_regressor(self.estimator))


def measured(found: npt.NDArray[np.generic], targets: npt.NDArray[np.generic], *, classes: bool) -> float:
    """Share of equal entries, or the root of the mean squared difference."""
    if classes:
        return float(np.mean(found == targets))
    return float(np.sqrt(np.mean(np.square(found.astype(np.float64) - targets.astype(np.float64)))))


def fit_to(estimator: PrivateEstimator, table: Table) -> FittedTable:
    """Fit an estimator that was made for the table."""
    rows, targets = table.train
    signs = is_regressor(estimator) and table.facts.classes is not None
    given = 2.0 * targets.astype(np.float64) - 1.0 if signs else targets
    estimator.fit(rows, given)  # pyright: ignore[reportAttributeAccessIssue]
    return FittedTable(estimator=estimator, signs=bool(signs))


def non_private(table: Table) -> dict[str, float]:
    """What linear models and boosted trees of scikit-learn reach on the test records without privacy.

    Guarantee: none. So it is refused for data that are not declared public.

    Returns:
        Names ↦ accuracy or root mean squared error; ``nothing`` is the commonest class or the mean, of test targets.
    """
    if not table.public:
        raise InvalidArgument(
            f"table must be public to be trained on without privacy, got {table.name!r}. Declare the data public only "
            "if anyone may see them."
        )
    if table.test is None or not len(table.test[0]):
        raise InvalidArgument("table must have test records, got none. Name a test file.")
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression

    (rows, targets), (test, truth) = table.train, table.test
    if table.facts.classes:
        models = {"linear": LogisticRegression(max_iter=1000), "trees": HistGradientBoostingClassifier(random_state=0)}
        counts = np.bincount(truth.astype(np.int64))
        nothing = np.full(len(truth), int(counts.argmax()))
    else:
        models = {"linear": LinearRegression(), "trees": HistGradientBoostingRegressor(random_state=0)}
        nothing = np.full(len(truth), truth.astype(np.float64).mean())
    scores = {
        name: measured(
            cast("npt.NDArray[np.generic]", model.fit(rows, targets).predict(test)),
            truth,
            classes=bool(table.facts.classes),
        )
        for name, model in models.items()
    }
    return {**scores, "nothing": measured(nothing, truth, classes=bool(table.facts.classes))}
