"""What tables release: `describe_file` and `synthesize`, charged in a run folder first, and `schema_check`."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sordino import checks
from sordino.commands.outcomes import closed_after_failure, composition_statement, run_folder
from sordino.commands.running import SILENT, DryRun, Progress, perform, preview, write_new_file
from sordino.commands.tables import TableFile, table_format
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import compose
from sordino.runs import RunFolder
from sordino.runs.results import guarantee_body

if TYPE_CHECKING:
    import pyarrow as pa

    from sordino.data import Schema
    from sordino.definitions import Guarantee
    from sordino.description import TableDescriber, TableDescription
    from sordino.ledger import Account
    from sordino.synthesis import TableSynthesizer

DEFAULT_DELTA = 1e-6
"""δ of statistics and synthetic tables where none is given."""


@dataclass(frozen=True, kw_only=True)
class DescribedTable:
    """Noisy statistics of a table.

    Args:
        name: of the dataset.
        description: the statistics and their guarantee.
        run: the run folder.
        out: the file with everything, or None.
    """

    name: str
    description: "TableDescription"
    run: RunFolder
    out: Path | None

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {**self.description.to_dict(), "run": str(self.run.path)}


def describe_file(
    data: str | Path,
    *,
    epsilon: float,
    delta: float = DEFAULT_DELTA,
    schema: "Path | str | Schema | None" = None,
    public_schema_from: Path | str | None = None,
    target: str | None = None,
    target_bounds: tuple[float, float] | None = None,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    bins: int = 10,
    cross: Sequence[tuple[str, str]] | None = None,
    confidence: float = 0.95,
    out: Path | str | None = None,
    run: Path | str | None = None,
    seed: int | None = None,
    reproducible: bool = False,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> DescribedTable | DryRun:
    """Noisy counts, means, quantiles, histograms and cross tables of a table, with intervals, all in one charge.

    Guarantee: (ε, δ) for one record added or removed, charged before a record is read.

    Args:
        data: A .csv, .tsv or .parquet file, or adult.
        epsilon: ε of everything that the command releases.
        delta: δ, well below 1 / number of records; 0 for geometric and Laplace noise.
        schema: Schema file that declares your table's columns.
        public_schema_from: PUBLIC sample file to infer the schema from.
        target: Column of the label, with --public-schema-from.
        target_bounds: With --public-schema-from: public bounds of a numeric target.
        quantiles: Quantile levels, separated by commas.
        bins: Number of equal bins of a numeric column.
        cross: Cross table COLUMN:COLUMN, may be repeated; `none` for none. Default: categories by target.
        confidence: Confidence level of each interval.
        out: Also write the result to a new .json file.
        run: Run folder to create. Default: runs/describe-NAME-DATE-NUMBER.
        seed: Seed of all random numbers; only with --reproducible.
        reproducible: Allow --seed; the result is marked not for release.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Returns:
        The statistics; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range.
        MissingDeclaration: the schema is not declared.
    """
    from sordino.description import TableDescriber

    source = TableFile.of_options(data, schema, public_schema_from, target, target_bounds)
    out = None if out is None else Path(out)
    if out is not None:
        _check_new_file(out, (".json",))
    describer = TableDescriber(
        schema=source.schema,
        epsilon=epsilon,
        delta=delta,
        quantiles=tuple(quantiles),
        bins=bins,
        cross=cross if cross is None else tuple(cross),
        confidence=confidence,
        random_state=seed,
        reproducible=reproducible,
        ledger=ledger,
    )
    if dry_run:
        return preview(lambda payer, _: _charge(describer, payer), ledger, delta=delta, progress=progress)
    settings = {"quantiles": list(quantiles), "bins": bins, "cross": cross if cross is None else list(map(list, cross))}
    folder = _charged_run(source, describer, command="describe", settings=settings, epsilon=epsilon, folder=run)
    with folder, progress.stage("measuring"):
        description = describer.fit(source.path).description_
    folder.write_guarantee(description.guarantee)
    found = DescribedTable(name=source.name, description=description, run=folder, out=out)
    if out is not None:
        body = json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        out.write_text(body + "\n", encoding="utf-8")
    return found


@dataclass(frozen=True, kw_only=True)
class SyntheticTable:
    """A synthetic table.

    Args:
        synthesizer: what was measured, and the guarantee.
        table: the records that were drawn.
        out: the file they are in.
        run: the run folder.
    """

    synthesizer: "TableSynthesizer"
    table: "pa.Table"
    out: Path
    run: RunFolder

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        synthesizer = self.synthesizer
        return {
            **guarantee_body(synthesizer.guarantee_),
            "method": synthesizer.method,
            "records": self.table.num_rows,
            "noisy_number_of_records": synthesizer.model_.total,
            "measured": [{"columns": list(one.columns), "noise_stddev": one.stddev} for one in synthesizer.measured_],
            "out": str(self.out),
            "run": str(self.run.path),
        }


def synthesize(
    data: str | Path,
    *,
    epsilon: float,
    delta: float = DEFAULT_DELTA,
    schema: "Path | str | Schema | None" = None,
    public_schema_from: Path | str | None = None,
    target: str | None = None,
    target_bounds: tuple[float, float] | None = None,
    out: Path | str = "synthetic.csv",
    rows: int | None = None,
    method: str = "aim",
    degree: int | None = None,
    bins: int = 20,
    max_model_mb: float = 4.0,
    run: Path | str | None = None,
    seed: int | None = None,
    reproducible: bool = False,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> SyntheticTable | DryRun:
    """Write a synthetic table with the same columns, whose joint distribution was learned privately.

    Guarantee: (ε, δ) for one record added or removed, charged before a record is read.

    Args:
        data: A .csv, .tsv or .parquet file, or adult.
        epsilon: ε of everything that the command releases.
        delta: δ, well below 1 / number of records.
        schema: Schema file that declares your table's columns.
        public_schema_from: PUBLIC sample file to infer the schema from.
        target: Column of the label, with --public-schema-from.
        target_bounds: With --public-schema-from: public bounds of a numeric target.
        out: Synthetic table to create, .csv, .tsv or .parquet.
        rows: Number of records to draw. Default: the noisy number of records.
        method: aim, mst, or independent (no dependence between columns).
        degree: aim: maximum number of columns of a marginal.
        bins: Number of equal bins of each numeric column.
        max_model_mb: aim: maximum size of the model's tables, in megabytes.
        run: Run folder to create. Default: runs/NAME-DATE-NUMBER.
        seed: Seed of all random numbers; only with --reproducible.
        reproducible: Allow --seed; the result is marked not for release.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Returns:
        The table; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range.
        MissingDeclaration: the schema is not declared.
    """
    from sordino.randomness import KeyedRNG
    from sordino.synthesis import TableSynthesizer

    if rows is not None:
        checks.integer(0, rows=rows)
    source = TableFile.of_options(data, schema, public_schema_from, target, target_bounds)
    out = Path(out)
    _check_new_file(out, (".csv", ".tsv", ".parquet"))
    synthesizer = TableSynthesizer(
        schema=source.schema,
        epsilon=epsilon,
        delta=delta,
        method=method,
        degree=degree,
        bins=bins,
        max_model_mb=max_model_mb,
        random_state=seed,
        reproducible=reproducible,
        ledger=ledger,
    )
    if dry_run:
        return preview(lambda payer, _: _charge(synthesizer, payer), ledger, delta=delta, progress=progress)
    KeyedRNG(seed=seed, reproducible=reproducible)  # refuses a seed that is not declared
    kind = "public" if source.public else "private"
    progress.status(f"{kind} records, synthetic table by {method}", title=source.name)
    folder = _charged_run(
        source,
        synthesizer,
        command="synthesize",
        settings={"method": method, "bins": bins, "degree": degree, "max_model_mb": max_model_mb},
        epsilon=epsilon,
        folder=run,
    )
    with folder, progress.stage("measuring") as advance:
        synthesizer.fit(
            source.path, progress=lambda part: advance(words=f"measuring: {100 * part:.0f} % of the budget")
        )
    folder.write_guarantee(synthesizer.guarantee_)
    table = synthesizer.sample(rows)
    _write_table(table, out)
    return SyntheticTable(synthesizer=synthesizer, table=table, out=out, run=folder)


def _check_new_file(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse a file that is there already, or that has another ending, before anything is charged."""
    if path.suffix.lower() not in endings:
        raise InvalidArgument(f"out must end in {' or '.join(endings)}, got {str(path)!r}. Rename it.")
    if path.exists():
        raise InvalidArgument(f"out must be a new file, got {str(path)!r}, which is there. Choose another name.")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"out must be in a folder that is there, got {str(path)!r}. Make the folder first.")
    # What can't be written is known before anything is charged.
    path.open("x").close()
    path.unlink()


