"""Products by either library: the same numbers as in double precision, whatever the sizes."""

import pytest
import torch

from sordino.gradients import products
from sordino.gradients.products import affine, grams, per_record_product, transposed_product

# Sizes below and above the work from which oneDNN is taken, with lengths that are cut and lengths that aren't.
SIZES = [(3, 2, 5), (64, 200, 300), (200, 130, 257), (511, 96, 64), (130, 700, 33)]


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def library(request, monkeypatch):
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(products, "_is_faster", lambda: request.param)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(result, expected, terms):
    """Within the rounding of a sum of as many normal products."""
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() <= 3e-7 * terms**0.5 * expected.abs().max().clamp(min=1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_transposed_products_are_those_of_double_precision(k, m, n):
    left, right = normal(k, m), normal(k, n, seed=1)
    assert_close(transposed_product(left, right), left.double().t() @ right.double(), k)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_products_and_squares_of_each_record_are_those_of_double_precision(k, m, n):
    left, right = normal(2, k, m), normal(2, k, n, seed=1)
    # As they come from a layer with time first, records are not next to each other in memory.
    right = right.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(per_record_product(left, right), left.double().transpose(1, 2) @ right.double(), k)
    assert_close(grams(right), right.double() @ right.double().transpose(1, 2), n)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("activation", ["none", "tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_affine_maps_are_those_of_double_precision(activation, biased, k, m, n):
    x, weight, bias = normal(m, k), normal(n, k, seed=1) / k**0.5, normal(n, seed=2)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    expected = expected if activation == "none" else getattr(torch, activation)(expected)
    assert_close(affine(x, weight, bias if biased else None, activation), expected, 25)


@pytest.mark.usefixtures("library")
def test_a_record_that_is_not_finite_spoils_its_own_product_only():
    left, right = normal(3, 100, 150), normal(3, 100, 200, seed=1)
    left[1, 7, 5] = torch.inf
    result = per_record_product(left, right)
    assert bool(result[[0, 2]].isfinite().all())
    assert not bool(result[1].isfinite().all())
