"""`sordino runs`, `verify`, `report`, `predict` and `export`: what run folders hold, and their models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, heading, key_value_table, render_metrics
from sordino.cli.options import DATA, Form, command
from sordino.commands.outcomes import describe_value
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument, SordinoError

if TYPE_CHECKING:
    from sordino.commands import (
        ExportedModel,
        ListedRuns,
        Predictions,
        RunsComparison,
        RunSummary,
        WrittenReport,
    )
    from sordino.verification import VerificationReport

_MARKS = {"pass": Text("pass", style="green"), "fail": Text("FAIL", style="bold red")}


@command("runs list")
def print_runs(output: Output, found: "ListedRuns", *, folder: Path) -> None:
    """All runs in a folder, oldest first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "data", "model", "state", "ε", "δ", "steps", "accuracy"):
        number = name in {"ε", "δ", "steps", "accuracy"}
        table.add_column(
            name, justify="right" if number else "left", no_wrap=number or name == "state", overflow="fold"
        )
    for one in found.runs:
        accuracy = one.metrics.get("test_accuracy")
        table.add_row(
            one.path.name,
            one.data,
            one.model,
            Text(one.state, style="" if one.state == "complete" else "yellow"),
            "" if one.epsilon is None else format_upper_bound(one.epsilon),
            f"{one.plan.get('delta', '')}",
            f"{one.charged:,}",
            "" if accuracy is None else f"{100 * accuracy:.1f} %",
        )
    words = f"{len(found.runs)} runs in {folder}"
    rows = [(name, "can't be read; try sordino verify") for name in found.unreadable]
    output.print_result(found.to_dict(), heading(words), table, key_value_table(rows))


@command("runs show")
def print_run(output: Output, one: "RunSummary") -> None:
    """One run: what was planned, what was charged, what came out."""
    rows = [
        ("started", one.started),
        ("state", one.state),
        ("steps charged", f"{one.charged:,}" + (f", {one.repeated:,} of them repeated" if one.repeated else "")),
        ("segments", f"{one.segments:,}"),
        *((name.replace("_", " "), describe_value(value)) for name, value in one.plan.items() if name != "schema"),
        *((f"{part} {name}".replace("_", " "), describe_value(value)) for part, name, value in one.flat_facts()),
        *((name.replace("_", " "), value) for name, value in one.measured().items()),
    ]
    claim = f"ε so far = {format_upper_bound(one.epsilon)}" if one.epsilon is not None else "nothing was charged"
    words = claim if one.guarantee is None else one.guarantee.describe()
    output.print_result(one.to_dict(), heading(words), key_value_table(rows))


