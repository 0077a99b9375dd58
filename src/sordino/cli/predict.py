"""`sordino predict RUN DATA` and `sordino export RUN`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call
from sordino.cli.outcomes import render_metrics

__all__ = ["export_command", "predict_command"]


def predict_command(
    run: Annotated[Path, typer.Argument(help="Run folder with a model.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="File of new records, or a named dataset's test records.")
    ],
    out: Annotated[
        Path, typer.Option(help="Predictions file, .csv, .tsv or .parquet; an existing file is replaced.")
    ] = Path("scored.csv"),
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of each label.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory of a custom module.")] = "",
    data_is_public: Annotated[
        bool,
        typer.Option("--data-is-public", help="Declare the records public; with a label column accuracy is printed."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict new records by a run's model. Nothing is charged: what is computed from a private model stays private.

    A table needs the columns of the run's schema; its other columns, and a label column if there is one, are copied
    with the predictions. What is written is as private as the new records.
    """
    output, found = call("predict", locals())
    rows = [("records", f"{found.records:,}"), ("columns", ", ".join(found.columns)), ("file", str(found.out))]
    page: list[RenderableType] = [heading(f"{run.name} on {data}"), key_value_table(rows)]
    if found.metrics:
        page += [Text(), render_metrics(found.metrics, found.labels)]
    elif found.has_targets:
        said = (
            "There is a column of true values. Nothing was measured on it: accuracy on private records is a release of "
            "its own. Declare the records public (--data-is-public), or pay: sordino report RUN --evaluate."
        )
        page += [Text(), Text(said, style="dim")]
    output.print_result(found.to_dict(), *page)


def export_command(
    run: Annotated[Path, typer.Argument(help="Run folder with a model.")],
    format: Annotated[str, typer.Option(help="`onnx`.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="File to write. Default: NAME.onnx.")] = None,
    model: Annotated[str, typer.Option(help="module:factory of a custom module.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a run's model for other programs: linear models, boosting, forests, naive Bayes, modules of common layers.

    The file takes encoded features, and is compared with the model by onnxruntime before it is kept.
    """
    output, found = call("export", locals())
    rows = [
        ("model", found.model),
        ("input", f"features, float32 [records, {', '.join(map(str, found.shape))}]"),
        ("outputs", ", ".join(found.outputs)),
        ("compared", "with the model, on synthetic records, by onnxruntime"),
        ("file", str(found.file)),
    ]
    output.print_result(found.to_dict(), heading(f"{run.name} as ONNX"), key_value_table(rows))
