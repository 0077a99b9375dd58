"""Settings of one cell: their names, what each may be, and how a cell's are put together."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from sordino import accounting, checks
from sordino.clipping import Clipping, ProjectedClipping, QuantileClipping, get_clipping
from sordino.data import DatasetSplits, Records, load_dataset
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, compose
from sordino.training import Plan

__all__ = [
    "ARMS",
    "CLIPPINGS",
    "DataSource",
    "Experiment",
    "ExperimentSettings",
    "NUMERIC",
    "TrainingMode",
    "Value",
    "canonical",
    "checked",
    "close",
    "differing",
    "ignores",
    "settings_from",
]


Value: TypeAlias = str | int | float
TrainingMode: TypeAlias = Literal["private", "noise without clipping", "clipping without noise", "neither"]
ARMS: tuple[TrainingMode, ...] = get_args(TrainingMode)
"""Only the first protects anybody."""
CLIPPINGS = ("flat", "automatic", "psac", "global", "per_layer", "quantile", "adaclip")
_MODELS = ("logistic", "mlp", "relu", "cnn")
_RECIPES = ("logistic", "mlp", "cnn")


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """Everything that is trained in one cell.

    Args:
        arm: whether there is clipping, noise, both or neither.
        model: logistic, mlp (tanh, records of norm 2), relu (one hidden layer on the features as they are) or cnn.
        width: hidden units of mlp and relu.
        pca: private principal components kept of normalized records; 0 takes the features as they are.
        pca_noise_multiplier: noise of their second moments, as a noise multiplier.
        noise_multiplier: σ, or None when `target_epsilon` is given.
        target_epsilon: ε of everything in the cell, or None when σ is given.
        delta: δ.
        batch_size: expected size of a batch.
        max_grad_norm: clipping norm C. Without clipping it only scales the noise.
        clipping: how gradients are clipped.
        projections: r of norms estimated by projections; 0 for exact norms.
        quantile: share of records left unclipped, under quantile clipping.
        steps: number of steps.
        learning_rate: of SGD, at the start.
        final_learning_rate: reached linearly after `decay_steps`, or None.
        decay_steps: see above.
        momentum: of SGD (Nesterov), in [0, 1).
        averaging: share of the steps whose weights are averaged; 0 keeps the last.
        seed: repetitions of a cell differ in it alone.
    """

    arm: TrainingMode = "private"
    model: str = "logistic"
    width: int = 64
    pca: int = 0
    pca_noise_multiplier: float = 7.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    batch_size: float
    max_grad_norm: float = 1.0
    clipping: str = "flat"
    projections: int = 0
    quantile: float = 0.5
    steps: int
    learning_rate: float
    final_learning_rate: float | None = None
    decay_steps: int = 0
    momentum: float = 0.0
    averaging: float = 0.0
    seed: int = 0


def _number(check: Callable[..., float]) -> Callable[[str, object], Value]:
    return lambda place, value: check(**{place: value})


def _share(place: str, value: object) -> Value:
    return checks.probability(zero=True, one=False, hint="", **{place: value})


def _count(least: int) -> Callable[[str, object], Value]:
    return lambda place, value: checks.integer(least, hint="", **{place: value})


def _word(words: tuple[str, ...]) -> Callable[[str, object], Value]:
    def check(place: str, value: object) -> Value:
        checks.one_of(words, hint="", **{place: value})
        return cast("str", value)

    return check


def _projections(place: str, value: object) -> Value:
    return 0 if value == "exact" else checks.integer(0, hint='Or write "exact".', **{place: value})


_POSITIVE = _number(checks.positive)
# What a file may say of a cell. `epochs`, `decay_epochs` and `recipe` are ways to say something else.
_CHECKS: dict[str, Callable[[str, object], Value]] = {
    "arm": _word(ARMS),
    "averaging": _number(checks.probability),
    "batch_size": _POSITIVE,
    "clipping": _word(CLIPPINGS),
    "decay_epochs": _POSITIVE,
    "delta": lambda place, value: checks.probability(zero=False, one=False, hint="", **{place: value}),
    "epochs": _POSITIVE,
    "final_learning_rate": _POSITIVE,
    "learning_rate": _POSITIVE,
    "max_grad_norm": _POSITIVE,
    "model": _word(_MODELS),
    "momentum": _share,
    "noise_multiplier": _POSITIVE,
    "pca": _count(0),
    "pca_noise_multiplier": _POSITIVE,
    "projections": _projections,
    "quantile": lambda place, value: checks.probability(zero=False, one=False, hint="", **{place: value}),
    "recipe": _word(_RECIPES),
    "seed": _count(0),
    "steps": _count(1),
    "target_epsilon": _POSITIVE,
    "width": _count(1),
}
NUMERIC = tuple(sorted({*_CHECKS} - {"arm", "clipping", "model", "recipe"}))
"""Settings that are numbers, and so can be an axis with a scale."""
# Two ways to say one thing.
_EITHER = (("noise_multiplier", "target_epsilon"), ("epochs", "steps"))


def checked(name: str, value: object, *, place: str) -> Value:
    """The value of one setting, if it may be that; `place` names it in the error.

    Raises:
        InvalidArgument: an unknown setting, or a value that it can't have.
    """
    if name not in _CHECKS:
        known = ", ".join(sorted(_CHECKS))
        raise InvalidArgument(f"{place} must be a setting, got one that is unknown. Settings are {known}.")
    return _CHECKS[name](place, value)


def settings_from(values: Mapping[str, Value], *, population: int, place: str) -> ExperimentSettings:
    """The settings that checked `values` say, for `population` training records; `place` names them in an error.

    Raises:
        InvalidArgument: something needed is missing, or said twice.
    """
    told = dict(values)
    for one, other in _EITHER:
        if one in told and other in told:
            raise InvalidArgument(f"{place} must have one of {one} and {other}, got both. Leave one out.")
    recipe = told.pop("recipe", None)
    if recipe is not None:
        told = _with_recipe(told, str(recipe), population, place)
    for name in ("batch_size", "learning_rate"):
        if name not in told:
            raise InvalidArgument(f"{place} must have {name}, got none. Put it into [base], or vary it in [grid].")
    if "noise_multiplier" not in told and "target_epsilon" not in told and told.get("arm") != "neither":
        raise InvalidArgument(f"{place} must have noise_multiplier or target_epsilon, got neither. Give one of them.")
    size = float(told["batch_size"])
    if size > population:
        raise InvalidArgument(
            f"{place} must have a batch_size of at most the {population} training records, got {size:g}. Lower it."
        )
    if "epochs" in told:
        told["steps"] = max(1, round(float(told.pop("epochs")) * population / size))
    if "steps" not in told:
        raise InvalidArgument(f"{place} must have epochs or steps, got neither. Give one of them.")
    if ("final_learning_rate" in told) != ("decay_epochs" in told):
        raise InvalidArgument(f"{place} must have final_learning_rate and decay_epochs together, got one. Give both.")
    if "decay_epochs" in told:
        told["decay_steps"] = max(1, round(float(told.pop("decay_epochs")) * population / size))
    if told.get("projections") and told.get("clipping", "flat") != "flat":
        raise InvalidArgument(f"{place} must have flat clipping with projections, got another. Leave clipping out.")
    return ExperimentSettings(**told)  # pyright: ignore[reportArgumentType] (each value was checked under its name)


def _with_recipe(told: Mapping[str, Value], recipe: str, population: int, place: str) -> dict[str, Value]:
    """The values that are given, and the recipe's for the others; a recipe is made for a target ε."""
    from sordino.recipes import recommend_config

    if "target_epsilon" not in told:
        raise InvalidArgument(f"{place} must have target_epsilon with a recipe, got none. Give it, or drop the recipe.")
    steps = told.get("steps")
    found = recommend_config(
        recipe,
        shape=(1,),
        classes=2,
        dataset_size=population,
        target_epsilon=float(told["target_epsilon"]),
        delta=float(told.get("delta", 1e-5)),
        steps=None if steps is None else int(steps),
    )
    now = found.plan.step_plan(0)
    filled: dict[str, Value] = {
        "model": recipe,
        "batch_size": now.expected_batch_size,
        "max_grad_norm": now.max_grad_norm,
        "learning_rate": found.learning_rate,
        "momentum": found.momentum,
        "averaging": getattr(found.averaging, "fraction", 0.0),
    }
    if "epochs" not in told:
        filled["steps"] = found.plan.steps
    return {**filled, **told}


