"""Noise that clients add themselves: its size is right at every ε, and the count of updates is kept."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from sordino.errors import InvalidArgument, PrivacyError
from sordino.federated import LocalPrivacy, clipped_update
from sordino.randomness import KeyedRNG


def delta_of(epsilon, ratio):
    """Balle and Wang 2018, theorem 8, for a sensitivity of `ratio` standard deviations."""
    return norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(-ratio / 2 - epsilon / ratio)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 20.0, 50.0])
@pytest.mark.parametrize("rounds", [1, 16])
def test_epsilon_holds_where_the_classical_formula_fails(epsilon, rounds):
    local = LocalPrivacy(epsilon=epsilon, delta=1e-5, max_update_norm=0.7, rounds=rounds)
    ratio = 2 * 0.7 / local.stddev * math.sqrt(rounds)
    assert delta_of(epsilon, ratio) <= 1e-5 * (1 + 1e-9)
    assert delta_of(epsilon, ratio * 1.001) > 1e-5


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.05, False)])
def test_every_entry_gets_the_noise_of_twice_the_bound(factor, good):
    local = LocalPrivacy(epsilon=2.0, delta=1e-5, max_update_norm=0.5, rng=KeyedRNG(seed=1, reproducible=True))
    sent = local.privatize({"a": torch.zeros(20_000), "b": torch.zeros(200, 100)})
    z = torch.cat([value.flatten().double() for value in sent.values()]) / (local.stddev * factor)
    assert (abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / 40_000)) == good


def test_what_was_not_declared_is_not_sent():
    local = LocalPrivacy(epsilon=2.0, delta=1e-5, max_update_norm=1.0, rounds=2)
    update = {"a": torch.ones(3)}
    first, second = local.privatize(update), local.privatize(update)
    assert not torch.equal(first["a"], second["a"])
    assert local.guarantee().epsilon <= 2.0
    with pytest.raises(PrivacyError, match="declared"):
        local.privatize(update)
    assert local.sent == 2


def test_an_update_that_is_not_finite_is_only_noise():
    local = LocalPrivacy(epsilon=100.0, delta=1e-5, max_update_norm=1e-3)
    sent = local.privatize({"a": torch.tensor([math.nan, 1e30])})
    assert sent["a"].isfinite().all()
    assert sent["a"].abs().max() < 1


@pytest.mark.parametrize("name", ["epsilon", "max_update_norm"])
def test_values_out_of_range_are_refused(name):
    values = {"epsilon": 1.0, "delta": 1e-5, "max_update_norm": 1.0, name: 0.0}
    with pytest.raises(InvalidArgument, match=name):
        LocalPrivacy(**values)


def test_one_key_is_for_one_client():
    key = KeyedRNG()
    LocalPrivacy(epsilon=1.0, delta=1e-5, max_update_norm=1.0, rng=key)
    with pytest.raises(InvalidArgument, match="fresh"):
        LocalPrivacy(epsilon=1.0, delta=1e-5, max_update_norm=1.0, rng=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "bound"), [(1_000_000, 1e-4), (1000, 0.3), (7, 0.5), (100_000, 9.5e-5), (3, 1e-30)])
def test_no_type_of_numbers_rounds_an_update_beyond_its_bound(dtype, count, bound):
    from sordino.federated import clipped_update

    for value in (1.0, 0.777):
        clipped = clipped_update({"a": torch.full((count,), value, dtype=dtype)}, max_update_norm=bound)
        assert clipped["a"].dtype == dtype
        assert float(clipped["a"].double().norm()) <= bound


def test_arrays_are_clipped_and_noised_as_tensors_are():
    def sent(update):
        local = LocalPrivacy(
            epsilon=8.0, delta=1e-5, max_update_norm=1.0, rounds=1, rng=KeyedRNG(seed=1, reproducible=True)
        )
        return local.privatize(update)["a"]

    values = [3.0, 4.0]
    assert torch.equal(sent({"a": np.array(values, dtype=np.float32)}), sent({"a": torch.tensor(values)}))
    assert clipped_update({"a": np.array(values)}, max_update_norm=1.0)["a"].tolist() == pytest.approx([0.6, 0.8])
