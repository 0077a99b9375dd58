"""`sordino predict RUN DATA`: a run's model on new records. `sordino export RUN`: the model for other programs."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import RenderableType
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.train import load_model_factory
from sordino.cli.training_job import render_metrics
from sordino.errors import InvalidArgument
from sordino.runs import Metric

if TYPE_CHECKING:
    import pyarrow as pa

    from sordino.data import DatasetSplits, Records, TableFormat
    from sordino.recipes.saved_model import SavedModel

__all__ = ["export_model", "measure", "open_model", "predict"]

_OUT = ".csv, .tsv or .parquet"


def open_model(run: Path, factory: str, device: str = "cpu") -> "SavedModel":
    """The run's model; `factory` names that of a module of the user's own, and is empty otherwise."""
    from sordino.recipes.saved_model import load_model

    if not factory:
        return load_model(run, device=device)
    module = load_model_factory(factory)
    if isinstance(module, str):
        raise InvalidArgument(
            f"model must name the function that makes your module, module:factory, got {factory!r}. Leave it out for a "
            "model of sordino."
        )
    return load_model(run, module=module, device=device)


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file of new records, or a named set's test records.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="Where the predictions go: .csv, .tsv or .parquet. An old file is replaced.")
    ] = Path("scored.csv"),
    with_probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of each label.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a module of your own.")] = "",
    data_is_public: Annotated[
        bool,
        typer.Option("--data-is-public", help="Declare the records public: with a label column accuracy is shown."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict new records by a run's model. Nothing is charged: what is computed from a private model stays private.

    A table needs the columns of the run's schema; its other columns, and a label column if there is one, are copied
    with the predictions. What is written is as private as the new records.
    """
    out = Output(as_json=as_json)
    _check_out(out_file, run, data)
    saved = open_model(run, model)
    if with_probabilities and saved.is_regressor:
        raise InvalidArgument(
            "probabilities must be left out for a run that predicts a number, got them. Leave it out."
        )
    with out.progress("reading and predicting"):
        new = _read(saved, data)
        predictions = _predictions(saved, new.records, with_probabilities)
        target = new.targets
        is_public = data_is_public or new.public
        metrics = {} if target is None or not is_public else measure(saved, new.records, target)
        new.write(out_file, predictions)
    document = {
        "run": str(run),
        "records": len(new.records),
        "columns": list(predictions),
        "out": str(out_file),
        "metrics": {name: metric.value for name, metric in metrics.items() if ":" not in name},
    }
    rows = [("records", f"{len(new.records):,}"), ("columns", ", ".join(predictions)), ("file", str(out_file))]
    page: list[RenderableType] = [heading(f"{run.name} on {data}"), key_value_table(rows)]
    if metrics:
        page += [Text(), render_metrics(metrics)]
    elif target is not None:
        said = (
            "There is a column of true values. Nothing was measured on it: accuracy on private records is a release of "
            "its own. Declare the records public (--data-is-public), or pay: sordino report RUN --evaluate."
        )
        page += [Text(), Text(said, style="dim")]
    out.print_result(document, *page)


