"""A dataset as estimators take it: rows, targets, and the public facts that estimators want declared."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from sordino import accounting, checks, estimators
from sordino.data import CategoricalColumn, DatasetSplits, NumericColumn, Records, Schema, TableColumn
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    PrivateEstimator,
    check_single_process,
    common_relation,
    dry_run_events,
    split_budget_equally,
)
from sordino.events import Event, compose, describe_sampling
from sordino.ledger import Account

Rows = npt.NDArray[np.float64]
Labeled = tuple[Rows, npt.NDArray[np.generic]]
"""Rows [n, d] in [−1, 1] and targets [n]: indices of classes, or numbers in their own unit."""


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What is public about a table.

    Args:
        columns: number of columns of the rows.
        dataset_size: the number of training records, treated as public.
        data_norm: the largest ℓ2 norm of a row, from the schema alone.
        one_hot: groups of columns of which at most one is set.
        target: name of what is predicted.
        classes: number of classes, or None for a number.
        target_bounds: declared bounds of the target, or None for classes.
    """

    columns: int
    dataset_size: int
    data_norm: float
    one_hot: tuple[tuple[int, ...], ...]
    target: str
    classes: int | None
    target_bounds: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularTask:
    """Rows and targets to train on and to measure on; `facts` say what is public about them.

    Args:
        name: of the dataset.
        public: whether the training records are public.
        facts: the public facts.
        train: records to train on.
        test: records to measure on, or None.
    """

    name: str
    public: bool
    facts: PublicFacts
    train: Labeled
    test: Labeled | None

    @property
    def test_records(self) -> Labeled:
        """Records to measure on.

        Raises:
            InvalidArgument: there are none.
        """
        if self.test is None or not len(self.test[0]):
            raise InvalidArgument("table must have public test records to measure on, got none. Name a test file.")
        return self.test

    @property
    def metric(self) -> str:
        """What a model is measured by: ``accuracy`` (larger is better) or ``rmse``."""
        return "accuracy" if self.facts.classes else "rmse"


def make_tabular_task(dataset: DatasetSplits, *, target: str | None = None) -> TabularTask:
    """The dataset as a table that predicts `target`: its label (None), or one of its numeric columns.

    With a numeric column as the target the label becomes a feature. Records without a schema (images, texts) are
    flattened and scaled to norm 1, each by itself.

    Raises:
        InvalidArgument: `target` is neither the label nor a numeric column.

    Example:
        >>> from sordino.data import load_dataset
        >>> adult = load_dataset("adult")
        >>> make_tabular_task(adult).facts.data_norm == 13**0.5
        True
        >>> make_tabular_task(adult, target="age").facts.target_bounds
        (17, 90)
    """
    schema = dataset.schema
    if schema is None:
        if target not in {None, "label"}:
            raise InvalidArgument(f"target must be 'label' for {dataset.name}, got {target!r}. Leave it out.")
        return _flat(dataset)
    if target is None or target == schema.target:
        return _encoded(dataset, schema)
    numeric = {column.name: column for column in schema.columns if _is_target(column)}
    if schema.target_bounds is not None:
        raise InvalidArgument(
            f"target must be {schema.target!r}, the number that the schema declares, got {target!r}. Leave it out."
        )
    if target not in numeric:
        raise InvalidArgument(
            f"target must be {schema.target!r} or one of the numeric columns {', '.join(numeric)}, got {target!r}."
        )
    return _regression(dataset, schema, cast("NumericColumn", numeric[target]))


def predicted_from(dataset: DatasetSplits, target: str | None) -> DatasetSplits:
    """The dataset with the schema of what `make_tabular_task` predicts from what; its records are as they were."""
    schema = dataset.schema
    if schema is None or target is None or target == schema.target:
        return dataset
    column = next(column for column in schema.columns if column.name == target)
    assert isinstance(column, NumericColumn)
    label = CategoricalColumn(name=schema.target, categories=schema.labels)
    rest = tuple(other for other in schema.columns if other is not column)
    bounds = (column.low, column.high)
    changed = replace(schema, columns=(*rest, label), target=column.name, labels=(), target_bounds=bounds)
    return replace(dataset, schema=changed, labels=())


def _is_target(column: TableColumn) -> bool:
    """Whether the number can be read off the column's one feature."""
    return isinstance(column, NumericColumn) and not (column.log or column.missing)


