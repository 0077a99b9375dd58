"""`sordino report RUN`: what a run folder guarantees, as a page, Markdown, JSON or a registry entry."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.ledger import DryRunOption, open_account, print_no_charge, print_preview
from sordino.errors import InvalidArgument, SordinoError
from sordino.runs import Evaluation, RunFolder

if TYPE_CHECKING:
    from sordino.data import DatasetSplits, Records
    from sordino.ledger import Account
    from sordino.recipes.saved_model import SavedModel
    from sordino.report import Report
    from sordino.report.utility import Predictions

__all__ = ["Asked", "Format", "pay_and_evaluate", "report"]


class Format(StrEnum):
    """What a report is written as."""

    HTML = "html"
    MD = "md"
    JSON = "json"
    REGISTRY = "registry"
    WORKSHEET = "worksheet"

    @property
    def file(self) -> str:
        """The name that the file has in a run folder."""
        others = {"registry": "registry.yaml", "worksheet": "worksheet.md"}
        return others.get(self.value, f"report.{self.value}")


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[MORE]...", help="More run folders, after --compare.")
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="A page, Markdown, JSON, a draft for the public registry, or the worksheet."),
    ] = Format.HTML,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write: a file, or a folder; the run folder if not given."),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Compare these runs with the first one.")
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
        bool,
        typer.Option("--evaluation-disjoint", help="Declare that no person is in both these and the training records."),
    ] = False,
    dataset_name: Annotated[str | None, typer.Option(help="The account in --ledger that pays for it.")] = None,
    dry_run: DryRunOption = False,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of the file in --evaluate.")] = None,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own in --evaluate.")] = "",
    purpose: Annotated[str | None, typer.Option(help="What the model is for; stored in the run folder.")] = None,
    owner: Annotated[str | None, typer.Option(help="Who is responsible for the records; stored.")] = None,
    contact: Annotated[str | None, typer.Option(help="Where questions go; stored.")] = None,
    legal_basis: Annotated[str | None, typer.Option(help="Why the records may be used; stored.")] = None,
    approved_by: Annotated[str | None, typer.Option(help="Who approved the release with this ε; stored.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail with exit code 1 when something required is not stated.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run folder, after computing ε again from its transcript."""
    from sordino.report import Declarations, build_report, store_declarations
    from sordino.runs import RunFolder

    declared = Declarations(
        **_texts(purpose=purpose, owner=owner, contact=contact, legal_basis=legal_basis, approved_by=approved_by)
    )
    if others and not compare:
        raise InvalidArgument(f"report must be given one run folder, got {1 + len(others)}. Add --compare.")
    paths = [run, *(compare or []), *(others or [])]
    if len(paths) > 1 and form in (Format.REGISTRY, Format.WORKSHEET):
        raise InvalidArgument(f"--format {form.value} must be given one run, got several. Drop --compare.")
    folders, out = [RunFolder.open(path) for path in paths], Output(as_json=as_json)
    asked = None
    if evaluate is not None:
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
    if dry_run:
        if asked is None:
            print_no_charge(out, "a report reads no record")
        else:
            account = open_account(asked.ledger, asked.account)
            print_preview(out, lambda payer, _: pay_and_evaluate(folders[0], asked, payer), account, delta=asked.delta)
        return
    if declared != Declarations():
        if len(paths) > 1:
            raise InvalidArgument("--purpose and the like must be given for one run, got several. Drop --compare.")
        store_declarations(folders[0], declared)
    given = (
        evaluation_epsilon,
        evaluation_delta or None,
        evaluation_by,
        evaluation_disjoint or None,
        dataset_name,
        schema,
    )
    if asked is not None:
        with out.progress("evaluating"):
            pay_and_evaluate(folders[0], asked, open_account(asked.ledger, asked.account))
    elif model or any(value is not None for value in given):
        raise InvalidArgument("evaluate must name records when an option of an evaluation is given, got none.")
    with out.progress("computing ε from the transcript, and writing", total=len(folders)) as advance:
        reports = []
        for folder in folders:
            reports.append(build_report(folder, ledger=ledger))
            advance()
        files = _write(reports, form, _target(out_file, run, form, several=len(paths) > 1))
    written = [Path(file) for file in files.values()]
    if reports[0].attacks is not None and written[0].resolve().is_relative_to(folders[0].path.resolve()):
        # The report shows it, so the manifest holds it.
        written.append(folders[0].path / "attack.json")
    folders[0].vouch(*written)
    _finish(out, reports, files)
    silent = {one.name: one.missing for one in reports if one.missing}
    if strict and silent:
        words = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in silent.items())
        message = (
            f"a run must state everything that a report needs, got one that does not ({words}). "
            "See `sordino explain report`."
        )
        if as_json:
            # The one document has been printed.
            out.stderr.print(f"sordino: {message}", soft_wrap=True, markup=False)
            raise typer.Exit(1)
        raise SordinoError(message)


