"""Attacks on gradients, updates, models and sums, and a malicious participant of federated learning.

From a shared gradient back to the record there are three ways: reading a linear layer with a bias (one record),
matching gradients in ℓ2 (DLG; iDLG when the label is read from a sign first), and matching their direction under a
total-variation prior (inverting gradients).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.clipping import FlatClipping
from sordino.errors import InvalidArgument
from sordino.gradients import GradientCapture
from sordino.mechanisms import standard_normal
from sordino.randomness import KeyedRNG
from sordino.training.probing.snapshots import evaluation_mode

_INNER = 20
_CLOSE_ENOUGH = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Inversion:
    """What was recovered.

    Args:
        features: (B, …), the reconstruction.
        labels: (B,), read from the gradient, guessed, or given.
        distance: how far the reconstruction's gradient is from the shared one, in the method's own measure.
        method: how it was found.
    """

    features: Tensor
    labels: Tensor
    distance: float
    method: str


def read_linear_layer(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """The input of a linear layer, from the gradient of one record: x = (∂L/∂W)ᵢ / (∂L/∂b)ᵢ, exactly.

    Args:
        weight_gradient: (outputs, inputs).
        bias_gradient: (outputs,), not zero everywhere.

    Returns:
        The input, (inputs,).

    Example:
        >>> x, slope = torch.tensor([0.5, -2.0]), torch.tensor([0.0, 3.0])
        >>> read_linear_layer(slope[:, None] * x, slope)
        tensor([ 0.5000, -2.0000])

    References:
        Phong et al. 2018, "Privacy-preserving deep learning via additively homomorphic encryption", section 3.
    """
    row = int(bias_gradient.abs().argmax())
    if weight_gradient.ndim != 2 or bias_gradient.shape != weight_gradient.shape[:1] or bias_gradient[row] == 0:
        raise InvalidArgument(
            "bias_gradient must have one value per row of weight_gradient and not be zero, got another. "
            "Without a bias, or for a record that fits perfectly, the layer gives nothing away."
        )
    return weight_gradient[row] / bias_gradient[row]


def label_from_sign(last_bias_gradient: Tensor) -> int:
    """The label of one record: under cross entropy only its own class has a negative bias gradient (p − 1 < 0).

    Args:
        last_bias_gradient: of the last layer, (classes,).

    Example:
        >>> label_from_sign(torch.tensor([0.2, -0.9, 0.7]))
        1

    References:
        Zhao, Mopuri, Bilen 2020, "iDLG: improved deep leakage from gradients", equations 3–5.
    """
    return int(last_bias_gradient.argmin())


def invert_by_matching(
    model: nn.Module,
    gradient: Sequence[Tensor],
    *,
    shape: Sequence[int],
    classes: int,
    labels: Tensor | None = None,
    steps: int = 120,
    restarts: int = 3,
    rng: KeyedRNG | None = None,
) -> Inversion:
    """DLG: min over (x, y) of ‖∇L(x, y) − g‖² by L-BFGS; with `labels` given (iDLG reads them first), over x alone.

    The attacker knows the model, its weights, the batch size and the gradient. The activations must have second
    derivatives (tanh, sigmoid): behind ReLU the search stalls.

    Args:
        model: features ↦ logits.
        gradient: one tensor a trained parameter.
        shape: of one record's features.
        classes: number of classes, ≥ 2.
        labels: (B,) when they are known; None searches for one record's label too.
        steps: of L-BFGS, ≥ 1.
        restarts: from other noise, ≥ 1; the best is kept.
        rng: of the starting points.

    Returns:
        The reconstruction with the smallest distance.

    References:
        Zhu, Liu, Han 2019, "Deep leakage from gradients", equation 5.
    """
    checks.integer(1, steps=steps)
    checks.integer(2, classes=classes)
    source, parameters = rng or KeyedRNG(), _matching(model, gradient)
    records = 1 if labels is None else len(labels)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        """‖∇L(x, y) − g‖², with y as logits when labels are searched for."""
        targets = labels if labels is not None else y.softmax(dim=1)
        own = torch.autograd.grad(F.cross_entropy(model(x), targets), parameters, create_graph=True)
        return torch.stack([((a - b) ** 2).sum() for a, b in zip(own, gradient, strict=True)]).sum()

    def search() -> Inversion:
        x, y = (
            _normal(start, source, "inversion-start").to(gradient[0]).requires_grad_()
            for start in ((records, *shape), (records, classes))
        )
        searched = [x] if labels is not None else [x, y]
        optimizer = torch.optim.LBFGS(
            searched, lr=1.0, max_iter=_INNER, history_size=100, line_search_fn="strong_wolfe"
        )
        best, kept = math.inf, (x.detach().clone(), y.detach().clone())

        def closure() -> Tensor:
            value = distance(x, y)
            for tensor, slope in zip(searched, torch.autograd.grad(value, searched), strict=True):
                tensor.grad = slope
            return value.detach()

        for _ in range(-(-steps // _INNER)):
            optimizer.step(closure)
            value = distance(x, y).item()
            if value < best:
                best, kept = value, (x.detach().clone(), y.detach().clone())
            if not math.isfinite(value) or value < _CLOSE_ENOUGH:
                break
        method = "gradient matching" if labels is None else "gradient matching, labels known"
        found = kept[1].argmax(dim=1) if labels is None else labels
        return Inversion(features=kept[0], labels=found, distance=best, method=method)

    found = [search() for _ in range(checks.integer(1, restarts=restarts))]
    return min(found, key=lambda one: one.distance)


def invert_by_direction(
    model: nn.Module,
    gradient: Sequence[Tensor],
    *,
    shape: Sequence[int],
    labels: Tensor,
    total_variation: float = 1e-2,
    steps: int = 600,
    learning_rate: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
    rng: KeyedRNG | None = None,
) -> Inversion:
    """Inverting gradients: min of 1 − cos(∇L(x), g) + α·TV(x) by Adam on signs, pixels kept within bounds.

    Works behind ReLU, where ℓ2 matching stalls, and for small batches.

    Args:
        model: features ↦ logits.
        gradient: one tensor a trained parameter.
        shape: of one record: (channels, height, width).
        labels: (B,), known or read by `label_from_sign`.
        total_variation: weight α ≥ 0 of the prior.
        steps: of Adam, ≥ 1; its learning rate falls by ten at 3/8, 5/8 and 7/8 of them.
        learning_rate: > 0, in units of pixels.
        low: smallest pixel.
        high: largest pixel.
        rng: of the starting point.

    References:
        Geiping, Bauermeister, Dröge, Moeller 2020, "Inverting gradients", equation 4 and section 4.
    """
    checks.non_negative(total_variation=total_variation)
    checks.positive(learning_rate=learning_rate)
    parameters = _matching(model, gradient)
    x = _normal((len(labels), *shape), rng or KeyedRNG(), "inversion-start").to(gradient[0]).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    milestones = [checks.integer(1, steps=steps) * k // 8 for k in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    norm = torch.stack([(part**2).sum() for part in gradient]).sum().sqrt()
    best, kept = math.inf, x.detach().clone()
    for _ in range(steps):
        own = torch.autograd.grad(F.cross_entropy(model(x), labels), parameters, create_graph=True)
        inner = torch.stack([(a * b).sum() for a, b in zip(own, gradient, strict=True)]).sum()
        length = torch.stack([(a**2).sum() for a in own]).sum().sqrt()
        value = 1 - inner / (length * norm).clamp_min(1e-30) + total_variation * _roughness(x)
        if value.item() < best:
            best, kept = value.item(), x.detach().clone()
        x.grad = torch.autograd.grad(value, x)[0].sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return Inversion(features=kept, labels=labels, distance=best, method="gradient direction, total variation")


def _roughness(x: Tensor) -> Tensor:
    """Mean absolute difference between neighboring pixels."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def _normal(shape: tuple[int, ...], rng: KeyedRNG, purpose: str) -> Tensor:
    return standard_normal(math.prod(shape), rng.new_stream(purpose)).reshape(shape)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _matching(model: nn.Module, gradient: Sequence[Tensor]) -> list[nn.Parameter]:
    """The trained parameters, of which `gradient` must have the shapes."""
    parameters = _trained(model)
    if [tuple(part.shape) for part in gradient] != [tuple(parameter.shape) for parameter in parameters]:
        raise InvalidArgument(
            "gradient must have one tensor for each trained parameter in their order, got others. "
            "Take it from shared_gradient."
        )
    return parameters