def _task(dataset: DatasetSplits, facts: PublicFacts, rows: Callable[[Records], Labeled]) -> TabularTask:
    return TabularTask(
        name=dataset.name,
        public=dataset.public,
        facts=facts,
        train=rows(dataset.train),
        test=None if dataset.test is None else rows(dataset.test),
    )


def flat_rows(records: Records) -> Rows:
    """Records without a schema as rows [n, d] of norm 1, each by itself."""
    flat = records.features.reshape(len(records), -1).astype(np.float64)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def _flat(dataset: DatasetSplits) -> TabularTask:
    facts = PublicFacts(
        columns=math.prod(dataset.train.record_shape),
        dataset_size=len(dataset.train),
        data_norm=1.0,
        one_hot=(),
        target="label",
        classes=len(dataset.labels),
        target_bounds=None,
    )
    return _task(dataset, facts, lambda records: (flat_rows(records), records.labels))


def _encoded(dataset: DatasetSplits, schema: Schema) -> TabularTask:
    facts = PublicFacts(
        columns=schema.width(),
        dataset_size=len(dataset.train),
        data_norm=schema.data_norm,
        one_hot=_groups(schema),
        target=schema.target,
        classes=len(dataset.labels) or None,
        target_bounds=schema.target_bounds,
    )
    return _task(dataset, facts, lambda records: (records.features.astype(np.float64), records.labels))


def _regression(dataset: DatasetSplits, schema: Schema, column: NumericColumn) -> TabularTask:
    start = sum(other.width for other in schema.columns[: schema.columns.index(column)])
    width, labels = schema.width(), len(dataset.labels)

    def rows(records: Records) -> Labeled:
        rest = np.delete(records.features, start, axis=1).astype(np.float64)
        scaled = records.features[:, start].astype(np.float64)
        targets = column.low + (scaled + 1) / 2 * (column.high - column.low)
        return np.hstack([rest, np.eye(labels)[records.labels]]), targets

    moved = tuple(tuple(i - (i > start) for i in group) for group in _groups(schema))
    facts = PublicFacts(
        columns=width - 1 + labels,
        dataset_size=len(dataset.train),
        data_norm=schema.data_norm,  # one column less, the label more
        one_hot=(*moved, tuple(range(width - 1, width - 1 + labels))),
        target=column.name,
        classes=None,
        target_bounds=(column.low, column.high),
    )
    return _task(dataset, facts, rows)


def _groups(schema: Schema) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in schema.one_hot if len(group) > 1)


# ----------------------------------------------------------------------------------------------------------------------
# Estimators by name, with everything they want declared taken from a table's public facts.
#
# Their other parameters are the estimators' defaults, which were chosen once on public data and are frozen: so choosing
# a method *in advance* costs no privacy. Trying several on private records does; `sordino compare` charges
# all of them.
# ----------------------------------------------------------------------------------------------------------------------


Declared: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class TabularMethod:
    """One way to learn a table.

    Args:
        name: as the command line calls it.
        description: what it does, in a few words.
        classifier: (estimator's name, its own parameters) for classes, or None.
        regressor: the same for numbers, or None; for two classes a regressor is used on ±1, by the sign.
        wants: the public facts it wants declared.
    """

    name: str
    description: str
    classifier: tuple[str, Declared] | None
    regressor: tuple[str, Declared] | None
    wants: tuple[str, ...]

    def estimator(self, facts: PublicFacts, *, epsilon: float, delta: float, **changes: object) -> PrivateEstimator:
        """The estimator, with everything declared.

        Raises:
            InvalidArgument: the method does not fit the table.
        """
        chosen = self._chosen(facts)
        if chosen is None:
            raise InvalidArgument(
                f"model must suit the table, got {self.name!r} for "
                f"{'a number' if facts.classes is None else f'{facts.classes} classes'}. "
                f"Choose one of {', '.join(method.name for method in supported_methods(facts))}."
            )
        kind = getattr(estimators, chosen[0])
        given = {name: _FACTS[name](facts) for name in self.wants}
        if facts.classes is not None and chosen is self.regressor:
            given["target_bounds"] = (-1.0, 1.0)
        known = kind().get_params()
        given = {name: value for name, value in given.items() if name in known}
        return kind(epsilon=epsilon, delta=delta, **given, **chosen[1], **changes)

    def _chosen(self, facts: PublicFacts) -> tuple[str, Declared] | None:
        if facts.classes is None:
            chosen = self.regressor
        else:
            chosen = self.classifier or (self.regressor if facts.classes == 2 else None)
        if chosen is None or chosen[0] not in estimators.__all__:
            return None
        return chosen

    def supports(self, facts: PublicFacts) -> bool:
        """Whether it can learn such a table."""
        return self._chosen(facts) is not None

    def fit(self, table: TabularTask, *, epsilon: float, delta: float, **changes: object) -> "FittedTable":
        """Fit to the training records: (epsilon, delta)-differentially private, as `guarantee_` says."""
        return fit_to(self.estimator(table.facts, epsilon=epsilon, delta=delta, **changes), table)