def _texts(**given: str | None) -> dict[str, str | None]:
    """The declarations on one line each.

    Raises:
        InvalidArgument: one is empty.
    """
    from sordino.report.build import one_line

    for name, text in given.items():
        if text is not None and one_line(text) is None:
            raise InvalidArgument(f"{name} must be a text, got an empty one. Leave --{name.replace('_', '-')} out.")
    return {name: one_line(text) for name, text in given.items()}


def _target(out_file: Path | None, run: Path, form: Format, *, several: bool) -> Path:
    name = f"comparison{Path(form.file).suffix}" if several else form.file
    if out_file is None:
        return run / name
    if out_file.is_dir() or (not out_file.suffix and not out_file.exists()):
        return out_file / name
    return out_file


def _write(reports: "list[Report]", form: Format, target: Path) -> dict[str, str]:
    """Write the file; with a page of one run, its picture too. What is written, by name."""
    from sordino import report as room

    target.parent.mkdir(parents=True, exist_ok=True)
    first, several = reports[0], len(reports) > 1
    if form is Format.HTML:
        text = room.render_comparison_html(reports) if several else room.render_html(first)
    elif form is Format.MD:
        text = room.render_comparison_markdown(reports) if several else room.render_markdown(first)
    elif form is Format.JSON:
        body = [one.to_dict() for one in reports]
        text = json.dumps(body, indent=2, ensure_ascii=False) if several else first.to_json()
        text += "\n"
    elif form is Format.WORKSHEET:
        text = room.render_worksheet(first)
    else:
        text = room.registry_yaml(first)
    target.write_text(text, encoding="utf-8")
    if form is not Format.HTML:
        return {"file": str(target)}
    if several:
        return {"page": str(target)}
    picture = target.with_suffix(".png")
    room.plot_report(first, picture)
    return {"page": str(target), "picture": str(picture)}