def export_model(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    form: Annotated[str, typer.Option("--format", help="`onnx`.")] = "onnx",
    out_file: Annotated[Path | None, typer.Option("--out", help="The file; NAME.onnx if not given.")] = None,
    model: Annotated[str, typer.Option(help="module:factory, for a module of your own.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a run's model for other programs: linear models, boosting, naive Bayes, and modules of common layers.

    The file takes encoded features, and is compared with the model by onnxruntime before it is kept.
    """
    from sordino.recipes.onnx_export import export_onnx

    checks.one_of(("onnx",), format=form)
    target = Path(f"{run.resolve().name}.onnx") if out_file is None else out_file
    if target.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(f"out must lie outside the run folder, got {str(target)!r}. Give another name.")
    saved = open_model(run, model)
    out = Output(as_json=as_json)
    with out.progress("writing, and comparing with the model"):
        outputs = export_onnx(saved, target)
    document = {
        "run": str(run),
        "file": str(target),
        "format": form,
        "model": saved.description,
        "outputs": list(outputs),
    }
    rows = [
        ("model", saved.description),
        ("input", f"features, float32 [records, {', '.join(map(str, saved.shape))}]"),
        ("outputs", ", ".join(outputs)),
        ("compared", "with the model, on synthetic records, by onnxruntime"),
        ("file", str(target)),
    ]
    out.print_result(document, heading(f"{run.name} as ONNX"), key_value_table(rows))


def _check_out(out_file: Path, run: Path, data: str) -> None:
    if out_file.suffix.lower() not in {".csv", ".tsv", ".parquet"}:
        raise InvalidArgument(f"out must be a {_OUT} file, got {str(out_file)!r}. Give another name.")
    if out_file.exists() and Path(data).exists() and out_file.samefile(data):
        raise InvalidArgument(f"out must be another file than the records, got {str(out_file)!r}. Give another name.")
    if out_file.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(
            f"out must lie outside the run folder, got {str(out_file)!r}: a run folder may be published."
        )
    if not out_file.resolve().parent.is_dir():
        raise InvalidArgument(f"out must lie in a folder that exists, got {str(out_file)!r}. Make the folder.")


def _predictions(saved: "SavedModel", records: "Records", chances: bool) -> dict[str, npt.NDArray[np.generic]]:
    """The columns to write: the prediction, and the probability of each label."""
    found = saved.predict_encoded(records)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "prediction": found if saved.is_regressor else np.array(saved.labels, dtype=object)[found.astype(np.int64)]
    }
    if chances:
        probabilities = saved.predict_proba(records)
        columns |= {f"probability_{label}": probabilities[:, k] for k, label in enumerate(saved.labels)}
    return columns


def measure(
    saved: "SavedModel",
    records: "Records",
    targets: npt.NDArray[np.generic],
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Metric]:
    """Accuracy and what is shown with it, or errors of a predicted number, on public records.

    Guarantee: none for the records: only call it for public ones.

    Args:
        saved: the model.
        records: encoded.
        targets: positions of the right labels, −1 where one is not listed; or numbers, NaN where there is none.
        groups: subgroups, by column.
    """
    from sordino.report import compute_label_utility, compute_regression_utility, compute_utility

    known = np.isfinite(targets) if saved.is_regressor else targets.astype(np.int64) >= 0
    if not known.any():
        raise InvalidArgument(
            f"column {saved.target!r} must hold {'numbers' if saved.is_regressor else 'listed labels'} to measure on, "
            "got none. Correct the column, or leave out --data-is-public."
        )
    if not saved.is_regressor and not known.all():
        raise InvalidArgument(
            f"labels of column {saved.target!r} must be among {', '.join(saved.labels[:12])}, got "
            f"{int((~known).sum()):,} rows with another label, or none. Correct them, or leave out --data-is-public."
        )
    if saved.is_regressor:
        return compute_regression_utility(saved.predict_encoded(records)[known], targets[known], public=True)
    chances = saved.probabilities(records)
    if chances is not None:
        return compute_utility(chances, targets, public=True, groups=groups)
    found, classes = saved.predict_encoded(records), len(saved.labels)
    scores = saved.scores(records)
    return compute_label_utility(found, targets, classes=classes, scores=scores, public=True, groups=groups)


# ----------------------------------------------------------------------------------------------------------------------
# New records: read as those of the training were, and written again with the predictions added.
# ----------------------------------------------------------------------------------------------------------------------


_Columns = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class _NewRecords:
    """Encoded records, their true values if a column holds them, and what is written with the predictions.

    Args:
        records: encoded.
        targets: positions of labels (−1 where not listed) or numbers (NaN where none), or None.
        public: whether the records are those of a named set.
        source: the table that the records came from, or None for arrays and named sets.
        table_format: how that table is written, if it is a CSV file.
    """

    records: "Records"
    targets: npt.NDArray[np.generic] | None
    public: bool = False
    source: Path | None = None
    table_format: "TableFormat | None" = None

    def write(self, path: Path, predictions: _Columns) -> None:
        """Write the file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if path.suffix.lower() == ".parquet":
            written = self._table()
            taken = set(written.column_names) & set(predictions)
            _check_free(taken)
            for name, values in predictions.items():
                written = written.append_column(name, pa.array(values.tolist()))
            pq.write_table(written, path)
            return
        rows = self._rows()
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
            first = next(rows)
            _check_free({name.strip() for name in first} & set(predictions))
            writer.writerow([*first, *predictions])
            columns = [_texts(values) for values in predictions.values()]
            for row, *values in zip(rows, *columns, strict=True):
                writer.writerow([*row, *values])

    def _rows(self) -> Iterator[list[str]]:
        """Header and cells as they stand in the file; of arrays and named sets the number of each record."""
        if self.source is None:
            yield ["record"]
            yield from ([str(number)] for number in range(len(self.records)))
            return
        from sordino.data.tables import is_csv, read_arrow

        if not is_csv(self.source):
            table = read_arrow(self.source)
            yield list(table.column_names)
            for batch in table.to_batches():
                cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in batch.columns]
                yield from (list(row) for row in zip(*cells, strict=True))
            return
        yield from _csv_rows(self.source, self.table_format)

    def _table(self) -> "pa.Table":
        """What stands in the file; every cell of a CSV file as a text."""
        import pyarrow as pa

        from sordino.data.tables import is_csv, read_arrow

        if self.source is None:
            return pa.table({})
        if not is_csv(self.source):
            return read_arrow(self.source)
        rows = _csv_rows(self.source, self.table_format)
        names = next(rows)
        cells = list(zip(*rows, strict=True)) or [()] * len(names)
        return pa.table({name: pa.array(list(cell), type=pa.string()) for name, cell in zip(names, cells, strict=True)})


def _check_free(taken: set[str]) -> None:
    if taken:
        raise InvalidArgument(
            f"data must have no column named {', '.join(sorted(taken))}, which the predictions are written to, got "
            "one. Rename it."
        )


def _texts(values: npt.NDArray[np.generic]) -> list[str]:
    return [value if isinstance(value, str) else repr(value) for value in values.tolist()]


def _csv_rows(source: Path, table_format: "TableFormat | None") -> Iterator[list[str]]:
    """Header and records of a CSV or TSV file, every cell as it stands there."""
    from sordino.data.tables import LONGEST_LINE, open_table_text

    csv.field_size_limit(LONGEST_LINE)
    encoding = "utf-8" if table_format is None else table_format.encoding
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    with open_table_text(source, table_format) as (file, separator):
        reader = csv.reader(io.TextIOWrapper(file, encoding=encoding, newline=""), delimiter=separator)
        names = next(reader)
        yield names
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise InvalidArgument(
                    f"line {reader.line_num} of {source.name!r} must have {len(names)} cells, as the header has, got "
                    f"{len(row)}. Correct the line."
                )
            yield row


def _read(saved: "SavedModel", data: str) -> _NewRecords:
    """The records of a named set or a file, encoded as the run's schema says."""
    from sordino.data.arrays import is_array, read_arrays, to_images
    from sordino.data.catalog import CATALOG
    from sordino.data.schema import Records
    from sordino.data.tables import is_table

    if data in CATALOG:
        return _read_named(saved, data)
    path = Path(data).expanduser()
    if not path.is_file() or not (is_table(path) or is_array(path)):
        raise InvalidArgument(
            f"data must be a .csv, .tsv, .parquet, .npz or IDX file that is there, or one of {', '.join(CATALOG)}, got "
            f"{data!r}. Check the path."
        )
    if is_table(path) and saved.schema is not None:
        return _read_table(saved, path)
    if is_array(path) and saved.schema is None and saved.array_schema is not None:
        array, labels = read_arrays(path)
        features = to_images(array, low=saved.array_schema.low, high=saved.array_schema.high)
        listed = np.isin(labels, np.arange(len(saved.labels)))
        records = Records(features=features, labels=np.zeros(len(features), dtype=np.int64))
        return _NewRecords(records=saved.encode(records), targets=np.where(listed, labels, -1).astype(np.int64))
    form = "a table" if saved.schema is not None else f"arrays of shape {saved.shape}"
    raise InvalidArgument(f"data must be {form}, as the run's training records were, got {path.name!r}.")


def _read_named(saved: "SavedModel", name: str) -> _NewRecords:
    from sordino.data import load_dataset

    dataset: DatasetSplits = load_dataset(name, keep_texts=saved.kind == "recipe")
    records = dataset.train if dataset.test is None else dataset.test
    if dataset.schema != saved.schema or tuple(dataset.labels) != saved.labels:
        raise InvalidArgument(
            f"data must have the run's columns and labels, got {name!r} with others. Give a file of new records."
        )
    return _NewRecords(records=saved.encode(records), targets=records.labels, public=dataset.public)


def _read_table(saved: "SavedModel", path: Path) -> _NewRecords:
    from sordino.data.schema import Records
    from sordino.data.tables import encode_features, is_csv, iterate_declared, positions, read_header, to_numbers

    schema = saved.schema
    assert schema is not None
    header = read_header(path, schema.table_format)
    missing = [column.name for column in schema.columns if column.name not in header]
    if missing:
        raise InvalidArgument(
            f"data must have the columns of the run's schema, got {path.name!r} without "
            f"{', '.join(map(repr, missing))}. Add them; cells may be empty."
        )
    has_target = schema.target in header
    features, targets = [], []
    for columns in iterate_declared(path, schema, with_target=has_target):
        features.append(encode_features(columns, schema))
        if has_target and schema.target_bounds is None:
            targets.append(positions(columns[schema.target], schema.labels))
        elif has_target:
            targets.append(to_numbers(columns[schema.target]))
    encoded = np.concatenate([np.zeros((0, schema.width()), dtype=np.float32), *features])
    if is_csv(path):
        lines = sum(1 for _ in _csv_rows(path, schema.table_format)) - 1
        if lines != len(encoded):
            raise InvalidArgument(
                f"every line of {path.name!r} must be a record of the header's form, got {abs(lines - len(encoded)):,} "
                "others: cells with quotes that do not close, or text behind a closing quote. Correct them."
            )
    return _NewRecords(
        records=Records(features=encoded, labels=np.zeros(len(encoded), dtype=np.int64)),
        targets=np.concatenate(targets) if targets else None,
        source=path,
        table_format=schema.table_format,
    )