_FACTS: dict[str, Callable[[PublicFacts], object]] = {
    "data_norm": lambda facts: facts.data_norm,
    "classes": lambda facts: tuple(range(facts.classes or 0)),
    "bounds": lambda facts: (-1.0, 1.0),  # noqa: ARG005 (rows are scaled to them)
    "target_bounds": lambda facts: facts.target_bounds,
    "dataset_size": lambda facts: facts.dataset_size,
    "one_hot": lambda facts: facts.one_hot or None,
}
_LINEAR = ("data_norm", "classes", "target_bounds")


def _linear(name: str, words: str, *, classes: str | None, numbers: bool) -> TabularMethod:
    return TabularMethod(
        name=name,
        description=words,
        classifier=None if classes is None else (classes, {"method": name}),
        regressor=("LinearRegression", {"method": name}) if numbers else None,
        wants=(*_LINEAR, "dataset_size") if name in {"dp-gd", "dp-sgd"} else _LINEAR,
    )


TABULAR_METHODS: Mapping[str, TabularMethod] = {
    method.name: method
    for method in (
        _linear("objective", "linear, noisy objective", classes="LogisticRegression", numbers=True),
        _linear("output", "linear, noisy minimizer", classes="LogisticRegression", numbers=True),
        _linear("dp-gd", "linear, noisy gradients", classes="LogisticRegression", numbers=True),
        _linear("dp-sgd", "linear, noisy batches", classes="LogisticRegression", numbers=False),
        _linear("adassp", "least squares, adaptive ridge", classes=None, numbers=True),
        _linear("sufficient-statistics", "least squares, noisy moments", classes=None, numbers=True),
        TabularMethod(
            name="svm",
            description="hinge, noisy objective",
            classifier=("LinearSVC", {}),
            regressor=None,
            wants=_LINEAR,
        ),
        TabularMethod(
            name="naive-bayes",
            description="noisy moments a class",
            classifier=("GaussianNB", {}),
            regressor=None,
            wants=("bounds", "classes", "one_hot"),
        ),
        TabularMethod(
            name="network",
            description="64 hidden units, DP-SGD",
            classifier=("DPClassifier", {}),
            regressor=("DPRegressor", {}),
            wants=("classes", "target_bounds", "dataset_size"),
        ),
        TabularMethod(
            name="boosting",
            description="a curve a feature",
            classifier=("HistGradientBoostingClassifier", {}),
            regressor=("HistGradientBoostingRegressor", {}),
            wants=("bounds", "classes", "target_bounds", "one_hot"),
        ),
        TabularMethod(
            name="forest",
            description="random trees, noisy leaves",
            classifier=("RandomForestClassifier", {}),
            regressor=("RandomForestRegressor", {}),
            wants=("bounds", "classes", "target_bounds", "one_hot"),
        ),
    )
}
"""Methods that learn tables, by name."""


def supported_methods(facts: PublicFacts) -> list[TabularMethod]:
    """The methods that can learn such a table."""
    return [method for method in TABULAR_METHODS.values() if method.supports(facts)]


def get_method(name: str) -> TabularMethod:
    """The method of this name."""
    checks.one_of(TABULAR_METHODS, model=name)
    return TABULAR_METHODS[name]


