"""`sordino audit`: train with canaries and bound ε from below; replay on neighbors; check the engine."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table, rounded
from sordino.cli.plots import checked_path
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from sordino.audit import AuditResult, CaseResult, Library, ReplayReport
    from sordino.cli.replay_cases import ReplayCase
    from sordino.data import DatasetSplits
    from sordino.recipes import TrainingConfig

__all__ = ["audit"]

_DEFAULT = "training"


class _OneByDefault(TyperGroup):
    """A group in which ``audit TARGET`` is ``audit training TARGET``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of what is none."""
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


audit = typer.Typer(
    cls=_OneByDefault, help="What an attacker can show about ε: audits, replays, checks.", no_args_is_help=True
)


@audit.command(_DEFAULT)
def training(
    target: Annotated[
        str, typer.Argument(metavar="RUN|DATA", help="A run folder, or data as for `sordino train` with --epsilon.")
    ],
    epsilon: Annotated[float | None, typer.Option(help="For DATA: the ε that is claimed.")] = None,
    delta: Annotated[float | None, typer.Option(help="For DATA: δ; 1e-5 or less if not given.")] = None,
    model: Annotated[str, typer.Option(help="For DATA: logistic, mlp or cnn.")] = "logistic",
    label: Annotated[str | None, typer.Option("--target", help="For a file: the column to predict.")] = None,
    schema: Annotated[Path | None, typer.Option(help="For a file: its declared schema.")] = None,
    public_schema_from: Annotated[
        Path | None, typer.Option(help="For a file: a PUBLIC sample to take the schema from.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="For a run: the data it was trained on, if not found by name.")
    ] = None,
    canaries: Annotated[str, typer.Option(help="gradients, mislabeled or random.")] = "gradients",
    count: Annotated[int, typer.Option(help="How many canaries.")] = 1000,
    attacker: Annotated[str, typer.Option(help="white-box sees every step, black-box the final model.")] = "white-box",
    confidence: Annotated[float, typer.Option(help="Of the bound.")] = 0.95,
    plot: Annotated[Path | None, typer.Option(help="A PNG or SVG; a run's goes to its audit.png.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train once with canaries, attack, and show ε from below. Exit code 1 when the claim is rejected."""
    checks.probability(zero=False, one=False, confidence=confidence)
    picture = None if plot is None else checked_path(plot)
    out, run = Output(as_json=as_json), _run(target)
    if run is not None and (epsilon is not None or delta is not None):
        raise InvalidArgument("epsilon and delta must be left out for a run, got some. The run's own are audited.")
    from sordino.audit import audit_training as audited
    from sordino.cli.plots import plot_audit
    from sordino.data import load_dataset
    from sordino.recipes.training_config import cross_entropy_per_record

    name = data or (target if run is None else _data_of(run))
    dataset = load_dataset(name, target=label, schema=schema, public_schema_from=public_schema_from)
    recipe = _recipe(dataset, run, epsilon, delta, model)
    if not dataset.public and canaries != "gradients":
        raise InvalidArgument(
            "canaries must be 'gradients' for private records, got others: their scores would tell of the records. "
            "Scores of gradient canaries don't."
        )
    out.print_status(
        Text.assemble((dataset.name, "bold"), f": one training with {count:,} canaries, {recipe.plan.steps} steps")
    )
    result = audited(
        recipe.build_model(),
        cross_entropy_per_record,
        dataset.train.tensors(),
        recipe.plan,
        canaries=canaries,
        count=count,
        attacker=attacker,
        confidence=confidence,
        optimizer=recipe.build_optimizer,
        performance=recipe.performance,
        averaging=recipe.averaging,
        progress=not as_json,
    )
    picture = picture or (None if run is None else run.path / "audit.png")
    if run is not None:
        _into_report(run, result)
    if picture is not None:
        plot_audit(result, picture)
        if run is not None:
            run.vouch(picture)
    document = result.to_dict() | {"picture": None if picture is None else str(picture)}
    out.print_result(document, *_page(result, picture))
    if not result.passed:
        raise typer.Exit(1)


