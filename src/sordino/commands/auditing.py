"""`audit_with_canaries`, `audit_replay`, `audit_conformance`: what attackers can show about ε, and what code keeps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import checks
from sordino.commands.pictures import checked_path
from sordino.commands.running import SILENT, Progress, rounded
from sordino.commands.training import get_recommended_config, get_training_config
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from sordino.audit import AuditResult, CaseResult, ReplayReport
    from sordino.data import DatasetSplits
    from sordino.recipes import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class TrainingAudit:
    """One audited training.

    Args:
        result: what was shown about ε.
        picture: the picture, or None.
    """

    result: "AuditResult"
    picture: Path | None

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return self.result.to_dict() | {"picture": None if self.picture is None else str(self.picture)}


def audit_with_canaries(
    target: str | Path,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    model: str = "logistic",
    label: str | None = None,
    schema: Path | None = None,
    public_schema_from: Path | None = None,
    data: str | None = None,
    canaries: str = "gradients",
    count: int = 1000,
    attacker: str = "white-box",
    confidence: float = 0.95,
    plot: Path | str | None = None,
    progress: Progress = SILENT,
) -> TrainingAudit:
    """Train once with canaries, attack, and bound ε from below; a run's report shows the audit afterwards.

    Args:
        target: Run folder, or data as for `sordino train` with --epsilon.
        epsilon: For DATA: stated ε.
        delta: For DATA: δ. Default: 1e-5 or less.
        model: For DATA: logistic, mlp or cnn.
        label: For a file: column to predict.
        schema: For a file: its schema file.
        public_schema_from: For a file: PUBLIC sample to infer the schema from.
        data: For a run: its training data, if not found by name.
        canaries: Kind of canaries: gradients, mislabeled or random.
        count: Number of canaries.
        attacker: Attacker: white-box sees every step, black-box the final model.
        confidence: Confidence level of the bound.
        plot: Picture file, .png or .svg. Default for a run: its audit.png.
        progress: what is said meanwhile.
    """
    checks.probability(zero=False, one=False, confidence=confidence)
    picture = None if plot is None else checked_path(Path(plot))
    run = RunFolder.open(target) if (Path(target) / "run.json").is_file() else None
    if run is not None and (epsilon is not None or delta is not None):
        raise InvalidArgument("epsilon and delta must be left out for a run, got some. The run's own are audited.")
    from sordino.audit import audit_training
    from sordino.commands.pictures import plot_audit
    from sordino.data import load_dataset
    from sordino.recipes.training_config import cross_entropy_per_record

    name = data or (target if run is None else _data_of(run))
    dataset = load_dataset(name, target=label, schema=schema, public_schema_from=public_schema_from)
    config = _config(dataset, run, epsilon, delta, model)
    if not dataset.public and canaries != "gradients":
        raise InvalidArgument(
            "canaries must be 'gradients' for private records, got others: their scores would tell of the records. "
            "Scores of gradient canaries don't."
        )
    progress.status(f"one training with {count:,} canaries, {config.plan.steps} steps", title=dataset.name)
    result = audit_training(
        config.build_model(),
        cross_entropy_per_record,
        dataset.train.tensors(),
        config.plan,
        canaries=canaries,
        count=count,
        attacker=attacker,
        confidence=confidence,
        optimizer=config.build_optimizer,
        performance=config.performance,
        averaging=config.averaging,
        progress=progress.is_shown,
    )
    picture = picture or (None if run is None else run.path / "audit.png")
    if run is not None:
        _into_report(run, result)
    if picture is not None:
        plot_audit(result, picture)
        if run is not None:
            run.vouch(picture)
    return TrainingAudit(result=result, picture=picture)


def _data_of(run: RunFolder) -> str:
    described = run.meta.get("data")
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument("data must be given for a run that doesn't name its dataset, got none. Give --data.")
    return name


def _config(
    dataset: "DatasetSplits", run: RunFolder | None, epsilon: float | None, delta: float | None, model: str
) -> "TrainingConfig":
    if run is not None:
        return get_training_config(run.path, dataset, model)
    epsilon = checks.positive(epsilon=epsilon, hint="Give --epsilon.")
    return get_recommended_config(model, dataset, epsilon, delta)


def _into_report(run: RunFolder, result: "AuditResult") -> None:
    """Add the audit to the run's others, and write its report again."""
    from sordino.report import write_report

    file = run.path / "audit.json"
    body = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    entries = [*(body if isinstance(body, list) else [body]), result.report_entry()]
    file.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    run.vouch(file)
    write_report(run)