def _is_regressor(estimator: object) -> bool:
    from sklearn.base import is_regressor

    return bool(is_regressor(estimator))


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
        """Indices of classes, or numbers in the target's unit [n]."""
        found = self.estimator.predict(rows)  # pyright: ignore[reportAttributeAccessIssue]
        return (found > 0).astype(np.int64) if self.signs else found

    def scores(self, rows: Rows) -> Rows:
        """Scores of the classes [n, K], larger for likelier ones; of a model for classes."""
        if self.signs:
            found = np.asarray(self.estimator.predict(rows))  # pyright: ignore[reportAttributeAccessIssue]
        elif hasattr(self.estimator, "decision_function"):
            found = np.asarray(self.estimator.decision_function(rows))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            found = np.asarray(self.estimator.predict_log_proba(rows))  # pyright: ignore[reportAttributeAccessIssue]
        return np.stack([-found, found], axis=1) if found.ndim == 1 else found

    def predict_proba(self, rows: Rows) -> Rows | None:
        """Probabilities of the classes [n, K]; None where the method has none (hinge loss, least squares)."""
        if self.signs or not hasattr(self.estimator, "predict_proba"):
            return None
        return np.asarray(self.estimator.predict_proba(rows))  # pyright: ignore[reportAttributeAccessIssue]

    def score(self, rows: Rows, targets: npt.NDArray[np.generic]) -> float:
        """Accuracy in [0, 1], or the root mean squared error in the target's unit.

        Guarantee: none beyond the model's; measure on public records.
        """
        checks.integer(1, records=len(rows))
        return measured(self.predict(rows), targets, classes=self.signs or not _is_regressor(self.estimator))


def measured(found: npt.NDArray[np.generic], targets: npt.NDArray[np.generic], *, classes: bool) -> float:
    """Share of equal entries, or the root of the mean squared difference."""
    if classes:
        return float(np.mean(found == targets))
    return float(np.sqrt(np.mean(np.square(found.astype(np.float64) - targets.astype(np.float64)))))


def fit_to(estimator: PrivateEstimator, table: TabularTask) -> FittedTable:
    """Fit an estimator that was made for the table."""
    rows, targets = table.train
    signs = _is_regressor(estimator) and table.facts.classes is not None
    given = 2.0 * targets.astype(np.float64) - 1.0 if signs else targets
    estimator.fit(rows, given)  # pyright: ignore[reportAttributeAccessIssue]
    return FittedTable(estimator=estimator, signs=bool(signs))


def non_private_scores(table: TabularTask) -> dict[str, float]:
    """What linear models and boosted trees of scikit-learn reach on the test records without privacy.

    Guarantee: none. So it is refused for data that are not declared public.

    Returns:
        Names ↦ accuracy or root mean squared error; ``nothing`` is the majority class or the mean, of test targets.
    """
    if not table.public:
        raise InvalidArgument(
            f"table must be public to be trained on without privacy, got {table.name!r}. Declare the data public only "
            "if anyone may see them."
        )
    (rows, targets), (test, truth) = table.train, table.test_records
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression

    if table.facts.classes:
        models = {"linear": LogisticRegression(max_iter=1000), "trees": HistGradientBoostingClassifier(random_state=0)}
    else:
        models = {"linear": LinearRegression(), "trees": HistGradientBoostingRegressor(random_state=0)}
    scores = {
        name: measured(
            cast("npt.NDArray[np.generic]", model.fit(rows, targets).predict(test)),
            truth,
            classes=bool(table.facts.classes),
        )
        for name, model in models.items()
    }
    return {**scores, "nothing": trivial_score(table)}


def non_private_linear_predictions(table: TabularTask) -> Rows:
    """Probabilities of the classes of the test records [n, K], by scikit-learn's logistic regression without privacy.

    Guarantee: none. So it is refused for data that are not declared public.
    """
    if not table.public or table.test is None or not table.facts.classes:
        raise InvalidArgument("table must be public, with labels and test records, got another. Declare data public.")
    from sklearn.linear_model import LogisticRegression

    rows, labels = table.train
    model = LogisticRegression(max_iter=1000).fit(rows, labels)
    found = np.zeros((len(table.test[0]), table.facts.classes))
    found[:, np.asarray(model.classes_, dtype=np.int64)] = model.predict_proba(table.test[0])
    return found


def trivial_score(table: TabularTask) -> float:
    """What always naming the majority class, or the mean, of the test targets would score on them.

    Guarantee: none; the test records must be public. An accuracy that is not above it was reached without learning.
    """
    truth = table.test_records[1]
    if table.facts.classes:
        guess: float = int(np.bincount(truth.astype(np.int64)).argmax())
    else:
        guess = float(truth.astype(np.float64).mean())
    return measured(np.full(len(truth), guess), truth, classes=bool(table.facts.classes))


