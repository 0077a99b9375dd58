"""`sordino runs list|show|compare`: the run folders in a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, Output, finite, heading, key_value_table
from sordino.definitions import Guarantee, format_upper_bound
from sordino.errors import SordinoError
from sordino.runs import RunFolder

__all__ = ["runs", "verify_command"]


runs = typer.Typer(help="Look at run folders.", no_args_is_help=True)
_FOLDER = Path("runs")


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """One run in a few numbers, none of which depends on a record unless it was declared public."""

    path: Path
    started: str
    state: str
    charged: int
    repeated: int
    segments: int
    guarantee: Guarantee | None
    epsilon: float | None
    plan: Mapping[str, object]
    facts: Mapping[str, object]
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, run: RunFolder) -> "_Summary":
        meta, guarantee, metrics = run.meta, run.guarantee, run.metrics
        lines = list(run)
        stated = [line.epsilon for line in lines if line.epsilon is not None]
        planned = run.plan.get("steps")
        reached = max((line.step + 1 for line in lines), default=0)
        is_whole = reached == planned or meta.get("open_ended") is True
        state = "cut off" if guarantee is None else "complete" if is_whole else "interrupted"
        return cls(
            path=run.path,
            started=str(meta.get("started", "")),
            state=state,
            charged=len(lines),
            repeated=sum(line.attempt > 1 for line in lines),
            segments=max(1, len(run.segments())),
            guarantee=guarantee,
            epsilon=guarantee.epsilon if guarantee else max(stated, default=None),
            plan=run.plan,
            facts={name: meta[name] for name in ("data", "training") if isinstance(meta.get(name), Mapping)},
            metrics={name: metric.value for name, metric in metrics.items() if metric.public},
        )

    @property
    def data(self) -> str:
        """Name of the dataset, when the run says it."""
        data = self.facts.get("data")
        return str(data.get("name", "")) if isinstance(data, Mapping) else ""

    @property
    def model(self) -> str:
        """Name of the model, when the run says it."""
        training = self.facts.get("training")
        return str(training.get("model", "")) if isinstance(training, Mapping) else ""

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        return {
            "run": str(self.path),
            "started": self.started,
            "state": self.state,
            "epsilon": None if self.epsilon is None else finite(self.epsilon),
            "delta": self.plan.get("delta"),
            "charged_steps": self.charged,
            "repeated_steps": self.repeated,
            "segments": self.segments,
            "description": None if self.guarantee is None else self.guarantee.describe(),
            "plan": dict(self.plan),
            **self.facts,
            "metrics": dict(self.metrics),
        }


@runs.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds the run folders.")] = _FOLDER,
    as_json: JsonOption = False,
) -> None:
    """All runs in a folder, oldest first."""
    found, broken = _found(folder)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "data", "model", "state", "ε", "δ", "steps", "accuracy"):
        number = name in {"ε", "δ", "steps", "accuracy"}
        table.add_column(
            name, justify="right" if number else "left", no_wrap=number or name == "state", overflow="fold"
        )
    for one in found:
        accuracy = one.metrics.get("test_accuracy")
        table.add_row(
            one.path.name,
            one.data,
            one.model,
            Text(one.state, style="" if one.state == "complete" else "yellow"),
            "" if one.epsilon is None else format_upper_bound(one.epsilon),
            f"{one.plan.get('delta', '')}",
            f"{one.charged:,}",
            "" if accuracy is None else f"{100 * accuracy:.1f} %",
        )
    document = {"runs": [one.to_dict() for one in found], "unreadable": broken}
    words = f"{len(found)} runs in {folder}"
    rows = [(name, "can't be read; try sordino verify") for name in broken]
    Output(as_json=as_json).print_result(document, heading(words), table, key_value_table(rows))


@runs.command("show")
def show_run(run: Annotated[Path, typer.Argument(help="A run folder.")], as_json: JsonOption = False) -> None:
    """One run: what was planned, what was charged, what came out."""
    one = _Summary.of(RunFolder.open(run))
    rows = [
        ("started", one.started),
        ("state", one.state),
        ("steps charged", f"{one.charged:,}" + (f", {one.repeated:,} of them repeated" if one.repeated else "")),
        ("segments", f"{one.segments:,}"),
        *((name.replace("_", " "), _describe(value)) for name, value in one.plan.items() if name != "schema"),
        *((f"{part} {name}".replace("_", " "), _describe(value)) for part, name, value in _flat(one.facts)),
        *((name.replace("_", " "), value) for name, value in _measured(one).items()),
    ]
    claim = f"ε so far = {format_upper_bound(one.epsilon)}" if one.epsilon is not None else "nothing was charged"
    words = claim if one.guarantee is None else one.guarantee.describe()
    Output(as_json=as_json).print_result(one.to_dict(), heading(words), key_value_table(rows))


@runs.command("compare")
def compare_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Two run folders or more.")],
    as_json: JsonOption = False,
) -> None:
    """Runs side by side: only what differs between them."""
    found = [_Summary.of(RunFolder.open(folder)) for folder in folders]
    columns = [_row(one) for one in found]
    names = list(dict.fromkeys(name for column in columns for name in column))
    differing = [name for name in names if len({column.get(name, "") for column in columns}) > 1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for one in found:
        table.add_column(Text(one.path.name, overflow="fold"), justify="right", overflow="fold")
    for name in differing:
        table.add_row(
            *(Text(words) for words in (name.replace("_", " "), *(column.get(name, "") for column in columns)))
        )
    document = {"runs": [one.to_dict() for one in found], "differing": differing}
    same = "The runs do not differ." if not differing else f"{len(found)} runs"
    Output(as_json=as_json).print_result(document, heading(same), table)


def _row(one: _Summary) -> dict[str, str]:
    fields = {"state": one.state, "ε": "" if one.epsilon is None else format_upper_bound(one.epsilon, 4)}
    counts = {"steps charged": f"{one.charged:,}", "repeated": f"{one.repeated:,}"}
    plan = {name: _describe(value) for name, value in one.plan.items()}
    other = {f"{part} {name}": _describe(value) for part, name, value in _flat(one.facts)}
    return fields | counts | plan | other | _measured(one)


def _measured(one: _Summary) -> dict[str, str]:
    """Values that stand for the whole; bins and subgroups are for the report and the JSON."""
    return {name: f"{value:.4f}" for name, value in one.metrics.items() if ":" not in name}


def _describe(value: object) -> str:
    """A value of a plan on one line: objects as names and values."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_describe(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(map(_describe, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(facts_of: Mapping[str, object]) -> list[tuple[str, str, object]]:
    return [
        (part, str(name), value)
        for part, body in facts_of.items()
        if isinstance(body, Mapping)
        for name, value in body.items()
        if value is not None
    ]


