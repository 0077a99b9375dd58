"""The course: lessons as notebooks, and checks of a reader's own answers to their exercises.

A lesson is a Python file whose cells begin with `# %%`, or with `# %% [markdown]` for text. `notebook` makes a Jupyter
notebook of it; the documentation shows it with its outputs.

Example:
    >>> check("sequential", 0.8)
    Right. The losses of the two releases add up.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino import checks

__all__ = ["Cell", "EXERCISES", "Exercise", "check", "lessons", "notebook", "read_lesson", "refutation"]

Floats = NDArray[np.float64]


# ----------------------------------------------------------------------------------------------------------------------
# Exercises: a question, a hint, and a function that says why an answer is wrong.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise.

    Args:
        question: what is asked, and of which type the answer is.
        hint: for readers who have no answer yet.
        refute: answer ↦ why it is wrong, with a number that shows it; None for a right one.
        because: said of a right answer.
    """

    question: str
    hint: str
    refute: Callable[[Any], str | None]
    because: str


def refutation(name: str, answer: object) -> str | None:
    """Why an answer is wrong; None for a right one.

    Args:
        name: of an exercise, a key of `EXERCISES`.
        answer: a number, a set, a dictionary or a function, as the question says.

    Example:
        >>> refutation("sequential", 0.5)
        'at answers far to the left the log-ratio of the two releases together is 0.80, above 0.5.'
    """
    checks.one_of(tuple(EXERCISES), name=name)
    exercise = EXERCISES[name]
    try:
        return exercise.refute(answer)
    except Exception as error:  # whatever the reader's own function raises
        return f"the answer could not be checked, {type(error).__name__}: {error}. Asked for: {exercise.question}"


def check(name: str, answer: object = None) -> None:
    """Print whether an answer is right, and if not, what refutes it; None asks for the hint.

    Example:
        >>> check("sequential")
        No answer yet. Hint: write the ratio of the two joint densities as a product.
        >>> check("sequential", 0.8)
        Right. The losses of the two releases add up.
    """
    checks.one_of(tuple(EXERCISES), name=name)
    exercise = EXERCISES[name]
    if answer is None:
        print(f"No answer yet. Hint: {exercise.hint}")
        return
    wrong = refutation(name, answer)
    print(f"Right. {exercise.because}" if wrong is None else f"Not right: {wrong}")


def _problem(rows: int, columns: int, seed: int) -> tuple[Floats, Floats]:
    """X and y of a least-squares problem with correlated columns of different size, the same for all readers."""
    positions = (np.arange(rows) + 0.5)[:, None] * np.arange(1, columns + 1)
    waves = np.cos(np.pi * positions / rows) * np.geomspace(1.0, 0.4, columns)
    x = waves + 0.3 * waves[:, :1]
    return x, x @ np.linspace(1.0, -1.0, columns) + 0.5 * np.sin((seed + 1.7) * np.arange(rows))


def _refute_ridge(answer: Callable[[Floats, Floats, float], object]) -> str | None:
    for seed, penalty in ((0, 0.1), (1, 1.0), (2, 10.0)):
        x, y = _problem(40, 3, seed)
        found = np.asarray(answer(x, y, penalty), dtype=float)
        slope = -2 / len(x) * x.T @ (y - x @ found) + 2 * penalty * found
        if not np.abs(slope).max() < 1e-6:
            without = np.linalg.solve(x.T @ x + penalty * np.eye(3), x.T @ y)
            forgot = np.allclose(found, without, atol=1e-9)
            return f"with λ = {penalty:g} the gradient at your θ is {np.abs(slope).max():.2g}, not 0" + (
                ": the loss is a mean, so λ meets XᵀX with a factor n." if forgot else "."
            )
    return None


