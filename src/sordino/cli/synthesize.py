"""`sordino synthesize FILE`: a private synthetic table, charged in a run folder first."""

import csv
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, Output, finite, heading, key_value_table
from sordino.cli.ledger import DatasetNameOption, DryRunOption, LedgerOption, open_account, print_preview
from sordino.cli.table_options import (
    LabelOption,
    PublicSchemaOption,
    ReproducibleOption,
    SchemaOption,
    SeedOption,
    TableArgument,
    TableFile,
    TargetBoundsOption,
)
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import InvalidArgument
from sordino.events import compose
from sordino.runs import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

    from sordino.description import TableDescriber
    from sordino.ledger import Account
    from sordino.synthesis import TableSynthesizer

__all__ = ["DEFAULT_DELTA", "charge_first", "charged_run", "check_new_file", "synthesize"]

DEFAULT_DELTA = 1e-6
_SHOWN = 12


def synthesize(
    data: TableArgument,
    epsilon: Annotated[float, typer.Option(help="ε of everything that the command releases.")],
    delta: Annotated[float, typer.Option(help="δ, well below 1 / number of records.")] = DEFAULT_DELTA,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target: LabelOption = None,
    target_bounds: TargetBoundsOption = None,
    out: Annotated[Path, typer.Option(help="The synthetic table: a new .csv, .tsv or .parquet file.")] = Path(
        "synthetic.csv"
    ),
    rows: Annotated[int | None, typer.Option(help="Records to draw; the noisy number of records if not given.")] = None,
    method: Annotated[str, typer.Option(help="aim, mst, or independent (no dependence between columns).")] = "aim",
    degree: Annotated[int | None, typer.Option(help="aim: the most columns of a measured marginal.")] = None,
    bins: Annotated[int, typer.Option(help="Equal parts of each numeric column between its bounds.")] = 20,
    max_model_mb: Annotated[float, typer.Option(help="aim: the most megabytes of the model's tables.")] = 4.0,
    run_path: Annotated[
        Path | None, typer.Option("--run", help="The run folder; runs/NAME-DATE-NUMBER if not given.")
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Draw a synthetic table with the same columns, whose joint distribution was learned privately."""
    from sordino import checks
    from sordino.randomness import KeyedRNG
    from sordino.synthesis import TableSynthesizer

    output, account = Output(as_json=as_json), open_account(ledger, dataset_name)
    if rows is not None:
        checks.integer(0, rows=rows)
    source = TableFile.of_options(data, schema, public_schema_from, target, target_bounds)
    check_new_file(out, (".csv", ".tsv", ".parquet"))
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
        ledger=account,
    )
    if dry_run:
        print_preview(output, lambda payer, _: charge_first(synthesizer, payer), account, delta=delta)
        return
    KeyedRNG(seed=seed, reproducible=reproducible)  # refuses a seed that is not declared
    kind = "public" if source.public else "private"
    output.print_status(Text.assemble((source.name, "bold"), f": {kind} records, synthetic table by {method}"))
    parameters = {"bins": bins, "degree": degree, "max_model_mb": max_model_mb}
    run = charged_run(
        source,
        synthesizer,
        command="synthesize",
        settings={"method": method, **parameters},
        epsilon=epsilon,
        folder=run_path,
    )
    try:
        with output.progress("measuring") as advance:
            synthesizer.fit(
                source.path, progress=lambda part: advance(words=f"measuring: {100 * part:.0f} % of the budget")
            )
    except BaseException:
        run.close()
        raise
    run.close()
    run.write_guarantee(synthesizer.guarantee_)
    table = synthesizer.sample(rows)
    _write_table(table, out)
    output.print_result(
        _document(synthesizer, table.num_rows, out, run.path), *_page(synthesizer, table, out, run.path)
    )


def check_new_file(path: Path, endings: tuple[str, ...]) -> None:
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


def charge_first(releaser: "TableSynthesizer | TableDescriber", payer: "Account") -> None:
    """Charge everything that a fit would charge."""
    payer.charge(
        compose(list(releaser.planned_events())),
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit=PrivacyUnit.RECORD,
    )


def charged_run(
    source: TableFile,
    synthesizer: "TableSynthesizer | TableDescriber",
    *,
    command: str,
    settings: dict[str, object],
    epsilon: float,
    folder: Path | None,
) -> RunFolder:
    """A run folder in which the charge stands, before a record is read; nothing where the ledger refuses it."""
    from sordino import accounting
    from sordino.cli.training_job import run_folder
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
    }
    run = RunFolder.create(
        run_folder(f"{command}-{source.name}", folder), plan=json.dumps(plan, indent=2, allow_nan=False), meta=meta
    )
    try:
        spent = accounting.epsilon(events, delta, neighboring_relation=relation)
        run.append(step=0, event=events, epsilon=spent.upper)
    except BaseException:
        run.close()
        shutil.rmtree(run.path)
        raise
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


def _document(synthesizer: "TableSynthesizer", rows: int, out: Path, run: Path) -> dict[str, object]:
    guarantee = synthesizer.guarantee_
    return {
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "privacy_unit": guarantee.privacy_unit.value,
        "neighboring_relation": guarantee.neighboring_relation.value,
        "accountant": guarantee.accountant,
        "caveats": list(guarantee.caveats),
        "description": guarantee.describe(),
        "method": synthesizer.method,
        "records": rows,
        "noisy_number_of_records": synthesizer.model_.total,
        "measured": [{"columns": list(one.columns), "noise_stddev": one.stddev} for one in synthesizer.measured_],
        "out": str(out),
        "run": str(run),
    }


def _page(synthesizer: "TableSynthesizer", table: "pa.Table", out: Path, run: Path) -> list[RenderableType]:
    guarantee = synthesizer.guarantee_
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})-differentially private"
    rows = [
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *(("caveat", caveat) for caveat in guarantee.caveats),
        ("synthetic", f"{table.num_rows:,} records of {table.num_columns} columns"),
        ("estimated size", f"about {synthesizer.model_.total:,.0f} private records, a noisy number"),
    ]
    together = [one for one in synthesizer.measured_ if len(one.columns) > 1]
    finest: dict[tuple[str, ...], float] = {}
    for one in together:
        finest[one.columns] = min(one.stddev, finest.get(one.columns, one.stddev))
    measured = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    measured.add_column("columns measured together", overflow="fold")
    measured.add_column("noise, records a cell", justify="right", no_wrap=True)
    best = sorted(finest.items(), key=lambda item: (item[1], item[0]))
    for columns, stddev in best[:_SHOWN]:
        measured.add_row(" × ".join(columns), f"± {stddev:,.1f}")
    more = [Text(f"and {len(best) - _SHOWN} more; --json lists all", style="dim")]
    return [
        heading(claim),
        key_value_table(rows),
        Text(),
        *([measured] if best else [Text("Every column was measured by itself: no dependence is kept.", style="dim")]),
        *(more if len(best) > _SHOWN else []),
        Text(),
        key_value_table([("table", str(out)), ("run", str(run))]),
    ]
