"""Norms taken while the backward pass runs: the numbers of afterwards, and less that is kept."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oracles import per_record_gradients, relative_error, squared_norms, weighted_sums
from sordino.errors import PrivacyError
from sordino.gradients import GradientCapture
from sordino.gradients.backward_strategies import NormsInBackward
from sordino.gradients.rules import base as rule_module
from sordino.gradients.rules.linear import LinearRule
from training.memory_models import MODELS, RECORDS, batch_for

WEIGHTS = torch.linspace(0.2, 1, RECORDS, dtype=torch.float64)


def squares(model, x):
    return model(x).square().sum()


def once(model, x):
    squares(model, x).backward()


def twice_through_one_graph(model, x):
    loss = squares(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def twice_forward_and_backward(model, x):
    for _ in range(2):
        once(model, x)


def with_a_call_beside_the_loss(model, x):
    model(x)
    once(model, x)


def in_checkpoints_of_each_kind(model, x):
    for reentrant in (False, True):
        start = x.clone().requires_grad_(reentrant)
        checkpoint(model, start, use_reentrant=reentrant).square().sum().backward()


# Models with checkpoints of their own, or on whole numbers, which checkpoints by reentry don't take.
NOT_IN_CHECKPOINTS = {name for name in MODELS if "check" in name or name in ("dropping", "repeated", "tied")}
CASES = [
    (name, run)
    for name in MODELS
    for run in (once, twice_through_one_graph, twice_forward_and_backward, with_a_call_beside_the_loss)
] + [(name, in_checkpoints_of_each_kind) for name in MODELS if name not in NOT_IN_CHECKPOINTS]


def read(model, x, run, *, foreseen, groups=None):
    """Bounds and sums of a lean recording; norms are taken early for `foreseen` groups, late without."""
    capture = GradientCapture(model, low_memory=True)
    try:
        with capture.capturing(
            RECORDS, scale=0.5, backward_strategy=None if foreseen is None else NormsInBackward(foreseen)
        ):
            run(model, x)
        bounds = capture.squared_norm_bounds(groups)
        sums = {}
        capture.add_weighted_sums(WEIGHTS if groups is None else WEIGHTS.expand(len(groups), -1), sums, last=True)
    finally:
        capture.detach()
    return bounds, sums


def groupings(model):
    parameters = list(model.parameters())
    return {
        "together": [parameters],
        "apart": [[parameter] for parameter in parameters],
        "in halves": [parameters[::2], parameters[1::2]],
    }


@pytest.mark.parametrize(("name", "run"), CASES)
@pytest.mark.parametrize(
    ("foreseen", "asked"),
    [("together", "together"), ("apart", "apart"), ("together", "in halves"), ("apart", "together")],
)
def test_bounds_and_sums_are_those_taken_afterwards(name, run, foreseen, asked):
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), batch_for(name)
    by = groupings(model)
    groups = None if asked == "together" else by[asked]
    late, expected = read(model, x, run, foreseen=None, groups=groups)
    early, found = read(model, x, run, foreseen=by[foreseen], groups=groups)
    torch.testing.assert_close(early, late, rtol=1e-5, atol=1e-12)
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-5, atol=1e-6)


class Narrow(nn.Module):
    """Gradients of records are kept of its layer, as there are many positions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.repeat(1, 128).view(len(x), 192, 4)).tanh().mean(1)


def test_a_kept_gradient_and_a_later_one_are_measured_together():
    torch.manual_seed(0)
    model, x, later = Narrow(), batch_for(""), batch_for("") - 1
    exact = per_record_gradients(
        model, lambda model, pair: squares(model, pair[0]) + squares(model, pair[1]), (x, later)
    )
    capture = GradientCapture(model, low_memory=True)
    with capture.capturing(RECORDS, backward_strategy=NormsInBackward([list(model.parameters())])):
        once(model, x)
        assert not capture.layer_calls()[0].grads
        once(model, later)
    assert relative_error(capture.squared_norms(), squared_norms(exact)) < 1e-5
    sums = {}
    capture.add_weighted_sums(WEIGHTS, sums)
    for value, expected in zip(sums.values(), weighted_sums(exact, WEIGHTS), strict=True):
        assert relative_error(value, expected) < 1e-5
    capture.detach()