def differing(cells: Sequence[ExperimentSettings]) -> tuple[str, ...]:
    """Names of the settings that are not the same in all cells, in the order of the fields."""
    return tuple(
        item.name
        for item in fields(ExperimentSettings)
        if len({getattr(settings, item.name) for settings in cells}) > 1
    )


def close(one: object, other: object) -> bool:
    """Whether two values of a setting are the same."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


# ----------------------------------------------------------------------------------------------------------------------
# One cell of a sweep: data, settings, plan, and what that guarantees; all of it is known before any data.
# ----------------------------------------------------------------------------------------------------------------------


_FORMAT = 1
_NOISE = ("noise_multiplier", "target_epsilon")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The public data of a sweep, by name; nothing is read before `load`.

    Args:
        name: a named set, or the path of a file that was declared public.
        records: how many training records are used, the first ones of the set.
        test: path of a test file, for a file.
        schema: path of its schema, for a file.
    """

    name: str
    records: int
    test: str | None = None
    schema: str | None = None

    def load(self) -> DatasetSplits:
        """The records; sweeps exist for public data alone, so the set is marked public."""
        schema = None if self.schema is None else Path(self.schema)
        dataset = load_dataset(self.name, schema=schema, test=self.test)
        if dataset.test is None or not len(dataset.test):
            raise InvalidArgument("test must be declared: a file of the same form to measure on. Add it to [data].")
        if len(dataset.train) < self.records:
            raise InvalidArgument(
                f"records must be at most the {len(dataset.train)} training records, got {self.records}. Lower it."
            )
        train = dataset.train
        kept = Records(features=train.features[: self.records], labels=train.labels[: self.records])
        return replace(dataset, train=kept, public=True)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training: where its numbers come from is all in `settings`, and `key` tells two cells apart.

    Args:
        settings: everything that is trained.
        source: the data.
        told: what the grid says of this cell, for a reader.
        values: everything that the file says of it, as it is written there.
    """

    settings: ExperimentSettings
    source: DataSource
    told: Mapping[str, Value]
    values: Mapping[str, Value]

    @cached_property
    def key(self) -> str:
        """A fingerprint of data and settings: a cell that was changed has another one and is run anew."""
        body = {"format": _FORMAT, "data": asdict(self.source), "settings": asdict(self.settings)}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def words(self) -> str:
        """What the grid says of the cell."""
        return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in self.told.items())

    @property
    def is_private(self) -> bool:
        """Whether a guarantee stands behind the cell: there is clipping and there is noise."""
        return self.settings.arm == "private"

    @cached_property
    def plan(self) -> Plan:
        """The plan. Without noise its noise multiplier is 0; without clipping it only says how much noise there is."""
        told = self.settings
        draft = Plan(
            noise_multiplier=told.noise_multiplier or 0.0,
            max_grad_norm=told.max_grad_norm,
            sample_rate=told.batch_size / self.source.records,
            steps=told.steps,
            expected_batch_size=told.batch_size,
            delta=told.delta,
            dataset_size_is_public=True,
            clipping=_clipping(told, 0.0),
        )
        if told.arm in ("neither", "clipping without noise") or told.target_epsilon is None:
            return replace(draft, clipping=_clipping(told, told.noise_multiplier or 0.0))
        multiplier = accounting.calibrate_noise_multiplier(
            lambda noise: self._with(replace(draft, noise_multiplier=noise).event()),
            target_epsilon=told.target_epsilon,
            delta=told.delta,
            neighboring_relation=draft.neighboring_relation,
        )
        return replace(draft, noise_multiplier=multiplier, clipping=_clipping(told, multiplier))

    @property
    def pca_event(self) -> Event | None:
        """What the private components cost, or None."""
        return Gaussian(noise_multiplier=self.settings.pca_noise_multiplier) if self.settings.pca else None

    def _with(self, event: Event) -> Event:
        return event if self.pca_event is None else compose([self.pca_event, event])

    def event(self, steps: int | None = None) -> Event:
        """Components and the first `steps` steps, or all of them."""
        return self._with(self.plan.event(steps))

    def guarantee(self, steps: int | None = None) -> Guarantee | None:
        """What the cell would guarantee on private records if its settings were fixed beforehand; None: nothing."""
        if not self.is_private:
            return None
        found = self.plan.guarantee(steps=steps)
        if self.pca_event is None:
            return found
        spent = accounting.epsilon(self.event(steps), found.delta, neighboring_relation=found.neighboring_relation)
        return replace(found, epsilon=spent.upper, accountant=spent.accountant)

    @cached_property
    def epsilon(self) -> float | None:
        """ε of the cell, or None where nothing is guaranteed."""
        found = self.guarantee()
        return None if found is None else found.epsilon

    def value(self, name: str) -> Value | None:
        """The cell's value on an axis; None where the axis means nothing to it."""
        told = self.settings
        if ignores(told, name):
            return None
        if name in ("epochs", "decay_epochs", "recipe"):
            return self.values.get(name)
        if name == "noise_multiplier":
            return float(self.plan.step_plan(0).noise_multiplier)
        found: Value | None = getattr(told, name)
        return found


