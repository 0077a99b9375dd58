"""The zoo: mechanisms broken in ways known from public reports, each caught by the check that the page names."""

import re
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.audit import EngineLibrary, check_engine
from sordino.audit.conformance.engine_cases import ENGINE_CHECKS
from sordino.clipping import FlatClipping
from sordino.mechanisms import TensorGaussianMechanism
from sordino.sampling import PoissonSampling
from sordino.training import accumulators
from sordino.training.accumulators import ClippedSumAccumulator
from sordino.training.charging import ChargeLog
from sordino.training.step import PrivateStep

PAGE = Path(__file__).parents[2] / "docs" / "auditing.md"
add_noise, factors, draw = TensorGaussianMechanism.add_noise_, FlatClipping.clip_factors, PoissonSampling.draw
add, finish, charge, finite = ClippedSumAccumulator.add, PrivateStep.finish, ChargeLog.add, accumulators._finite

NOISE = "noise has the declared scale in every tensor"
FRESH = "noise is fresh in every step and coordinate"
SENSITIVITY = "one record moves the sum by at most the clipping norm"
CHUNKS = "chunks have the sum of the whole batch"
DIVISOR = "the divisor is public"
POISSON = "batches are drawn by Poisson sampling"
BROKEN = "a broken record adds nothing and stops nothing"
RESUME = "a resumed run draws new noise"
CHARGED = "every step is charged"


def scaled_noise(factor):
    def broken(self, tensors, *, rng, step, rank=0):
        weaker = TensorGaussianMechanism(
            noise_multiplier=factor * self.noise_multiplier, l2_sensitivity=self.l2_sensitivity
        )
        add_noise(weaker, tensors, rng=rng, step=step, rank=rank)

    return broken


def no_noise(self, tensors, *, rng, step, rank=0):
    return None


def noise_reused(self, tensors, *, rng, step, rank=0):
    add_noise(self, tensors, rng=rng, step=0, rank=rank)


def one_noise_for_all_coordinates(self, tensors, *, rng, step, rank=0):
    for number, tensor in enumerate(tensors):
        single = torch.zeros(1)
        add_noise(self, [single], rng=rng, step=step, rank=rank + number)
        tensor.add_(single)


def last_layer_without_noise(self, tensors, *, rng, step, rank=0):
    add_noise(self, tensors[:-2], rng=rng, step=step, rank=rank)


def noise_of_the_mean(self, tensors, *, rng, step, rank=0):
    scaled_noise(1 / 8)(self, tensors, rng=rng, step=step, rank=rank)


def clip_of_the_sum(self, tensors, *, rng, step, rank=0):
    norm = torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()
    for tensor in tensors:
        tensor.mul_((12 * self.l2_sensitivity / norm).clamp(max=1))
    add_noise(self, tensors, rng=rng, step=step, rank=rank)


def no_clipping(self, squared_norms, *, max_grad_norm):
    return torch.ones_like(squared_norms)


def twice_the_norm(self, squared_norms, *, max_grad_norm):
    return factors(self, squared_norms, max_grad_norm=2 * max_grad_norm)


def norms_not_square_rooted(self, squared_norms, *, max_grad_norm):
    return factors(self, squared_norms.sqrt(), max_grad_norm=max_grad_norm)


def each_layer_alone(self, sizes):
    return tuple((name,) for name in sizes)


def the_whole_norm_for_each(self, sizes, *, max_grad_norm):
    return (max_grad_norm,) * len(sizes)


def counted_twice(self, into, *, records):
    before = {parameter: total.clone() for parameter, total in into.items()}
    add(self, into, records=records)
    for parameter, total in into.items():
        total.add_(total - before.get(parameter, 0))


class Chunks:
    """Adds a later chunk's records twice, as a sum that is not cleared between micro-batches does."""

    def begin(self, now):
        self._chunks_so_far = 0
        begin(self, now)

    def add(self, into, *, records):
        (counted_twice if self._chunks_so_far else add)(self, into, records=records)
        self._chunks_so_far += 1


begin = ClippedSumAccumulator.begin


class Realized:
    """Divides by the number of records that there are."""

    def add(self, into, *, records):
        self._records = getattr(self, "_records", 0) + records
        add(self, into, records=records)

    def finish(self):
        scale = self._at(self._step).expected_batch_size / max(self.bounds._records, 1)
        self.bounds._records = 0
        finish(self)
        for parameter in self._capture.trainable():
            parameter.grad.mul_(scale)


