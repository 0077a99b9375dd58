"""Running a recipe on a data set, and what to put beside the result when the data are public (floor 6)."""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.data import DataSet, Records
from sordino.errors import InvalidArgument
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.recipes.defaults import Recipe
from sordino.runs import RunFolder
from sordino.training.trainer import FitResult, Transcript, fit

__all__ = ["accuracy", "non_private_twin", "train"]

_TWIN_BATCH = 256
_TWIN_LEAST_STEPS = 1000
# (learning rate, epochs) of Adam: within half a percent of the best that was found on the public data sets.
_TWIN_LINEAR, _TWIN_OTHER = (0.02, 12), (0.003, 5)


def train(
    dataset: DataSet,
    recipe: Recipe,
    *,
    run: RunFolder | None = None,
    resume: Path | None = None,
    checkpoint_every: int | None = None,
    diagnostics: str | None = None,
    ledger: Account | Reservation | None = None,
    transcript: Transcript | None = None,
    progress: bool = True,
    randomness: Randomness | None = None,
) -> FitResult:
    """Train the recipe's model on the training records.

    Guarantee: that of `fit` under ``recipe.plan``; only ``dataset.train`` is read.

    Args:
        dataset: its training records have the recipe's shape.
        recipe: from `recommend`.
        run: open for writing; it gets the transcript, the model and the guarantee, and is closed.
        resume: the folder of a run of this recipe that was cut off.
        checkpoint_every: steps between checkpoints.
        diagnostics: None, or "private" as in `fit`.
        ledger: the data set's account, as in `fit`.
        transcript: charged before each step, beside or instead of a run.
        progress: show step, ε so far and time left.
        randomness: fresh for every run; None draws a new key from the operating system.

    Returns:
        The model with its guarantee.
    """
    _same_shape(dataset.train, recipe)
    return fit(
        recipe.build_model(),
        losses,
        dataset.train.tensors(),
        recipe.plan,
        optimizer=recipe.build_optimizer,
        performance=recipe.performance,
        randomness=randomness,
        averaging=recipe.averaging,
        run=run,
        resume=resume,
        checkpoint_every=checkpoint_every,
        diagnostics=diagnostics,
        ledger=ledger,
        transcript=transcript,
        progress=progress,
    )


def losses(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each record, shape (records,)."""
    return F.cross_entropy(model(features), labels, reduction="none")


def non_private_twin(dataset: DataSet, recipe: Recipe) -> nn.Module:
    """The recipe's model trained on the same records without privacy, by Adam: the accuracy that privacy costs.

    Guarantee: none. So it is refused for data that are not declared public.

    Args:
        dataset: a public data set.
        recipe: whose model is trained.

    Raises:
        InvalidArgument: the data set is not public, or has no records.
    """
    checks.integer(1, records=len(dataset.train))
    if not dataset.public:
        raise InvalidArgument(
            f"dataset must be public to be trained on without privacy, got {dataset.name!r}. "
            "Declare the data public only if anyone may see them."
        )
    _same_shape(dataset.train, recipe)
    features, labels = (part.to(recipe.performance.device) for part in dataset.train.tensors())
    learning_rate, epochs = _TWIN_LINEAR if recipe.model in {"logistic", "mlp"} else _TWIN_OTHER
    steps = max(_TWIN_LEAST_STEPS, epochs * -(-len(labels) // _TWIN_BATCH))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = recipe.build_model().to(recipe.performance.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
        for rows in islice(_shuffled(len(labels)), steps):
            optimizer.zero_grad()
            losses(model, features[rows], labels[rows]).mean().backward()
            optimizer.step()
            schedule.step()
    return model


def _shuffled(records: int) -> Iterator[Tensor]:
    """Batches of positions, one epoch after another, in the same order every time."""
    randomness = Randomness(seed=0, reproducible=True)
    for epoch in count():
        order = np.argsort(randomness.stream("twin", step=epoch).integers64(records))
        yield from torch.from_numpy(order).split(_TWIN_BATCH)


@torch.no_grad()
def accuracy(model: nn.Module, records: Records) -> float:
    """Share of records, in [0, 1], whose largest logit is that of their label.

    Guarantee: none beyond the model's. On private records the number is a statistic of them that nothing protects:
    measure on public records, or keep it to yourself.

    Args:
        model: features (B, …) ↦ logits (B, classes). Evaluated in evaluation mode, and left in the mode it was in.
        records: at least one.
    """
    features, labels = records.tensors()
    checks.integer(1, records=len(labels))
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        chunks = zip(features.split(4096), labels.split(4096), strict=True)
        right = [(model(x.to(device)).argmax(1).cpu() == y).sum() for x, y in chunks]
    finally:
        for module, mode in modes:
            module.training = mode
    return float(torch.stack(right).sum()) / len(labels)


def _same_shape(records: Records, recipe: Recipe) -> None:
    if records.record_shape != recipe.shape:
        raise InvalidArgument(
            f"dataset must have records of shape {recipe.shape}, got {records.record_shape}. Ask for a recipe of that "
            "shape."
        )