def _finish(out: Output, reports: "list[Report]", files: dict[str, str]) -> None:
    from sordino.report.formatting import (
        delta_text,
        epsilon_sentences,
        format_epsilon,
        hazards_line,
        headline_scope,
        summary_rows,
    )

    if len(reports) > 1:
        rows = [(one.name, f"ε = {format_epsilon(one.headline_epsilon)}, δ = {delta_text(one)}") for one in reports]
        document = {"runs": [one.to_dict() for one in reports], **files}
        out.print_result(
            document, heading(f"{len(reports)} runs, side by side"), key_value_table([*rows, *files.items()])
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
    document = {**one.to_dict(), **files}
    out.print_result(
        document,
        heading(f"ε = {format_epsilon(one.headline_epsilon)}, δ = {delta_text(one)}"),
        key_value_table(rows),
    )


# ----------------------------------------------------------------------------------------------------------------------
# `sordino report RUN --evaluate DATA`: a run's model on private records, charged before they are read.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An evaluation as the command asks for it.

    Args:
        data: a named set, of which the test records are taken, or a file.
        schema: of the file.
        epsilon, delta: what is paid.
        by: columns of subgroups, whose values the schema declares.
        disjoint: declares that no person is both here and in the training records.
        model: the factory of a model of the user's own, or empty.
        ledger, account: who pays, or None.
    """

    data: str
    schema: Path | None
    epsilon: float | None
    delta: float
    by: Sequence[str]
    disjoint: bool
    model: str
    ledger: str | None
    account: str | None


def pay_and_evaluate(folder: RunFolder, asked: Asked, account: "Account | None") -> Evaluation:
    """Charge, read, predict, release, and write the answer into the run folder.

    Guarantee: that of `measure_private_utility`. A file is opened after the charge.
    """
    from sordino.data import load_dataset
    from sordino.data.catalog import CATALOG
    from sordino.report import measure_private_utility

    epsilon = checks.positive(evaluation_epsilon=asked.epsilon, hint="Give --evaluation-epsilon.")
    known = None
    if asked.data in CATALOG:
        # Public records: what is declared of them comes from the set itself.
        known = load_dataset(asked.data)
        labels, schema = known.labels, known.schema
    else:
        labels, schema = _declared(asked)
    groups = _groups(schema, asked.by)
    if not labels:
        raise InvalidArgument(
            "evaluate must be of a run that predicts a label, got one of a number. Measure its errors on public "
            "records: sordino predict RUN FILE --data-is-public."
        )

    saved = _model_of(folder, asked, labels, schema)

    def read() -> "Predictions":
        dataset = load_dataset(asked.data, schema=asked.schema) if known is None else known
        records = dataset.train if known is None else known.test
        if records is None:
            raise InvalidArgument("data must have test records to be evaluated on, got a set without. Give a file.")
        return _predicted(_probabilities(saved, records), dataset, records, groups)

    return measure_private_utility(
        read,
        classes=labels,
        epsilon=epsilon,
        delta=asked.delta,
        groups=groups,
        records=f"test records of {asked.data}" if known is not None else f"records of {Path(asked.data).name}",
        disjoint=asked.disjoint,
        ledger=account,
        run=folder,
    )


def _declared(asked: Asked) -> "tuple[tuple[str, ...], object]":
    """Labels and columns of a file, from its schema; the file itself must be there, and is not opened."""
    from sordino.data.schema import read_schema

    if asked.schema is None:
        raise InvalidArgument("schema must be declared for a file to be evaluated on, got none. Give --schema.")
    if not Path(asked.data).expanduser().is_file():
        raise InvalidArgument(f"evaluate must be a named set or a file, got {asked.data!r}. Check the path.")
    declared = read_schema(asked.schema)
    return declared.labels, declared


def _groups(schema: object, by: Sequence[str]) -> dict[str, tuple[str, ...]]:
    columns = {column.name: column for column in getattr(schema, "columns", ())}
    groups: dict[str, tuple[str, ...]] = {}
    for name in by:
        values = getattr(columns.get(name), "groups", None)
        if values is None:
            raise InvalidArgument(
                f"evaluation_by must name a column of declared categories, got {name!r}. See the schema."
            )
        groups[name] = tuple(values)
    return groups


def _predicted(
    chances: "np.ndarray", dataset: "DatasetSplits", records: "Records", groups: Mapping[str, tuple[str, ...]]
) -> "Predictions":
    found: dict[str, list[str]] = {}
    first = 0
    for column in dataset.schema.columns if dataset.schema else ():
        part = records.features[:, first : first + column.width]
        first += column.width
        if column.name in groups:
            # A value that the schema does not list is all zeros, and counts as another one.
            names = [*groups[column.name], ""]
            places = part.argmax(axis=1)
            places[part.max(axis=1) <= 0] = len(names) - 1
            found[column.name] = [names[place] for place in places.tolist()]
    return chances, records.labels, found


def _model_of(folder: RunFolder, asked: Asked, labels: Sequence[str], schema: object) -> "SavedModel":
    """The run's model, for records of its form: refused before anything is charged otherwise."""
    from sordino.cli.predict import open_model

    saved = open_model(folder.path, asked.model)
    if tuple(labels) != saved.labels or (saved.schema is not None and schema != saved.schema):
        raise InvalidArgument(
            "evaluate must be records with the columns and labels of the run, got others. Give the run's own schema."
        )
    return saved


def _probabilities(saved: "SavedModel", records: "Records") -> "np.ndarray":
    """Probabilities of the labels by the run's model; the softmax of its scores where it has no probabilities."""
    from scipy.special import softmax

    encoded = saved.encode(records)
    found = saved.probabilities(encoded)
    return np.asarray(softmax(saved.scores(encoded), axis=1)) if found is None else found