def shuffled(self, *, dataset_size, step, rng):
    """Each record once an epoch, in batches of one size."""
    epoch = max(1, round(1 / self.sample_rate))
    order = np.argsort(rng.stream("shuffle", step=step // epoch).integers64(dataset_size))
    return np.sort(order[step % epoch :: epoch])


def fixed_size(self, *, dataset_size, step, rng):
    order = np.argsort(rng.stream("fixed", step=step).integers64(dataset_size))
    return np.sort(order[: round(self.sample_rate * dataset_size)])


def more_than_declared(self, *, dataset_size, step, rng):
    return draw(
        PoissonSampling(sample_rate=min(1.0, 1.5 * self.sample_rate)),
        dataset_size=dataset_size,
        step=step,
        rng=rng,
    )


def not_a_number_let_through(squares):
    return torch.nan_to_num(squares, nan=0.0, posinf=0.0)


def step_skipped(self, tensors, *, rng, step, rank=0):
    if all(bool(tensor.isfinite().all()) for tensor in tensors):
        add_noise(self, tensors, rng=rng, step=step, rank=rank)
    else:
        for tensor in tensors:
            tensor.zero_()


def the_same_key(count):
    return bytes(count)


def charged_once(self, event, times=1):
    if not self._history:
        charge(self, event, 1)


ZOO = {
    "no noise": ([(TensorGaussianMechanism, "add_noise_", no_noise)], NOISE),
    "half the noise": ([(TensorGaussianMechanism, "add_noise_", scaled_noise(0.5))], NOISE),
    "5 % too little noise": ([(TensorGaussianMechanism, "add_noise_", scaled_noise(0.95))], NOISE),
    "noise of the mean, on the sum": ([(TensorGaussianMechanism, "add_noise_", noise_of_the_mean)], NOISE),
    "a layer without noise": ([(TensorGaussianMechanism, "add_noise_", last_layer_without_noise)], NOISE),
    "the same noise in every step": ([(TensorGaussianMechanism, "add_noise_", noise_reused)], FRESH),
    "one noise for all coordinates": ([(TensorGaussianMechanism, "add_noise_", one_noise_for_all_coordinates)], FRESH),
    "no clipping": ([(FlatClipping, "clip_factors", no_clipping)], SENSITIVITY),
    "twice the clipping norm": ([(FlatClipping, "clip_factors", twice_the_norm)], SENSITIVITY),
    "norms whose root was taken twice": ([(FlatClipping, "clip_factors", norms_not_square_rooted)], SENSITIVITY),
    "clipping of the mean": (
        [(FlatClipping, "clip_factors", no_clipping), (TensorGaussianMechanism, "add_noise_", clip_of_the_sum)],
        SENSITIVITY,
    ),
    "each layer clipped to C, counted as C together": (
        [(FlatClipping, "groups", each_layer_alone), (FlatClipping, "clip_norms", the_whole_norm_for_each)],
        SENSITIVITY,
    ),
    "records counted twice": ([(ClippedSumAccumulator, "add", counted_twice)], SENSITIVITY),
    "records of a later micro-batch counted twice": (
        [(ClippedSumAccumulator, "add", Chunks.add), (ClippedSumAccumulator, "begin", Chunks.begin)],
        CHUNKS,
    ),
    "division by the realized batch size": (
        [(ClippedSumAccumulator, "add", Realized.add), (PrivateStep, "finish", Realized.finish)],
        DIVISOR,
    ),
    "shuffled batches called Poisson": ([(PoissonSampling, "draw", shuffled)], POISSON),
    "batches of a fixed size called Poisson": ([(PoissonSampling, "draw", fixed_size)], POISSON),
    "a higher sample rate than declared": ([(PoissonSampling, "draw", more_than_declared)], POISSON),
    "a record that is no number passes": ([(accumulators, "_finite", not_a_number_let_through)], BROKEN),
    "the step is skipped for a record that is no number": (
        [(accumulators, "_finite", not_a_number_let_through), (TensorGaussianMechanism, "add_noise_", step_skipped)],
        BROKEN,
    ),
    "noise replayed on resume": ([(secrets, "token_bytes", the_same_key)], RESUME),
    "steps that are not charged": ([(ChargeLog, "add", charged_once)], CHARGED),
}


def test_the_engine_itself_passes_every_check():
    assert check_engine().broken == set()


@pytest.mark.parametrize("name", ZOO)
def test_a_broken_mechanism_is_caught_by_its_named_check(name, monkeypatch):
    patches, named = ZOO[name]
    for owner, attribute, replacement in patches:
        monkeypatch.setattr(owner, attribute, replacement)
    assert ENGINE_CHECKS[named].run(EngineLibrary()).verdict == "wrong"


def test_the_page_lists_the_zoo_and_every_check_catches_something():
    table = re.findall(r"^\| ([^|]+) \| `([^|]+)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert dict(table) == {name: named for name, (_, named) in ZOO.items()}
    assert {named for _, named in ZOO.values()} == set(ENGINE_CHECKS)
    assert len(ZOO) >= 15
