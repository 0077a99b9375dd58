"""`predict` and `export`: a run's model on new records, and for other programs."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.commands.outcomes import measure
from sordino.commands.running import SILENT, Progress
from sordino.commands.training import load_model_factory
from sordino.errors import InvalidArgument
from sordino.runs import Metric

if TYPE_CHECKING:
    import pyarrow as pa

    from sordino.data import DatasetSplits, Records, TableFormat
    from sordino.recipes.saved_model import SavedModel


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


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of new records.

    Args:
        run: the run folder of the model.
        records: how many.
        columns: the columns that were written: the prediction, and with it the probability of each label.
        out: the file.
        metrics: what was measured, on public records with their true values; empty otherwise.
        has_targets: whether there was a column of true values.
        labels: that the model tells apart; empty where it predicts a number.
    """

    run: Path
    records: int
    columns: Mapping[str, npt.NDArray[np.generic]]
    out: Path
    metrics: Mapping[str, Metric]
    has_targets: bool
    labels: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON types, without the predictions themselves."""
        return {
            "run": str(self.run),
            "records": self.records,
            "columns": list(self.columns),
            "out": str(self.out),
            "metrics": {name: metric.value for name, metric in self.metrics.items() if ":" not in name},
        }


def predict(
    run: Path | str,
    data: str,
    *,
    out: Path | str = "scored.csv",
    probabilities: bool = False,
    model: str = "",
    data_is_public: bool = False,
    progress: Progress = SILENT,
) -> Predictions:
    """Write a run's predictions of new records next to them. Nothing is charged: the model is private already.

    A table needs the columns of the run's schema; its other columns, and a label column if there is one, are copied
    with the predictions. What is written is as private as the new records.

    Args:
        run: Run folder with a model.
        data: File of new records, or a named dataset's test records.
        out: Predictions file, .csv, .tsv or .parquet; an existing file is replaced.
        probabilities: Also write the probability of each label.
        model: module:factory of a custom module.
        data_is_public: Declare the records public; with a label column accuracy is printed.
        progress: what is said meanwhile.
    """
    out, run = Path(out), Path(run)
    _check_out(out, run, str(data))
    saved = open_model(run, model)
    if probabilities and saved.is_regressor:
        raise InvalidArgument(
            "probabilities must be left out for a run that predicts a number, got them. Leave it out."
        )
    with progress.stage("reading and predicting"):
        new = _read(saved, data)
        columns = _predictions(saved, new.records, probabilities)
        is_public = data_is_public or new.public
        metrics = {} if new.targets is None or not is_public else measure(saved, new.records, new.targets)
        new.write(out, columns)
    return Predictions(
        run=run,
        records=len(new.records),
        columns=columns,
        out=out,
        metrics=metrics,
        has_targets=new.targets is not None,
        labels=saved.labels,
    )


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model as a file for other programs.

    Args:
        run: its run folder.
        file: where it is.
        format: of the file.
        model: what it is.
        shape: of one record's features.
        outputs: names of what the file computes.
    """

    run: Path
    file: Path
    format: str
    model: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "run": str(self.run),
            "file": str(self.file),
            "format": self.format,
            "model": self.model,
            "outputs": list(self.outputs),
        }


def export(
    run: Path | str,
    *,
    format: str = "onnx",
    out: Path | str | None = None,
    model: str = "",
    progress: Progress = SILENT,
) -> ExportedModel:
    """Write a run's model for other programs: linear models, boosting, naive Bayes, and modules of common layers.

    The file takes encoded features, and is compared with the model by onnxruntime before it is kept.

    Args:
        run: Run folder with a model.
        format: `onnx`.
        out: File to write. Default: NAME.onnx.
        model: module:factory of a custom module.
        progress: what is said meanwhile.
    """
    from sordino.recipes.onnx_export import export_onnx

    checks.one_of(("onnx",), format=format)
    run = Path(run)
    target = Path(f"{run.resolve().name}.onnx" if out is None else out)
    if target.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(f"out must lie outside the run folder, got {str(target)!r}. Give another name.")
    saved = open_model(run, model)
    with progress.stage("writing, and comparing with the model"):
        outputs = export_onnx(saved, target)
    return ExportedModel(
        run=run, file=target, format=format, model=saved.description, shape=tuple(saved.shape), outputs=tuple(outputs)
    )


def _check_out(out_file: Path, run: Path, data: str) -> None:
    if out_file.suffix.lower() not in {".csv", ".tsv", ".parquet"}:
        raise InvalidArgument(f"out must be a .csv, .tsv or .parquet file, got {str(out_file)!r}. Give another name.")
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

        written = self._table()
        _check_free({name.strip() for name in written.column_names} & set(predictions))
        if path.suffix.lower() == ".parquet":
            for name, values in predictions.items():
                written = written.append_column(name, pa.array(values.tolist()))
            pq.write_table(written, path)
            return
        if self.source is None:
            written = pa.table({"record": [str(number) for number in range(len(self.records))]})
        columns = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in written.columns]
        columns += [_texts(values) for values in predictions.values()]
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
            writer.writerow([*written.column_names, *predictions])
            writer.writerows(zip(*columns, strict=True))

    def _table(self) -> "pa.Table":
        """Content of the file; every cell of a CSV file as text."""
        import pyarrow as pa

        from sordino.data.tables import is_csv, read_arrow

        if self.source is None:
            return pa.table({})
        if not is_csv(self.source):
            return read_arrow(self.source)
        rows = _csv_rows(self.source, self.table_format)
        names = next(rows)
        cells = list(zip(*rows, strict=True)) or [()] * len(names)
        return pa.table([pa.array(list(cell), type=pa.string()) for cell in cells], names=names)


def _check_free(taken: set[str]) -> None:
    if taken:
        raise InvalidArgument(
            f"data must have no column named {', '.join(sorted(taken))}, which the predictions are written to, got "
            "one. Rename it."
        )


def _texts(values: npt.NDArray[np.generic]) -> list[str]:
    return [value if isinstance(value, str) else repr(value) for value in values.tolist()]


def _csv_rows(source: Path, table_format: "TableFormat | None") -> Iterator[list[str]]:
    """Header and records of a CSV or TSV file, every cell as text."""
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
