import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.gradients.numerics import full_precision, row_squared_norms
from sordino.gradients.rules.base import cheapest_kernel, convolution_kernel_costs, kernel_costs
from strategies import record_counts, seeds


@settings(deadline=None, max_examples=50)
@given(
    records=record_counts,
    length=st.sampled_from([0, 1, 7, 1023, 1024, 2048, 5000]),
    size=st.sampled_from([1e-36, 1e-20, 1e-3, 1.0, 1e10, 1e25]),
    seed=seeds,
)
def test_sums_of_squares_are_accurate_at_any_size(records, length, size, seed):
    x = torch.randn(records, length, generator=torch.Generator().manual_seed(seed)) * size
    true = x.double().square().sum(1)
    assert row_squared_norms(x).dtype == torch.float64
    assert torch.allclose(row_squared_norms(x), true, rtol=5e-7, atol=0)


def test_a_long_row_does_not_drift():
    x = torch.full((1, 10_000_000), 0.1)
    true = 1e7 * float(x[0, 0].double()) ** 2
    assert float(row_squared_norms(x)) == pytest.approx(true, rel=2e-7)


def test_half_precision_entries_do_not_underflow():
    x = torch.full((1, 1000), 1e-4, dtype=torch.half)
    assert float(row_squared_norms(x)) == pytest.approx(1000 * float(x[0, 0].double()) ** 2, rel=1e-6)


def test_non_finite_entries_stay_non_finite_and_do_not_touch_other_rows():
    x = torch.ones(4, 3000)
    x[0, 0], x[1, 2999], x[2, 5] = torch.nan, torch.inf, -torch.inf
    result = row_squared_norms(x)
    assert not result[:3].isfinite().any()
    assert float(result[3]) == pytest.approx(3000)


@pytest.mark.parametrize("width", [4, 10_000])
def test_an_unsafe_row_is_summed_again_alone(width):
    x = torch.ones(4, width)
    x[1] = 1e-30
    x[2] = 0
    x[3] = 1e30
    assert row_squared_norms(x).tolist() == pytest.approx([width, width * 1e-60, 0.0, width * 1e60], rel=1e-6)


@pytest.mark.parametrize("user", ["high", "highest"])
def test_reading_runs_in_full_precision_and_gives_the_users_setting_back(user):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(user)
        with full_precision(torch.device("cpu")):
            assert torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
        assert torch.get_float32_matmul_precision() == user
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_cost_models_choose_by_shape():
    assert cheapest_kernel(kernel_costs(32, 128, 768, 3072)) == "ghost"
    assert cheapest_kernel(kernel_costs(16, 128, 8, 256)) == "stored"
    assert cheapest_kernel(kernel_costs(2, 40, 32, 32)) == "norm_only"
    assert cheapest_kernel(kernel_costs(16, 256, 768, 768)) == "stored"
    assert cheapest_kernel(kernel_costs(16, 256, 768, 768, low_memory=True)) == "ghost"
    early = {"channels": 16, "outputs": 16, "window": 9, "groups": 1}
    assert cheapest_kernel(convolution_kernel_costs(records=32, pixels=34**2, positions=32**2, **early)) == "stored"
    late = {"channels": 512, "outputs": 512, "window": 9, "groups": 1}
    assert cheapest_kernel(convolution_kernel_costs(records=32, pixels=36, positions=16, **late)) == "ghost"
    assert cheapest_kernel(convolution_kernel_costs(records=32, pixels=None, positions=16, **late)) == "norm_only"