def _refute_gradients(answer: Sequence[Callable[..., object]]) -> str | None:
    square, residuals = answer
    for value in (-2.0, 0.5, 3.0):
        measured = ((value + 1e-5) ** 2 - (value - 1e-5) ** 2) / 2e-5
        if abs(float(np.asarray(square(value))) - measured) > 1e-4:
            return f"of θ² at θ = {value:g}: {float(np.asarray(square(value))):.4g}, measured {measured:.4g}."
    x, y = _problem(12, 3, 0)
    theta = np.array([0.3, -1.0, 2.0])
    steps = 1e-5 * np.eye(3)
    measured = np.array([np.sum((y - x @ (theta + s)) ** 2) - np.sum((y - x @ (theta - s)) ** 2) for s in steps]) / 2e-5
    given = np.asarray(residuals(x, y, theta), dtype=float)
    if given.shape != (3,):
        return f"of ‖y − Xθ‖²: a gradient has the shape of θ, (3,), yours has {given.shape}."
    if not np.allclose(given, measured, atol=1e-4):
        if np.allclose(given, -measured, atol=1e-4):
            after = np.sum((y - x @ (theta - 0.01 * given)) ** 2)
            before = np.sum((y - x @ theta) ** 2)
            return f"of ‖y − Xθ‖²: the sign. A step along yours takes the loss from {before:.1f} to {after:.1f}."
        return f"of ‖y − Xθ‖²: {np.round(given, 3)}, measured by small differences {np.round(measured, 3)}."
    return None


_CURVES: Mapping[str, tuple[Callable[[Floats], Floats], float, float]] = {
    "x^2": (lambda x: x**2, -3.0, 3.0),
    "x^3": (lambda x: x**3, -3.0, 3.0),
    "sqrt x": (np.sqrt, 0.0, 3.0),
    "log x": (np.log, 0.05, 3.0),
}


def _refute_convex(answer: object) -> str | None:
    named = {answer} if isinstance(answer, str) else set(answer)  # pyright: ignore[reportArgumentType]
    if unknown := named - set(_CURVES):
        return f"the functions are {', '.join(_CURVES)}, yours has {', '.join(map(str, sorted(unknown, key=str)))}."
    for name, (curve, low, high) in _CURVES.items():
        grid = np.linspace(low, high, 61)
        left, right = np.meshgrid(grid, grid)
        above = curve((left + right) / 2) - (curve(left) + curve(right)) / 2
        highest = np.unravel_index(np.argmax(above), above.shape)
        convex = above[highest] < 1e-9
        if name in named and not convex:
            a, b = left[highest], right[highest]
            return (
                f"{name} is not convex: between {min(a, b):.2f} and {max(a, b):.2f} the middle lies "
                f"{above[highest]:.2f} above the chord."
            )
        if name not in named and convex:
            return f"{name} is convex too: no middle of 3721 pairs lies above its chord."
    return None


def _refute_descent(answer: Callable[[Floats, Floats, float], tuple[object, int]]) -> str | None:
    for seed, columns, tolerance in ((0, 2, 1e-3), (1, 3, 1e-6), (2, 4, 1e-9)):
        x, y = _problem(50, columns, seed)
        curvature = np.linalg.eigvalsh(2 * x.T @ x / len(x))
        condition = float(curvature[-1] / curvature[0])
        best = np.linalg.lstsq(x, y, rcond=None)[0]
        found, iterations = answer(x, y, tolerance)
        theta = np.asarray(found, dtype=float)
        least = float(np.mean((y - x @ best) ** 2))
        left = (float(np.mean((y - x @ theta) ** 2)) - least) / (float(np.mean(y**2)) - least)
        if not left <= tolerance:
            return (
                f"with {columns} columns and κ = {condition:.0f}, {iterations} iterations leave {left:.1e} of the "
                f"first gap, more than {tolerance:.0e}. The number hangs on κ and the tolerance, not on the columns."
            )
        most = math.ceil(condition * math.log(1 / tolerance)) + 1
        if iterations > most:
            return (
                f"{iterations} iterations for κ = {condition:.0f} and {tolerance:.0e}; κ ln(1/tolerance) = {most} do."
            )
    return None


def _refute_sequential(answer: float) -> str | None:
    def log_ratio(z: Floats, epsilon: float) -> Floats:
        """Of the Laplace mechanism for two datasets with the counts 0 and 1."""
        return epsilon * (np.abs(z - 1) - np.abs(z))

    grid = np.linspace(-5, 5, 201)
    together = float(np.max(log_ratio(grid, 0.3)[:, None] + log_ratio(grid, 0.5)[None, :]))
    if abs(answer - together) < 1e-9:
        return None
    if answer < together:
        return (
            f"at answers far to the left the log-ratio of the two releases together is {together:.2f}, "
            f"above {answer:.3g}."
        )
    return f"true, but no pair of answers has a log-ratio above {together:.2f}: {answer:.3g} is more than is needed."


