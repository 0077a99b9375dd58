"""Accuracy of the recipes against ε: `./run bench accuracy --recipe NAME [--data …] [--epsilon …] [--seeds 3]`.

Every run becomes a row of `benchmarks/results/accuracy-RECIPE.json`; a row that is there is not run again, so a
benchmark that was cut off goes on where it stopped. `docs/results.md` is made from all rows and from
`published.json`, at the end of each call, or by `--page` alone.

A row holds: recipe, data, epsilon (target, or null), setting (or null), delta, seed, accuracy and ece (both in [0, 1],
on the test records), epsilon_spent, epsilon_rdp (of the same events), relation, sampler, seconds (of CPU),
made, commit, machine, torch. Seeds are chosen, so that a row can be repeated: such models are not for release.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from sordino import data
from sordino.data import DatasetSplits, Records
from sordino.data.schema import fixed_order
from sordino.randomness import KeyedRNG
from sordino.recipes import RECIPES, Recipe, get_recipe
from sordino.report import compute_utility

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "results.md"
DELTA = 1e-5
EPSILONS = (1.0, 2.0, 3.0, 8.0)
HELD_OUT = 6
EXTRACTED = 1.5
Row = dict[str, object]
END_TO_END = ("tanh-cnn",)
KEY = ("recipe", "data", "epsilon", "setting", "seed")


def measured(
    pipeline: Recipe, dataset: DatasetSplits, name: str, *, epsilon: float | None, setting: str | None, seed: int
) -> Row:
    """One run and what it reached on the test records, which are public."""
    started = time.process_time()
    rng = KeyedRNG(seed=seed, reproducible=True)
    fitted = pipeline.fit(dataset, epsilon=epsilon, setting=setting, delta=DELTA, rng=rng)
    seconds = time.process_time() - started
    test = dataset.test
    assert test is not None
    found = compute_utility(fitted.predict_proba(test), test.labels, public=dataset.public)
    return {
        "recipe": pipeline.name,
        "data": name,
        "epsilon": epsilon,
        "setting": setting,
        "delta": DELTA,
        "seed": seed,
        "accuracy": round(found["test_accuracy"].value, 6),
        "ece": round(found["test_ece"].value, 6),
        "epsilon_spent": fitted.guarantee.epsilon,
        "epsilon_rdp": fitted.epsilon_under("rdp"),
        "neighboring_relation": fitted.guarantee.neighboring_relation.value,
        "sampler": fitted.guarantee.sampler,
        "seconds": round(seconds, 1),
        "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def held_out(dataset: DatasetSplits) -> DatasetSplits:
    """The training records without a sixth of them, and that sixth in place of the test records."""
    order = fixed_order(len(dataset.train))
    cut = len(order) - len(order) // HELD_OUT
    return replace(dataset, train=part(dataset.train, order[:cut]), test=part(dataset.train, order[cut:]))


def part(records: Records, rows: np.ndarray) -> Records:
    texts = None if records.texts is None else tuple(records.texts[row] for row in rows)
    return Records(np.ascontiguousarray(records.features[rows]), records.labels[rows], texts)


def key(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in KEY)


def kept(name: str) -> list[Row]:
    file = RESULTS / f"accuracy-{name}.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def keep(name: str, rows: Sequence[Row]) -> None:
    """All rows of a recipe, whole or not at all."""
    file = RESULTS / f"accuracy-{name}.json"
    draft = file.with_suffix(".draft")
    lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    draft.write_text(f'{{\n "rows": [\n  {lines}\n ]\n}}\n')
    draft.replace(file)


def run(name: str, sets: Sequence[str], epsilons: Sequence[float], settings: Sequence[str], seeds: int) -> None:
    pipeline = get_recipe(name)
    for title in sets or pipeline.data_sets:
        dataset = None
        for epsilon, setting in [*((one, None) for one in epsilons), *((None, one) for one in settings)]:
            for seed in range(seeds):
                rows = kept(name)
                if (name, title, epsilon, setting, seed) in {key(row) for row in rows}:
                    continue
                dataset = data.load_dataset(title, keep_texts=True) if dataset is None else dataset
                row = measured(pipeline, dataset, title, epsilon=epsilon, setting=setting, seed=seed)
                # Another process may have kept rows meanwhile.
                keep(name, sorted({key(each): each for each in [*kept(name), row]}.values(), key=place))
                sys.stdout.write(told(row))
                sys.stdout.flush()


def validate(name: str, sets: Sequence[str], epsilons: Sequence[float], settings: Sequence[str], seeds: int) -> None:
    """The same on a held-out sixth of the training records: nothing is kept, and constants may be chosen by it."""
    pipeline = get_recipe(name)
    for title in sets or pipeline.data_sets:
        dataset = held_out(data.load_dataset(title, keep_texts=True))
        for epsilon, setting in [*((one, None) for one in epsilons), *((None, one) for one in settings)]:
            for seed in range(seeds):
                sys.stdout.write(told(measured(pipeline, dataset, title, epsilon=epsilon, setting=setting, seed=seed)))
                sys.stdout.flush()


def told(row: Row) -> str:
    noise = f"ε = {row['epsilon']:g}" if row["epsilon"] is not None else f"{row['setting']}"
    reached, spent = f"{100 * number(row['accuracy']):.2f} %", f"{number(row['epsilon_spent']):.4f}"
    name = f"{row['recipe']:<18} {row['data']:<14} {noise:<14} seed {row['seed']}"
    return f"{name}: {reached}, ε spent {spent}, {row['seconds']} s\n"


def place(row: Row) -> tuple[object, ...]:
    """Where a row stands in its file."""
    return (str(row["data"]), row["epsilon"] is None, row["epsilon"] or 0.0, str(row["setting"]), row["seed"])


# --- the page --------------------------------------------------------------------------------------------------------


def page() -> str:
    """docs/results.md, from the rows that were kept."""
    published = json.loads((HERE / "published.json").read_text())
    rows = [row for name in RECIPES for row in kept(name)]
    blocks = [(HERE / "results-intro.md").read_text().rstrip()]
    for uses in (False, True):
        names = [name for name in RECIPES if bool(get_recipe(name).public_inputs) is uses]
        chosen = [row for row in rows if row["recipe"] in names]
        if not chosen:
            continue
        blocks.append("## With public data or models" if uses else "## Without public data")
        for title in dict.fromkeys(str(row["data"]) for row in chosen):
            here = [row for row in chosen if row["data"] == title]
            blocks += [f"### {title}", table(here, published, uses=uses)]
    blocks += [file.read_text().rstrip() for file in sorted((HERE / "results").glob("section-*.md"))]
    blocks += ["## How constants were chosen, and what reproduces a row", methods(rows)]
    cited = [
        textwrap.fill(f"- {source}", 100, subsequent_indent="  ", break_on_hyphens=False)
        for source in published["citations"]
    ]
    blocks += ["## Sources of published figures", "\n".join(cited)]
    return "\n\n".join(blocks) + "\n"


def table(rows: Sequence[Row], published: Mapping[str, Mapping[str, object]], *, uses: bool) -> str:
    """One dataset: a line for each recipe at each ε."""
    names = "recipe | ε | accuracy, % | figure to beat | best published | ε under RDP | ECE"
    lines = [f"| {names} | CPU seconds, first run | further runs |", f"|{'---|' * 9}"]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["epsilon"], row["setting"]), []).append(row)
    for (recipe, epsilon, setting), found in groups.items():
        title = str(found[0]["data"])
        spent = max(number(row["epsilon_spent"]) for row in found)
        target = spent if epsilon is None else number(epsilon)
        kind = "with" if uses else "without"
        lines.append(
            f"| `{recipe}`{f', {setting}' if setting else ''} | {target:.3g} | {spread(found)} "
            f"| {figure(published['source'], title, target)} | {best(published, str(recipe), title, target, kind)} "
            f"| {max(number(row['epsilon_rdp']) for row in found):.3g} "
            f"| {statistics.fmean(number(row['ece']) for row in found):.3f} "
            f"| {further(found) + extraction(rows, recipe):.0f} | {further(found):.0f} |"
        )
    return "\n".join(lines)


def further(rows: Sequence[Row]) -> float:
    """Mean seconds of a run whose features had been made before, in the same process."""
    least = min(number(row["seconds"]) for row in rows)
    return statistics.fmean(number(row["seconds"]) for row in rows if number(row["seconds"]) <= EXTRACTED * least)


def extraction(rows: Sequence[Row], recipe: object) -> float:
    """Mean seconds that the runs of a recipe on one dataset took longer when they had to make the features first.

    A process makes them once: a row that took over `EXTRACTED` times as long as another one of the same settings did.
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row["recipe"] == recipe:
            groups.setdefault((row["epsilon"], row["setting"]), []).append(row)
    longer = []
    for found in groups.values():
        least = min(number(row["seconds"]) for row in found)
        longer += [
            number(row["seconds"]) - further(found) for row in found if number(row["seconds"]) > EXTRACTED * least
        ]
    return statistics.fmean(longer) if longer else 0.0


