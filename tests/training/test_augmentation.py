import pytest
import torch
from torch import nn

from sordino import fit
from sordino.errors import CoupledRecords, InvalidArgument
from sordino.gradients import GradientCapture
from sordino.training import Plan, average_over_views

PLAN = Plan(noise_multiplier=0.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=6.0, delta=1e-5)


def loss(model, x, y):
    return (model(x) - y).square().sum(1)


def shifted(x, y):
    return x + torch.randn(len(x), 1), y


def test_views_are_averaged_before_the_norm_is_taken():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3), torch.randn(6, 2)
    capture = GradientCapture(model)
    torch.manual_seed(1)
    with capture.capturing(6):
        average_over_views(loss, shifted, views=3)(model, x, y).sum().backward()
    measured = capture.squared_norms()
    capture.detach()
    torch.manual_seed(1)
    shifts = [torch.randn(6, 1) for _ in range(3)]
    for record in range(6):
        one = [
            loss(model, x[record : record + 1] + shift[record], y[record : record + 1]).sum() / 3 for shift in shifts
        ]
        gradients = torch.autograd.grad(sum(one), list(model.parameters()))
        assert float(measured[record]) == pytest.approx(sum(float(g.square().sum()) for g in gradients), rel=1e-4)


def test_a_model_trains_on_several_views():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(6, 3), torch.randn(6, 2)
    before = model.weight.detach().clone()
    fit(model, average_over_views(loss, shifted, views=2), (x, y), PLAN, progress=False)
    assert 0 < float((model.weight.detach() - before).norm()) <= 1 + 1e-5


def test_a_transform_that_mixes_records_is_refused():
    def mixed(x, y):
        return (x + x.flip(0)) / 2, y

    torch.manual_seed(0)
    with pytest.raises(CoupledRecords):
        fit(
            nn.Linear(3, 2),
            average_over_views(loss, mixed, views=2),
            (torch.randn(6, 3), torch.randn(6, 2)),
            PLAN,
            progress=False,
        )


def test_the_number_of_views_is_at_least_one():
    with pytest.raises(InvalidArgument, match="views"):
        average_over_views(loss, shifted, views=0)