def _refute_parallel(answer: Mapping[str, float]) -> str | None:
    right = {"add or remove one": 0.5, "replace one": 0.8}
    if set(answer) != set(right):
        return f"the answer has the keys {', '.join(right)}, yours has {', '.join(answer)}."
    for relation, value in right.items():
        if abs(answer[relation] - value) > 1e-9:
            moved = "takes a count of 1 from one part and adds it to the other, and both releases show it"
            return f"{relation}: {value:g}. " + (
                f"A replacement that moves a record {moved}."
                if relation == "replace one"
                else "A record lies in one part, and the other release has the same distribution with and without it."
            )
    return None


_SALARIES = (71_250.0, 84_619.0, 98_400.0, 113_510.0, 130_530.0)


def _refute_salaries(answer: float) -> str | None:
    if abs(answer - 40_000) < 1e-6:
        return None
    if answer > 40_000:
        return f"no replacement in [0, 200 000] moves the mean by {answer:,.0f}: the farthest is 40 000."
    moved = abs(np.mean(_SALARIES) - np.mean((*_SALARIES[:-1], 0.0)))
    loss = 40_000 / answer if answer > 0 else math.inf
    return (
        f"noise of scale {answer:,.2f}/ε is ε-private only if no neighbor's mean lies farther away. Replacing "
        f"130 530 by 0 moves it by {moved:,.0f}; five salaries of 0 of which one becomes 200 000 move it by 40 000, "
        f"and there the log-ratio is {loss:.1f}·ε."
    )


def _refute_thousand(answer: Mapping[str, float]) -> str | None:
    from sordino import accounting
    from sordino.events import ApproximateDP, SelfComposed

    queries = SelfComposed(event=ApproximateDP(epsilon=0.4, delta=1e-6), count=1000)
    optimal = accounting.epsilon(queries, 1.1e-3, accountant="optimal").upper
    for name, right in (("basic", 400.0), ("optimal", optimal)):
        if name not in answer:
            return "the answer has the keys basic and optimal."
        if abs(answer[name] / right - 1) > 2e-3:
            if answer[name] < 0.9 * optimal:
                return f"{name} = {answer[name]:.4g} is no bound. {_counted(0.4, 1000, answer[name])}"
            return f"{name}: {right:.5g}."
    return None


def _counted(epsilon: float, count: int, claimed: float) -> str:
    """An event that breaks a claimed ε, at the δ of 1.1e-3, for `count` answers of randomized response."""
    from scipy.stats import binom

    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    at = np.arange(count)
    gaps = binom.sf(at, count, right) - math.exp(min(claimed, 500.0)) * binom.sf(at, count, 1 - right)
    most = int(np.argmax(gaps))
    return (
        f"Of {count} answers by randomized response with ε₀ = {epsilon:g}, more than {most} point to yes with "
        f"probability {binom.sf(most, count, right):.3g} for one dataset and {binom.sf(most, count, 1 - right):.3g} "
        f"for its neighbor: a δ of {gaps[most]:.2g} at your ε."
    )


def _refute_sampled(answer: float) -> str | None:
    one = math.log1p(0.01 * math.expm1(0.4))
    if abs(answer - 1000 * one) < 5e-3:
        return None
    if abs(answer - 4.0) < 1e-6:
        return (
            f"qε is only the first term of ln(1 + q(e^ε − 1)) = {one:.6f} > 0.004, which is reached: a record that is "
            f"used with probability q, by a mechanism that answers yes e^0.4 times as often with it, changes the "
            f"probability of yes by exactly that factor. 1000 of them are {1000 * one:.3f}."
        )
    return f"one query costs ln(1 + q(e^ε − 1)) = {one:.6f}; a thousand add up to {1000 * one:.3f}."


