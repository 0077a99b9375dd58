"""The audit with secure noise: the engine passes, broken noise and sums are caught, broken clipping is harmless."""

import numpy as np
import pytest
import torch

from sordino.audit import EngineLibrary, check_engine
from sordino.audit.conformance.engine_cases import ENGINE_CHECKS
from sordino.clipping import FlatClipping
from sordino.mechanisms.integer_noise import GridSumMechanism
from sordino.training.special_accumulators import IntegerAccumulator

noise, add, add_noise = GridSumMechanism.noise, IntegerAccumulator.add, IntegerAccumulator.add_noise_
grid_stddev, factors = GridSumMechanism.grid_stddev.fget, FlatClipping.clip_factors


ENGINE = EngineLibrary(secure_mode=True)


def no_noise(self, count, stream):
    return np.zeros(count, dtype=np.int64)


def one_noise_for_all_coordinates(self, count, stream):
    return np.repeat(noise(self, 1, stream), count)


def noise_reused(self, tensors, *, rng, step):
    add_noise(self, tensors, rng=rng, step=0)


def added_twice(self, into, *, records):
    add(self, into, records=records)
    add(self, into, records=records)


SABOTAGE = {
    "no noise": (GridSumMechanism, "noise", no_noise),
    "5 % too little noise": (GridSumMechanism, "grid_stddev", property(lambda self: int(0.95 * grid_stddev(self)))),
    "noise of a float's unit": (GridSumMechanism, "grid_stddev", property(lambda self: grid_stddev(self) >> 29)),
    "one noise for all coordinates": (GridSumMechanism, "noise", one_noise_for_all_coordinates),
    "noise reused": (IntegerAccumulator, "add_noise_", noise_reused),
    "records counted twice": (IntegerAccumulator, "add", added_twice),
}
BROKEN_CLIPPING = {
    "no clipping": lambda self, squared_norms, *, max_grad_norm: torch.ones_like(squared_norms),
    "wrong clipping norm": lambda self, squares, *, max_grad_norm: factors(self, squares, max_grad_norm=9.0),
}


def test_the_engine_with_secure_noise_passes_the_checks():
    assert check_engine(ENGINE).broken == set()


@pytest.mark.parametrize("name", SABOTAGE)
def test_broken_noise_or_sums_are_caught(name, monkeypatch):
    monkeypatch.setattr(*SABOTAGE[name])
    assert any(not check.run(ENGINE).passed for check in ENGINE_CHECKS.values())


@pytest.mark.parametrize("name", BROKEN_CLIPPING)
def test_broken_clipping_is_harmless_because_the_integers_are_checked(name, monkeypatch):
    monkeypatch.setattr(FlatClipping, "clip_factors", BROKEN_CLIPPING[name])
    assert ENGINE_CHECKS["one record moves the sum by at most the clipping norm"].run(ENGINE).passed