def _charge(releaser: "TableSynthesizer | TableDescriber", payer: "Account") -> None:
    """Charge everything that a fit would charge."""
    payer.charge(
        compose(list(releaser.planned_events())),
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit=PrivacyUnit.RECORD,
    )


def _charged_run(
    source: TableFile,
    synthesizer: "TableSynthesizer | TableDescriber",
    *,
    command: str,
    settings: dict[str, object],
    epsilon: float,
    folder: Path | str | None,
) -> RunFolder:
    """A run folder with the charge, written before a record is read; none if the ledger refuses it."""
    from sordino import accounting
    from sordino.events import to_dict

    events = compose(list(synthesizer.planned_events()))
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    delta = float(synthesizer.delta or 0.0)
    if synthesizer.ledger is not None:
        synthesizer.ledger.check_charge(events, neighboring_relation=relation, privacy_unit=PrivacyUnit.RECORD)
    plan = {
        "schema": 1,
        "method": command,
        "steps": 1,
        "parameters": settings,
        "stages": [{"name": command, "charges": [{"event": to_dict(events), "count": 1}]}],
        "delta": delta,
        "neighboring_relation": relation.value,
        "privacy_unit": PrivacyUnit.RECORD.value,
        "dataset_size_is_public": False,
    }
    meta = {
        "target_epsilon": epsilon,
        "reproducible": synthesizer.reproducible,
        "settings": "The settings were fixed in advance",
        "tuned_on_these_data": source.public,
        "data": {
            "name": source.name,
            "records": None,
            "labels": len(source.schema.labels),
            "target": source.schema.target,
            "source": "not public" if not source.public else "embedded: UCI Adult",
            "license": "CC BY 4.0" if source.public else "the user's own",
            "public": source.public,
        },
        "training": {
            "model": f"{command}: {settings.get('method', command)}",
            "optimizer": None,
            "learning_rate": None,
        },
        "released": "noisy statistics"
        if command == "describe"
        else "a synthetic table, and the noisy statistics that it was drawn from",
        "noise_arithmetic": "integers, drawn exactly",
        "data_accesses": {
            "preprocessing": "Each record is put into public cells on its own, by the declared schema.",
            "normalization": "No statistic of the records is computed without noise.",
            "schema": "Bounds, categories and labels are declared, never taken from the records.",
            "early_stopping": "None: the number of measurements is fixed in advance.",
            "evaluation": "None.",
            "logging": "Only what was released is printed or stored.",
        },
        **composition_statement(public=source.public, charged=synthesizer.ledger is not None),
    }
    run = RunFolder.create(
        run_folder(f"{command}-{source.name}", folder), plan=json.dumps(plan, indent=2, allow_nan=False), meta=meta
    )
    with closed_after_failure(run):
        spent = accounting.epsilon(events, delta, neighboring_relation=relation)
        run.append(step=0, event=events, epsilon=spent.upper)
    return run


