"""`attack` and `diagnose`: who was in a run's training data, and what clipping and noise did to its model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sordino import checks
from sordino.commands.outcomes import measure, probabilities, subgroups_of
from sordino.commands.running import SILENT, Progress
from sordino.commands.training import get_training_config, load_model_factory
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sordino.audit.attacks import MembershipReport, TrainReference
    from sordino.data import DatasetSplits
    from sordino.recipes import TrainingConfig
    from sordino.recipes.saved_model import SavedModel
    from sordino.research import Convergence, SubgroupGap, TangentKernel

_LEAST_REFERENCES = 4
_TRAINED_ON = 256


@dataclass(frozen=True, kw_only=True)
class Attacks:
    """Attacks on a run's model.

    Args:
        run: its name.
        report: how well each attack finds members, compared with what the guarantee allows.
        picture: their ROC curves.
        file: the numbers.
    """

    run: str
    report: "MembershipReport"
    picture: Path
    file: Path

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return self.report.to_dict() | {"run": self.run, "picture": str(self.picture), "file": str(self.file)}


def attack(
    run: Path | str,
    *,
    data: str | None = None,
    schema: Path | str | None = None,
    test: Path | str | None = None,
    data_is_public: bool = False,
    model: str = "",
    references: int = 8,
    members: int = 2000,
    out: Path | str | None = None,
    progress: Progress = SILENT,
) -> Attacks:
    """Attack a run's model: who was in its training data? A failed attack is no proof.

    Guarantee: none. The results are statistics of the members without noise: they stay with the data.

    Args:
        run: Run folder with a model.
        data: Training records of the run, a name or a file. Default: the run's own.
        schema: Schema file that declares your table's columns.
        test: File with records that were NOT in training, with the same columns.
        data_is_public: Declare both files public; the results may be released.
        model: module:factory, for a model of your own.
        references: Number of reference models, even; 0 runs only attacks without them.
        members: Number of members to attack, and of non-members; the first of each.
        out: Folder for attack.json and attack.png. Default: attacks/NAME.
        progress: what is said meanwhile.
    """
    if references != 0 and (checks.integer(0, references=references) < _LEAST_REFERENCES or references % 2):
        raise InvalidArgument(
            f"references must be 0 or an even number ≥ {_LEAST_REFERENCES}, got {references}: every record is in half "
            "of the reference models. Give --references 8."
        )
    checks.integer(1, members=members)

    run, folder = Path(run), RunFolder.open(run)
    target = Path(out) if out else Path("attacks") / run.resolve().name
    if target.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(
            f"out must lie outside the run folder, got {str(target)!r}: a run folder may be published."
        )
    dataset = load_run_dataset(folder, data, schema, test, public=data_is_public)
    if _is_estimator(folder):
        saved = _saved_classifier(folder, dataset)
        attacked, reference = _as_module(saved), _estimators_like(saved, len(dataset.train))
    else:
        recipe = _config_of_run(folder, dataset, model)
        attacked, reference = _with_parameters(recipe, folder), _like_the_run(recipe, len(dataset.train))
    progress.status(f"{references} reference models, then every attack", title=run.name)
    with progress.stage("training reference models", total=references or None) as advance:

        def counted(features: "Tensor", labels: "Tensor") -> "nn.Module":
            trained = reference(features, labels)
            advance()
            return trained

        report = _attacked(folder, dataset, attacked, counted if references else None, references, members)
    target.mkdir(parents=True, exist_ok=True)
    found = Attacks(run=run.name, report=report, picture=target / "attack.png", file=target / "attack.json")
    from sordino.audit.attacks import plot_roc

    plot_roc(report, found.picture, title=f"Membership attacks on {run.name}")
    found.file.write_text(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def load_run_dataset(
    folder: RunFolder, data: str | None, schema: Path | str | None, test: Path | str | None, *, public: bool
) -> "DatasetSplits":
    """The dataset of a run, with records that were not trained on.

    Args:
        folder: the `RunFolder`.
        data: a name or a file; None takes the name that the run states.
        schema: of a file.
        test: records that were not trained on, for a file.
        public: declares a file's records public.
    """
    from sordino.data import load_dataset

    said = folder.meta.get("data")
    name = data or (str(said.get("name", "")) if isinstance(said, dict) else "")
    dataset = load_dataset(name, schema=schema, test=test, test_is_public=public)
    if isinstance(said, dict) and said.get("held_out_every") is not None:
        # Whose every fifth record was kept out of training: these are no members.
        split = replace(dataset, public=True, test=None).with_held_out_records()
        dataset = replace(dataset, train=split.train, test=split.test if dataset.test is None else dataset.test)
    if dataset.test is None or not len(dataset.test):
        raise InvalidArgument(
            "test must be a file of records that were not trained on, got none. Give --test: an "
            "attack compares members with such records."
        )
    return replace(dataset, public=dataset.public or public)


def _config_of_run(folder: RunFolder, dataset: "DatasetSplits", model: str) -> "TrainingConfig":
    """The recipe of a run; `model` names the factory of a model of the user's own and is empty otherwise."""
    training = folder.meta.get("training")
    said = str(training.get("model", "")) if isinstance(training, dict) else ""
    return get_training_config(folder.path, dataset, load_model_factory(model or said))


