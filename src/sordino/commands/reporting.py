"""`report` and `evaluate`: what a run folder guarantees, and its model on private records, charged first."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sordino import checks
from sordino.commands.outcomes import Format, category_values
from sordino.commands.prediction import open_model
from sordino.commands.running import SILENT, DryRun, Progress, open_account, perform
from sordino.errors import InvalidArgument
from sordino.runs import Evaluation, RunFolder

if TYPE_CHECKING:
    from sordino.data import ArraySchema, Records, Schema
    from sordino.ledger import Account
    from sordino.recipes.saved_model import SavedModel
    from sordino.report import Report
    from sordino.report.utility import Predictions


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """The reports of one run or several, and where they were written.

    Args:
        reports: one a run.
        files: their files by name: ``file``, or ``page`` and ``picture``.
    """

    reports: "Sequence[Report]"
    files: Mapping[str, str]

    @property
    def not_stated(self) -> dict[str, Sequence[str]]:
        """What a report needs and a run does not state, by run."""
        return {one.name: one.missing for one in self.reports if one.missing}

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        if len(self.reports) > 1:
            return {"runs": [one.to_dict() for one in self.reports], **self.files}
        return {**self.reports[0].to_dict(), **self.files}


def report(
    run: Path | str,
    *,
    compare: Sequence[Path | str] = (),
    format: Format = Format.HTML,
    out: Path | str | None = None,
    ledger: str | None = None,
    account: str | None = None,
    evaluate: str | None = None,
    evaluation_epsilon: float | None = None,
    evaluation_delta: float = 0.0,
    evaluation_by: Sequence[str] = (),
    evaluation_disjoint: bool = False,
    schema: "Path | Schema | ArraySchema | None" = None,
    model: str = "",
    dry_run: bool = False,
    purpose: str | None = None,
    owner: str | None = None,
    contact: str | None = None,
    legal_basis: str | None = None,
    approved_by: str | None = None,
    progress: Progress = SILENT,
) -> WrittenReport | DryRun:
    """Write the report of a run folder, after computing ε again from its transcript.

    Args:
        run: Run folder.
        compare: Compare these runs with the first one.
        format: Format: page, Markdown, JSON, draft for the public registry, or worksheet.
        out: File or folder to write. Default: the run folder.
        ledger: Ledger that the run was charged to, a file or postgresql://…
        account: Account in --ledger to charge.
        evaluate: PRIVATE records to evaluate the model on: a file, or a named dataset's test records.
        evaluation_epsilon: ε of the evaluation.
        evaluation_delta: δ of the evaluation.
        evaluation_by: Also evaluate by the declared categories of this column; may be repeated.
        evaluation_disjoint: Declare that no person is in both the evaluation and the training records.
        schema: Schema file of the table in --evaluate.
        model: module:factory of a custom model in --evaluate.
        dry_run: only say what the evaluation would cost.
        purpose: Purpose of the model; stored in the run folder.
        owner: Owner of the records; stored in the run folder.
        contact: Contact for questions; stored in the run folder.
        legal_basis: Legal basis for using the records; stored in the run folder.
        approved_by: Approver of the release with this ε; stored in the run folder.
        progress: what is said meanwhile.
    """
    from sordino.report import Declarations, build_report, store_declarations

    form, several = Format(format), bool(compare)
    declared = Declarations(
        **_texts(purpose=purpose, owner=owner, contact=contact, legal_basis=legal_basis, approved_by=approved_by)
    )
    if several and form in (Format.REGISTRY, Format.WORKSHEET):
        raise InvalidArgument(f"--format {form.value} must be given one run, got several. Drop --compare.")
    folders = [RunFolder.open(path) for path in (run, *compare)]
    if declared != Declarations() and several:
        raise InvalidArgument("--purpose and the like must be given for one run, got several. Drop --compare.")
    given = (account, evaluation_epsilon, schema, evaluation_by, evaluation_disjoint, evaluation_delta, model)
    if evaluate is not None:
        payer = open_account(ledger if account is not None else None, account)
        options = {
            "epsilon": evaluation_epsilon,
            "delta": evaluation_delta,
            "by": evaluation_by,
            "disjoint": evaluation_disjoint,
            "schema": schema,
            "model": model,
        }
        paid = _evaluate(folders[0], evaluate, options, payer, dry_run=dry_run, progress=progress)
        if isinstance(paid, DryRun):
            return paid
    elif dry_run:
        return DryRun(why="a report reads no record")
    elif any(given):
        raise InvalidArgument("evaluate must name records when an option of an evaluation is given, got none.")
    if declared != Declarations():
        store_declarations(folders[0], declared)
    with progress.stage("computing ε from the transcript, and writing", total=len(folders)) as advance:
        reports = []
        for folder in folders:
            reports.append(build_report(folder, ledger=ledger))
            advance()
        files = _write(reports, form, _target(None if out is None else Path(out), Path(run), form, several=several))
    written = [Path(file) for file in files.values()]
    if reports[0].attacks is not None and written[0].resolve().is_relative_to(folders[0].path.resolve()):
        # The report shows it, so the manifest holds it.
        written.append(folders[0].path / "attack.json")
    folders[0].vouch(*written)
    return WrittenReport(reports=reports, files=files)


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


def _target(out: Path | None, run: Path, form: Format, *, several: bool) -> Path:
    name = f"comparison{Path(form.file).suffix}" if several else form.file
    if out is None:
        return run / name
    if out.is_dir() or (not out.suffix and not out.exists()):
        return out / name
    return out


def _write(reports: "list[Report]", form: Format, target: Path) -> dict[str, str]:
    """Write the file; with a page of one run, its picture too. What is written, by name."""
    from sordino import report as pages

    target.parent.mkdir(parents=True, exist_ok=True)
    first, several = reports[0], len(reports) > 1
    if form is Format.HTML:
        text = pages.render_comparison_html(reports) if several else pages.render_html(first)
    elif form is Format.MD:
        text = pages.render_comparison_markdown(reports) if several else pages.render_markdown(first)
    elif form is Format.JSON:
        body = [one.to_dict() for one in reports]
        text = json.dumps(body, indent=2, ensure_ascii=False) if several else first.to_json()
        text += "\n"
    elif form is Format.WORKSHEET:
        text = pages.render_worksheet(first)
    else:
        text = pages.registry_yaml(first)
    target.write_text(text, encoding="utf-8")
    if form is not Format.HTML:
        return {"file": str(target)}
    if several:
        return {"page": str(target)}
    picture = target.with_suffix(".png")
    pages.plot_report(first, picture)
    return {"page": str(target), "picture": str(picture)}


# ----------------------------------------------------------------------------------------------------------------------
# `evaluate`: a run's model on private records, charged before they are read.
# ----------------------------------------------------------------------------------------------------------------------


def evaluate(
    run: Path | str | RunFolder,
    data: str,
    *,
    epsilon: float | None,
    delta: float = 0.0,
    by: Sequence[str] = (),
    disjoint: bool = False,
    schema: "Path | Schema | ArraySchema | None" = None,
    model: str = "",
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> Evaluation | DryRun:
    """Release how good a run's model is on private records, and write it into the run folder.

    Guarantee: (ε, δ) for one of these records, charged before a file is opened.

    Args:
        run: a run folder with a model that predicts a label.
        data: PRIVATE records: a file, or a named dataset, of which the test records are taken.
        epsilon: that the evaluation costs.
        delta: that it costs.
        by: columns of declared categories: also within each of their groups.
        disjoint: declare that no person is both here and in the training records.
        schema: the declared schema of the file.
        model: ``module:factory``, for a model of your own.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Returns:
        The noisy counts; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: the records are not of the run's form.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    options = {"epsilon": epsilon, "delta": delta, "by": by, "disjoint": disjoint, "schema": schema, "model": model}
    return _evaluate(folder, data, options, ledger, dry_run=dry_run, progress=progress)


