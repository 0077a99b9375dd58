"""`compare`: all methods that can learn a table, side by side, and what comparing costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from sordino import checks
from sordino.commands.pictures import checked_path
from sordino.commands.running import SILENT, DryRun, Progress, default_delta, preview, with_affordable_delta
from sordino.commands.tables import TableOptions, load_table
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    from sordino.data import DatasetSplits
    from sordino.ledger import Account
    from sordino.recipes.tabular import Comparison, PublicFacts, TabularMethod

__all__ = ["MethodComparison", "compare"]


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Methods side by side.

    Args:
        found: their scores and what all fits cost together.
        non_private: scores of models without privacy; empty for private records.
        methods: those compared.
        data: name of the dataset.
        target: what is predicted.
        public: whether the records are public.
        delta: of a fit.
        repeats: fits of each method at each ε.
        picture: the file with the picture.
    """

    found: "Comparison"
    non_private: Mapping[str, float]
    methods: "Sequence[TabularMethod]"
    data: str
    target: str
    public: bool
    delta: float
    repeats: int
    picture: Path

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        found, total = self.found, self.found.total
        return {
            "measure": found.measure,
            "delta": self.delta,
            "public": self.public,
            "results": [
                {"method": cell.method, "epsilon": cell.epsilon, "score": cell.mean, "scores": list(cell.scores)}
                for cell in found.cells
            ],
            "non_private": dict(self.non_private),
            "total": {
                "epsilon": encode_number(total.epsilon),
                "delta": total.delta,
                "neighboring_relation": total.neighboring_relation.value,
                "accountant": total.accountant,
                "description": total.describe(),
            },
            "picture": str(self.picture),
        }


def compare(
    data: "str | Path | DatasetSplits",
    *,
    epsilon: float | Sequence[float] = (0.1, 1.0, 8.0),
    delta: float | None = None,
    methods: Sequence[str] | None = None,
    repeats: int = 1,
    plot: Path | str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
    **table: Unpack[TableOptions],
) -> MethodComparison | DryRun:
    """Fit private methods on one table, measure them on public test records, and draw the picture.

    On public data every method is fitted at every ε. On private records every fit is charged, so there is one ε for
    all of them together, and each method gets its part.

    Guarantee: on private records `MethodComparison.found.total`, of all fits together.

    Args:
        data: Name from `sordino data list`, or a file.
        epsilon: ε of each fit; several values on public data, one on private data.
        delta: δ, as for train.
        methods: Method names, separated by commas. Default: all that support the table.
        repeats: Number of fits per method and ε, on public data.
        plot: Picture file, .png or .svg. Default: compare-NAME.png.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.
        **table: how a file is declared and read, see `sordino.commands.TableOptions`.

    Returns:
        The scores; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range.
        MissingDeclaration: a declaration is missing.
    """
    budgets = sorted(
        {checks.positive(epsilon=value) for value in ([epsilon] if isinstance(epsilon, int | float) else epsilon)}
    )
    checks.integer(1, repeats=repeats)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    dataset = load_table(data, table, progress, by_estimator=True)
    picture = checked_path(Path(f"compare-{dataset.name}.png" if plot is None else plot))
    if ledger is not None and dataset.public:
        raise InvalidArgument(
            "ledger must be left out for public records, got one: they have no privacy budget. Drop --ledger."
        )
    if not dataset.public and len(budgets) != 1:
        raise InvalidArgument(
            f"epsilon must be one number on private records, got {len(budgets)}: every fit is paid for, and all "
            "methods share one budget. Give --epsilon once, or declare the data public."
        )
    if dataset.test is None:
        raise MissingDeclaration(
            "test must be declared: a PUBLIC file to measure on. Accuracy on private records is a release of its own."
        )
    from sordino.recipes import tabular
    from sordino.recipes.tabular import make_tabular_task, non_private_scores

    rows = make_tabular_task(dataset, target=table.get("target"))
    chosen = _chosen(methods, rows.facts)
    slack = default_delta(rows.facts.dataset_size) if delta is None else delta
    progress.status(_describe(dataset.public, len(chosen), budgets), title=dataset.name)
    if dry_run and dataset.public:
        return DryRun(why="the records are public")

    def shared(level: float, payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        return tabular.compare_private(rows, chosen, epsilon=budgets[0], delta=level, ledger=payer, progress=advance)

    def affordable(payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        if delta is not None:
            return shared(delta, payer, advance)
        return with_affordable_delta(lambda level: shared(level, payer, advance), slack, payer, progress)

    if dry_run:
        return preview(lambda payer, _: affordable(payer), ledger, delta=slack, progress=progress)
    fits = len(chosen) * (len(budgets) * repeats if dataset.public else 1)
    with progress.stage("fitting", total=fits) as advance:
        if dataset.public:
            found = tabular.compare_public(
                rows, chosen, epsilons=budgets, delta=slack, repeats=repeats, progress=advance
            )
            others = non_private_scores(rows)
        else:
            found, others = affordable(ledger, advance), {}
    from sordino.commands.pictures import plot_comparison

    plot_comparison(found, others, title=f"{dataset.name}: {rows.facts.target}", delta=slack, path=picture)
    return MethodComparison(
        found=found,
        non_private=others,
        methods=chosen,
        data=dataset.name,
        target=rows.facts.target,
        public=dataset.public,
        delta=slack,
        repeats=repeats,
        picture=picture,
    )


def _chosen(names: Sequence[str] | None, facts: "PublicFacts") -> "list[TabularMethod]":
    from sordino.recipes.tabular import supported_methods

    suited = {method.name: method for method in supported_methods(facts)}
    if names is None:
        return list(suited.values())
    for name in names:
        checks.one_of(suited, methods=name)
    if not names or len(set(names)) != len(names):
        raise InvalidArgument("methods must be names with commas between, each once. Leave it out for all.")
    return [suited[name] for name in names]


def _describe(public: bool, methods: int, budgets: list[float]) -> str:
    if public:
        return f"public records, {methods} methods at ε = {', '.join(f'{value:g}' for value in budgets)}"
    return (
        f"PRIVATE records. {methods} methods SHARE ε = {budgets[0]:g}: every one of them gets only its part, and all "
        "of it is spent."
    )