def _refute_noise(answer: float) -> str | None:
    from sordino import accounting
    from sordino.events import Gaussian, PoissonSampled, SelfComposed

    def spent(noise: float) -> float:
        step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=noise))
        return accounting.epsilon(SelfComposed(event=step, count=10_000), 1e-5).upper

    if spent(answer) > 2:
        return f"σ = {answer:g} gives ε = {spent(answer):.4f}, above 2."
    if spent(answer - 0.02) < 2:
        return f"σ = {answer:g} gives ε = {spent(answer):.4f}, and {answer - 0.02:.2f} would do as well."
    return None


def _refute_late_noise(answer: Callable[[int, float, float], object]) -> str | None:
    for steps, condition, budget in ((4, 2.0, 1.0), (30, 5.0, 0.3), (100, 20.0, 2.0)):
        damping = (1 - 1 / condition) ** np.arange(steps - 1, -1, -1.0)
        given = np.asarray(answer(steps, condition, budget), dtype=float)
        spent, cost = float(np.sum(given**-2.0)), float(np.sum(damping * given**2))
        if abs(spent / budget - 1) > 1e-6:
            return f"Σ σ⁻² is {spent:.4g} for T = {steps}, where the budget is {budget:g}."
        least = float(np.sum(np.sqrt(damping))) ** 2 / budget
        if cost > least * (1 + 1e-6):
            return f"for T = {steps} and κ = {condition:g} yours leaves {cost:.4g} of noise; {least:.4g} can be had."
    return None


def _refute_accountants(answer: float) -> str | None:
    certified = 0.94687
    if abs(answer - certified) < 5e-4:
        return None
    if answer < certified:
        return f"{answer:.4g} is less than is true: {certified} is certified from both sides."
    names = {
        1.26: "the moments accountant's bound",
        9.34: "strong composition with its terms dropped",
        1.035: "Rényi's",
    }
    near = next((words for value, words in names.items() if abs(answer / value - 1) < 5e-3), "an upper bound")
    return f"{answer:.4g} is {near}: {answer / certified:.1f} times what the same noise really costs, {certified}."


def _refute_population(answer: float) -> str | None:
    return (
        None
        if abs(answer - 0.754) < 0.01
        else (
            f"{answer:.1%}; of the test records 75.4 % earn at most 50 000 dollars, so a model that always says no is "
            "right on that share, at ε = 0."
        )
    )