def ignores(settings: ExperimentSettings, name: str) -> bool:
    """Whether the setting `name` has no part in what is trained."""
    match settings.arm:
        case "neither":
            return name in (*_NOISE, "max_grad_norm", "clipping", "projections", "quantile")
        case "clipping without noise":
            return name in _NOISE
        case "noise without clipping":
            return name in ("clipping", "projections", "quantile")
        case _:
            return False


def canonical(settings: ExperimentSettings) -> ExperimentSettings:
    """The settings with everything that has no part set to its default, so that equal trainings are one cell."""
    defaults = {
        "noise_multiplier": None,
        "target_epsilon": None,
        "max_grad_norm": 1.0,
        "clipping": "flat",
        "projections": 0,
        "quantile": 0.5,
    }
    return replace(settings, **{name: value for name, value in defaults.items() if ignores(settings, name)})


def _clipping(told: ExperimentSettings, noise_multiplier: float) -> Clipping:
    if told.projections:
        return ProjectedClipping(projections=told.projections)
    if told.clipping == "quantile":
        # A twentieth of the batch is usual; the counts may not cost more than the gradient.
        count_noise = max(told.batch_size / 20, noise_multiplier)
        return QuantileClipping(quantile=told.quantile, count_noise=count_noise)
    return get_clipping(told.clipping)


def _shown(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
