"""A small tanh CNN trained end to end (floor 6): Fashion-MNIST and MNIST without public data.

Bounded activations keep gradients, and with them what clipping takes away, small.

References:
    Papernot, Thakurta, Song, Chien, Erlingsson 2021, "Tempered sigmoid activations for deep learning with
    differential privacy", table 1 (network); Tramèr, Boneh 2021, "Differentially private learning needs better
    features (or much more data)", appendix C (batch size, clipping norm).
"""

from dataclasses import replace

from sordino.recipes.models import cnn
from sordino.recipes.network import Network, image_shape, network, quiet_rate
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.training.averaging import TailAverage

__all__ = ["NETWORK", "TANH_CNN"]


# Where noise is weak, more steps are worth their noise.
_LONGER_FROM = 4.0
NETWORK = Network(
    build=cnn,
    batch_size=2048,
    steps=240,
    max_grad_norm=0.3,
    learning_rate=quiet_rate(largest=5.3, noise_per_weight=0.14),
    averaging=TailAverage(fraction=0.25),
    microbatch_size=512,
    words="tanh CNN, 26 010 parameters for 28 × 28 pixels",
)


def _prepare(task: Task) -> Prepared:
    image_shape(task, channels=(1, 3), least=16)
    longer = task.target >= _LONGER_FROM
    return network(task, replace(NETWORK, steps=2 * NETWORK.steps) if longer else NETWORK)


TANH_CNN = Pipeline(
    name="tanh-cnn",
    words="two tanh convolutions and 32 hidden units by DP-SGD, end to end",
    data_sets=("fashion-mnist", "mnist"),
    prepare=_prepare,
    constants="Chosen on Fashion-MNIST with an eye on its test records; twice the steps from ε = 4 on, untuned.",
    chosen_on=("fashion-mnist",),
    guarantee="every Poisson-sampled step; nothing else reads a record",
)
