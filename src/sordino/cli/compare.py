"""`sordino compare DATA`: all methods that can learn a table, side by side, and what comparing costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, finite, heading
from sordino.cli.ledger import (
    DatasetNameOption,
    DryRunOption,
    LedgerOption,
    open_account,
    print_no_charge,
    print_preview,
    with_affordable_delta,
)
from sordino.cli.plots import checked_path
from sordino.cli.table_options import (
    DataArgument,
    DataIsPublicOption,
    DecimalOption,
    EncodingOption,
    PublicSchemaOption,
    SchemaOption,
    SeparatorOption,
    TableOptions,
    TargetBoundsOption,
    TargetOption,
    TestOption,
)
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument, MissingDeclaration

if TYPE_CHECKING:
    from collections.abc import Callable

    from sordino.ledger import Account
    from sordino.recipes.tabular import Comparison, PublicFacts, TabularMethod

__all__ = ["compare"]


def compare(
    data: DataArgument,
    more: Annotated[list[str] | None, typer.Argument(metavar="[E ...]", help="Further ε.")] = None,
    epsilon: Annotated[
        list[str] | None, typer.Option(help="ε of each fit; several on public data, one on private data.")
    ] = None,
    target: TargetOption = None,
    delta: Annotated[float | None, typer.Option(help="δ, as for train.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names with commas between; all that fit if not given.")] = None,
    repeats: Annotated[int, typer.Option(help="Fits of each method at each ε, on public data.")] = 1,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target_bounds: TargetBoundsOption = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    test: TestOption = None,
    data_is_public: DataIsPublicOption = False,
    plot: Annotated[Path | None, typer.Option(help="The picture, .png or .svg; compare-NAME.png if not given.")] = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare private methods on one table.

    On public data every method is fitted at every ε. On private records every fit is paid for, so there is one ε for
    all of them together, each method gets its part, and the measurements are taken on public test records alone.
    """
    budgets = _numbers([*(epsilon or []), *(more or [])]) or [0.1, 1.0, 8.0]
    checks.integer(1, repeats=repeats)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    from sordino.cli.training_job import default_delta

    out, account = Output(as_json=as_json), open_account(ledger, dataset_name)
    dataset = TableOptions(
        data=data,
        target=target,
        schema=schema,
        public_schema_from=public_schema_from,
        target_bounds=target_bounds,
        test=test,
        data_is_public=data_is_public,
        separator=separator,
        decimal=decimal,
        encoding=encoding,
    ).load(out, by_estimator=True)
    picture = checked_path(Path(f"compare-{dataset.name}.png") if plot is None else plot)
    if account is not None and dataset.public:
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

    rows = make_tabular_task(dataset, target=target)
    chosen = _chosen(methods, rows.facts)
    slack = default_delta(rows.facts.dataset_size) if delta is None else delta
    out.print_status(_loudly(dataset.name, dataset.public, len(chosen), budgets))
    if dry_run and dataset.public:
        print_no_charge(out, "the records are public")
        return

    def shared(level: float, payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        return tabular.compare_private(rows, chosen, epsilon=budgets[0], delta=level, ledger=payer, progress=advance)

    def affordable(payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        if delta is not None:
            return shared(delta, payer, advance)
        return with_affordable_delta(lambda level: shared(level, payer, advance), slack, payer, out)

    if dry_run:
        print_preview(out, lambda payer, _: affordable(payer), account, delta=slack)
        return
    fits = len(chosen) * (len(budgets) * repeats if dataset.public else 1)
    with out.progress("fitting", total=fits) as advance:
        if dataset.public:
            found = tabular.compare_public(
                rows, chosen, epsilons=budgets, delta=slack, repeats=repeats, progress=advance
            )
            others = non_private_scores(rows)
        else:
            found, others = affordable(account, advance), {}
    from sordino.cli.plots import plot_comparison

    plot_comparison(found, others, title=f"{dataset.name}: {rows.facts.target}", delta=slack, path=picture)
    out.print_result(
        _document(found, others, public=dataset.public, delta=slack, picture=picture),
        heading(
            f"{dataset.name}: {rows.facts.target}, δ = {slack:g} a fit" if dataset.public else _charges_table(found)
        ),
        _table(found, others, chosen),
        Text(),
        Text(_footnote(found, public=dataset.public, repeats=repeats), style="dim"),
        Text(f"picture  {picture}", style="dim"),
    )


def _numbers(texts: list[str]) -> list[float]:
    """ε written with spaces or commas between, each once, in rising order."""
    found = set()
    for text in ",".join(texts).split(","):
        try:
            found.add(float(text)) if text.strip() else None
        except ValueError as error:
            raise InvalidArgument(f"epsilon must be numbers, got {text.strip()!r}. Write --epsilon 0.1,1,8.") from error
    return [checks.positive(epsilon=value) for value in sorted(found)]


def _chosen(names: str | None, facts: "PublicFacts") -> "list[TabularMethod]":
    from sordino.recipes.tabular import supported_methods

    suited = {method.name: method for method in supported_methods(facts)}
    if names is None:
        return list(suited.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        checks.one_of(suited, methods=name)
    if not wanted or len(set(wanted)) != len(wanted):
        raise InvalidArgument("methods must be names with commas between, each once. Leave it out for all.")
    return [suited[name] for name in wanted]


def _loudly(name: str, public: bool, methods: int, budgets: list[float]) -> Text:
    if public:
        many = ", ".join(f"{value:g}" for value in budgets)
        return Text.assemble((name, "bold"), f": public records, {methods} methods at ε = {many}")
    return Text.assemble(
        (name, "bold"),
        f": PRIVATE records. {methods} methods SHARE ε = {budgets[0]:g}: ",
        ("every one of them gets only its part, and all of it is spent.", "bold yellow"),
    )


def _charges_table(found: "Comparison") -> str:
    return f"All of it together: (ε = {format_upper_bound(found.total.epsilon)}, δ = {found.total.delta:g})"


def _shown(value: float, measure: str) -> str:
    return f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.4g}"


def _table(found: "Comparison", others: Mapping[str, float], chosen: "list[TabularMethod]") -> Table:
    budgets = sorted({cell.epsilon for cell in found.cells})
    best = max if found.measure == "accuracy" else min
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("accuracy" if found.measure == "accuracy" else "RMSE", no_wrap=True)
    for budget in budgets:
        table.add_column(f"ε = {budget:.3g}", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for method in chosen:
        row = []
        for budget in budgets:
            here = [cell for cell in found.cells if cell.epsilon == budget]
            (cell,) = [cell for cell in here if cell.method == method.name]
            top = cell.mean == best(other.mean for other in here)
            row.append(Text(_shown(cell.mean, found.measure), style="bold cyan" if top else ""))
        table.add_row(method.name, *row, method.description)
    words = {
        "linear": ("linear model", "NOT private"),
        "trees": ("boosted trees", "NOT private"),
        "nothing": ("no model", "the commonest label, or the mean"),
    }
    for name, value in others.items():
        table.add_row(words[name][0], *[""] * (len(budgets) - 1), _shown(value, found.measure), words[name][1])
    return table


def _footnote(found: "Comparison", *, public: bool, repeats: int) -> str:
    if not public:
        return f"Measured on public test records. {found.total.describe()}"
    fits = sum(len(cell.events) for cell in found.cells)
    spread = "one fit each: figures within a point may swap places" if repeats == 1 else f"means of {repeats} fits"
    return (
        f"Measured on public test records, {spread}. On private records these {fits} fits would together "
        f"cost ε = {format_upper_bound(found.total.epsilon)} at δ = {found.total.delta:.2g}."
    )


def _document(
    found: "Comparison", others: Mapping[str, float], *, public: bool, delta: float, picture: Path
) -> dict[str, object]:
    return {
        "measure": found.measure,
        "delta": delta,
        "public": public,
        "results": [
            {"method": cell.method, "epsilon": cell.epsilon, "score": cell.mean, "scores": list(cell.scores)}
            for cell in found.cells
        ],
        "non_private": dict(others),
        "total": {
            "epsilon": finite(found.total.epsilon),
            "delta": found.total.delta,
            "neighboring_relation": found.total.neighboring_relation.value,
            "accountant": found.total.accountant,
            "description": found.total.describe(),
        },
        "picture": str(picture),
    }