# ----------------------------------------------------------------------------------------------------------------------
# Several methods on one table at several ε, with the charges of all of them.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method at one ε.

    Args:
        method: its name.
        epsilon: as asked for.
        scores: measured values on the test records, one a fit; accuracy or root mean squared error.
        events: what each fit did.
        neighboring_relation: of the events.
    """

    method: str
    epsilon: float
    scores: tuple[float, ...]
    events: tuple[Event, ...]
    neighboring_relation: NeighboringRelation

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was fitted and measured, and what all of it costs.

    Args:
        measure: ``accuracy`` or ``rmse``.
        cells: every method at every ε.
        total: the guarantee of all fits together.
    """

    measure: str
    cells: tuple[MethodResult, ...]
    total: Guarantee


def compare_public(
    table: TabularTask,
    methods: Sequence[TabularMethod],
    *,
    epsilons: Sequence[float],
    delta: float,
    repeats: int = 1,
    progress: Callable[[], object] | None = None,
) -> Comparison:
    """Fit every method at every ε to a *public* table, and measure on its test records.

    Guarantee: each fit is (ε, delta)-differentially private; `total` is what all of them together are.

    `progress` is called after each fit; their number is public.

    Raises:
        InvalidArgument: the table is not public; use `share` for private records.
    """
    if not table.public:
        raise InvalidArgument(
            f"table must be public for a grid of ε, got {table.name!r}: every fit would be paid for. Use one ε, shared."
        )
    checks.integer(1, repeats=repeats)
    cells = []
    for epsilon in epsilons:
        for method in methods:
            made = [method.estimator(table.facts, epsilon=epsilon, delta=delta) for _ in range(repeats)]
            cells.append(_cell(table, method, epsilon, made, progress))
    # Every fit has a δ of its own, so together they have at least the sum of them.
    fits = sum(len(cell.events) for cell in cells)
    return _compared(table, cells, min(0.5, fits * delta * (1 + 1e-9)))


def compare_private(
    table: TabularTask,
    methods: Sequence[TabularMethod],
    *,
    epsilon: float,
    delta: float,
    ledger: Account | None = None,
    progress: Callable[[], object] | None = None,
) -> Comparison:
    """Fit every method once, with one budget for all of them, and measure on test records that are public.

    Guarantee: all models together are (epsilon, delta)-differentially private. So whichever is kept, and whatever the
    measurements led to, is covered; each had only its part of the budget. With an account all of it is charged, at
    once and before a record is read.

    `progress` is called after each fit; their number is public.
    """
    check_single_process("compare")
    made = split_budget_equally(
        lambda one, slack: [method.estimator(table.facts, epsilon=one, delta=slack) for method in methods],
        columns=table.facts.columns,
        epsilon=epsilon,
        delta=delta,
    )
    if ledger is not None:
        planned = [dry_run_events(estimator, table.facts.columns) for estimator in made]
        neighboring_relation = common_relation([neighboring_relation for _, neighboring_relation in planned])
        ledger.charge(
            compose([event for events, _ in planned for event in events]),
            note="compare",
            neighboring_relation=neighboring_relation,
        )
    cells = [
        _cell(table, method, float(estimator.epsilon or 0.0), [estimator], progress)
        for method, estimator in zip(methods, made, strict=True)
    ]
    return _compared(table, cells, delta)


def _cell(
    table: TabularTask,
    method: TabularMethod,
    epsilon: float,
    made: Sequence[PrivateEstimator],
    progress: Callable[[], object] | None,
) -> MethodResult:
    test, fits = table.test_records, []
    for estimator in made:
        fits.append(fit_to(estimator, table))
        if progress is not None:
            progress()
    return MethodResult(
        method=method.name,
        epsilon=epsilon,
        scores=tuple(fit.score(*test) for fit in fits),
        events=tuple(compose(list(fit.estimator.events_)) for fit in fits),
        neighboring_relation=common_relation([fit.estimator.guarantee_.neighboring_relation for fit in fits]),
    )


def _compared(table: TabularTask, cells: Sequence[MethodResult], delta: float) -> Comparison:
    event = compose([event for cell in cells for event in cell.events])
    neighboring_relation = common_relation([cell.neighboring_relation for cell in cells])
    spent = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
    return Comparison(
        measure=table.metric,
        cells=tuple(cells),
        total=Guarantee(
            epsilon=spent.upper,
            delta=delta,
            accountant=spent.accountant,
            sampler=describe_sampling(event),
            neighboring_relation=neighboring_relation,
            # Batch sizes and divisors of the descents were taken from it.
            caveats=("the size of the dataset is treated as public",),
        ),
    )
