"""Products by either library: the same numbers as in double precision, whatever the sizes."""

import pytest
import torch
from torch import nn

from agreement import check
from sordino.gradients import numerics
from sordino.gradients.numerics import affine, affine_map, grams, per_record_product, transposed_product

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

# Sizes below and above the work from which oneDNN is taken, with lengths that are cut and lengths that aren't.
SIZES = [(3, 2, 5), (200, 130, 7), (64, 200, 300), (200, 130, 257), (511, 96, 64), (130, 700, 33)]


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def library(request, monkeypatch):
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("no oneDNN in this torch")
    for found in ("_is_faster", "_has_whole_units"):
        monkeypatch.setattr(numerics, found, lambda: request.param)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_product(result, left, right, change=lambda exact: exact):
    """``left @ right`` within what rounding can do, along any tree of additions, and a slope of at most 1."""
    assert result.dtype == torch.float32
    left, right = left.double(), right.double()
    allowed = (left.shape[-1] + 8) * 2**-24 * (left.abs() @ right.abs() + 2)
    assert bool(((result - change(left @ right)).abs() <= allowed).all())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_transposed_products_are_those_of_double_precision(k, m, n):
    left, right = normal(k, m), normal(k, n, seed=1)
    assert_product(transposed_product(left, right), left.t(), right)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_products_and_squares_of_each_record_are_those_of_double_precision(k, m, n):
    left, right = normal(2, k, m), normal(2, k, n, seed=1)
    # As they come from a layer with time first, records are not next to each other in memory.
    right = right.transpose(0, 1).contiguous().transpose(0, 1)
    assert_product(per_record_product(left, right), left.transpose(1, 2), right)
    assert_product(grams(right), right, right.transpose(1, 2))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("activation", ["none", "tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "m", "n"), SIZES)
def test_affine_maps_are_those_of_double_precision(activation, biased, k, m, n):
    x, weight, bias = normal(m, k), normal(n, k, seed=1) / k**0.5, normal(n, seed=2)
    shift = bias.double() if biased else 0
    applied = {"none": torch.clone, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}[activation]
    assert_product(affine(x, weight, bias if biased else None, activation), x, weight.t(), lambda z: applied(z + shift))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("outputs", [300, 900])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_a_map_is_the_same_for_any_number_of_rows(outputs, biased, turned):
    weight, bias = normal(outputs, 200, seed=1) / 15, normal(outputs, seed=2) if biased else None
    call = affine_map(64, weight.t().contiguous().t() if turned else weight, bias, "tanh")
    shift = 0 if bias is None else bias.double()
    for rows in (64, 1, 200, 64):
        x = normal(rows, 400, seed=rows)[:, :200]
        # Where results go, rows may be apart in memory.
        out = torch.full((rows, outputs + 7), torch.nan)[:, :outputs]
        call(x, out)
        assert_product(out, x, weight.t(), lambda z: torch.tanh(z + shift))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("positions", "width"), [(96, 128), (131, 160), (129, 256), (64, 512)])
def test_inner_products_that_are_half_mirrored_are_those_of_double_precision(positions, width):
    x = normal(positions, 3, width).transpose(0, 1)
    assert_product(grams(x), x, x.transpose(1, 2))
    assert torch.equal(grams(x), grams(x).transpose(1, 2)) or positions**2 * width > 2 * numerics._LEAST


@pytest.mark.usefixtures("library")
def test_a_record_that_is_not_finite_spoils_its_own_product_only():
    left, right = normal(3, 100, 150), normal(3, 100, 200, seed=1)
    left[1, 7, 5] = torch.inf
    result = per_record_product(left, right)
    assert bool(result[[0, 2]].isfinite().all())
    assert not bool(result[1].isfinite().all())


def outputs_squared(m, x):
    output = m(x)
    return (output[0] if isinstance(output, tuple) else output).square().flatten(1).sum(1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(9, 7), (3, 9)),
        (lambda: nn.Linear(9, 7), (3, 70, 9)),
        (lambda: nn.Linear(40, 60), (3, 4, 40)),
        (lambda: nn.LSTM(5, 6, batch_first=True), (3, 9, 5)),
        (lambda: nn.LSTM(5, 6, batch_first=True, bidirectional=True, proj_size=3, num_layers=2), (3, 4, 5)),
        (lambda: nn.LSTM(5, 6, batch_first=True, bias=False), (3, 4, 5)),
        (lambda: nn.GRU(5, 6, batch_first=True, bidirectional=True), (3, 9, 5)),
        (lambda: nn.RNN(5, 6, batch_first=True), (3, 9, 5)),
        (lambda: nn.RNN(5, 6, batch_first=True, nonlinearity="relu"), (3, 9, 5)),
    ],
)
def test_layers_are_exact_when_every_product_takes_the_library(make, shape, monkeypatch):
    monkeypatch.setattr(numerics, "_LEAST", 0)
    monkeypatch.setattr(numerics, "_ROWS", 2)
    torch.manual_seed(0)
    check(make(), outputs_squared, normal(*shape))
