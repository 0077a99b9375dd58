"""Several methods on one table at several ε, with the bill for all of them (floor 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from sordino import accounting, checks
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator, refuse_several
from sordino.estimators.rehearsal import common_relation, equal_shares, rehearse
from sordino.events import Event, compose
from sordino.ledger import Account
from sordino.recipes.methods import TableMethod, fit_to
from sordino.recipes.tables import Table
from sordino.wording import sampling_words

__all__ = ["Cell", "Comparison", "compare", "share"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one ε.

    Args:
        method: its name.
        epsilon: as asked for.
        scores: measured values on the test records, one a fit; accuracy or root mean squared error.
        events: what each fit did.
        relation: of the events.
    """

    method: str
    epsilon: float
    scores: tuple[float, ...]
    events: tuple[Event, ...]
    relation: NeighboringRelation

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
    cells: tuple[Cell, ...]
    total: Guarantee


def compare(
    table: Table, methods: Sequence[TableMethod], *, epsilons: Sequence[float], delta: float, repeats: int = 1
) -> Comparison:
    """Fit every method at every ε to a *public* table, and measure on its test records.

    Guarantee: each fit is (ε, delta)-differentially private; `total` is what all of them together are.

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
            cells.append(_cell(table, method, epsilon, made))
    # Every fit has a δ of its own, so together they have at least the sum of them.
    fits = sum(len(cell.events) for cell in cells)
    return _compared(table, cells, min(0.5, fits * delta * (1 + 1e-9)))


def share(
    table: Table, methods: Sequence[TableMethod], *, epsilon: float, delta: float, ledger: Account | None = None
) -> Comparison:
    """Fit every method once, with one budget for all of them, and measure on test records that are public.

    Guarantee: all models together are (epsilon, delta)-differentially private. So whichever is kept, and whatever the
    measurements led to, is covered; each had only its part of the budget. With an account all of it is charged, at
    once and before a record is read.
    """
    refuse_several("compare")
    made = equal_shares(
        lambda one, slack: [method.estimator(table.facts, epsilon=one, delta=slack) for method in methods],
        columns=table.facts.columns,
        epsilon=epsilon,
        delta=delta,
    )
    if ledger is not None:
        planned = [rehearse(estimator, table.facts.columns) for estimator in made]
        relation = common_relation([relation for _, relation in planned])
        ledger.charge(compose([event for events, _ in planned for event in events]), note="compare", relation=relation)
    cells = [
        _cell(table, method, float(estimator.epsilon or 0.0), [estimator])
        for method, estimator in zip(methods, made, strict=True)
    ]
    return _compared(table, cells, delta)


def _cell(table: Table, method: TableMethod, epsilon: float, made: Sequence[PrivateEstimator]) -> Cell:
    if table.test is None or not len(table.test[0]):
        raise InvalidArgument("table must have public test records to compare on, got none. Name a test file.")
    fits = [fit_to(estimator, table) for estimator in made]
    return Cell(
        method=method.name,
        epsilon=epsilon,
        scores=tuple(fit.score(*table.test) for fit in fits),
        events=tuple(compose(list(fit.estimator.events_)) for fit in fits),
        relation=common_relation([fit.estimator.privacy_.relation for fit in fits]),
    )


def _compared(table: Table, cells: Sequence[Cell], delta: float) -> Comparison:
    event = compose([event for cell in cells for event in cell.events])
    relation = common_relation([cell.relation for cell in cells])
    spent = accounting.epsilon(event, delta, relation=relation)
    return Comparison(
        measure=table.measure,
        cells=tuple(cells),
        total=Guarantee(
            epsilon=spent.upper,
            delta=delta,
            accountant=spent.accountant,
            sampler=sampling_words(event),
            relation=relation,
            # Batch sizes and divisors of the descents were taken from it.
            caveats=("the size of the data set is treated as public",),
        ),
    )