@command("runs compare", forms={"folders": Form(kind=list[Path], metavar="RUN RUN…")})
def print_runs_comparison(output: Output, found: "RunsComparison") -> None:
    """Runs side by side: only what differs between them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for one in found.runs:
        table.add_column(Text(one.path.name, overflow="fold"), justify="right", overflow="fold")
    for name in found.differing:
        words = (name.replace("_", " "), *(column.get(name, "") for column in found.columns))
        table.add_row(*(Text(word) for word in words))
    same = f"{len(found.runs)} runs" if found.differing else "The runs do not differ."
    output.print_result(found.to_dict(), heading(same), table)


@command("verify", derived=False)
def print_verification(
    output: Output,
    found: "VerificationReport",
    *,
    run: Annotated[Path, typer.Argument(help="Run folder.")],  # noqa: ARG001 (the function's)
    ledger: Annotated[  # noqa: ARG001
        str | None, typer.Option(help="Ledger that the run was charged to, a file or postgresql://…")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Earlier published hash of the run.")] = None,  # noqa: ARG001
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the hash of the whole run, for publication.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also exit with code 1 if something could not be checked.")
    ] = False,
) -> None:
    """Check a run: hashes, plan against transcript, the guarantee by two accountants. Exit code 1 when it fails."""
    good = found.complete if strict else found.passed
    if anchor and good and not output.as_json:
        typer.echo(found.head)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "", ""):
        table.add_column(style=style, overflow="fold")
    for item in found.items:
        table.add_row(item.name, _MARKS.get(item.status, Text("not checked", style="yellow")), Text(item.detail))
    verdict = "The run folder is consistent." if good else "The run folder is NOT consistent."
    if found.passed and not good:
        verdict = "Nothing failed, but not everything could be checked."
    output.print_result(found.to_dict() | {"strict": strict, "ok": good}, heading(verdict), table)
    if not good:
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# Reports.
# ----------------------------------------------------------------------------------------------------------------------


def _compared(options: dict[str, Any]) -> dict[str, Any]:
    """Run folders behind the first are compared with it, too."""
    others = options["others"] or []
    if others and not options["compare"]:
        raise InvalidArgument(f"report must be given one run folder, got {1 + len(others)}. Add --compare.")
    return options | {"compare": [*options["compare"], *others]}


@command(
    "report",
    forms={"compare": Form(kind=list[Path]), "account": Form(flag="--dataset-name")},
    prepare=_compared,
)
def print_report(
    output: Output,
    written: "WrittenReport",
    *,
    others: Annotated[  # noqa: ARG001 (taken by `prepare`)
        list[Path] | None, typer.Argument(metavar="[MORE]...", help="More run folders, after --compare.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if something required is not stated.")
    ] = False,
) -> None:
    """Write the report of a run folder, after computing ε again from its transcript."""
    output.print_result(written.to_dict(), *_page(written))
    if strict and written.not_stated:
        words = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in written.not_stated.items())
        message = (
            f"a run must state everything that a report needs, got one that does not ({words}). "
            "See `sordino explain report`."
        )
        if output.as_json:
            # The one document has been printed.
            output.stderr.print(f"sordino: {message}", soft_wrap=True, markup=False)
            raise typer.Exit(1)
        raise SordinoError(message)


def _page(written: "WrittenReport") -> tuple[RenderableType, ...]:
    from sordino.report.formatting import (
        delta_text,
        epsilon_sentences,
        format_epsilon,
        hazards_line,
        headline_scope,
        summary_rows,
    )

    reports, files = written.reports, written.files
    if len(reports) > 1:
        rows = [(one.name, f"ε = {format_epsilon(one.headline_epsilon)}, δ = {delta_text(one)}") for one in reports]
        return heading(f"{len(reports)} runs, side by side"), key_value_table([*rows, *files.items()])
    one = reports[0]
    guarantee = one.guarantee
    conditions = [(f"condition {number}", text) for number, text in enumerate(one.release.conditions, 1)]
    rows = [
        ("in words", " ".join(epsilon_sentences(one))),
        ("may it be released?", one.release.text),
        *conditions,
        *(
            (name, value or f"not stated (write it with {option})")
            for name, value, option in summary_rows(one)
            if value or option
        ),
        ("neighboring relation", guarantee.neighboring_relation.describe()),
        ("sampling", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *files.items(),
    ]
    if scope := headline_scope(one):
        rows.insert(0, ("counts", scope))
    if one.not_for_release:
        rows.insert(0, ("not for release", one.not_for_release))
    if one.missing:
        rows.append(("not stated", "; ".join(one.missing)))
    rows.append(("checks", hazards_line(one)))
    rows += [
        (f"limitation, {item.severity}", f"{item.title}: not met. {item.text}")
        for item in one.privacy_hazards
        if item.status == "limitation"
    ]
    claim = f"ε = {format_epsilon(one.headline_epsilon)}, δ = {delta_text(one)}"
    return heading(claim), key_value_table(rows)


# ----------------------------------------------------------------------------------------------------------------------
# A run's model on new records, and for other programs.
# ----------------------------------------------------------------------------------------------------------------------


@command("predict", forms={"data": DATA})
def print_predictions(output: Output, found: "Predictions", *, data: str) -> None:
    """Predict new records by a run's model. Nothing is charged: what is computed from a private model stays private.

    A table needs the columns of the run's schema; its other columns, and a label column if there is one, are copied
    with the predictions. What is written is as private as the new records.
    """
    rows = [("records", f"{found.records:,}"), ("columns", ", ".join(found.columns)), ("file", str(found.out))]
    page: list[RenderableType] = [heading(f"{found.run.name} on {data}"), key_value_table(rows)]
    if found.metrics:
        page += [Text(), render_metrics(found.metrics, found.labels)]
    elif found.has_targets:
        said = (
            "There is a column of true values. Nothing was measured on it: accuracy on private records is a separate "
            "release. Declare the records public (--data-is-public), or charge it: sordino report RUN --evaluate."
        )
        page += [Text(), Text(said, style="dim")]
    output.print_result(found.to_dict(), *page)


@command("export")
def print_export(output: Output, found: "ExportedModel") -> None:
    """Write a run's model for other programs: linear models, boosting, forests, naive Bayes, modules of common layers.

    The file takes encoded features, and is compared with the model by onnxruntime before it is kept.
    """
    rows = [
        ("model", found.model),
        ("input", f"features, float32 [records, {', '.join(map(str, found.shape))}]"),
        ("outputs", ", ".join(found.outputs)),
        ("compared", "with the model, on synthetic records, by onnxruntime"),
        ("file", str(found.file)),
    ]
    output.print_result(found.to_dict(), heading(f"{found.run.name} as ONNX"), key_value_table(rows))
