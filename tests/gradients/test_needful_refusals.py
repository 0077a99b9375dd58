"""What can't be private as it is says what to do instead, and that works."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oracles import per_record_gradients, relative_error, squared_norms
from sordino.errors import PrivacyError, UnsupportedModule
from sordino.gradients import GradientCapture

RECORDS = 5


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(RECORDS, 5, generator=generator), torch.randint(0, 3, (RECORDS,), generator=generator)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def assert_norms_are_exact(model):
    expected = squared_norms(per_record_gradients(model, cross_entropy, data()))
    capture = GradientCapture(model)
    with capture.capturing(RECORDS, scale=RECORDS):
        cross_entropy(model, data()).backward()
    assert relative_error(capture.squared_norms(), expected) <= 1e-5
    capture.detach()


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))


def test_spectral_normalisation_in_training_mode_is_refused_by_name():
    with pytest.raises(UnsupportedModule, match=r"0\.parametrizations\.weight\.0 .*spectral normalization"):
        GradientCapture(spectral())


def test_spectral_normalisation_with_a_fixed_power_iteration_is_exact():
    model = spectral().train()
    model[0].parametrizations.eval()
    assert_norms_are_exact(model)


class Complex(nn.Module):
    def __init__(self, *, as_real):
        super().__init__()
        weight = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(4))
        self.weight = nn.Parameter(weight if as_real else torch.view_as_complex(weight))

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x.to(weight.dtype) @ weight).abs().square()


def test_complex_parameters_are_refused_by_name():
    with pytest.raises(UnsupportedModule, match="weight must be real"):
        GradientCapture(Complex(as_real=False))


def test_complex_weights_kept_as_pairs_of_real_numbers_are_exact():
    assert_norms_are_exact(Complex(as_real=True))


def test_a_penalty_on_slopes_by_differences_is_exact_where_one_by_gradients_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    x, v = torch.randn(3, 4), F.normalize(torch.randn(3, 4), dim=1)

    def losses(one, rows):
        x, v = rows
        slope = (one(x + 0.1 * v) - one(x)) / 0.1
        return one(x).square().sum(1) + (slope[:, 0].abs() - 1).square()

    capture = GradientCapture(model)
    with capture.capturing(records=3):
        losses(model, (x, v)).sum().backward()
    expected = per_record_gradients(model, lambda one, rows: losses(one, rows).sum(), (x, v))
    assert relative_error(capture.squared_norms(), squared_norms(expected)) < 1e-4
    x.requires_grad_()
    with pytest.raises(PrivacyError, match="difference of two outputs"), capture.capturing(records=3):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
