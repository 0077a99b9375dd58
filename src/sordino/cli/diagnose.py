"""`sordino diagnose RUN`: what clipping and noise did to a run's model, measured on public test records."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.attack import dataset_of, recipe_of_run
from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from torch import nn

    from sordino.data import DataSet
    from sordino.diagnostics import Convergence, SubgroupGap, TangentKernel
    from sordino.recipes import Recipe

__all__ = ["diagnose"]

_MARK = {True: "yes", False: "no"}
_TRAINED_ON = 256


@dataclass(frozen=True, kw_only=True)
class _Found:
    kernel: "TangentKernel"
    courses: "Convergence"
    calibration: dict[str, dict[str, Metric]]
    gaps: "tuple[SubgroupGap, ...]"


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="The records of the run: a name, or a file; as the run says.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of your file.")] = None,
    test: Annotated[Path | None, typer.Option(help="A PUBLIC file of the same form; all is measured on it.")] = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="Declare the training records public: a twin may be trained.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    records: Annotated[int, typer.Option(help="Test records in the tangent kernel.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of training with noise alone, clipping alone, both, neither.")] = 40,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write the numbers to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tangent kernel, convergence, calibration and subgroups of a run's model, on public test records only."""
    checks.integer(1, records=records)
    checks.integer(1, steps=steps)
    out, folder = Output(as_json=as_json), RunFolder.open(run)
    dataset = dataset_of(folder, data, schema, test, public=data_is_public)
    if not dataset.public and test is None:
        raise InvalidArgument("test must be public records to measure on, got none. Give --test.")
    recipe = recipe_of_run(folder, dataset, model)
    out.say(Text.assemble((run.name, "bold"), ": measured on public test records, nothing else is read"))
    with out.stderr.status("measuring"):
        found = _measured(folder, dataset, recipe, records, steps)
    document = {"run": run.name} | _document(found)
    if out_file is not None:
        out_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out.finish(document, *_page(found))


def _measured(folder: RunFolder, dataset: "DataSet", recipe: "Recipe", records: int, steps: int) -> _Found:
    from sordino.cli.measuring import groups_of, probabilities
    from sordino.diagnostics import convergence, subgroup_gaps, tangent_kernel
    from sordino.recipes import non_private_twin
    from sordino.report import utility

    assert dataset.test is not None
    private = recipe.build_model()
    start = recipe.build_model()
    private.load_state_dict(folder.load_model())
    features, labels = dataset.test.tensors()
    step = recipe.plan.at(0)
    models: dict[str, nn.Module] = {"private": private}
    if dataset.public:
        models["twin"] = non_private_twin(dataset, recipe)
    chances = {name: probabilities(one, dataset.test) for name, one in models.items()}
    few = min(_TRAINED_ON, len(labels))
    return _Found(
        kernel=tangent_kernel(private, features[:records], labels[:records], max_grad_norm=step.max_grad_norm),
        courses=convergence(
            start,
            features[:few],
            labels[:few],
            steps=steps,
            learning_rate=recipe.learning_rate,
            max_grad_norm=step.max_grad_norm,
            # As much noise in the mean gradient as the run had, on far fewer records.
            noise_multiplier=step.noise_multiplier * few / step.expected_batch_size,
        ),
        calibration={name: utility(chance, dataset.test.labels, public=True) for name, chance in chances.items()},
        gaps=subgroup_gaps(chances["private"], chances["twin"], dataset.test.labels, groups_of(dataset, dataset.test))
        if "twin" in chances
        else (),
    )


def _document(found: _Found) -> dict[str, object]:
    return {
        "tangent_kernel": {
            "max_grad_norm": found.kernel.max_grad_norm,
            "records": found.kernel.records,
            "layers": list(found.kernel.layers),
            "rows": [
                {name: value for name, value in vars(row).items() if name != "matrix"}
                | {
                    "symmetric": row.symmetric,
                    "positive_form": row.positive_form,
                    "positive_eigenvalues": row.positive_eigenvalues,
                    "refutes": list(row.refutes),
                }
                for row in found.kernel.rows
            ],
        },
        "convergence": {name: list(losses) for name, losses in found.courses.losses.items()},
        "metrics": {
            model: {name: metric.value for name, metric in metrics.items() if not name.startswith("subgroup")}
            for model, metrics in found.calibration.items()
        },
        "subgroups": [vars(gap) for gap in found.gaps],
    }


def _page(found: _Found) -> tuple[RenderableType, ...]:
    refuted = [f"{row.name} ({', '.join(row.refutes)})" for row in found.kernel.rows if row.refutes]
    words = f"Beyond the published table: not kept here by {'; '.join(refuted)}" if refuted else ""
    last = [(name, f"loss {losses[0]:.4f} → {losses[-1]:.4f}") for name, losses in found.courses.losses.items()]
    note = f"clipping norm {found.kernel.max_grad_norm:g}; symmetric, form ≥ 0, eigenvalues ≥ 0; slope of the loss"
    head = heading("Clipping and the tangent kernel", note)
    blocks: list[RenderableType] = [head, _kernel(found.kernel), Text(words, style="yellow"), Text()]
    blocks += [heading("Noise and clipping apart", f"{found.courses.steps} full-batch steps"), facts(last), Text()]
    blocks += [heading("Calibration"), _calibration(found.calibration)]
    if found.gaps:
        blocks += [heading("Whom privacy costs"), _gaps(found.gaps)]
    return tuple(blocks)


def _kernel(kernel: "TangentKernel") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("clipping", "sym.", "form", "eig.", "predicted", "measured", "kept"):
        table.add_column(name, justify="left" if name == "clipping" else "right", no_wrap=True)
    for row in kernel.rows:
        marks = (_MARK[row.symmetric], _MARK[row.positive_form], _MARK[row.positive_eigenvalues])
        slopes = (f"{row.predicted:.4g}", f"{row.measured:.4g}", f"{100 * row.kept:.0f} %")
        table.add_row(row.name, *marks, *slopes)
    return table


def _calibration(calibration: dict[str, dict[str, Metric]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "accuracy", "ECE", "MCE"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, metrics in calibration.items():
        shown = [f"{100 * metrics[key].value:.1f} %" for key in ("test_accuracy", "test_ece", "test_mce")]
        table.add_row(name, *shown)
    return table


def _gaps(gaps: "tuple[SubgroupGap, ...]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", "records", "private", "twin", "gap (95 %)"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for gap in gaps:
        span = f"{100 * gap.gap:+.1f} ({100 * gap.lower:+.1f} to {100 * gap.upper:+.1f})"
        shares = (f"{100 * gap.private:.1f} %", f"{100 * gap.plain:.1f} %")
        table.add_row(f"{gap.column}: {gap.value}", f"{gap.records:,}", *shares, span)
    return table
