"""Modules that no rule reads go through the functional fallback: exact, or refused by name."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import oracles
from sordino.clipping import FlatClipping
from sordino.errors import RecordCountMismatch, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.gradients.rules import composite

BOUND = 0.3


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(model, loss, *batch, tolerance=1e-5):
    wanted = [p for p in model.parameters() if p.requires_grad]
    expected = oracles.per_record_gradients(model, lambda m, record: loss(m, *record).sum(), batch)
    capture = GradientCapture(model)
    with capture.capturing(records=batch[0].shape[0]):
        total = loss(model, *batch).sum()
        assert capture.uncaptured_uses(total) == []
        total.backward()
    squared = capture.squared_norms()
    assert torch.allclose(squared, oracles.squared_norms(expected), rtol=2 * tolerance)
    sums = {}
    capture.add_weighted_sums(FlatClipping().clip_factors(squared, max_grad_norm=BOUND), sums)
    reference = oracles.clipped_sum(expected, BOUND)
    scale = float(squared.sqrt().clamp(max=BOUND).max())
    for parameter, value in zip(wanted, reference, strict=True):
        assert oracles.relative_error(sums[parameter], value, floor=scale) < tolerance
    assert all(p.requires_grad and p.grad is None for p in wanted)
    capture.detach()


class Tokens(nn.Module):
    """A class token and a position table added by broadcast, a scale, in front of layers with rules."""

    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        tokens = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        return (tokens + self.positions) * self.scale


@pytest.mark.parametrize("whole", [False, True])
def test_class_token_position_table_and_scale_are_exact(whole):
    torch.manual_seed(0)
    if whole:

        class Model(Tokens):
            def __init__(self):
                super().__init__()
                self.layer, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

            def forward(self, x):
                return self.norm(self.layer(super().forward(x)))

        model = Model()
    else:
        model = nn.Sequential(nn.Linear(4, 4), Tokens(), nn.Linear(4, 3))
    check(model, lambda m, x: m(x)[:, 0].square().sum(1), x_of(5, 3, 4))


def test_a_frozen_bare_parameter_leaves_the_layers_inside_to_their_rules():
    torch.manual_seed(0)

    class Model(Tokens):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(super().forward(x))

    model = Model()
    for parameter in (model.cls, model.positions, model.scale):
        parameter.requires_grad_(False)
    check(model, lambda m, x: m(x)[:, 0].square().sum(1), x_of(5, 3, 4))


def test_a_module_that_only_returns_its_parameter_is_expanded_to_all_records():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 3, 4))

        def forward(self):
            return self.table

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = Table(), nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(torch.tanh(x + self.table()))

    torch.manual_seed(0)
    check(Model(), lambda m, x: m(x).square().flatten(1).sum(1), x_of(5, 3, 4))


def test_a_parameter_returned_without_a_record_dimension_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.g

    capture = GradientCapture(scale := Scale())
    for records in (3, 5):
        with pytest.raises(RecordCountMismatch, match="Scale"), capture.capturing(records=records):
            scale()


def test_parameter_lists_and_dicts_are_exact():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(3, 2) for _ in range(2)])
            self.shifts = nn.ParameterDict({"a": torch.randn(2)})

        def forward(self, *, values):
            return {"sum": values @ self.weights[0] + self.shifts["a"], "pair": (values @ self.weights[1], 3)}

    torch.manual_seed(0)

    def loss(m, x):
        output = m(values=x)
        return output["sum"].square().sum(1) + output["pair"][0].tanh().sum(1)

    check(Mixture(), loss, x_of(5, 3))
    check(Mixture(), lambda m, x: m(values=x)["pair"][0].tanh().sum(1) + 0 * m(values=x)["sum"].sum(1), x_of(5, 3))


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_layers_are_exact(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    check(model, lambda m, x: m(x).square().sum(1), x_of(4, 3))


def test_spectral_normalisation_stores_statistics_and_is_refused():
    model = parametrizations.spectral_norm(nn.Linear(3, 3))
    with pytest.raises(UnsupportedModule, match="buffer"):
        GradientCapture(model)


@pytest.mark.parametrize("make", [lambda: nn.ConvTranspose2d(2, 3, 2), lambda: nn.Bilinear(3, 3, 2), nn.PReLU])
def test_layers_without_a_rule_are_exact(make):
    torch.manual_seed(0)
    layer = make()
    if isinstance(layer, nn.Bilinear):
        check(layer, lambda m, x, y: m(x, y).square().sum(1), x_of(4, 3), x_of(4, 3, seed=5))
    else:
        check(layer, lambda m, x: m(x).square().flatten(1).sum(1), x_of(4, 2, 3, 3))


def test_a_subclass_that_overrides_forward_does_not_get_the_rule_of_its_base():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * math.sqrt(3)

    class Named(nn.Linear):
        pass

    torch.manual_seed(0)
    check(
        nn.Sequential(Scaled(5, 3), Named(3, 2)), lambda m, x: m(x).square().flatten(1).sum(1), torch.arange(4)[:, None]
    )


# --- refusals ----------------------------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def test_dropout_inside_a_module_without_a_rule_is_refused_by_name():
    capture = GradientCapture(
        model := nn.Sequential(
            Custom(lambda s, x: F.dropout((x.transpose(0, 1) * s.w).transpose(0, 1), 0.5, s.training))
        )
    )
    with pytest.raises(UnsupportedModule, match=r"0 \(Custom\).*dropout"), capture.capturing(records=2):
        model(x_of(2, 4, 3))
    model.eval()
    with capture.capturing(records=2):
        model(x_of(2, 4, 3))[0].sum().backward()
    assert capture.squared_norms().isfinite().all()


def test_a_module_that_stores_what_it_saw_is_refused_by_name():
    def running(s, x):
        s.seen.add_(x.detach().sum(0))
        return x * s.w

    def replaced(s, x):
        s.seen = x.detach().sum(0)
        return x * s.w

    for body in (running, replaced):
        capture = GradientCapture(model := Custom(body))
        with pytest.raises(UnsupportedModule, match=r"Custom.*buffer"), capture.capturing(records=2):
            model(x_of(2, 3))


def test_a_module_that_cannot_be_vectorised_runs_record_by_record():
    def branching(s, x):
        return x * s.w * (2.0 if float(x.sum()) > 0 else 1.0)

    torch.manual_seed(0)
    model = Custom(branching)
    capture = GradientCapture(model)
    x = x_of(3, 3)
    with capture.capturing(records=3):
        model(x).sum().backward()
    own = [2.0 if float(row.sum()) > 0 else 1.0 for row in x]
    expected = torch.stack([(row * factor).square().sum() for row, factor in zip(x, own, strict=True)]).double()
    assert torch.allclose(capture.squared_norms(), expected, rtol=1e-6)


def test_an_output_without_records_is_refused():
    capture = GradientCapture(model := Custom(lambda s, x: torch.einsum("bi,i->", x, s.w)))
    with pytest.raises(RecordCountMismatch, match="Custom"), capture.capturing(records=4):
        model(x_of(4, 3))


def test_a_hook_registered_after_the_capture_on_a_module_that_is_run_again_is_refused():
    model = Custom(lambda s, x: x * s.w)
    capture = GradientCapture(model)
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(UnsupportedModule, match="hook"), capture.capturing(records=4):
        model(x_of(4, 3))


def test_hooks_registered_before_the_capture_are_part_of_the_module():
    torch.manual_seed(0)
    for model in (Custom(lambda s, x: x * s.w), nn.Linear(3, 2)):
        model.register_forward_hook(lambda module, args, output: output * 2)
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        capture = GradientCapture(model)
        x = x_of(4, 3)
        with capture.capturing(records=4):
            model(x).sum().backward()
        squared = capture.squared_norms()
        capture.detach()
        plain = [torch.autograd.grad(model(row[None]).sum(), list(model.parameters())) for row in x]
        assert squared.tolist() == pytest.approx([sum(float(g.square().sum()) for g in gs) for gs in plain], rel=1e-5)


def test_a_child_read_by_name_outside_its_parent_is_refused():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    capture = GradientCapture(layer)
    with capture.capturing(records=3), pytest.raises(UncapturedParameter, match=r"out_proj\.weight"):
        F.linear(x_of(3, 4), layer.out_proj.weight).sum().backward()


class Sums(nn.Module):
    """Two parameters in a function that no rule knows; one has a name that was used inside once."""

    def __init__(self):
        super().__init__()
        self.measured, self.other = nn.Parameter(torch.ones(40, 6)), nn.Parameter(torch.full((40, 6), 0.5))

    def forward(self, x):
        steps = self.measured.cumsum(0) + self.other.cumsum(0).sin()
        return torch.einsum("bi,ji->bij", x, steps).tanh().logsumexp(2)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_too_large_to_be_kept_give_the_sums_of_kept_ones_group_by_group(apart, monkeypatch):
    found = []
    for entries in (composite.CHUNK_ENTRIES, 0):
        monkeypatch.setattr(composite, "CHUNK_ENTRIES", entries)
        model, sums = Sums(), {}
        groups = [[model.measured], [model.other]] if apart else [list(model.parameters())]
        capture = GradientCapture(model)
        with capture.capturing(3):
            model(x_of(3, 6)).sum().backward()
        squares = capture.squared_norm_bounds(groups)
        capture.add_weighted_sums(BOUND / squares.sqrt(), sums)
        found.append([sums[parameter] for parameter in model.parameters()])
        assert any("." in name for use in capture.layer_calls() for name in use.memo) == (entries == 0)
        capture.detach()
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