def _run(target: str) -> RunFolder | None:
    return RunFolder.open(target) if (Path(target) / "run.json").is_file() else None


def _data_of(run: RunFolder) -> str:
    described = run.meta.get("data")
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument("data must be given for a run that doesn't name its dataset, got none. Give --data.")
    return name


def _recipe(
    dataset: "DatasetSplits", run: RunFolder | None, epsilon: float | None, delta: float | None, model: str
) -> "TrainingConfig":
    from sordino.cli.train import get_training_config
    from sordino.cli.training_job import default_delta
    from sordino.recipes import recommend_config

    if run is not None:
        return get_training_config(run.path, dataset, model)
    size = len(dataset.train)
    return recommend_config(
        model,
        shape=dataset.train.record_shape,
        classes=dataset.num_classes,
        dataset_size=size,
        target_epsilon=checks.positive(epsilon=epsilon, hint="Give --epsilon."),
        delta=default_delta(size) if delta is None else delta,
    )


def _into_report(run: RunFolder, result: "AuditResult") -> None:
    """Add the audit to the run's others, and write its report again."""
    from sordino.report import write_report

    file = run.path / "audit.json"
    body = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    entries = [*(body if isinstance(body, list) else [body]), result.report_entry()]
    file.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    run.vouch(file)
    write_report(run)


def _page(result: "AuditResult", picture: Path | None) -> tuple[RenderableType, ...]:
    bound, claimed = result.bound, result.claimed
    verdict = "Nothing speaks against the claim; that is no proof of it." if result.passed else "The claim is REJECTED."
    rows = [
        ("claimed", f"ε = {format_upper_bound(claimed.epsilon)} at δ = {claimed.delta:g}"),
        ("shown", f"ε ≥ {bound.epsilon:.2f} with {100 * bound.confidence:g} % confidence, if {bound.family}"),
        ("could be shown", f"at most {bound.ceiling:.2f}, had all {bound.guesses} guesses been right"),
        ("attacker", result.report_entry()["attacker"]),
        ("guesses", f"{bound.correct} right of {bound.guesses}, on {bound.canaries:,} canaries ({result.canaries})"),
        *((f"{attacker}, {one.method}", f"ε ≥ {one.epsilon:.2f}") for attacker, one in result.others),
        *((check.name, _describe(check.passed, check.measured, check.expected)) for check in result.checks),
        ("training", f"{result.seconds:.0f} seconds"),
        *([] if picture is None else [("picture", str(picture))]),
    ]
    return heading(
        f"ε ≥ {bound.epsilon:.2f} was shown, ε = {format_upper_bound(claimed.epsilon)} is claimed", verdict
    ), key_value_table([(name, str(value)) for name, value in rows])


def _describe(passed: bool, measured: float, expected: float) -> str:
    return f"{'yes' if passed else 'NO'}: {measured:.4f}, expected {expected:g}"


@audit.command("replay")
def replay_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:CASE]", help="An object with pipeline, data and neighbors; all paths if left out."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run pipelines on neighboring data with all releases forced. Exit code 1 when anything else differs."""
    from sordino.audit import replay as replayed
    from sordino.cli.replay_cases import cases

    out = Output(as_json=as_json)
    found: dict[str, ReplayReport] = {}
    chosen = list(cases()) if target is None else [_case(target)]
    with out.progress("replaying", total=len(chosen)) as advance:
        for case in chosen:
            advance(words=case.name)
            found[case.name] = replayed(case.pipeline, case.data, case.neighbors)
            advance()
    good = all(report.passed for report in found.values())
    table = _table("path", "releases", "largest share of a sensitivity", "")
    for name, report in found.items():
        words = "; ".join(sorted({f"{one.kind}: {one.what}" for one in report.violations}))
        table.add_row(name, str(report.releases), f"{report.largest_share:.4f}", words or Text("pass", style="green"))
    document = {
        "passed": good,
        "paths": {
            name: {
                "releases": report.releases,
                "neighbors": report.neighbors,
                "largest_share": rounded(report.largest_share),
                "unmeasured": list(report.unmeasured),
                "violations": [dict(vars(one)) for one in report.violations],
            }
            for name, report in found.items()
        },
    }
    verdict = "No record shows in addition to the releases." if good else "A record shows in addition to the releases."
    out.print_result(document, heading(verdict, "On the neighbors that were tried; that is no proof."), table)
    if not good:
        raise typer.Exit(1)


