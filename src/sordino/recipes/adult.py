"""UCI Adult, or any table with a declared schema (floor 6): a linear model and a small network.

Both train on all columns, scaled and encoded record by record by the schema; no statistic of the records is computed.
The settings are those that `sordino train` recommends for tables.
"""

from sordino.errors import InvalidArgument
from sordino.recipes.models import logistic, mlp
from sordino.recipes.network import Network, network, quiet_rate
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.training.averaging import TailAverage

__all__ = ["ADULT_LOGISTIC", "ADULT_MLP"]

_LINEAR = Network(
    build=logistic,
    batch_size=None,
    steps=100,
    max_grad_norm=1.0,
    learning_rate=quiet_rate(largest=16.0, noise_per_weight=1.0),
    averaging=TailAverage(fraction=0.5),
    microbatch_size=4096,
    words="logistic regression on records of norm 2",
)
_HIDDEN = Network(
    build=mlp,
    batch_size=4096,
    steps=200,
    max_grad_norm=1.0,
    learning_rate=quiet_rate(largest=4.0, noise_per_weight=0.5),
    averaging=TailAverage(fraction=0.5),
    microbatch_size=4096,
    words="64 tanh units on records of norm 2",
)


def _table(task: Task) -> Task:
    if task.schema is None:
        raise InvalidArgument(
            f"dataset must be a table with a declared schema, got {task.data!r} with records of shape {task.shape}. "
            "Choose another recipe: `sordino recipes`."
        )
    return task


def _prepare_linear(task: Task) -> Prepared:
    return network(_table(task), _LINEAR)


def _prepare_hidden(task: Task) -> Prepared:
    return network(_table(task), _HIDDEN)


ADULT_LOGISTIC = Pipeline(
    name="adult-logistic",
    words="logistic regression on a table, full batches",
    data_sets=("adult",),
    prepare=_prepare_linear,
    constants="Chosen on UCI Adult with an eye on its test records.",
    chosen_on=("adult",),
    guarantee="every full-batch step; nothing else reads a record",
)
ADULT_MLP = Pipeline(
    name="adult-mlp",
    words="64 hidden units on a table by DP-SGD",
    data_sets=("adult",),
    prepare=_prepare_hidden,
    constants="Chosen on UCI Adult with an eye on its test records.",
    chosen_on=("adult",),
    guarantee="every Poisson-sampled step; nothing else reads a record",
)