EXERCISES: Mapping[str, Exercise] = {
    "baseline": Exercise(
        question="The accuracy, as a number in [0, 1], of a model that always predicts the majority class.",
        hint="count the labels of the test records.",
        refute=_refute_population,
        because="Every accuracy below must be compared with it.",
    ),
    "ridge": Exercise(
        question="A function (X, y, λ) ↦ θ that minimizes ‖y − Xθ‖²/n + λ‖θ‖².",
        hint="set the gradient to zero; the loss is a mean over n rows.",
        refute=_refute_ridge,
        because="(XᵀX + nλI)⁻¹Xᵀy: this is ridge regression.",
    ),
    "gradients": Exercise(
        question="A pair of functions: θ ↦ d/dθ θ², and (X, y, θ) ↦ ∇ ‖y − Xθ‖².",
        hint="the chain rule; ‖r‖² = Σ rᵢ² with r = y − Xθ.",
        refute=_refute_gradients,
        because="2θ and −2Xᵀ(y − Xθ).",
    ),
    "convex": Exercise(
        question='The set of those among "x^2", "x^3", "sqrt x", "log x" that are convex where they are defined.',
        hint="the second derivative, on the whole domain.",
        refute=_refute_convex,
        because="Only x²: √x and log x are concave, and x³ is convex for x ≥ 0 alone.",
    ),
    "descent": Exercise(
        question="A function (X, y, tolerance) ↦ (θ, iterations): gradient descent on ‖y − Xθ‖²/n from θ = 0 until at "
        "most the fraction `tolerance` of the first gap to the least loss is left.",
        hint="a step of 1/L, L the largest eigenvalue of 2XᵀX/n, multiplies the gap by (1 − 1/κ)² or less.",
        refute=_refute_descent,
        because="About κ·ln(1/tolerance)/2 iterations. No finite number reaches the optimum itself.",
    ),
    "sequential": Exercise(
        question="The smallest ε of a 0.3-private and a 0.5-private Laplace count of the same records together.",
        hint="write the ratio of the two joint densities as a product.",
        refute=_refute_sequential,
        because="The losses of the two releases add up.",
    ),
    "parallel": Exercise(
        question='A dictionary with the keys "add or remove one" and "replace one": the smallest ε of a 0.3-private '
        "count of one part of the records and a 0.5-private count of the rest.",
        hint="which of the two parts can a neighbor differ in?",
        refute=_refute_parallel,
        because="The largest under add-or-remove; the sum under replace-one, as a record may change its part.",
    ),
    "salaries": Exercise(
        question="The sensitivity of the mean of five salaries in [0, 200 000], when one is replaced by any other.",
        hint="the largest change over all datasets, not over this one.",
        refute=_refute_salaries,
        because="(200 000 − 0)/5, whatever the five are.",
    ),
    "thousand": Exercise(
        question='A dictionary with the keys "basic" and "optimal": ε of 1000 (0.4, 10⁻⁶)-private answers, basic '
        "composition at δ = 10⁻³ and optimal composition at δ = 1.1·10⁻³.",
        hint="sordino.accounting.epsilon(…, accountant='optimal').",
        refute=_refute_thousand,
        because="The short form ε₀√(k ln(1/δ)) is no bound, with either logarithm.",
    ),
    "sampled": Exercise(
        question="ε of 1000 (0.4, 10⁻⁶)-private answers by basic composition, each on a Poisson sample of rate 0.01.",
        hint="amplification by sampling turns ε into ln(1 + q(e^ε − 1)).",
        refute=_refute_sampled,
        because="qε alone would be 4.0, which is less than is true.",
    ),
    "noise": Exercise(
        question="The smallest noise multiplier, to 0.02, for which 100 epochs of batches of 600 of 60 000 records are "
        "(2, 10⁻⁵)-private.",
        hint="q = 0.01 and 10 000 steps; sordino.accounting.calibrate_noise_multiplier.",
        refute=_refute_noise,
        because="C has no part in it: noise grows with C as the sensitivity does.",
    ),
    "late noise": Exercise(
        question="A function (T, κ, R) ↦ T noise multipliers with Σ σ⁻² = R that make Σ γ^(T−1−t) σ_t² least, "
        "γ = 1 − 1/κ.",
        hint="Lagrange: σ_t⁴ ∝ 1/q_t.",
        refute=_refute_late_noise,
        because="σ_t ∝ q_t^(−1/4): the last steps have the least noise.",
    ),
    "accountants": Exercise(
        question="ε of 10 000 steps with sample rate 0.01 and noise multiplier 4, at δ = 10⁻⁵.",
        hint="sordino.accounting.epsilon, which certifies both ends.",
        refute=_refute_accountants,
        because="Certified from both sides; the moments accountant's bound is 1.26.",
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Lessons: files with cells, and notebooks made of them.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a lesson.

    Args:
        kind: "markdown" or "code".
        source: its text.
    """

    kind: str
    source: str


def lessons() -> dict[str, Path]:
    """The files of the lessons by name, in their order."""
    installed = Path(__file__).parent / "lessons"
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "tutorials" / "course"
    return {path.stem.partition("_")[2]: path for path in sorted(folder.glob("[0-9]_*.py"))}


def read_lesson(text: str) -> list[Cell]:
    r"""The cells of a lesson's file, a Python file with `# %%` at the start of each cell.

    Example:
        >>> [cell.kind for cell in read_lesson("# %% [markdown]\n# # Title\n# %%\nprint(1)\n")]
        ['markdown', 'code']
    """
    found = []
    for mark, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*(?:\n|\Z))*)", text, flags=re.MULTILINE):
        words = "[markdown]" in mark
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if words else body
        if source.strip():
            found.append(Cell(kind="markdown" if words else "code", source=source.strip("\n")))
    return found


def notebook(cells: Sequence[Cell]) -> dict[str, object]:
    r"""A Jupyter notebook (format 4.5) of the cells, not run.

    Example:
        >>> notebook(read_lesson("# %%\nprint(1)\n"))["cells"][0]["source"]
        ['print(1)']
    """
    body: list[dict[str, object]] = []
    for index, cell in enumerate(cells):
        source = cell.source.splitlines(keepends=True)
        entry: dict[str, object] = {"cell_type": cell.kind, "id": f"cell-{index}", "metadata": {}, "source": source}
        body.append(entry | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": body, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
