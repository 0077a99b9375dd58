"""One comparison for whole models: a capture against autograd, one record at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import oracles
from sordino.clipping import FlatClipping
from sordino.gradients import GradientCapture

BOUND = 0.3


def check(model: nn.Module, loss: Callable[..., Tensor], *batch: Tensor, tolerance: float = 1e-5) -> None:
    """`loss(model, *batch)` gives one value per record: values, norms and clipped sums must be autograd's."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    records = batch[0].shape[0]
    expected = oracles.per_record_gradients(model, lambda m, record: loss(m, *record).sum(), batch)
    plain = loss(model, *batch).detach()
    capture = GradientCapture(model)
    with capture.capturing(records=records):
        values = loss(model, *batch)
        assert torch.allclose(values.detach(), plain, rtol=1e-5, atol=1e-6)
        total = values.sum()
        assert capture.uncaptured_uses(total) == []
        total.backward()
    squared = capture.squared_norms()
    # Scalar parameters have one entry.
    expected = [g[:, None] if g.dim() == 1 else g for g in expected]
    true = oracles.squared_norms(expected)
    assert squared.shape == (records,)
    assert torch.allclose(squared, true, rtol=2 * tolerance, atol=1e-9)
    sums: dict[nn.Parameter, Tensor] = {}
    capture.add_weighted_sums(FlatClipping().clip_factors(squared, max_grad_norm=BOUND), sums)
    capture.detach()
    reference = oracles.clipped_sum(expected, BOUND)
    scale = float(true.sqrt().clamp(max=BOUND).max()) if records else 1.0
    for parameter, value in zip(wanted, reference, strict=True):
        got = sums.get(parameter, torch.zeros_like(parameter))
        assert oracles.relative_error(got.reshape(value.shape), value, floor=scale) < tolerance
    assert all(p.requires_grad and p.grad is None for p in wanted)


def check_on_one_seed(model: nn.Module, loss: Callable[[nn.Module], Tensor], records: int) -> None:
    """A model with dropout: on one seed, values and the sum of all records' gradients are those of plain torch."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(1)
    plain = loss(model)
    expected = torch.autograd.grad(plain.sum(), wanted)
    after = torch.get_rng_state()
    capture = GradientCapture(model)
    torch.manual_seed(1)
    with capture.capturing(records=records):
        values = loss(model)
        assert torch.allclose(values, plain, rtol=1e-5, atol=1e-6)
        values.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert capture.squared_norms().isfinite().all()
    sums: dict[nn.Parameter, Tensor] = {}
    capture.add_weighted_sums(torch.ones(records), sums)
    capture.detach()
    for parameter, value in zip(wanted, expected, strict=True):
        scale = max(float(g.abs().max()) for g in expected)
        assert oracles.relative_error(sums[parameter], value, floor=scale) < 1e-5
