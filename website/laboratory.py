"""Compute the table of the laboratory: what Poisson-sampled Gaussian steps cost, on a grid of settings.

For every sample rate q, noise multiplier σ and number of steps T the table holds upper bounds from the certified
accountant under add-or-remove-one: the advantage, ε at fixed δ and at fractions of the advantage, and the tail of the
privacy loss at these ε. Values are written as whole numbers on a logarithmic scale, rounded up by at most 0.07 %.

The tail is bounded through the convexity of δ in e^ε: for h > 0

    P(Z > t) = δ(t) + e^t Q(Z > t),    Q(Z > t) ≤ (δ(t − h) − δ(t)) / (e^t − e^(t−h)).

Run: python website/laboratory.py (minutes; the page and the report show what it wrote)
"""

import base64
import json
import math
import struct
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from sordino import accounting
from sordino.events import Event, Gaussian, PoissonSampled, SelfComposed

__all__ = ["DELTAS", "FRACTIONS", "NOISES", "RATES", "STEPS", "event", "main", "node", "values"]

TABLE = Path(__file__).parents[1] / "src/sordino/report/templates/laboratory.json"
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NOISES = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
STEPS = (1, 10, 100, 300, 1000, 3000, 10_000, 30_000)
DELTAS = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10)
FRACTIONS = (0.75, 0.5, 0.25, 0.1, 0.03)
LEAST, STEP = 1e-12, 0.00065
_NEAR = 2e-4  # h, as a part of the range of ε


def event(rate: float, noise: float, steps: int) -> Event:
    """`steps` Poisson-sampled Gaussian steps."""
    gaussian = Gaussian(noise_multiplier=noise)
    return SelfComposed(event=gaussian if rate == 1 else PoissonSampled(sample_rate=rate, event=gaussian), count=steps)


def node(settings: tuple[float, float, int]) -> list[float]:
    """Advantage, ε at each of `DELTAS` and of `FRACTIONS` of the advantage, P(Z > ε) at each of `DELTAS`."""
    run = event(*settings)
    advantage = min(1.0, accounting.membership_advantage(run).upper)
    epsilons = [accounting.epsilon(run, delta).upper if delta < advantage else 0.0 for delta in DELTAS]
    others = [accounting.epsilon(run, part * advantage).upper for part in FRACTIONS]
    positive = [epsilon for epsilon in epsilons if epsilon > 0]
    width, tails = _NEAR * (positive[-1] - (positive[0] if len(positive) > 1 else 0.0)), []
    for at in epsilons:
        if at <= width:
            tails.append(0.0)
            continue
        here, before = accounting.delta(run, at), accounting.delta(run, at - width)
        tails.append(min(1.0, here.upper - (before.upper - here.lower) / math.expm1(-width)))
    return [advantage, *epsilons, *others, *tails]


def values(number: int) -> float:
    """The number that a code stands for, as the page computes it."""
    return 0.0 if number == 0 else LEAST * math.exp((number - 1) * STEP)


def code(value: float) -> int:
    """The smallest code that stands for no less than a value."""
    if value <= 0:
        return 0
    found = max(1, 1 + math.ceil(math.log(value / LEAST) / STEP))
    while values(found) < value:
        found += 1
    if found > 65535:
        raise ValueError(f"value must be below {values(65535):.3g}, got {value:.3g}. Make STEP larger.")
    return found


def main() -> None:
    """Write the table."""
    grid = list(product(RATES, NOISES, STEPS))
    with ProcessPoolExecutor(2) as pool:
        codes = [code(value) for found in pool.map(node, grid, chunksize=8) for value in found]
    body = {
        "rates": RATES,
        "noises": NOISES,
        "steps": STEPS,
        "deltas": DELTAS,
        "fractions": FRACTIONS,
        "least": LEAST,
        "step": STEP,
        "codes": base64.b64encode(struct.pack(f"<{len(codes)}H", *codes)).decode("ascii"),
    }
    TABLE.write_text(json.dumps(body, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(grid)} settings, {TABLE.stat().st_size / 1024:.0f} KB in {TABLE}")


if __name__ == "__main__":
    main()