def spread(rows: Sequence[Row]) -> str:
    values = [100 * number(row["accuracy"]) for row in rows]
    if len(values) == 1:
        return f"**{values[0]:.2f}** (1 seed)"
    return f"**{statistics.fmean(values):.2f}** ± {statistics.stdev(values):.2f} ({len(values)} seeds)"


def best(published: Mapping[str, Mapping[str, object]], recipe: str, title: str, epsilon: float, kind: str) -> str:
    """The best figure of all, and the best of plain DP-SGD on the recipe's own kind of network."""
    found = figure(published[kind], title, epsilon)
    same = figure(published["end to end"], title, epsilon) if recipe in END_TO_END else "–"
    return found if same == "–" else f"{found}; such a network {same}"


def figure(kind: Mapping[str, object], title: str, epsilon: float) -> str:
    """A figure at this very ε: those of other ε would be no comparison."""
    found = kind.get(title)
    at = found.get(f"{epsilon:g}") if isinstance(found, Mapping) else None
    return f"{at[0]:g} ({at[1]})" if at else "–"


def methods(rows: Sequence[Row]) -> str:
    lines = ["| recipe | constants | public inputs | made | command |", "|---|---|---|---|---|"]
    for name in RECIPES:
        own = [row for row in rows if row["recipe"] == name]
        if not own:
            continue
        pipeline = get_recipe(name)
        targets = " ".join(f"{number(e):g}" for e in dict.fromkeys(row["epsilon"] for row in own) if e is not None)
        fixed = " ".join(dict.fromkeys(str(row["setting"]) for row in own if row["setting"] is not None))
        command = f"./run bench accuracy --recipe {name}"
        command += f" --data {' '.join(dict.fromkeys(str(row['data']) for row in own))}"
        command += f" --epsilon {targets}" if targets else " --epsilon"
        command += f" --setting {fixed}" if fixed else ""
        command += f" --seeds {1 + max(int(str(row['seed'])) for row in own)}"
        made = max(str(row["made"]) for row in own)
        used = ", ".join(pipeline.public_inputs) or "none"
        lines.append(f"| `{name}` | {pipeline.constants} | {used} | {made} | `{command}` |")
    return "\n".join(lines)


def number(value: object) -> float:
    return float(str(value))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=[])
    parser.add_argument("--data", nargs="+", default=[], help="named datasets; those of the recipe if not given")
    parser.add_argument("--epsilon", nargs="*", type=float, default=list(EPSILONS))
    parser.add_argument("--setting", nargs="+", default=[], help="settings of the recipe that fix the noise")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validate", action="store_true", help="measure on a held-out sixth of the training records")
    parser.add_argument("--page", action="store_true", help="only make docs/results.md from the rows that are there")
    return parser.parse_args(given)


def main(given: Iterable[str] | None = None) -> None:
    asked = arguments(None if given is None else list(given))
    if not asked.page:
        for name in asked.recipe or RECIPES:
            work = validate if asked.validate else run
            work(name, asked.data, asked.epsilon, asked.setting, asked.seeds)
    if not asked.validate:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