# ----------------------------------------------------------------------------------------------------------------------
# The gradient of one batch, as a participant might share it: exact, or clipped and noisy.
# ----------------------------------------------------------------------------------------------------------------------


def shared_gradient(model: nn.Module, features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The mean gradient of cross entropy, one tensor a trained parameter: what plain federated learning sends.

    Guarantee: none. A single record can often be read off it.

    Args:
        model: features (B, …) ↦ logits (B, classes).
        features: records first.
        labels: (B,).
    """
    loss = F.cross_entropy(model(features), labels)
    return torch.autograd.grad(loss, _trained(model))


def privatized_gradient(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    rng: KeyedRNG | None = None,
) -> tuple[Tensor, ...]:
    """The same, as one DP-SGD step sends it: each record's gradient clipped, the sum noisy, divided by the batch size.

    Guarantee: one Gaussian release with this noise multiplier under add-or-remove-one, for a public number of records.

    Args:
        model: features (B, …) ↦ logits (B, classes).
        features: records first.
        labels: (B,).
        max_grad_norm: clipping norm C > 0.
        noise_multiplier: standard deviation over C, ≥ 0.
        rng: of the noise; fresh by default.
    """
    checks.positive(max_grad_norm=max_grad_norm)
    checks.non_negative(noise_multiplier=noise_multiplier)
    parameters = _trained(model)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for row in range(len(labels)):
        own = shared_gradient(model, features[row : row + 1], labels[row : row + 1])
        squared = sum(((part.double() ** 2).sum() for part in own), torch.zeros((), dtype=torch.float64))
        (factor,) = FlatClipping().clip_factors(squared[None], max_grad_norm=max_grad_norm).tolist()
        if factor > 0:
            total = [sum_ + factor * part for sum_, part in zip(total, own, strict=True)]
    source = rng or KeyedRNG()
    stddev = noise_multiplier * max_grad_norm
    return tuple(
        (sum_ + stddev * _normal(sum_.shape, source, "shared-gradient").to(sum_)) / max(1, len(labels))
        for sum_ in total
    )


def gradient_of_update(
    model: nn.Module, update: Mapping[str, Tensor], *, learning_rate: float, steps: int = 1
) -> tuple[Tensor, ...]:
    """The gradient that a participant's update stands for, −Δ / (η · steps): exact for one step of plain SGD.

    After more steps it is their mean gradient along the way, which attacks take for that at the start.

    Args:
        model: names the trained parameters and their order.
        update: how far each of them moved, by name.
        learning_rate: η > 0 of the participant.
        steps: SGD steps that it took, ≥ 1.

    Example:
        >>> [part.tolist() for part in gradient_of_update(nn.Linear(1, 1, bias=False), {"weight": -torch.ones(1, 1)},
        ...                                               learning_rate=0.5)]
        [[[2.0]]]
    """
    scale = checks.positive(learning_rate=learning_rate) * checks.integer(1, steps=steps)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if set(names) != set(update):
        raise InvalidArgument("update must hold every trained parameter by its name, got others. Was a layer frozen?")
    return tuple(update[name].detach() / -scale for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# From sums back to records: two sums that differ in one record, and least squares on many noisy ones.
# ----------------------------------------------------------------------------------------------------------------------


Floats = NDArray[np.float64]

_RANK_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """Records as the answers have them.

    Args:
        values: an estimate for each record, within the bounds.
        determined: whether the queries fix the record's value when answers are exact.
        residual: root mean square of what the estimates leave unexplained; about the noise's standard deviation.
    """

    values: Floats
    determined: NDArray[np.bool_]
    residual: float


def difference_attack(total: float, total_without: float) -> float:
    """One person's value, from two exact sums that differ in that person.

    Example:
        >>> difference_attack(251_000.0, 198_500.0)
        52500.0
    """
    return float(total) - float(total_without)


def least_squares_reconstruction(
    queries: ArrayLike, answers: ArrayLike, *, low: float = 0.0, high: float = 1.0
) -> Reconstruction:
    """Least squares on released linear statistics, cut to the bounds.

    Args:
        queries: (statistics, records): row i says with which weight each record counts in statistic i.
        answers: (statistics,), exact or noisy.
        low: smallest possible value of a record.
        high: largest possible value.

    Example:
        >>> found = least_squares_reconstruction([[1, 1, 1], [0, 1, 1]], [2.0, 1.0])
        >>> found.determined.tolist(), round(float(found.values[0]), 6)
        ([True, False, False], 1.0)

    References:
        Dinur, Nissim 2003, "Revealing information while preserving privacy"; Dwork, McSherry, Talwar 2007, for the
        least-squares decoder.
    """
    weights, statistics = np.asarray(queries, dtype=np.float64), np.asarray(answers, dtype=np.float64)
    if weights.ndim != 2 or statistics.shape != weights.shape[:1] or not weights.size:
        raise InvalidArgument(
            f"queries and answers must have shapes (statistics, records) and (statistics,), got {weights.shape} and "
            f"{statistics.shape}. Give one row of weights a statistic."
        )
    if not low < high:
        raise InvalidArgument(f"low must be below high, got {low} and {high}. Swap them.")
    _, singular, directions = np.linalg.svd(weights, full_matrices=False)
    known = directions[singular > _RANK_TOLERANCE * singular.max(initial=0.0)]
    # A unit vector in the row space is a combination of the released statistics: its answer is the record itself.
    determined = (known**2).sum(axis=0) > 1 - 1e-6
    middle = (low + high) / 2
    shift = np.linalg.lstsq(weights, statistics - weights.sum(axis=1) * middle, rcond=_RANK_TOLERANCE)[0]
    values = middle + shift
    residual = float(np.sqrt(np.mean((statistics - weights @ values) ** 2)))
    return Reconstruction(
        values=np.clip(values, low, high),
        determined=cast("NDArray[np.bool_]", determined),
        residual=residual,
    )


def reconstruct_bits(queries: ArrayLike, answers: ArrayLike) -> NDArray[np.int64]:
    """One bit a record from counting queries: least squares, then rounding.

    With n records and some more random queries nearly all bits come out while the noise is below about √n; only more
    noise than that, or fewer answers, protects anyone.

    Args:
        queries: (counts, records) of zeros and ones.
        answers: (counts,).

    Returns:
        Bits, (records,).
    """
    return (least_squares_reconstruction(queries, answers).values > 0.5).astype(np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Model inversion: the input that a model holds for most typical of a class.
#
# What comes out is a prototype, a property of the class that the model was meant to learn. It is no record, and it
# shows no membership: only where a class is one person (a face, a voice) does it give a person away, and then
# differential privacy for single records of that person does not help either.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassPrototype:
    """An input that the model is sure of.

    Args:
        features: the input, with the shape of one record.
        label: the class.
        confidence: the model's probability of it there, in [0, 1].
    """

    features: Tensor
    label: int
    confidence: float


def class_prototype(
    model: nn.Module,
    label: int,
    *,
    shape: Sequence[int],
    steps: int = 200,
    learning_rate: float = 0.1,
    smoothness: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
) -> ClassPrototype:
    """Gradient descent on 1 − confidence from the middle gray, as the attack on face recognition did (MI-Face).

    The attacker knows the model and its weights, or can ask for gradients.

    Args:
        model: features ↦ logits; used in evaluation mode, and left in the mode it was in.
        label: the class, ≥ 0.
        shape: of one record.
        steps: ≥ 1.
        learning_rate: of Adam, > 0.
        smoothness: weight ≥ 0 of the squared differences between neighboring pixels.
        low: smallest value of a feature.
        high: largest value of a feature.

    References:
        Fredrikson, Jha, Ristenpart 2015, "Model inversion attacks that exploit confidence information", algorithm 1.
    """
    checks.integer(0, label=label)
    checks.non_negative(smoothness=smoothness)
    checks.positive(learning_rate=learning_rate)
    like = next(model.parameters())
    x = torch.full((1, *shape), (low + high) / 2, dtype=like.dtype, device=like.device, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    with evaluation_mode(model):
        for _ in range(checks.integer(1, steps=steps)):
            loss = F.cross_entropy(model(x), torch.tensor([label], device=like.device))
            if smoothness > 0 and len(shape) >= 2:
                rough = (x[..., 1:, :] - x[..., :-1, :]).square().sum() + (x[..., 1:] - x[..., :-1]).square().sum()
                loss = loss + smoothness * rough
            x.grad = torch.autograd.grad(loss, x)[0]
            optimizer.step()
            with torch.no_grad():
                x.clamp_(low, high)
        with torch.no_grad():
            confidence = model(x).softmax(dim=1)[0, label].item()
    return ClassPrototype(features=x.detach()[0], label=label, confidence=confidence)


# ----------------------------------------------------------------------------------------------------------------------
# How alike two pictures are: PSNR and SSIM.
# ----------------------------------------------------------------------------------------------------------------------


_WINDOW, _STD = 11, 1.5
_K1, _K2 = 0.01, 0.03
_MOST = 200.0


def psnr(found: Tensor, truth: Tensor, *, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB, at most 200: above 20 a digit can be read, above 30 it is nearly the original.

    Args:
        found: a picture, any shape.
        truth: the original, of the same shape.
        peak: largest value of a pixel, > 0.

    Example:
        >>> round(psnr(torch.zeros(4), torch.full((4,), 0.1)), 6)
        20.0
    """
    _same_shape(found, truth)
    checks.positive(peak=peak)
    error = float((found.double() - truth.double()).square().mean())
    return _MOST if error == 0 else min(_MOST, 10 * float(torch.log10(torch.tensor(peak**2 / error))))


def ssim(found: Tensor, truth: Tensor, *, peak: float = 1.0) -> float:
    """Structural similarity in [−1, 1], 1 for the same picture.

    Args:
        found: a picture (channels, height, width) of at least 11 × 11 pixels.
        truth: the original, of the same shape.
        peak: largest value of a pixel, > 0.

    References:
        Wang, Bovik, Sheikh, Simoncelli 2004, equation 13; Gaussian window of 11 × 11, standard deviation 1.5.
    """
    _same_shape(found, truth)
    checks.positive(peak=peak)
    if found.ndim != 3 or min(found.shape[1:]) < _WINDOW:
        raise InvalidArgument(
            f"found must be (channels, height, width) of {_WINDOW} × {_WINDOW} pixels or more, got "
            f"{tuple(found.shape)}. Use psnr."
        )
    offset = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    line = torch.exp(-(offset**2) / (2 * _STD**2))
    window = (line[:, None] * line[None, :] / line.sum() ** 2)[None, None]

    def mean(picture: Tensor) -> Tensor:
        return F.conv2d(picture.unsqueeze(1), window)

    x, y = found.detach().double().cpu(), truth.detach().double().cpu()
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both = mean(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _same_shape(found: Tensor, truth: Tensor) -> None:
    if found.shape != truth.shape:
        raise InvalidArgument(
            f"found and truth must have one shape, got {tuple(found.shape)} and {tuple(truth.shape)}."
        )


# ----------------------------------------------------------------------------------------------------------------------
# A malicious participant: in federated learning it paints another participant's class with a generator.
#
# The shared model serves the attacker as the judge of its generator. Whatever comes out is what the class looks like,
# not one record; so clipping and noise for single records leave the attack alive, and only noise for whole
# participants, which hides that a participant has such a class at all, ends it.
# ----------------------------------------------------------------------------------------------------------------------


Pair = tuple[Tensor, Tensor]

_LATENT = 32
_FEDERATION = "federation-normal"
_FAKES = 32


class Protection(StrEnum):
    """What the participants' updates are protected by."""

    NONE = "none"
    RECORD = "record"
    CLIENT = "client"


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A small federated learning of one victim and one attacker.

    Args:
        rounds: ≥ 1.
        local_steps: SGD steps of each participant a round, ≥ 1.
        batch_size: records a local step, ≥ 1.
        learning_rate: of the participants, > 0.
        protection: none; `RECORD` clips each record's gradient in the victim's steps and adds noise; `CLIENT` has the
            server clip each participant's whole update and add noise to their sum.
        max_grad_norm: clipping norm of a record's gradient, or of a participant's update, > 0.
        noise_multiplier: standard deviation over that norm, ≥ 0.
    """

    rounds: int = 60
    local_steps: int = 10
    batch_size: int = 64
    learning_rate: float = 0.1
    protection: Protection = Protection.NONE
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        checks.integer(1, rounds=self.rounds)
        checks.integer(1, local_steps=self.local_steps)
        checks.integer(1, batch_size=self.batch_size)
        checks.positive(learning_rate=self.learning_rate)
        checks.positive(max_grad_norm=self.max_grad_norm)
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "protection", Protection(self.protection))


@dataclass(frozen=True, kw_only=True, eq=False)
class Impersonation:
    """What the attacker painted.

    Args:
        pictures: (pictures, *shape), in [0, 1].
        confidence: the shared model's mean probability that they are of the victim's class.
        model: the shared model after the last round.
    """

    pictures: Tensor
    confidence: float
    model: nn.Module


class Impersonator:
    """The attacker alone, for a federation of one's own: `update` is what it sends in a round, `pictures` what it has.

    It trains a generator to have its pictures taken for `target` by the shared model, and puts them into its own
    training under a label of their own, which drives the owner of the class to tell ever more about it.

    Args:
        records: features (n, channels, height, width) in [0, 1] and labels of the attacker's.
        target: the class to paint.
        classes: number of true classes; the shared model has one output more, for the fakes.
        federation: the local steps.
        generator_steps: a round, ≥ 1.
        rng: of batches, noise and pictures; fresh by default.

    Example:
        >>> attacker = Impersonator((torch.ones(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64)), target=1, classes=2,
        ...                         federation=Federation(local_steps=1, batch_size=4), generator_steps=1)
        >>> sent = attacker.update(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        >>> list(sent), tuple(attacker.pictures(5).shape)
        (['1.weight', '1.bias'], (5, 1, 8, 8))

    References:
        Hitaj, Ateniese, Pérez-Cruz 2017, "Deep models under the GAN", section 5.
    """

    def __init__(
        self,
        records: Pair,
        *,
        target: int,
        classes: int,
        federation: Federation,
        generator_steps: int = 30,
        rng: KeyedRNG | None = None,
    ) -> None:
        self._records, self._target, self._federation = records, checks.integer(0, target=target), federation
        self._classes = checks.integer(2, classes=classes)
        self._steps = checks.integer(1, generator_steps=generator_steps)
        self._source = rng or KeyedRNG()
        self._painter = _painter(tuple(records[0].shape[1:]))
        self._optimizer = torch.optim.Adam(self._painter.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def update(self, model: nn.Module) -> dict[str, Tensor]:
        """What the attacker sends: how far it wants each parameter moved. `model`, the shared one, stays as it is."""
        parts = self.flat_update(model).split([parameter.numel() for parameter in model.parameters()])
        named = zip(model.named_parameters(), parts, strict=True)
        return {name: part.view_as(parameter) for (name, parameter), part in named}

    def flat_update(self, model: nn.Module) -> Tensor:
        """`update` as one vector, in the order of the model's parameters."""
        weights = _flat(model)
        self._paint(model)
        fakes = self.pictures(_FAKES * self._federation.local_steps)
        batches = _with_fakes(_batches(self._records, self._federation, self._source), fakes, self._classes)
        found = _update(model, weights, batches, self._federation, None)
        _load(model, weights)
        return found

    def _paint(self, model: nn.Module) -> None:
        """Train the generator to have its pictures taken for the target by `model`."""
        wanted = torch.full((_FAKES,), self._target)
        parameters = list(self._painter.parameters())
        for _ in range(self._steps):
            loss = F.cross_entropy(model(self._painter(_normal((_FAKES, _LATENT), self._source, _FEDERATION))), wanted)
            for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = slope
            self._optimizer.step()

    def pictures(self, count: int = _FAKES) -> Tensor:
        """Pictures as the attacker paints them now, (count, *shape), in [0, 1]."""
        with torch.no_grad():
            return self._painter(_normal((count, _LATENT), self._source, _FEDERATION))


def impersonate(
    victim: Pair,
    attacker: Pair,
    *,
    target: int,
    classes: int,
    federation: Federation,
    generator_steps: int = 30,
    rng: KeyedRNG | None = None,
) -> Impersonation:
    """Runs the attack of an `Impersonator` in a federation of two.

    Args:
        victim: features in [0, 1] and labels of the victim, some of them `target`.
        attacker: of the attacker, none of them `target`.
        target: the class to paint.
        classes: number of true classes; the shared model has one more, for the fakes.
        federation: rounds, steps and protection.
        generator_steps: of the attacker a round, ≥ 1.
        rng: of batches, noise and pictures; fresh by default.

    References:
        Hitaj, Ateniese, Pérez-Cruz 2017, "Deep models under the GAN", section 5.
    """
    if target in attacker[1].tolist() or target not in victim[1].tolist():
        raise InvalidArgument(
            "target must be a class of the victim's that the attacker has no records of, got another. Choose one."
        )
    if victim[0].ndim != 4 or any(side % 4 for side in victim[0].shape[2:]):
        raise InvalidArgument(
            f"victim must have pictures (records, channels, height, width) with sides that are multiples of 4, got "
            f"{tuple(victim[0].shape)}. Pad them."
        )
    source, shape = rng or KeyedRNG(), tuple(victim[0].shape[1:])
    model = _shared_model(shape, checks.integer(2, classes=classes) + 1)
    malicious = Impersonator(
        attacker,
        target=target,
        classes=classes,
        federation=federation,
        generator_steps=generator_steps,
        rng=source,
    )
    weights = _flat(model)
    for _ in range(federation.rounds):
        protected = federation.protection is Protection.RECORD
        own = _update(model, weights, _batches(victim, federation, source), federation, source if protected else None)
        _load(model, weights)
        weights = weights + _together([own, malicious.flat_update(model)], federation, source)
        _load(model, weights)
    pictures = malicious.pictures()
    with torch.no_grad():
        confidence = model(pictures).softmax(dim=1)[:, target].mean().item()
    return Impersonation(pictures=pictures, confidence=confidence, model=model)


# ── the federation ──────────────────────────────────────────────────────────────────────────────────────────


def _together(updates: list[Tensor], federation: Federation, rng: KeyedRNG) -> Tensor:
    """Mean update; under client protection each is clipped and their sum noisy."""
    if federation.protection is not Protection.CLIENT:
        return torch.stack(updates).mean(dim=0)
    bound = federation.max_grad_norm
    squares = torch.stack([(update.double() ** 2).sum() for update in updates])
    factors = FlatClipping().clip_factors(squares, max_grad_norm=bound)
    total = sum((f.to(u) * u for f, u in zip(factors, updates, strict=True)), torch.zeros_like(updates[0]))
    return (total + federation.noise_multiplier * bound * _normal(total.shape, rng, _FEDERATION)) / len(updates)


def _update(
    model: nn.Module,
    weights: Tensor,
    batches: Iterator[Pair],
    federation: Federation,
    noise: KeyedRNG | None,
) -> Tensor:
    """What one participant sends: its weights after the local steps, minus those it was given."""
    _load(model, weights)
    parameters, bound = list(model.parameters()), federation.max_grad_norm
    for features, labels in batches:
        if noise is None:
            slopes = torch.autograd.grad(F.cross_entropy(model(features), labels), parameters)
        else:
            sums = {parameter: torch.zeros_like(parameter) for parameter in parameters}
            capture = GradientCapture(model)
            try:
                with capture.capturing(records=len(labels)):
                    F.cross_entropy(model(features), labels, reduction="sum").backward()
                factors = FlatClipping().clip_factors(capture.squared_norm_bounds(), max_grad_norm=bound)
                capture.add_weighted_sums(factors, sums)
            finally:
                capture.detach()
            stddev = federation.noise_multiplier * bound
            slopes = [
                (sums[p] + stddev * _normal(p.shape, noise, _FEDERATION)) / federation.batch_size for p in parameters
            ]
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter -= federation.learning_rate * slope
    return _flat(model) - weights


def _batches(records: Pair, federation: Federation, rng: KeyedRNG) -> Iterator[Pair]:
    features, labels = records
    for _ in range(federation.local_steps):
        draws = rng.new_stream("federation-batch").uniform(federation.batch_size) * len(labels)
        chosen = torch.from_numpy(draws.astype(np.int64))
        yield features[chosen], labels[chosen]


def _with_fakes(batches: Iterator[Pair], fakes: Tensor, label: int) -> Iterator[Pair]:
    for (features, labels), part in zip(batches, fakes.split(_FAKES), strict=True):
        yield torch.cat([features, part]), torch.cat([labels, torch.full((len(part),), label)])


# ── the attacker ────────────────────────────────────────────────────────────────────────────────────────────


def _painter(shape: tuple[int, ...]) -> nn.Module:
    """Noise → picture by two transposed convolutions: neighboring pixels are painted together."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Linear(_LATENT, 64 * (height // 4) * (width // 4)),
        nn.Unflatten(1, (64, height // 4, width // 4)),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def _shared_model(shape: tuple[int, ...], outputs: int) -> nn.Module:
    channels, height, width = shape
    sides = -(-height // 4) * -(-width // 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, stride=2, padding=2),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * sides, outputs),
    )


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _load(model: nn.Module, weights: Tensor) -> None:
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
