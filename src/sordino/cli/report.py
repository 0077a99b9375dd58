"""`sordino report RUN`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.options import DryRunOption, call
from sordino.commands.outcomes import Format
from sordino.errors import InvalidArgument, SordinoError

if TYPE_CHECKING:
    from sordino.commands import WrittenReport

__all__ = ["report_command"]


def report_command(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[MORE]...", help="More run folders, after --compare.")
    ] = None,
    format: Annotated[
        Format,
        typer.Option("--format", help="Format: page, Markdown, JSON, draft for the public registry, or worksheet."),
    ] = Format.HTML,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File or folder to write. Default: the run folder."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Compare these runs with the first one.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Ledger that the run was charged to, a file or postgresql://…")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="PRIVATE records to evaluate the model on: a file, or a named dataset's test records."),
    ] = None,
    evaluation_epsilon: Annotated[float | None, typer.Option(help="ε of the evaluation.")] = None,
    evaluation_delta: Annotated[float, typer.Option(help="δ of the evaluation.")] = 0.0,
    evaluation_by: Annotated[
        list[str] | None, typer.Option(help="Also evaluate by the declared categories of this column; may be repeated.")
    ] = None,
    evaluation_disjoint: Annotated[
        bool,
        typer.Option(
            "--evaluation-disjoint", help="Declare that no person is in both the evaluation and the training records."
        ),
    ] = False,
    account: Annotated[str | None, typer.Option("--dataset-name", help="Account in --ledger to charge.")] = None,
    dry_run: DryRunOption = False,
    schema: Annotated[Path | None, typer.Option(help="Schema file of the table in --evaluate.")] = None,
    model: Annotated[str, typer.Option(help="module:factory of a custom model in --evaluate.")] = "",
    purpose: Annotated[str | None, typer.Option(help="Purpose of the model; stored in the run folder.")] = None,
    owner: Annotated[str | None, typer.Option(help="Owner of the records; stored in the run folder.")] = None,
    contact: Annotated[str | None, typer.Option(help="Contact for questions; stored in the run folder.")] = None,
    legal_basis: Annotated[
        str | None, typer.Option(help="Legal basis for using the records; stored in the run folder.")
    ] = None,
    approved_by: Annotated[
        str | None, typer.Option(help="Approver of the release with this ε; stored in the run folder.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if something required is not stated.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run folder, after computing ε again from its transcript."""
    if others and not compare:
        raise InvalidArgument(f"report must be given one run folder, got {1 + len(others)}. Add --compare.")
    options = {**locals(), "compare": [*(compare or []), *(others or [])], "evaluation_by": evaluation_by or ()}
    for name in ("others", "strict"):
        del options[name]
    output, written = call("report", options)
    _print(output, written)
    if strict and written.not_stated:
        words = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in written.not_stated.items())
        message = (
            f"a run must state everything that a report needs, got one that does not ({words}). "
            "See `sordino explain report`."
        )
        if as_json:
            # The one document has been printed.
            output.stderr.print(f"sordino: {message}", soft_wrap=True, markup=False)
            raise typer.Exit(1)
        raise SordinoError(message)


def _print(output: Output, written: "WrittenReport") -> None:
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
        output.print_result(
            written.to_dict(), heading(f"{len(reports)} runs, side by side"), key_value_table([*rows, *files.items()])
        )
        return
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
        (f"limitation, {item.severity}", f"{item.title}. {item.text}")
        for item in one.privacy_hazards
        if item.status == "limitation"
    ]
    output.print_result(
        written.to_dict(),
        heading(f"ε = {format_epsilon(one.headline_epsilon)}, δ = {delta_text(one)}"),
        key_value_table(rows),
    )
