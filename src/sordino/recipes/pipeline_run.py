"""The run folder around a pipeline's stages, what it says, and the seed (floor 6)."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sordino.data import DataSet
from sordino.events import Event, Nothing, compose
from sordino.randomness import Randomness
from sordino.runs import RunFolder

__all__ = ["begun", "ended", "facts", "seeded"]


def begun(
    path: Path, plan: str, meta: Mapping[str, object], charges: Sequence[Event], randomness: Randomness
) -> RunFolder:
    """A new folder in which one process begins; a torn line counts as one of each kind of charge."""
    folder = RunFolder.create(path, plan=plan, meta=meta)
    kinds = list(dict.fromkeys(event for event in charges if not isinstance(event, Nothing)))
    folder.begin(key=randomness.commitment, first_step=0, most=compose(kinds), seeded=randomness.reproducible)
    return folder


@contextlib.contextmanager
def ended(folder: RunFolder | None) -> Iterator[None]:
    """Close the folder at the end; after a failure before the first charge nothing is left of it."""
    if folder is None:
        yield
        return
    try:
        yield
    except BaseException:
        folder.close()
        if not any(folder):
            shutil.rmtree(folder.path)
        raise
    folder.close()


@contextlib.contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Initial weights come from torch's generator; a repeatable run repeats them too."""
    if not randomness.reproducible or randomness.seed is None:
        yield
        return
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.seed % 2**63)
        yield


def facts(
    dataset: DataSet,
    *,
    training: Mapping[str, object],
    stages: Sequence[str],
    constants: str,
    chosen_on: Sequence[str],
    public_inputs: Sequence[str],
) -> dict[str, object]:
    """Public facts about the run. No path of this machine is among them."""
    return {
        "settings": constants,
        "tuned_on_these_data": dataset.public and dataset.name in chosen_on,
        "data": {
            "name": dataset.name,
            "records": len(dataset.train),
            "labels": len(dataset.labels),
            "source": dataset.source if dataset.public else "not public",
            "licence": dataset.licence,
            "public": dataset.public,
            "public_inputs": ", ".join(public_inputs) or "none",
        },
        "training": dict(training),
        "noise_arithmetic": "floating point",
        "data_touches": {
            "preprocessing": f"Stages of the recipe, each of them charged: {', '.join(stages)}.",
            "normalization": "Each record by itself, or by what a charged stage released.",
            "schema": "The form of the records and the labels are declared, never taken from the records.",
            "early_stopping": "None: steps were fixed beforehand.",
            "evaluation": "None by the recipe; what is measured afterwards is measured on public test records.",
            "logging": "No loss, norm or batch size is printed or stored.",
        },
        **({"composition": "The records are public: other uses of them concern nobody."} if dataset.public else {}),
    }
