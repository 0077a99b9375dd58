"""How a training's outcome and its figures are printed, for the commands that leave a run folder."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import heading, key_value_table
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.commands import RunOutcome
    from sordino.runs import Metric

__all__ = ["render_metrics", "render_outcome"]


def render_outcome(outcome: "RunOutcome") -> tuple[RenderableType, ...]:
    """The outcome for people."""
    guarantee, path = outcome.guarantee, outcome.run.path
    rows = [
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        ("sampler", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *(("caveat", caveat) for caveat in guarantee.caveats),
    ]
    if outcome.interrupted:
        rows.append(("interrupted", f"after {outcome.steps:,} steps; what was charged stays charged"))
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})"
    claim += "-differentially private" if guarantee.is_private else ": NOT private"
    blocks: list[RenderableType] = [heading(claim), key_value_table(rows)]
    if outcome.metrics:
        from sordino.report import label_names

        blocks += [Text(), render_metrics(outcome.metrics, label_names(outcome.run))]
    files = [("model", "model.safetensors"), ("report", "report.html"), ("picture", "report.png")]
    where = key_value_table([(name, str(path / file)) for name, file in files])
    return (*blocks, Text(), where)


def render_metrics(metrics: "Mapping[str, Metric]", labels: Sequence[str]) -> RenderableType:
    """Accuracy or errors on public records, and what they are compared with; `labels` are the names of the labels."""
    names = {
        "test_accuracy": "test accuracy, private",
        "baseline_test_accuracy": "non-private baseline",
        "majority_accuracy": "the commonest label",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, words in names.items():
        if name in metrics:
            own = name == "test_accuracy"
            bar = Text("━" * round(40 * metrics[name].value), style="cyan" if own else "bright_black")
            table.add_row(words, Text(f"{100 * metrics[name].value:.1f} %", style="bold" if own else ""), bar)
    blocks: list[RenderableType] = [table] if table.row_count else []
    if metrics.get("test_accuracy") and _learned_nothing(metrics):
        words = "Not above the commonest label: this accuracy is reached without learning."
        blocks.append(Text(words, style="yellow"))
    from sordino.report import describe_figures

    return Group(*blocks, key_value_table(describe_figures(metrics, labels)))


def _learned_nothing(metrics: "Mapping[str, Metric]") -> bool:
    floor = metrics.get("majority_accuracy")
    return floor is not None and metrics["test_accuracy"].value <= floor.value