@dataclass(frozen=True, kw_only=True)
class Replays:
    """Pipelines replayed on neighboring data.

    Args:
        found: by path.
    """

    found: "Mapping[str, ReplayReport]"

    @property
    def passed(self) -> bool:
        """Whether no record shows in addition to the releases."""
        return all(report.passed for report in self.found.values())

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "passed": self.passed,
            "paths": {
                name: {
                    "releases": report.releases,
                    "neighbors": report.neighbors,
                    "largest_share": rounded(report.largest_share),
                    "unmeasured": list(report.unmeasured),
                    "violations": [dict(vars(one)) for one in report.violations],
                }
                for name, report in self.found.items()
            },
        }


def audit_replay(target: str | None = None, *, progress: Progress = SILENT) -> Replays:
    """Run pipelines on neighboring data with all releases forced.

    Args:
        target: MODULE:OBJECT with pipeline, data and neighbors. Default: all built-in pipelines.
        progress: what is said meanwhile.
    """
    from sordino.audit import replay
    from sordino.commands.replay_cases import cases

    found: dict[str, ReplayReport] = {}
    parts = ("name", "pipeline", "data", "neighbors")
    wanted = "MODULE:CASE with name, pipeline, data and neighbors"
    chosen = list(cases()) if target is None else [_named(target, "case", parts, wanted)]
    with progress.stage("replaying", total=len(chosen)) as advance:
        for case in chosen:
            advance(words=case.name)
            found[case.name] = replay(case.pipeline, case.data, case.neighbors)
            advance()
    return Replays(found=found)


def _named(target: str, what: str, parts: Sequence[str], wanted: str) -> Any:
    """The object that ``module:name`` names, if it has all `parts`."""
    module, colon, name = target.partition(":")
    try:
        found = getattr(import_module(module), name, None) if colon else None
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"{what} must name a module that can be imported, got {module!r}. Check it.") from error
    if not all(hasattr(found, part) for part in parts):
        raise InvalidArgument(f"{what} must be {wanted}, got {target!r}. See `sordino explain auditing`.")
    return found


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """Cases on which training libraries are known to be wrong.

    Args:
        cases: their names.
        found: by path, then by case.
    """

    cases: Sequence[str]
    found: "Mapping[str, Mapping[str, CaseResult]]"

    @property
    def failed(self) -> int:
        """How many findings are wrong."""
        return sum(not one.passed for row in self.found.values() for one in row.values())

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "passed": not self.failed,
            "checks": {
                name: {
                    case: {"verdict": one.verdict, "passed": one.passed, "description": one.description}
                    for case, one in row.items()
                }
                for name, row in self.found.items()
            },
        }


def audit_conformance(
    path: Sequence[str] | None = None, *, only: str = "", every_path: bool = False, progress: Progress = SILENT
) -> Conformance:
    """Try every case on which training libraries are known to be wrong.

    Args:
        path: Training path of sordino, or MODULE:OBJECT of another library; may be repeated.
        only: Run only cases whose name contains this text.
        every_path: Run all training paths, including the compiled one; takes minutes.
        progress: what is said meanwhile.
    """
    from sordino.audit import CASES, check_library, library_paths

    known = library_paths()
    parts = ("name", "refusals", "make_private", "clipped_sum")
    wanted = f"one of {', '.join(map(repr, known))} or MODULE:OBJECT"
    chosen = {
        name: known.get(name) or _named(name, "path", parts, wanted)
        for name in path or (known if every_path else ["engine"])
    }
    cases = [name for name in CASES if only in name]
    if not cases:
        raise InvalidArgument(f"only must be a part of some case's name, got {only!r}. Leave it out to see them all.")
    found: dict[str, dict[str, CaseResult]] = {}
    with progress.stage("trying cases", total=len(cases) * len(chosen)) as advance:
        for name, library in chosen.items():
            found[name] = {}
            for one in check_library(library, only=only):
                found[name][one.case] = one
                advance()
    return Conformance(cases=cases, found=found)
