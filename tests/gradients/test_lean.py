"""Sparing memory changes kernels, never results."""

import pytest
import torch
from torch import nn

from sordino.errors import InvalidArgument, PrivacyError
from sordino.gradients import GradientCapture
from sordino.gradients.rules.base import cheapest_kernel, convolution_kernel_costs, kernel_costs
from sordino.training.plan import PerformanceOptions


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(40, 160), nn.GELU(), nn.Linear(160, 3)), (32, 40)),
        (lambda: nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3)), (8, 12, 12)),
    ],
)
def test_norms_and_sums_are_those_of_the_fast_way(build, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(5, *shape)
    results = []
    for lean in (False, True):
        capture = GradientCapture(model, low_memory=lean)
        with capture.capturing(records=5):
            model(x).square().flatten(1).sum(1).sum().backward()
        sums: dict[nn.Parameter, torch.Tensor] = {}
        norms = capture.squared_norms()
        capture.add_weighted_sums(torch.linspace(0.1, 1, 5), sums)
        results.append((norms, sums))
        capture.detach()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=0)
    for parameter in model.parameters():
        torch.testing.assert_close(results[0][1][parameter], results[1][1][parameter], rtol=1e-4, atol=1e-4)


def test_last_sums_are_the_same_and_end_the_recording() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 160), nn.GELU(), nn.Linear(160, 3)), torch.randn(5, 32, 40)
    capture = GradientCapture(model)
    with capture.capturing(records=5):
        model(x).square().flatten(1).sum(1).sum().backward()
    first: dict[nn.Parameter, torch.Tensor] = {}
    last: dict[nn.Parameter, torch.Tensor] = {}
    capture.squared_norm_bounds()
    capture.add_weighted_sums(torch.ones(5), first)
    capture.add_weighted_sums(torch.ones(5), last, last=True)
    assert all(torch.equal(first[parameter], last[parameter]) for parameter in model.parameters())
    with pytest.raises(PrivacyError, match="dropped"):
        capture.add_weighted_sums(torch.ones(5), last)
    with pytest.raises(PrivacyError, match="dropped"):
        capture.squared_norms()


def test_lean_kernels_keep_less() -> None:
    assert cheapest_kernel(kernel_costs(16, 1024, 2048, 512)) == "stored"
    assert cheapest_kernel(kernel_costs(16, 1024, 2048, 512, low_memory=True)) == "norm_only"
    assert cheapest_kernel(kernel_costs(16, 128, 1024, 256)) == "stored"
    assert cheapest_kernel(kernel_costs(16, 128, 1024, 256, low_memory=True)) == "ghost"
    assert cheapest_kernel(kernel_costs(2, 256, 3072, 768)) == "ghost"
    layer = {"records": 16, "pixels": None, "positions": 64, "channels": 256, "outputs": 256, "window": 9, "groups": 1}
    assert cheapest_kernel(convolution_kernel_costs(**layer, low_memory=True)) == "norm_only"


def test_other_memory_modes_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="clipping_mode must be one of fast, low_memory, groupwise"):
        PerformanceOptions(clipping_mode="tiny")  # pyright: ignore[reportArgumentType]
