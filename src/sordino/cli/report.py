"""`sordino report RUN`: the page and the picture of a run folder."""

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.definitions import round_up

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write report.html and report.png; the run folder if not given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html and report.png of a run folder, after computing ε again from its transcript."""
    from sordino.report import write
    from sordino.runs import RunFolder

    out = Output(as_json=as_json)
    written = write(RunFolder.open(run), folder=out_folder)
    guarantee = written.report.guarantee
    document = {**written.report.to_dict(), "page": str(written.page), "picture": str(written.picture)}
    rows = [
        ("unit", guarantee.unit.words),
        ("neighbours", guarantee.relation.words),
        ("sampler", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        ("page", str(written.page)),
        ("picture", str(written.picture)),
    ]
    if written.report.not_for_release:
        rows.insert(0, ("not for release", written.report.not_for_release))
    out.finish(document, heading(f"ε = {round_up(guarantee.epsilon)}, δ = {guarantee.delta:g}"), facts(rows))
