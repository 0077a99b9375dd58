"""Groups clipped while the backward pass runs: the sums of afterwards, less that is kept, nothing by halves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino import PerformanceOptions, fit
from sordino.clipping import AutomaticClipping, FlatClipping, GroupedClipping
from sordino.errors import InvalidArgument, PrivacyError, UncapturedParameter
from sordino.gradients import GradientCapture
from sordino.gradients.backward_strategies import GroupwiseInBackward
from training.memory_models import MODELS, RECORDS, batch_for, gradients, plan_of


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["layer", "parameter", "block"])
@pytest.mark.parametrize("inner", [FlatClipping(), AutomaticClipping()])
def test_sums_are_those_taken_afterwards(name, by, inner):
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), batch_for(name)
    clipping = GroupedClipping(by=by, inner=inner)
    expected = gradients(model, x, clipping=clipping, memory="fast")
    for chunks in (1, 2):
        found = gradients(model, x, clipping=clipping, memory="groupwise", chunks=chunks)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_was_kept_of_a_layer_is_gone_before_the_one_below_is_reached():
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    model = nn.Sequential(first, nn.ReLU(), last)
    capture = GradientCapture(model)
    blocks = GroupwiseInBackward(
        [list(first.parameters()), list(last.parameters())], lambda squares, _: torch.ones_like(squares)
    )
    kept = []
    with capture.capturing(RECORDS, backward_strategy=blocks):
        hidden = model[1](first(batch_for("")))
        hidden.register_hook(lambda _: kept.append((len(capture.layer_calls()), set(blocks.sums))))
        last(hidden).square().sum().backward()
    assert kept == [(0, set(last.parameters()))]
    assert capture.layer_calls() == []


def test_a_record_that_is_not_finite_adds_nothing():
    torch.manual_seed(0)
    model, x = MODELS["perceptron"](), batch_for("")
    x[2] = torch.inf
    found = gradients(model, x, clipping=GroupedClipping(), memory="groupwise")
    expected = gradients(model, x[[0, 1, 3, 4]], clipping=GroupedClipping(), memory="fast")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_every_record_keeps_the_bound_alone():
    torch.manual_seed(0)
    model, x = MODELS["tied"](), batch_for("tied")
    for record in x.split(1):
        found = gradients(model, record, clipping=GroupedClipping(), memory="groupwise")
        assert torch.cat([part.flatten() for part in found]).norm() <= 0.3 * (1 + 1e-6)


def recorded(model, run):
    capture = GradientCapture(model)
    blocks = GroupwiseInBackward([list(model.parameters())], lambda squares, _: torch.ones_like(squares))
    try:
        with capture.capturing(RECORDS, backward_strategy=blocks):
            run(model)
        capture.add_backward_sums({})
    finally:
        capture.detach()


def test_a_second_backward_through_a_layer_that_is_done_is_refused():
    def twice(model):
        loss = model(batch_for("")).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(PrivacyError, match="once in a batch that is clipped block by block"):
        recorded(nn.Linear(6, 3), twice)


def test_a_second_forward_and_backward_is_refused():
    def again(model):
        for _ in range(2):
            model(batch_for("")).square().sum().backward()

    with pytest.raises(PrivacyError, match="once in a batch that is clipped block by block"):
        recorded(nn.Linear(6, 3), again)


def test_an_uncaptured_use_is_refused_although_sums_were_taken():
    def beside(model):
        (model(batch_for("")).square().sum() + model.weight.square().sum()).backward()

    with pytest.raises(UncapturedParameter):
        recorded(nn.Linear(6, 3), beside)


def test_norms_of_a_recording_by_blocks_are_refused():
    model = nn.Linear(6, 3)
    capture = GradientCapture(model)
    blocks = GroupwiseInBackward([list(model.parameters())], lambda squares, _: torch.ones_like(squares))
    with capture.capturing(RECORDS, backward_strategy=blocks):
        model(batch_for("")).square().sum().backward()
    with pytest.raises(PrivacyError, match="by its sums"):
        capture.squared_norms()


def test_calls_that_are_no_part_of_the_loss_are_left_out():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), batch_for("")
    sums = []
    for unused in (False, True):
        capture = GradientCapture(model)
        blocks = GroupwiseInBackward([list(model.parameters())], lambda squares, _: torch.ones_like(squares))
        with capture.capturing(RECORDS, backward_strategy=blocks):
            if unused:
                model(x)
            model(x).square().sum().backward()
        into = {}
        capture.add_backward_sums(into)
        sums.append(into[model.weight])
        capture.detach()
    torch.testing.assert_close(sums[0], sums[1])


def test_fit_takes_grouped_plans_only():
    model, data = nn.Linear(6, 3), (batch_for(""), torch.zeros(RECORDS).long())

    def loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    performance = PerformanceOptions(clipping_mode="groupwise")
    assert fit(model, loss, data, plan_of(GroupedClipping()), performance=performance, progress=False).steps == 1
    with pytest.raises(InvalidArgument, match='clipping_mode="groupwise"'):
        fit(model, loss, data, plan_of(FlatClipping()), performance=performance, progress=False)