def _case(target: str) -> "ReplayCase":
    """The case that ``module:name`` names."""
    module, colon, name = target.partition(":")
    try:
        found = getattr(import_module(module), name, None) if colon else None
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"case must name a module that can be imported, got {module!r}. Check it.") from error
    if not all(hasattr(found, part) for part in ("name", "pipeline", "data", "neighbors")):
        raise InvalidArgument(
            f"case must be MODULE:CASE with name, pipeline, data and neighbors, got {target!r}. "
            "See `sordino explain auditing`."
        )
    return found  # pyright: ignore[reportReturnType]


@audit.command()
def conformance(
    path: Annotated[
        list[str] | None, typer.Option(help="A path of the library, or MODULE:OBJECT of another; may be repeated.")
    ] = None,
    only: Annotated[str, typer.Option(help="A part of the names of the cases wanted.")] = "",
    every: Annotated[bool, typer.Option("--every-path", help="All paths, the compiled one too: minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Try every case on which training libraries are known to be wrong. Exit code 1 when one fails."""
    from sordino.audit import CASES, check_library, library_paths

    out, known = Output(as_json=as_json), library_paths()
    chosen = {name: known.get(name) or _library(name, known) for name in path or (known if every else ["engine"])}
    cases = [name for name in CASES if only in name]
    if not cases:
        raise InvalidArgument(f"only must be a part of some case's name, got {only!r}. Leave it out to see them all.")
    found: dict[str, dict[str, CaseResult]] = {}
    with out.progress("trying cases", total=len(cases) * len(chosen)) as advance:
        for name, library in chosen.items():
            found[name] = {}
            for one in check_library(library, only=only):
                found[name][one.case] = one
                advance()
    table = _table("case", *chosen)
    for case in cases:
        table.add_row(case, *(_verdict(findings[case]) for findings in found.values()))
    failed = sum(not one.passed for findings in found.values() for one in findings.values())
    verdict = f"{len(cases)} cases, as they should be." if not failed else f"{failed} of the findings are wrong."
    document = {
        "passed": not failed,
        "checks": {
            name: {
                case: {"verdict": one.verdict, "passed": one.passed, "description": one.description}
                for case, one in row.items()
            }
            for name, row in found.items()
        },
    }
    out.print_result(document, heading(verdict, "That is no proof; a case that fails is one."), table)
    if failed:
        raise typer.Exit(1)


def _verdict(found: "CaseResult") -> Text:
    if found.verdict == "not offered":
        return Text("–", style="dim")
    if found.passed:
        return Text(found.verdict, style="green")
    return Text(f"FAIL: {found.description or found.verdict}", style="bold red")


def _library(target: str, known: "dict[str, Library]") -> "Library":
    """The library that ``module:name`` names."""
    module, colon, name = target.partition(":")
    try:
        found = getattr(import_module(module), name, None) if colon else None
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"path must name a module that can be imported, got {module!r}. Check it.") from error
    if not all(hasattr(found, part) for part in ("name", "refusals", "make_private", "clipped_sum")):
        ours = ", ".join(repr(one) for one in known)
        raise InvalidArgument(
            f"path must be one of {ours} or MODULE:OBJECT, got {target!r}. See `sordino explain auditing`."
        )
    return found  # pyright: ignore[reportReturnType]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
