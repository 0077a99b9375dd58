"""`sordino report RUN --evaluate DATA`: a run's model on private records, charged before they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sordino import checks
from sordino.cli.ledger import account_at
from sordino.cli.train import model_called
from sordino.errors import InvalidArgument
from sordino.runs import Evaluation, RunFolder

if TYPE_CHECKING:
    from torch import nn

    from sordino.data import DataSet, Records
    from sordino.report.evaluation import Predictions

__all__ = ["Asked", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An evaluation as the command asks for it.

    Args:
        data: a named set, of which the test records are taken, or a file.
        schema: of the file.
        epsilon, delta: what is paid.
        by: columns of subgroups, whose values the schema declares.
        disjoint: declares that nobody is both here and in the training records.
        model: the factory of a model of the user's own, or empty.
        ledger, account: who pays, or None.
    """

    data: str
    schema: Path | None
    epsilon: float | None
    delta: float
    by: Sequence[str]
    disjoint: bool
    model: str
    ledger: str | None
    account: str | None


def evaluate(folder: RunFolder, asked: Asked) -> Evaluation:
    """Charge, read, predict, release, and write the answer into the run folder.

    Guarantee: that of `private_utility`. A file is opened after the charge.
    """
    from sordino.data import load
    from sordino.data.catalogue import CATALOGUE
    from sordino.report import private_utility

    epsilon = checks.positive(evaluation_epsilon=asked.epsilon, hint="Give --evaluation-epsilon.")
    account = account_at(asked.ledger, asked.account)
    known = None
    if asked.data in CATALOGUE:
        # Public records: what is declared of them comes from the set itself.
        known = load(asked.data)
        labels, schema = known.labels, known.schema
    else:
        labels, schema = _declared(asked)
    groups = _groups(schema, asked.by)

    def read() -> "Predictions":
        dataset = load(asked.data, schema=asked.schema) if known is None else known
        records = dataset.train if known is None else known.test
        if records is None:
            raise InvalidArgument("data must have test records to be evaluated on, got a set without. Give a file.")
        return _predicted(_model(folder, dataset, asked.model), dataset, records, groups)

    return private_utility(
        read,
        classes=labels,
        epsilon=epsilon,
        delta=asked.delta,
        groups=groups,
        records=f"test records of {asked.data}" if known is not None else f"records of {Path(asked.data).name}",
        disjoint=asked.disjoint,
        ledger=account,
        run=folder,
    )


def _declared(asked: Asked) -> "tuple[tuple[str, ...], object]":
    """Labels and columns of a file, from its schema; the file itself must be there, and is not opened."""
    from sordino.data.schema import read_schema

    if asked.schema is None:
        raise InvalidArgument("schema must be declared for a file to be evaluated on, got none. Give --schema.")
    if not Path(asked.data).expanduser().is_file():
        raise InvalidArgument(f"evaluate must be a named set or a file, got {asked.data!r}. Check the path.")
    declared = read_schema(asked.schema)
    return declared.labels, declared


def _groups(schema: object, by: Sequence[str]) -> dict[str, tuple[str, ...]]:
    columns = {column.name: column for column in getattr(schema, "columns", ())}
    groups: dict[str, tuple[str, ...]] = {}
    for name in by:
        values = getattr(columns.get(name), "categories", None)
        if values is None:
            raise InvalidArgument(
                f"evaluation_by must name a column of declared categories, got {name!r}. See the schema."
            )
        groups[name] = tuple(values)
    return groups


def _predicted(
    model: "nn.Module", dataset: "DataSet", records: "Records", groups: Mapping[str, tuple[str, ...]]
) -> "Predictions":
    from sordino.cli.measuring import probabilities

    found: dict[str, list[str]] = {}
    first = 0
    for column in dataset.schema.columns if dataset.schema else ():
        part = records.features[:, first : first + column.width]
        first += column.width
        if column.name in groups:
            # A value that the schema does not list is all zeros, and counts as another one.
            names = [*groups[column.name], ""]
            places = part.argmax(axis=1)
            places[part.max(axis=1) <= 0] = len(names) - 1
            found[column.name] = [names[place] for place in places.tolist()]
    return probabilities(model, records), records.labels, found


def _model(folder: RunFolder, dataset: "DataSet", factory: str) -> "nn.Module":
    """The run's model with its parameters. No number is taken from the records but their form."""
    from sordino.recipes import recommend
    from sordino.training.plan import Plan

    training, target = folder.meta.get("training"), folder.meta.get("target_epsilon")
    name = training.get("model") if isinstance(training, Mapping) else None
    if "max_grad_norm" not in folder.plan or not isinstance(name, str) or not isinstance(target, int | float):
        raise InvalidArgument(
            "run must be one of a module that `sordino train` made, got another. Use sordino.report.private_utility."
        )
    plan = Plan.from_json((folder.path / "plan.json").read_text())
    now = plan.at(0)
    recipe = recommend(
        model_called(factory or name),
        shape=dataset.train.record_shape,
        classes=len(dataset.labels),
        population=max(1, round(now.expected_batch_size / now.sample_rate)),
        target_epsilon=float(target),
        delta=plan.delta,
        steps=plan.steps,
    )
    model = recipe.build_model()
    model.load_state_dict(folder.load_model())
    return model