def _found(folder: Path) -> tuple[list[_Summary], list[str]]:
    found, broken = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (path / "run.json").is_file():
            continue
        try:
            found.append(_Summary.of(RunFolder.open(path)))
        except SordinoError:
            broken.append(path.name)
    return sorted(found, key=lambda one: (one.started, one.path.name)), broken


# ----------------------------------------------------------------------------------------------------------------------
# `sordino verify RUN`: whether a run folder's files, lines and numbers fit together.
# ----------------------------------------------------------------------------------------------------------------------


_MARKS = {"pass": Text("pass", style="green"), "fail": Text("FAIL", style="bold red")}


def verify_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    ledger: Annotated[
        str | None, typer.Option(help="The ledger that the run was charged to: a file, or postgresql://…")
    ] = None,
    head: Annotated[str | None, typer.Option(help="A hash of the run that was published before.")] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the hash that stands for the whole run, to publish it.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Also fail when something could not be checked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run: hashes, plan against transcript, the guarantee by two accountants. Exit code 1 when it fails."""
    from sordino import verification

    out = Output(as_json=as_json)
    with out.progress("checking"):
        found = verification.verify(run, ledger=ledger, head=head)
    good = found.complete if strict else found.passed
    if anchor and good and not as_json:
        typer.echo(found.head)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "", ""):
        table.add_column(style=style, overflow="fold")
    for item in found.items:
        table.add_row(item.name, _MARKS.get(item.status, Text("not checked", style="yellow")), Text(item.detail))
    verdict = "The run holds together." if good else "The run does NOT hold together."
    if found.passed and not good:
        verdict = "Nothing failed, but not everything could be checked."
    out.print_result(found.to_dict() | {"strict": strict, "ok": good}, heading(verdict), table)
    if not good:
        raise typer.Exit(1)
