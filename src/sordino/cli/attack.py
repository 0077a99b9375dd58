"""`sordino attack RUN`: membership attacks on a run's model, held against the ceiling of its guarantee."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.cli.train import model_called
from sordino.definitions import round_up
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.audit.attacks import MembershipReport, TrainReference
    from sordino.data import DataSet
    from sordino.recipes import Recipe

__all__ = ["attack", "dataset_of", "recipe_of_run"]

_PRIVATE = "Private: these numbers are statistics of the members, without noise. Keep them beside the data."
_SHOWN_SLICES = 5


def attack(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="The records of the run: a name, or a file; as the run says.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of your file.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="A file of records that were NOT trained on, of the same form.")
    ] = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="Declare both files public: the results may be shown.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    references: Annotated[int, typer.Option(help="Reference models, even; 0 makes only attacks without any.")] = 8,
    members: Annotated[int, typer.Option(help="Members to attack, and as many others; the first of each.")] = 2000,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where attack.json and attack.png go; attacks/NAME if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attack a run's model: who was in its training data? Results stay local; a failed attack is no proof."""
    checks.integer(0, references=references)
    checks.integer(1, members=members)

    out, folder = Output(as_json=as_json), RunFolder.open(run)
    target = out_folder or Path("attacks") / run.resolve().name
    if target.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(
            f"out must lie outside the run folder, got {str(target)!r}: a run folder may be published."
        )
    dataset = dataset_of(folder, data, schema, test, public=data_is_public)
    recipe = recipe_of_run(folder, dataset, model)
    out.say(Text.assemble((run.name, "bold"), f": {references} reference models, then every attack"))
    with out.stderr.status("attacking"):
        report = _attacked(folder, dataset, recipe, references, members)
    target.mkdir(parents=True, exist_ok=True)
    picture, file = target / "attack.png", target / "attack.json"
    document = report.to_dict() | {"run": run.name, "picture": str(picture), "file": str(file)}
    from sordino.audit.attacks import draw_roc

    draw_roc(report, picture, title=f"Membership attacks on {run.name}")
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out.finish(document, *_page(report, {"picture": str(picture), "numbers": str(file)}))
    if report.above_ceiling:
        raise typer.Exit(1)


def dataset_of(
    folder: RunFolder, data: str | None, schema: Path | None, test: Path | None, *, public: bool
) -> "DataSet":
    """The data set of a run, with records that were not trained on.

    Args:
        folder: the `RunFolder`.
        data: a name or a file; None takes the name that the run states.
        schema: of a file.
        test: records that were not trained on, for a file.
        public: declares a file's records public.
    """
    from sordino.data import load

    said = folder.meta.get("data")
    name = data or (str(said.get("name", "")) if isinstance(said, dict) else "")
    dataset = load(name, schema=schema, test=test)
    if dataset.test is None or not len(dataset.test):
        raise InvalidArgument(
            "test must be a file of records that were not trained on, got none. Give --test: without them nobody can "
            "tell what the model says of strangers."
        )
    return replace(dataset, public=dataset.public or public)


def recipe_of_run(folder: RunFolder, dataset: "DataSet", model: str) -> "Recipe":
    """The recipe of a run; `model` names the factory of a model of the user's own and is empty otherwise."""
    from sordino.cli.resuming import recipe_of

    training = folder.meta.get("training")
    said = str(training.get("model", "")) if isinstance(training, dict) else ""
    return recipe_of(folder.path, dataset, model_called(model or said))


