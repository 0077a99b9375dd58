"""Texts by hashed words and a private logistic regression, with no public data (floor 6).

Which words occur is hashed to 4096 numbers, so no vocabulary is taken from the texts. Two stages share the budget: how
often each number occurs, by which common words get small weights as in tf-idf; and full-batch gradient descent.
Everything is Gaussian, so together it is one Gaussian, exactly. Nothing is slow: a fit takes less than a minute.

Why it is (ε, δ)-differentially private: a row x of norm at most 1 adds its squares (x₁², …, x_d²) to the sums, a vector
of norm at most (Σ xⱼ⁴)^½ ≤ Σ xⱼ² ≤ 1. They are rounded down to whole steps and added as integers, so no rounding of
floats can move the sums by more. Given the noisy sums, the weighting of a row is one fixed function of it, and the
descent is the library's private training.

References:
    Weinberger, Dasgupta, Langford, Smola, Attenberg 2009, "Feature hashing for large scale multitask learning".
    Spärck Jones 1972, "A statistical interpretation of term specificity and its application in retrieval".
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.estimators.intake import normalised_rows
from sordino.mechanisms import GridGaussianMechanism, budget
from sordino.mechanisms.budgets import GaussianBudget
from sordino.randomness import Randomness
from sordino.recipes.payment import Payment, Stage
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.running import losses
from sordino.recipes.stages import FittedModule, pay_for, training_stage
from sordino.recipes.task import Prepared, Task
from sordino.training.averaging import TailAverage
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["HASHED_WORDS", "squares"]

# Chosen on the last 5000 training reviews of IMDB in the fixed order, at ε = 1 and 8.
_SHARE, _RIDGE, _STEPS, _RATE, _NORM = 0.1, 3.0, 60, 10.0, 0.7
# Beside a row of norm 1; with a full bias, steps of this size would overshoot.
_CONSTANT = 0.2
_MOMENTUM = 0.9
# Whole steps of a square; sums stay below 2^53 for up to 2^23 records.
_BITS = 30
_CHUNK = 2048


def squares(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Sums of the squares of rows of norm ≤ 1, each rounded down to a multiple of 2^−30; exact, in any order. [d].

    A row with an entry that is not finite adds nothing. Not private.

    Example:
        >>> squares(np.array([[3.0, 4.0], [0.0, 2.0], [np.nan, 1.0]])).round(6).tolist()
        [0.36, 1.64]
    """
    total = np.zeros(rows.shape[1], dtype=np.int64)
    for start in range(0, len(rows), _CHUNK):
        units = normalised_rows(_finite(rows[start : start + _CHUNK]).astype(np.float64))
        total += np.floor(np.ldexp(np.square(units), _BITS)).astype(np.int64).sum(axis=0)
    return np.ldexp(total.astype(np.float64), -_BITS)


def _finite(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)


def _prepare(task: Task) -> Prepared:
    if len(task.shape) != 1:
        raise InvalidArgument(
            f"records must be rows of hashed words for recipe 'hashed-words', got records of shape {task.shape}. "
            "See sordino.data.hashed_features."
        )
    whole = budget(epsilon=task.target, delta=task.delta)
    assert isinstance(whole, GaussianBudget)
    shared, rest = whole.split(_SHARE, 1 - _SHARE)
    plan = Plan(
        noise_multiplier=rest.noise_multiplier * math.sqrt(_STEPS),
        max_grad_norm=_NORM,
        sample_rate=1.0,
        steps=_STEPS,
        expected_batch_size=float(task.population),
        delta=task.delta,
        dataset_size_is_public=True,
    )
    columns = task.shape[0]
    event = _sums(shared, columns).event()
    weighing = Stage(name="word weights", charges=(event,), settings={"share": _SHARE, "ridge": _RIDGE})
    settings = {"learning_rate": _RATE, "momentum": _MOMENTUM}

    def run(records: Records, payment: Payment) -> FittedModule:
        pay_for(weighing, payment)
        weights = _weights(_sums(shared, columns, payment.randomness), records)
        return _trained(records, payment, weights, plan, classes=task.classes)

    return Prepared(
        stages=(weighing, training_stage(plan, settings=settings)),
        fit=run,
        training={
            "model": f"logistic regression on {columns} hashed words, privately weighted",
            "optimizer": f"SGD, momentum {_MOMENTUM}, full batches",
            "learning_rate": _RATE,
        },
    )


def _sums(shared: GaussianBudget, columns: int, randomness: Randomness | None = None) -> GridGaussianMechanism:
    return GridGaussianMechanism(
        noise_multiplier=shared.noise_multiplier,
        l2_sensitivity=1.0,
        dimension=columns,
        granularity=2.0**-_BITS,
        randomness=Randomness() if randomness is None else randomness,
    )


def _weights(sums: GridGaussianMechanism, records: Records) -> Tensor:
    """(Σ xⱼ² + noise, but not below 0, + ridge)^(−1/2), the ridge in units of the noise."""
    noisy = np.asarray(sums.release(squares(records.features)))
    return torch.from_numpy(1 / np.sqrt(np.maximum(noisy, 0.0) + _RIDGE * sums.stddev)).float()


def _trained(records: Records, payment: Payment, weights: Tensor, plan: Plan, *, classes: int) -> FittedModule:
    def inputs(given: Records) -> Tensor:
        rows = torch.from_numpy(_finite(given.features).astype(np.float32)) * weights
        rows /= rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
        constant = torch.full((len(rows), 1), _CONSTANT)
        return torch.cat([rows, constant], dim=1) / math.sqrt(1 + _CONSTANT**2)

    module = nn.Linear(len(weights) + 1, classes, bias=False)
    nn.init.zeros_(module.weight)
    fit(
        module,
        losses,
        (inputs(records), records.tensors()[1]),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=_MOMENTUM, nesterov=True),
        averaging=TailAverage(fraction=0.1),
        performance=Performance(microbatch_size=4096),
        transcript=payment,
        randomness=payment.randomness,
        progress=payment.progress,
    )
    return FittedModule(module=module, inputs=inputs, beside={"word_weights": weights})


HASHED_WORDS = Pipeline(
    name="hashed-words",
    words="hashed words weighted by private counts, then logistic regression on full batches",
    data_sets=("imdb",),
    prepare=_prepare,
    constants="Chosen on 5000 of the training reviews of IMDB.",
    chosen_on=("imdb",),
    guarantee="one Gaussian release of sums of squares of rows of norm 1, and full-batch Gaussian steps",
)
