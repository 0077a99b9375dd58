"""A malicious participant: in federated learning it paints another participant's class with a generator.

The shared model serves the attacker as the judge of its generator. Whatever comes out is what the class looks like, not
one record; so clipping and noise for single records leave the attack alive, and only noise for whole
participants, which hides that a participant has such a class at all, ends it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.clipping import FlatClipping
from sordino.errors import InvalidArgument
from sordino.gradients import GradientCapture
from sordino.mechanisms import standard_normal
from sordino.randomness import KeyedRNG

__all__ = ["Federation", "Impersonation", "Impersonator", "Protection", "impersonate"]

Pair = tuple[Tensor, Tensor]

_LATENT = 32
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
        _paint(model, self._painter, self._optimizer, self._target, self._steps, self._source)
        fakes = self.pictures(_FAKES * self._federation.local_steps)
        batches = _with_fakes(_batches(self._records, self._federation, self._source), fakes, self._classes)
        found = _update(model, weights, batches, self._federation, None)
        _load(model, weights)
        return found

    def pictures(self, count: int = _FAKES) -> Tensor:
        """Pictures as the attacker paints them now, (count, *shape), in [0, 1]."""
        with torch.no_grad():
            return self._painter(_normal((count, _LATENT), self._source))


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
    return (total + federation.noise_multiplier * bound * _normal(total.shape, rng)) / len(updates)


def _update(
    model: nn.Module,
    weights: Tensor,
    batches: Iterator[Pair],
    federation: Federation,
    noise: KeyedRNG | None,
) -> Tensor:
    """What one participant sends: its weights after the local steps, minus those it was given."""
    _load(model, weights)
    parameters = list(model.parameters())
    for features, labels in batches:
        if noise is None:
            slopes = torch.autograd.grad(F.cross_entropy(model(features), labels), parameters)
        else:
            slopes = _private_slopes(model, parameters, features, labels, federation, noise)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter -= federation.learning_rate * slope
    return _flat(model) - weights


def _private_slopes(
    model: nn.Module,
    parameters: list[nn.Parameter],
    features: Tensor,
    labels: Tensor,
    federation: Federation,
    rng: KeyedRNG,
) -> list[Tensor]:
    bound, sums = federation.max_grad_norm, {parameter: torch.zeros_like(parameter) for parameter in parameters}
    capture = GradientCapture(model)
    try:
        with capture.capturing(records=len(labels)):
            F.cross_entropy(model(features), labels, reduction="sum").backward()
        factors = FlatClipping().clip_factors(capture.squared_norm_bounds(), max_grad_norm=bound)
        capture.add_weighted_sums(factors, sums)
    finally:
        capture.detach()
    stddev = federation.noise_multiplier * bound
    return [(sums[p] + stddev * _normal(p.shape, rng)) / federation.batch_size for p in parameters]


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


def _paint(
    model: nn.Module, painter: nn.Module, optimizer: torch.optim.Optimizer, target: int, steps: int, source: KeyedRNG
) -> None:
    wanted = torch.full((_FAKES,), target)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(painter(_normal((_FAKES, _LATENT), source))), wanted)
        slopes = torch.autograd.grad(loss, list(painter.parameters()))
        for parameter, slope in zip(painter.parameters(), slopes, strict=True):
            parameter.grad = slope
        optimizer.step()


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


def _normal(shape: tuple[int, ...], rng: KeyedRNG) -> Tensor:
    return standard_normal(int(np.prod(shape)), rng.new_stream("federation-normal")).reshape(shape)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _load(model: nn.Module, weights: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