def _write_table(table: "pa.Table", path: Path) -> None:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
        return
    columns = [column.to_pylist() for column in table.columns]  # a missing number is None, written as nothing
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
        writer.writerow(table.column_names)
        writer.writerows(zip(*columns, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# `schema_draft` and `schema_check`: how well a table fits its schema.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SchemaDraft:
    """A schema to fill in.

    Args:
        path: its file.
        columns: of the table.
    """

    path: Path
    columns: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {"schema": str(self.path), "columns": list(self.columns)}


def schema_draft(
    file: Path | str,
    *,
    target: str | None = None,
    out: Path | str | None = None,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> SchemaDraft:
    """Write a schema with blanks to fill in. Only the file's header is read, and no record.

    Args:
        file: A .csv, .tsv, .parquet or .feather file.
        target: Column to predict.
        out: Schema file to create, .toml or .json. Default: NAME.schema.toml.
        separator: Separator of a CSV file: ';', tab, … Default: the schema's.
        decimal: Decimal mark of a CSV file: . or , Default: the schema's.
        encoding: Encoding of a CSV file: utf-8, latin-1, cp1252, … Default: the schema's.
    """
    from sordino.data import TableFormat
    from sordino.data.schema_files import draft_schema

    file = Path(file)
    path = Path(f"{file.name.partition('.')[0]}.schema.toml") if out is None else Path(out)
    if path.suffix.lower() not in (".toml", ".json"):
        raise InvalidArgument(f"out must end with .toml or .json, got {path.name!r}. Rename it.")
    form = table_format(None, separator, decimal, encoding) or TableFormat()
    text, names = draft_schema(file, target=target, table_format=form, out=path)
    write_new_file(path, text)
    return SchemaDraft(path=path, columns=tuple(names))


@dataclass(frozen=True, kw_only=True)
class SchemaCheck:
    """How well a table fits its schema.

    Args:
        schema: the declared one.
        counts: by column, how many values are of each kind that `sordino.data.schema_files.declared_statuses` names.
        guarantee: of noisy counts; None for exact ones, which are not for release.
        noise: standard deviation of the noise of a column's counts.
    """

    schema: "Schema"
    counts: Mapping[str, Sequence[int]]
    guarantee: "Guarantee | None"
    noise: Mapping[str, float]

    def shares(self, name: str) -> list[float]:
        """Shares in [0, 1] that add up to 1, also of noisy counts; all 0 where there is nothing."""
        positive = np.maximum(np.asarray(self.counts[name], dtype=np.float64), 0.0)
        return (positive / positive.sum() if positive.sum() > 0 else positive).tolist()

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        from sordino.data.schema_files import declared_statuses

        columns = [
            {
                "name": name,
                "role": "target" if name == self.schema.target else "feature",
                "counts": dict(zip(kinds, self.counts[name], strict=True)),
                "shares": dict(zip(kinds, self.shares(name), strict=True)),
                **({"noise_stddev": self.noise[name]} if self.noise else {}),
            }
            for name, kinds in declared_statuses(self.schema).items()
        ]
        if self.guarantee is None:
            return {"release": "not for release: exact shares of private records", "columns": columns}
        claim = {
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "description": self.guarantee.describe(),
        }
        return {"release": "may be released", "guarantee": claim, "columns": columns}


def schema_check(
    file: Path | str,
    *,
    schema: "Path | str | Schema",
    epsilon: float | None = None,
    delta: float | None = None,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> SchemaCheck | DryRun:
    """Count how many values of each column can be read, lie in range and are listed, and records without a label.

    Guarantee: with `epsilon`, (ε, δ) for one record added or removed: a record is in one cell of one histogram a
    column; charged before a record is read. Without, none: exact counts are only for people who may see the records.

    Args:
        file: A .csv, .tsv, .parquet or .feather file.
        schema: Schema file, .json or .toml.
        epsilon: Release noisy shares with this ε. Default: exact shares, not for release.
        delta: With --epsilon: δ for Gaussian noise; 0 for geometric noise.
        separator: Separator of a CSV file: ';', tab, … Default: the schema's.
        decimal: Decimal mark of a CSV file: . or , Default: the schema's.
        encoding: Encoding of a CSV file: utf-8, latin-1, cp1252, … Default: the schema's.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Returns:
        The counts; with `dry_run` the cost.
    """
    from sordino.data.schema import Schema, read_schema

    file = Path(file)
    declared = schema if isinstance(schema, Schema) else read_schema(Path(schema))
    if not isinstance(declared, Schema):
        raise InvalidArgument("schema must describe the columns of a table, got an array schema. Declare the columns.")
    form = table_format(declared, separator, decimal, encoding)
    declared = declared if form is None else replace(declared, table_format=form)
    if epsilon is None:
        if delta is not None or ledger is not None:
            raise InvalidArgument(
                "delta and ledger must be left out without --epsilon, got one: exact shares are no release and cost "
                "nothing. Give --epsilon, or drop them."
            )
        if dry_run:
            return DryRun(why="exact shares are no release")
        with progress.stage("counting"):
            return SchemaCheck(schema=declared, counts=_exact(file, declared), guarantee=None, noise={})
    checks.positive(epsilon=epsilon)
    return perform(
        lambda payer, _: _released(file, declared, epsilon, delta or 0.0, payer),
        file,
        ledger,
        dry_run=dry_run,
        delta=delta or 0.0,
        progress=progress,
    )


def _exact(file: Path, declared: "Schema") -> Mapping[str, Sequence[int]]:
    from sordino.data.schema_files import column_statuses, declared_statuses

    counts = {name: np.zeros(len(kinds), dtype=np.int64) for name, kinds in declared_statuses(declared).items()}
    for part in column_statuses(file, declared):
        for name, codes in part.items():
            counts[name] += np.bincount(codes, minlength=len(counts[name]))
    return {name: found.tolist() for name, found in counts.items()}


def _released(file: Path, declared: "Schema", epsilon: float, delta: float, account: "Account | None") -> SchemaCheck:
    """Noisy counts, charged before a record is read."""
    from sordino import accounting
    from sordino.data.schema_files import column_statuses, declared_statuses
    from sordino.data.tables import require_declared_columns
    from sordino.definitions import Guarantee
    from sordino.mechanisms import PrivateHistogram, make_budget
    from sordino.mechanisms.calibration import PureBudget
    from sordino.randomness import KeyedRNG

    checks.probability(one=False, delta=delta)
    kinds, rng = declared_statuses(declared), KeyedRNG()
    shares = make_budget(epsilon=epsilon, delta=delta).split(*[1.0] * len(kinds))
    mechanisms = {
        name: PrivateHistogram(budget=share, categories=tuple(range(len(kinds[name]))), rng=rng)
        for name, share in zip(kinds, shares, strict=True)
    }
    total = compose([mechanism.event() for mechanism in mechanisms.values()])
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    spent = accounting.epsilon(total, delta, neighboring_relation=relation)
    require_declared_columns(file, declared)
    if account is not None:
        account.charge(total, note="schema check", neighboring_relation=relation, privacy_unit=PrivacyUnit.RECORD)
    parts = list(column_statuses(file, declared))
    counts = {
        name: mechanism.release(np.concatenate([part[name] for part in parts]).tolist()).tolist()
        for name, mechanism in mechanisms.items()
    }
    factor = 2**0.5 if isinstance(shares[0], PureBudget) else 1.0
    noise = {name: factor * float(mechanism.noise.scales.max()) for name, mechanism in mechanisms.items()}
    guarantee = Guarantee(
        epsilon=min(spent.upper, epsilon),
        delta=delta,
        accountant=spent.accountant,
        sampler="none",
        neighboring_relation=relation,
    )
    return SchemaCheck(schema=declared, counts=counts, guarantee=guarantee, noise=noise)
