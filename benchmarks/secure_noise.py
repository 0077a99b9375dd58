"""What secure noise costs: noise for a million parameters, and a private step, beside floating-point noise.

Run ``OMP_NUM_THREADS=1 python benchmarks/secure_noise.py``. Processor time, methods interleaved, medians of ratios.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sordino.gradients import GradientCapture
from sordino.mechanisms.integer_noise import GridSumMechanism
from sordino.mechanisms.tensor_noise import standard_normal
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.training.plan import Plan
from sordino.training.step import PrivateStep

_ROUNDS = 7


def network() -> nn.Module:
    """The usual small convolutional network for 28 × 28 pictures."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def perceptron() -> nn.Module:
    """One wide hidden layer."""
    return nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))


def logistic() -> nn.Module:
    """Logistic regression."""
    return nn.Linear(784, 10)


def clock(work: Callable[[], object]) -> float:
    """Processor seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def stepper(model: nn.Module, x: Tensor, y: Tensor, *, secure: bool, alone: bool) -> Callable[[], None]:
    """One private step on all records, every time it is called."""
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        steps=1,
        expected_batch_size=float(len(x)),
        delta=1e-5,
        secure_mode=secure,
    )
    step = PrivateStep(GradientCapture(model), plan, KeyedRNG())

    def work() -> None:
        for chunk in split_into_microbatches(
            np.arange(len(x)), step=step.last_step + 1, microbatch_size=1 if alone else None
        ):
            index = torch.from_numpy(chunk.indices)
            with step.capturing(chunk):
                nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum").backward()
            step.add(chunk)
        step.finish()

    return work


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = KeyedRNG()
    mechanism = GridSumMechanism(noise_multiplier=1.0, record_norm=1.0, dimension=10**6)
    pairs = [
        (
            clock(lambda: mechanism.noise(10**6, rng.new_stream("secure"))),
            clock(lambda: standard_normal(10**6, rng.new_stream("floats"))),
        )
        for _ in range(_ROUNDS)
    ]
    secure, floats = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"noise for 10^6 parameters: {secure:.0f} ms, floating point {floats:.1f} ms")
    for make, shape, records in ((network, (1, 28, 28), 256), (perceptron, (60,), 512), (logistic, (784,), 512)):
        x, y = torch.ones(records, *shape).cumsum(0) / records, torch.arange(records) % 10
        works = [stepper(make(), x, y, secure=s, alone=a) for s, a in ((False, False), (True, False), (True, True))]
        rows = [[clock(work) for work in works] for _ in range(_ROUNDS + 1)][1:]
        together, alone = (statistics.median(row[k] / row[0] for row in rows) for k in (1, 2))
        print(f"{make.__name__}, {records} records: secure {together:.1f}, one record at a time {alone:.0f}")


if __name__ == "__main__":
    main()