def test_what_was_kept_of_a_layer_is_gone_before_the_one_below_is_reached():
    model = nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU(), nn.GroupNorm(3, 6))
    capture, kept = GradientCapture(model, low_memory=True), []
    with capture.capturing(RECORDS, backward_strategy=NormsInBackward([list(model.parameters())])):
        hidden = model[1](model[0](torch.randn(RECORDS, 6, 5)))
        hidden.register_hook(lambda _: kept.extend((use.saved, use.grads) for use in capture.layer_calls()))
        model[2](hidden).square().sum().backward()
    assert kept == [((), ())]
    capture.detach()


def test_a_gradient_that_was_changed_after_it_was_measured_is_measured_again():
    torch.manual_seed(0)

    def meddled(model, x):
        hidden = model[0](x)
        arrived = []
        # An addition hands one and the same gradient on.
        hidden.register_hook(lambda grad: arrived.append(grad))
        (hidden + 0).square().sum().backward()
        arrived[0].mul_(3)

    for layer, x in ((nn.Linear(6, 3), batch_for("")), (nn.LayerNorm(6), batch_for(""))):
        model = nn.Sequential(layer)
        late, expected = read(model, x, meddled, foreseen=None)
        early, found = read(model, x, meddled, foreseen=[list(model.parameters())])
        sums = torch.cat([part.flatten() for part in found.values()])
        assert sums.norm() <= (WEIGHTS * early.sqrt()).sum() * (1 + 1e-6)
        if isinstance(layer, nn.Linear):
            torch.testing.assert_close(early, late, rtol=1e-6, atol=0)
            torch.testing.assert_close(found, expected)


def test_settings_that_were_changed_after_it_was_measured_count():
    torch.manual_seed(0)
    model, x = nn.Conv1d(16, 8, 3, padding=1), torch.randn(RECORDS, 16, 6)

    def meddled(model, x):
        once(model, x)
        model.padding_mode = "circular"

    late, expected = read(model, x, meddled, foreseen=None)
    model.padding_mode = "zeros"
    early, found = read(model, x, meddled, foreseen=[list(model.parameters())])
    torch.testing.assert_close(early, late, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected)


def test_a_rule_that_is_not_known_is_read_afterwards(monkeypatch):
    class Own(LinearRule):
        """May read whatever it likes, for norms and again for sums."""

    model, x = Narrow(), batch_for("")
    for rule in (LinearRule(), Own()):
        monkeypatch.setitem(rule_module._RULES, nn.Linear, rule)
        capture = GradientCapture(model, low_memory=True)
        with capture.capturing(RECORDS, backward_strategy=NormsInBackward([list(model.parameters())])):
            once(model, x)
        assert bool(capture.layer_calls()[0].grads) == isinstance(rule, Own)
        capture.detach()


def test_a_record_that_is_not_finite_is_left_out():
    torch.manual_seed(0)
    model, x = MODELS["positions"](), batch_for("")
    x[2] = torch.inf
    late, _ = read(model, x, once, foreseen=None)
    early, _ = read(model, x, once, foreseen=[list(model.parameters())])
    assert not early[2].isfinite()
    torch.testing.assert_close(early[[0, 1, 3, 4]], late[[0, 1, 3, 4]], rtol=1e-5, atol=0)


def test_the_gradients_of_records_can_be_read():
    torch.manual_seed(0)
    model, x = Narrow(), batch_for("")
    exact = per_record_gradients(model, lambda model, batch: squares(model, *batch), (x,))
    capture = GradientCapture(model, low_memory=True)
    with capture.capturing(RECORDS, backward_strategy=NormsInBackward([list(model.parameters())])):
        once(model, x)
    found = [gradients for gradients, _ in capture.per_record_gradients()]
    for parameter, expected in zip(model.parameters(), exact, strict=True):
        assert relative_error(torch.cat([part[parameter] for part in found]), expected) < 1e-5
    capture.detach()


def test_an_input_that_was_overwritten_is_refused_where_it_is_read_again():
    model, x = nn.Linear(6, 3), batch_for("")
    capture = GradientCapture(model, low_memory=True)
    with capture.capturing(RECORDS, backward_strategy=NormsInBackward([list(model.parameters())])):
        F.mse_loss(model(x), torch.zeros(RECORDS, 3)).backward()
    x.zero_()
    with pytest.raises(PrivacyError, match="in-place change"):
        capture.squared_norms()
    capture.detach()