def _is_estimator(folder: RunFolder) -> bool:
    return folder.model_description.get("kind") == "estimator"


def _saved_classifier(folder: RunFolder, dataset: "DatasetSplits") -> "SavedModel":
    """The estimator of a run, for records of its form."""
    from sordino.recipes.saved_model import load_model

    saved = load_model(folder)
    if saved.is_regressor:
        raise InvalidArgument(
            "run must predict a label, got one of a number, which no attack here is made for. "
            "Its ε bounds every attack: see sordino report."
        )
    if saved.schema is not None and dataset.schema != saved.schema:
        raise InvalidArgument("data must have the columns and labels of the run, got others. Give the run's schema.")
    return saved


def _as_module(saved: "SavedModel") -> "nn.Module":
    """An estimator as features ↦ logits: logarithms of its probabilities, or its scores."""
    import numpy as np
    import torch

    from sordino.data import Records

    class Logits(torch.nn.Module):
        def forward(self, features: "Tensor") -> "Tensor":
            array = features.detach().cpu().numpy()
            records = Records(array, np.zeros(len(array), dtype=np.int64))
            chances = saved.probabilities(records)
            found = saved.scores(records) if chances is None else np.log(np.maximum(chances, 1e-300))
            return torch.from_numpy(np.asarray(found, dtype=np.float64))

    return Logits()


def _estimators_like(saved: "SavedModel", dataset_size: int) -> "TrainReference":
    """Reference models are fitted as the run's was, with the same ratio of noise to signal on fewer records."""
    from sordino.data import Records
    from sordino.estimators.base import independent_copy
    from sordino.recipes.tabular import FittedTable

    assert isinstance(saved.fitted, FittedTable)
    fitted = saved.fitted

    def train(features: "Tensor", labels: "Tensor") -> "nn.Module":
        own = independent_copy(fitted.estimator)
        parameters = own.get_params(deep=False)
        # Noise on sums falls as ε grows, and the sums of fewer records are smaller.
        changes: dict[str, object] = {"epsilon": parameters["epsilon"] * dataset_size / max(1, len(labels))}
        if parameters.get("dataset_size") is not None:
            changes["dataset_size"] = len(labels)
        own.set_params(**changes)
        targets = labels.numpy()
        rows = saved.rows(Records(features.numpy(), targets))
        own.fit(rows, 2.0 * targets - 1.0 if fitted.signs else targets)  # pyright: ignore[reportAttributeAccessIssue]
        return _as_module(replace(saved, fitted=FittedTable(estimator=own, signs=fitted.signs)))

    return train


