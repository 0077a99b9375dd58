"""The kernel against slow autograd, slopes against moved weights, the table where it holds and where it does not."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.errors import InvalidArgument
from sordino.research import PUBLISHED, compute_kernels, measure_tangent_kernel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(count=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


def median_norm(model, features, labels):
    return float(np.median(np.sqrt(compute_kernels(model, features, labels).squared_norms().sum(axis=0))))


def test_the_kernel_is_that_of_slow_autograd():
    model, (features, labels) = network().double(), batch()
    found = compute_kernels(model, features, labels)
    rows = []
    for x in features.double():
        out = model(x[None])[0]
        for k in range(3):
            slopes = torch.autograd.grad(out[k], list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    J = torch.stack(rows).numpy()
    assert found.kernel(np.ones((2, 7))) == pytest.approx(J @ J.T)
    assert found.layers == ("0", "2")


def test_gradient_norms_are_those_of_one_record_at_a_time():
    model, (features, labels) = network().double(), batch()
    squares = compute_kernels(model, features, labels).squared_norms()
    for row in range(7):
        loss = nn.functional.cross_entropy(model(features[row : row + 1].double()), labels[row : row + 1])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        for layer in range(2):
            slow = sum(float((slope**2).sum()) for slope in slopes[2 * layer : 2 * layer + 2])
            assert squares[layer, row] == pytest.approx(slow)


def test_every_predicted_slope_is_the_measured_one():
    model, (features, labels) = network(), batch()
    table = measure_tangent_kernel(model, features, labels, max_grad_norm=median_norm(model, features, labels))
    assert [row.name for row in table.rows] == list(PUBLISHED)
    for row in table.rows:
        assert row.predicted == pytest.approx(row.measured, rel=1e-5, abs=1e-9)
        assert row.predicted < 0


def test_what_holds_of_the_table_and_what_does_not():
    # More outputs than parameters: the kernel is singular, and unequal factors turn a flat direction downwards.
    model, (features, labels) = network(), batch(24)
    table = measure_tangent_kernel(model, features, labels, max_grad_norm=median_norm(model, features, labels))
    none, flat, layers = table.row("none"), table.row("flat"), table.row("layer-wise")
    assert none.symmetric
    assert none.positive_form
    assert not flat.symmetric
    assert not flat.positive_form
    assert flat.positive_eigenvalues  # HC has the eigenvalues of C^½ H C^½
    assert not layers.symmetric
    large = table.row("large threshold")
    assert large.symmetric
    assert large.positive_form
    assert large.kept == 1
    # Dropped records are still moved by the others: their columns are zero, their rows are not.
    dropping = table.row("global flat")
    assert 0 < dropping.kept < 1
    assert dropping.refutes == ("symmetric", "positive form")
    assert dropping.positive_eigenvalues
    assert dropping.smallest_on_kept >= -1e-9


def test_without_dropped_records_global_clipping_keeps_all_three():
    model, (features, labels) = network(), batch()
    table = measure_tangent_kernel(model, features, labels, max_grad_norm=1e3)
    for row in table.rows:
        assert row.symmetric
        assert row.positive_form
        assert row.kept == 1
        assert row.refutes == ()


def test_clipping_and_dropping_can_make_the_loss_rise():
    # One record pulls the scalar weight one way with force 10, nine pull the other way with force 1 each.
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    features = torch.ones(10, 1)
    targets = torch.tensor([10.0] + [-1.0] * 9)
    table = measure_tangent_kernel(
        model,
        features,
        targets,
        max_grad_norm=1.5,
        loss=lambda outputs, wanted: 0.5 * (outputs[:, 0] - wanted) ** 2,
    )
    assert table.row("none").predicted == pytest.approx(-(0.1**2))
    for name in ("flat", "global flat"):
        assert table.row(name).predicted > 0
        assert table.row(name).measured > 0
    assert table.row("large threshold").predicted < 0


def test_a_frozen_layer_has_no_part_in_the_kernel_and_the_model_stays_as_it_was():
    model, (features, labels) = network(), batch()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = measure_tangent_kernel(model, features, labels, max_grad_norm=0.3)
    assert table.layers == ("2",)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for row in table.rows:
        assert row.predicted == pytest.approx(row.measured, rel=1e-5, abs=1e-9)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidArgument, match="one row a record"):
        measure_tangent_kernel(network(), torch.zeros(3, 4), torch.tensor([0]), max_grad_norm=1.0)
    with pytest.raises(InvalidArgument, match="max_grad_norm"):
        measure_tangent_kernel(network(), *batch(), max_grad_norm=0.0)
    broken = network()
    with torch.no_grad():
        broken[0].weight.fill_(torch.nan)
    with pytest.raises(InvalidArgument, match="finite"):
        measure_tangent_kernel(broken, *batch(), max_grad_norm=1.0)