def _evaluate(
    folder: RunFolder,
    data: str,
    options: dict[str, Any],
    ledger: "Account | None",
    *,
    dry_run: bool,
    progress: Progress,
) -> Evaluation | DryRun:
    def work(payer: "Account | None", _: Path) -> Evaluation:
        with nullcontext() if dry_run else progress.stage("evaluating"):
            return _charge_and_evaluate(folder, data, ledger=payer, **options)

    return perform(work, folder.path, ledger, dry_run=dry_run, delta=options["delta"], progress=progress)


def _charge_and_evaluate(
    folder: RunFolder,
    data: str,
    *,
    epsilon: float | None,
    delta: float,
    by: Sequence[str],
    disjoint: bool,
    schema: "Path | Schema | ArraySchema | None",
    model: str,
    ledger: "Account | None",
) -> Evaluation:
    from sordino.data import load_dataset
    from sordino.data.catalog import CATALOG
    from sordino.report import measure_private_utility

    epsilon = checks.positive(evaluation_epsilon=epsilon, hint="Give --evaluation-epsilon.")
    known = None
    if data in CATALOG:
        # Public records: what is declared of them comes from the set itself.
        known = load_dataset(data)
        labels, declared = known.labels, known.schema
    else:
        labels, declared = _declared(data, schema)
    groups = _groups(declared, by)
    if not labels:
        raise InvalidArgument(
            "evaluate must be of a run that predicts a label, got one of a number. Measure its errors on public "
            "records: sordino predict RUN FILE --data-is-public."
        )
    saved = _model_of(folder, model, labels, declared)

    def read() -> "Predictions":
        dataset = load_dataset(data, schema=schema) if known is None else known
        records = dataset.train if known is None else known.test
        if records is None:
            raise InvalidArgument("data must have test records to be evaluated on, got a set without. Give a file.")
        # A value that the schema does not list counts as another one.
        values = {name: category_values(dataset, records, name, [*listed, ""]) for name, listed in groups.items()}
        return _probabilities(saved, records), records.labels, values

    return measure_private_utility(
        read,
        classes=labels,
        epsilon=epsilon,
        delta=delta,
        groups=groups,
        records=f"test records of {data}" if known is not None else f"records of {Path(data).name}",
        disjoint=disjoint,
        ledger=ledger,
        run=folder,
    )


def _declared(data: str, schema: "Path | Schema | ArraySchema | None") -> "tuple[tuple[str, ...], object]":
    """Labels and columns of a file, from its schema; the file itself must be there, and is not opened."""
    from sordino.data.schema import read_schema

    if schema is None:
        raise InvalidArgument("schema must be declared for a file to be evaluated on, got none. Give --schema.")
    if not Path(data).expanduser().is_file():
        raise InvalidArgument(f"evaluate must be a named set or a file, got {data!r}. Check the path.")
    declared = read_schema(Path(schema)) if isinstance(schema, str | Path) else schema
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


def _model_of(folder: RunFolder, model: str, labels: Sequence[str], schema: object) -> "SavedModel":
    """The run's model, for records of its form: refused before anything is charged otherwise."""
    saved = open_model(folder.path, model)
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
