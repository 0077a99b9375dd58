"""`sordino report RUN`: what a run folder guarantees, as a page, Markdown, JSON or a registry entry."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.definitions import round_up
from sordino.errors import InvalidArgument, SordinoError

if TYPE_CHECKING:
    from sordino.report import Report

__all__ = ["Format", "report"]


class Format(StrEnum):
    """What a report is written as."""

    HTML = "html"
    MD = "md"
    JSON = "json"
    REGISTRY = "registry"

    @property
    def file(self) -> str:
        """The name that the file has in a run folder."""
        return {"html": "report.html", "md": "report.md", "json": "report.json", "registry": "registry.yaml"}[
            self.value
        ]


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[MORE]...", help="More run folders, after --compare.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A page, Markdown, JSON, or a draft for the public registry.")
    ] = Format.HTML,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write: a file, or a folder; the run folder if not given."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Put these runs beside the first one.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="The ledger that the run was charged to: a file, or postgresql://…")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="PRIVATE records to evaluate the model on first: a file, or a named set's test records."),
    ] = None,
    evaluation_epsilon: Annotated[float | None, typer.Option(help="ε that the evaluation costs.")] = None,
    evaluation_delta: Annotated[float, typer.Option(help="δ that the evaluation costs.")] = 0.0,
    evaluation_by: Annotated[
        list[str] | None, typer.Option(help="Also by the declared categories of this column; may be repeated.")
    ] = None,
    evaluation_disjoint: Annotated[
        bool, typer.Option("--evaluation-disjoint", help="Declare that nobody is in these and the training records.")
    ] = False,
    dataset_name: Annotated[str | None, typer.Option(help="The account in --ledger that pays for it.")] = None,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of the file in --evaluate.")] = None,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own in --evaluate.")] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail with exit code 1 when something required is not stated.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run folder, after computing ε again from its transcript."""
    from sordino.report import read
    from sordino.runs import RunFolder

    if others and not compare:
        raise InvalidArgument(f"report must be given one run folder, got {1 + len(others)}. Add --compare.")
    paths = [run, *(compare or []), *(others or [])]
    if len(paths) > 1 and form is Format.REGISTRY:
        raise InvalidArgument("--format registry must be given one run, got several. Drop --compare.")
    folders = [RunFolder.open(path) for path in paths]
    given = (
        evaluation_epsilon,
        evaluation_delta or None,
        evaluation_by,
        evaluation_disjoint or None,
        dataset_name,
        schema,
    )
    if evaluate is not None:
        from sordino.cli.evaluating import Asked
        from sordino.cli.evaluating import evaluate as pay_and_evaluate

        asked = Asked(
            data=evaluate,
            schema=schema,
            epsilon=evaluation_epsilon,
            delta=evaluation_delta,
            by=tuple(evaluation_by or ()),
            disjoint=evaluation_disjoint,
            model=model,
            ledger=ledger if dataset_name is not None else None,
            account=dataset_name,
        )
        pay_and_evaluate(folders[0], asked)
    elif model or any(value is not None for value in given):
        raise InvalidArgument("evaluate must name records when an option of an evaluation is given, got none.")
    reports = [read(folder, ledger=ledger) for folder in folders]
    files = _write(reports, form, _target(out_file, run, form, several=len(paths) > 1))
    folders[0].vouch(*(Path(file) for file in files.values()))
    out = Output(as_json=as_json)
    _finish(out, reports, files)
    silent = {one.name: one.missing for one in reports if one.missing}
    if strict and silent:
        words = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in silent.items())
        message = (
            f"a run must state everything that a report needs, got one that does not ({words}). See docs/report.md."
        )
        if as_json:
            # The one document has been printed.
            out.stderr.print(f"sordino: {message}", soft_wrap=True, markup=False)
            raise typer.Exit(1)
        raise SordinoError(message)


def _target(out_file: Path | None, run: Path, form: Format, *, several: bool) -> Path:
    name = f"comparison{Path(form.file).suffix}" if several else form.file
    if out_file is None:
        return run / name
    if out_file.is_dir() or (not out_file.suffix and not out_file.exists()):
        return out_file / name
    return out_file


def _write(reports: "list[Report]", form: Format, target: Path) -> dict[str, str]:
    """Write the file; beside a page of one run, its picture too. What is written, by name."""
    from sordino import report as room

    target.parent.mkdir(parents=True, exist_ok=True)
    first, several = reports[0], len(reports) > 1
    if form is Format.HTML:
        text = room.comparison_html(reports) if several else room.html(first)
    elif form is Format.MD:
        text = room.comparison_markdown(reports) if several else room.markdown(first)
    elif form is Format.JSON:
        body = [one.to_dict() for one in reports]
        text = json.dumps(body, indent=2, ensure_ascii=False) if several else first.to_json()
        text += "\n"
    else:
        text = room.registry_yaml(first)
    target.write_text(text, encoding="utf-8")
    if form is not Format.HTML:
        return {"file": str(target)}
    if several:
        return {"page": str(target)}
    picture = target.with_suffix(".png")
    room.draw(first, picture)
    return {"page": str(target), "picture": str(picture)}


def _finish(out: Output, reports: "list[Report]", files: dict[str, str]) -> None:
    if len(reports) > 1:
        rows = [(one.name, f"ε = {round_up(one.guarantee.epsilon)}, δ = {one.guarantee.delta:g}") for one in reports]
        document = {"runs": [one.to_dict() for one in reports], **files}
        out.finish(document, heading(f"{len(reports)} runs, side by side"), facts([*rows, *files.items()]))
        return
    one = reports[0]
    guarantee = one.guarantee
    rows = [
        ("unit", guarantee.unit.words),
        ("neighbours", guarantee.relation.words),
        ("sampler", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *files.items(),
    ]
    if one.not_for_release:
        rows.insert(0, ("not for release", one.not_for_release))
    if one.missing:
        rows.append(("not stated", ", ".join(one.missing)))
    violated = [item.title for item in one.pitfalls if item.status == "violated"]
    rows += [("violated", title) for title in violated]
    document = {**one.to_dict(), **files}
    out.finish(document, heading(f"ε = {round_up(guarantee.epsilon)}, δ = {guarantee.delta:g}"), facts(rows))
