"""Settings of one cell: their names, what each may be, and how a cell's are put together (floor 6)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, cast, get_args

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["ARMS", "Arm", "CLIPPINGS", "NUMERIC", "Settings", "Value", "checked", "close", "differing", "settings_from"]

Value: TypeAlias = str | int | float
Arm: TypeAlias = Literal["private", "noise without clipping", "clipping without noise", "neither"]
ARMS: tuple[Arm, ...] = get_args(Arm)
"""Only the first protects anybody."""
CLIPPINGS = ("flat", "automatic", "psac", "global", "per_layer", "quantile", "adaclip")
_MODELS = ("logistic", "mlp", "relu", "cnn")
_RECIPES = ("logistic", "mlp", "cnn")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is trained in one cell.

    Args:
        arm: whether there is clipping, noise, both or neither.
        model: logistic, mlp (tanh, records of norm 2), relu (one hidden layer on the features as they are) or cnn.
        width: hidden units of mlp and relu.
        pca: private principal components kept of normalised records; 0 takes the features as they are.
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

    arm: Arm = "private"
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


def settings_from(values: Mapping[str, Value], *, population: int, place: str) -> Settings:
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
    return Settings(**told)  # pyright: ignore[reportArgumentType] (each value was checked under its name)


def _with_recipe(told: Mapping[str, Value], recipe: str, population: int, place: str) -> dict[str, Value]:
    """The values that are given, and the recipe's for the others; a recipe is made for a target ε."""
    from sordino.recipes import recommend

    if "target_epsilon" not in told:
        raise InvalidArgument(f"{place} must have target_epsilon with a recipe, got none. Give it, or drop the recipe.")
    steps = told.get("steps")
    found = recommend(
        recipe,
        shape=(1,),
        classes=2,
        population=population,
        target_epsilon=float(told["target_epsilon"]),
        delta=float(told.get("delta", 1e-5)),
        steps=None if steps is None else int(steps),
    )
    now = found.plan.at(0)
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


def differing(cells: Sequence[Settings]) -> tuple[str, ...]:
    """Names of the settings that are not the same in all cells, in the order of the fields."""
    return tuple(
        item.name for item in fields(Settings) if len({getattr(settings, item.name) for settings in cells}) > 1
    )


def close(one: object, other: object) -> bool:
    """Whether two values of a setting are the same."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other