def _with_parameters(recipe: "TrainingConfig", folder: RunFolder) -> "nn.Module":
    model = recipe.build_model()
    model.load_state_dict(folder.load_model())
    return model


def _attacked(
    folder: RunFolder,
    dataset: "DatasetSplits",
    model: "nn.Module",
    reference: "TrainReference | None",
    references: int,
    members: int,
) -> "MembershipReport":
    from sordino.audit.attacks import membership_report
    from sordino.randomness import KeyedRNG

    assert dataset.test is not None
    features, labels = dataset.train.tensors()
    others, other_labels = dataset.test.tensors()
    rng = KeyedRNG()
    count = min(members, len(labels), len(other_labels) // 2)
    return membership_report(
        model,
        (features[:count], labels[:count]),
        (others[:count], other_labels[:count]),
        population=(others[count : 3 * count], other_labels[count : 3 * count]),
        event=folder.event(),
        claim=folder.guarantee,
        train_reference=reference,
        references=references,
        label_names=dataset.labels,
        public=dataset.public,
        rng=rng,
    )


def _like_the_run(recipe: "TrainingConfig", population: int) -> "TrainReference":
    """Reference models are trained as the run was: same steps and clipping, and as much noise in the mean gradient."""
    import torch

    from sordino.recipes.training_config import cross_entropy_per_record
    from sordino.training.fit import fit

    def train(features: "Tensor", labels: "Tensor") -> torch.nn.Module:
        plan, share = recipe.plan, len(labels) / population
        own = replace(
            plan,
            expected_batch_size=plan.step_plan(0).expected_batch_size * share,
            noise_multiplier=plan.step_plan(0).noise_multiplier * share,
        )
        return fit(
            recipe.build_model(),
            cross_entropy_per_record,
            (features, labels),
            own,
            optimizer=recipe.build_optimizer,
            averaging=recipe.averaging,
            performance=recipe.performance,
            progress=False,
        ).model

    return train


# ----------------------------------------------------------------------------------------------------------------------
# `diagnose`: what clipping and noise did to a run's model, measured on public test records.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured of a run's model; an estimator takes no gradient steps: it has neither kernel nor courses.

    Args:
        run: its name.
        kernel: what clipping does to the tangent kernel.
        courses: losses of short trainings with noise alone, clipping alone, both, neither.
        calibration: metrics of the model, and of the baseline where there is one.
        gaps: what privacy costs in each subgroup.
    """

    run: str
    kernel: "TangentKernel | None"
    courses: "Convergence | None"
    calibration: dict[str, dict[str, Metric]]
    gaps: "Sequence[SubgroupGap]"

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        kernel, courses = self.kernel, self.courses
        return {
            "run": self.run,
            "tangent_kernel": None
            if kernel is None
            else {
                "max_grad_norm": kernel.max_grad_norm,
                "records": kernel.records,
                "layers": list(kernel.layers),
                "rows": [
                    {name: value for name, value in vars(row).items() if name != "matrix"}
                    | {
                        "symmetric": row.symmetric,
                        "positive_form": row.positive_form,
                        "positive_eigenvalues": row.positive_eigenvalues,
                        "refutes": list(row.refutes),
                    }
                    for row in kernel.rows
                ],
            },
            "convergence": None if courses is None else {name: list(losses) for name, losses in courses.losses.items()},
            "metrics": {
                model: {name: metric.value for name, metric in metrics.items() if not name.startswith("subgroup")}
                for model, metrics in self.calibration.items()
            },
            "subgroups": [vars(gap) for gap in self.gaps],
        }


def diagnose(
    run: Path | str,
    *,
    data: str | None = None,
    schema: Path | str | None = None,
    test: Path | str | None = None,
    data_is_public: bool = False,
    model: str = "",
    records: int = 16,
    steps: int = 40,
    out: Path | str | None = None,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Tangent kernel, convergence, calibration and subgroups of a run's model, on public test records only.

    Args:
        run: Run folder with a model.
        data: Training records of the run, a name or a file. Default: the run's own.
        schema: Schema file that declares your table's columns.
        test: PUBLIC file with the same columns; all figures are measured on it.
        data_is_public: Declare the training records public; a non-private baseline is trained.
        model: module:factory, for a model of your own.
        records: Number of test records in the tangent kernel.
        steps: Steps of training with noise only, clipping only, both, neither.
        out: Also write the numbers to this file.
        progress: what is said meanwhile.
    """
    checks.integer(1, records=records)
    checks.integer(1, steps=steps)
    run, folder = Path(run), RunFolder.open(run)
    dataset = load_run_dataset(folder, data, schema, test, public=data_is_public)
    if not dataset.public and test is None:
        raise InvalidArgument("test must be public records to measure on, got none. Give --test.")
    progress.status("measured on public test records, nothing else is read", title=run.name)
    with progress.stage("measuring"):
        if _is_estimator(folder):
            found = _diagnose_estimator(run.name, _saved_classifier(folder, dataset), dataset)
        else:
            config = _config_of_run(folder, dataset, model)
            found = _diagnose_module(folder, dataset, config, records, steps)
    if out is not None:
        Path(out).write_text(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def _diagnose_module(
    folder: RunFolder, dataset: "DatasetSplits", recipe: "TrainingConfig", records: int, steps: int
) -> Diagnosis:
    from sordino.recipes import non_private_baseline
    from sordino.report import compute_utility
    from sordino.research import measure_convergence, measure_tangent_kernel, subgroup_gaps

    assert dataset.test is not None
    private, start = _with_parameters(recipe, folder), recipe.build_model()
    features, labels = dataset.test.tensors()
    step = recipe.plan.step_plan(0)
    models: dict[str, nn.Module] = {"private": private}
    if dataset.public:
        models["baseline"] = non_private_baseline(dataset, recipe)
    chances = {name: probabilities(one, dataset.test) for name, one in models.items()}
    few = min(_TRAINED_ON, len(labels))
    return Diagnosis(
        run=folder.path.name,
        kernel=measure_tangent_kernel(private, features[:records], labels[:records], max_grad_norm=step.max_grad_norm),
        courses=measure_convergence(
            start,
            features[:few],
            labels[:few],
            steps=steps,
            learning_rate=recipe.learning_rate,
            max_grad_norm=step.max_grad_norm,
            # As much noise in the mean gradient as the run had, on far fewer records.
            noise_multiplier=step.noise_multiplier * few / step.expected_batch_size,
        ),
        calibration={
            name: compute_utility(chance, dataset.test.labels, public=True) for name, chance in chances.items()
        },
        gaps=subgroup_gaps(
            chances["private"], chances["baseline"], dataset.test.labels, subgroups_of(dataset, dataset.test)
        )
        if "baseline" in chances
        else (),
    )


def _diagnose_estimator(run: str, saved: "SavedModel", dataset: "DatasetSplits") -> Diagnosis:
    """Accuracy, calibration and subgroups of an estimator, and of scikit-learn's linear model, on public records."""
    from scipy.special import softmax

    from sordino.recipes.tabular import make_tabular_task, non_private_linear_predictions
    from sordino.report import compute_utility
    from sordino.research import subgroup_gaps

    assert dataset.test is not None
    test = dataset.test
    groups = subgroups_of(dataset, test)
    calibration = {"private": measure(saved, test, test.labels, groups)}
    gaps: tuple[SubgroupGap, ...] = ()
    if dataset.public:
        baseline = non_private_linear_predictions(make_tabular_task(dataset))
        calibration["baseline"] = compute_utility(baseline, test.labels, public=True)
        chances = saved.probabilities(test)
        own = softmax(saved.scores(test), axis=1) if chances is None else chances
        gaps = subgroup_gaps(own, baseline, test.labels, groups)
    return Diagnosis(run=run, kernel=None, courses=None, calibration=calibration, gaps=gaps)
