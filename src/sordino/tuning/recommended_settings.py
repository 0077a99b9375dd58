"""Settings of DP-SGD by published rules, from n, d, ε and δ alone. No data, nothing is charged.

| setting | rule | source |
|---|---|---|
| batch B | the smallest with a signal q√T/σ within 10 % of the best | Sander, Stock, Sablayrolles 2023 |
| steps T | epochs · n/B, at most (nμ)²/d | Bassily, Feldman, Talwar, Thakurta 2019, in its order |
| noise σ | the least for (ε, δ), B and T | the accountant |
| clipping C | 1: C and the learning rate are one knob for normalized gradients | De et al. 2022; Bu et al. 2023 |
| learning rate | R / (C√T · √(1 + dσ²/B²)), mean gradients, plain SGD | Bassily, Smith, Thakurta 2014 |

R is the way from start to end. The rules are for convex losses with gradients of norm C; for deep nets they are where
to begin, not where to end. At another ε, learning rate × steps grows in proportion to ε (Panda et al. 2024). With a
fixed ratio B/σ and fixed T the total amount of noise stays the same, so settings can be tried at a small batch first
(Sander, Stock and Sablayrolles 2023): `small_batch` is that trial, on public records.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, PoissonSampled, SelfComposed

_WITHIN = 0.9
_RUNGS = 10
_SMALLEST_TRIAL = 16
_CLIPPING = 1.0


@dataclass(frozen=True, kw_only=True)
class RecommendedSettings:
    """What the rules say.

    Args:
        batch_size: expected batch size B.
        sample_rate: q = B/n.
        steps: T.
        epochs: q·T.
        noise_multiplier: σ.
        max_grad_norm: C.
        learning_rate: for plain SGD on the mean of clipped gradients; with momentum m, times 1 − m.
        signal: q√T/σ, the inverse of the total amount of noise.
        signal_ceiling: the most that ε and δ allow, μ.
        gradient_to_noise: B/(σ√d): the norm of a sum of equal clipped gradients over that of the noise, in one step.
        useful_steps: (nμ)²/d, beyond which steps only add noise.
        small_batch: (B′, σ′) with B′/σ′ = B/σ, for cheap trials on public records with the same steps.
    """

    batch_size: int
    sample_rate: float
    steps: int
    epochs: float
    noise_multiplier: float
    max_grad_norm: float
    learning_rate: float
    signal: float
    signal_ceiling: float
    gradient_to_noise: float
    useful_steps: float
    small_batch: tuple[int, float]


def recommend_settings(
    *,
    dataset_size: int,
    num_parameters: int,
    target_epsilon: float,
    delta: float,
    epochs: float = 40.0,
    distance: float = 1.0,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> RecommendedSettings:
    """Batch size, steps, noise, clipping norm and learning rate by published rules.

    Guarantee: DP-SGD with Poisson sampling and these settings is (target_epsilon, delta)-differentially private, the
    number of records being public. No record is read.

    Args:
        dataset_size: records n ≥ 1, public.
        num_parameters: trainable parameters d ≥ 1.
        target_epsilon: > 0.
        delta: in (0, 1).
        epochs: what may be computed, in passes over the records, > 0.
        distance: R > 0, from where training starts to where it should end.
        neighboring_relation: the neighboring relation.

    Example:
        >>> found = recommend_settings(dataset_size=60_000, num_parameters=7850, target_epsilon=1.0, delta=1e-5)
        >>> found.batch_size, found.steps, found.max_grad_norm
        (256, 9375, 1.0)
    """
    checks.integer(1, dataset_size=dataset_size)
    checks.integer(1, num_parameters=num_parameters)
    checks.positive(epochs=epochs)
    checks.positive(distance=distance)
    goal = {"target_epsilon": target_epsilon, "delta": delta, "neighboring_relation": neighboring_relation}
    ceiling = 1 / accounting.calibrate_noise_multiplier(lambda z: Gaussian(noise_multiplier=z), **goal)
    useful = (dataset_size * ceiling) ** 2 / num_parameters
    rungs = [_rung(size, dataset_size, epochs, useful, goal) for size in _ladder(dataset_size)]
    best = max(signal for *_, signal in rungs)
    # The smallest batch that loses little: its steps are the most.
    size, steps, noise, signal = next(rung for rung in rungs if rung[3] >= _WITHIN * best)
    spread = math.sqrt(1 + num_parameters * noise**2 / size**2)
    trial = max(min(size, _SMALLEST_TRIAL), round(size / max(1.0, noise / 0.5)))
    return RecommendedSettings(
        batch_size=size,
        sample_rate=size / dataset_size,
        steps=steps,
        epochs=steps * size / dataset_size,
        noise_multiplier=noise,
        max_grad_norm=_CLIPPING,
        learning_rate=float(f"{distance / (_CLIPPING * math.sqrt(steps) * spread):.3g}"),
        signal=signal,
        signal_ceiling=ceiling,
        gradient_to_noise=size / (noise * math.sqrt(num_parameters)),
        useful_steps=useful,
        small_batch=(trial, noise * trial / size),
    )


def _ladder(records: int) -> list[int]:
    """Powers of two up to half of the records, and all of them."""
    top = max(0, math.floor(math.log2(max(1, records / 2))))
    return sorted({*(2**power for power in range(max(0, top - _RUNGS + 1), top + 1)), records})


def _rung(
    size: int, records: int, epochs: float, useful: float, goal: dict[str, float | NeighboringRelation]
) -> tuple[int, int, float, float]:
    """(B, T, σ, signal) of one batch size."""
    rate = size / records
    steps = max(1, min(math.ceil(epochs / rate - 1e-9), math.floor(max(1.0, useful))))
    noise = accounting.calibrate_noise_multiplier(_sgd(rate, steps), **goal)  # pyright: ignore[reportArgumentType]
    if not noise > 0:
        raise InvalidArgument("target_epsilon must need some noise, got one so large that none is. Lower it.")
    return size, steps, noise, rate * math.sqrt(steps) / noise


def _sgd(rate: float, steps: int) -> Callable[[float], Event]:
    def event(noise: float) -> Event:
        step: Event = Gaussian(noise_multiplier=noise)
        return SelfComposed(event=PoissonSampled(sample_rate=rate, event=step) if rate < 1 else step, count=steps)

    return event