def _attacked(
    folder: RunFolder, dataset: "DataSet", recipe: "Recipe", references: int, members: int
) -> "MembershipReport":
    from sordino.audit.attacks import membership_report
    from sordino.randomness import Randomness

    assert dataset.test is not None
    model = recipe.build_model()
    model.load_state_dict(folder.load_model())
    features, labels = dataset.train.tensors()
    others, other_labels = dataset.test.tensors()
    randomness = Randomness()
    count = min(members, len(labels), len(other_labels) // 2)
    return membership_report(
        model,
        (features[:count], labels[:count]),
        (others[:count], other_labels[:count]),
        population=(others[count : 3 * count], other_labels[count : 3 * count]),
        event=folder.event(),
        claim=folder.guarantee,
        train_reference=_like_the_run(recipe, len(labels)) if references else None,
        references=references,
        label_names=dataset.labels,
        public=dataset.public,
        randomness=randomness,
    )


def _like_the_run(recipe: "Recipe", population: int) -> "TrainReference":
    """Reference models are trained as the run was: same steps and clipping, and as much noise in the mean gradient."""
    import torch

    from sordino.recipes.running import losses
    from sordino.training.trainer import fit

    def train(features: "Tensor", labels: "Tensor") -> torch.nn.Module:
        plan, share = recipe.plan, len(labels) / population
        own = replace(
            plan,
            expected_batch_size=plan.at(0).expected_batch_size * share,
            noise_multiplier=plan.at(0).noise_multiplier * share,
        )
        return fit(
            recipe.build_model(),
            losses,
            (features, labels),
            own,
            optimizer=recipe.build_optimizer,
            averaging=recipe.averaging,
            performance=recipe.performance,
            progress=False,
        ).model

    return train


def _page(report: "MembershipReport", files: dict[str, str]) -> tuple[RenderableType, ...]:
    best, ceiling = report.strongest, report.ceiling
    words = f"{best.name} finds members best: AUC {best.roc.auc:.3f}, no attack can exceed {ceiling.auc:.3f}"
    verdict = [
        Text(
            f"ABOVE THE CEILING: {', '.join(report.above_ceiling)}. The claimed guarantee is refuted.", style="bold red"
        )
        if report.above_ceiling
        else Text("No attack is above the ceiling."),
        Text("An attack that fails is no proof of privacy.", style="dim"),
    ]
    banner = [] if report.public else [Text(_PRIVATE, style="bold yellow"), Text()]
    claim = "none" if report.claim is None else f"ε = {round_up(report.claim.epsilon)}, δ = {report.claim.delta:g}"
    rows = [
        ("claim", claim),
        ("ceiling from", ceiling.source),
        ("attacked", f"{best.roc.members:,} members, {best.roc.non_members:,} others"),
        ("reference models", f"{report.references}, trained as the run was"),
        *files.items(),
    ]
    known = facts([(one.name, one.knowledge) for one in report.attacks])
    blocks = (_attacks(report), Text("What the attacker knows besides the record"), known, _slices(report), facts(rows))
    return (*banner, heading(words), Group(*verdict), Text(), *blocks)


def _attacks(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rates = [rate.false_positive_rate for rate in report.strongest.roc.rates]
    table.add_column("attack", overflow="fold")
    for name in ("AUC", "advantage", *(f"TPR at {100 * rate:g} %" for rate in rates)):
        table.add_column(name, justify="right")
    for one in report.attacks:
        shown = [f"{100 * rate.value:.1f} % ({100 * rate.lower:.1f}–{100 * rate.upper:.1f})" for rate in one.roc.rates]
        table.add_row(one.name, f"{one.roc.auc:.3f}", f"{one.roc.advantage:.3f}", *shown)
    most = [f"{100 * report.ceiling.true_positive_rate(rate):.1f} %" for rate in rates]
    style, advantage = "bold", f"{report.ceiling.advantage:.3f}"
    table.add_row("ceiling of the claim", f"{report.ceiling.auc:.3f}", advantage, *most, style=style)
    return table


def _slices(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worst groups, each alone", "members", "AUC"):
        table.add_column(name, justify="left" if name.startswith("worst") else "right")
    for part in report.slices[:_SHOWN_SLICES]:
        table.add_row(part.name, f"{part.members:,}", f"{part.auc:.3f} ({part.lower:.3f}–{part.upper:.3f})")
    return table
