"""Norms in one backward pass and sums in the next: the sums of a single pass, nothing kept, nothing by halves."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from sordino import PerformanceOptions, Plan, PrivacyEngine, fit
from sordino.clipping import AdaClip, AutomaticClipping, FlatClipping, GroupedClipping, QuantileClipping
from sordino.errors import InvalidArgument, PrivacyError, UncapturedParameter
from sordino.gradients import GradientCapture
from sordino.gradients.backward_strategies import TwoPassBackward, tensor_fingerprint
from sordino.gradients.rules.base import LayerCall
from sordino.randomness import KeyedRNG
from training.memory_models import MODELS, RECORDS, Repeated, batch_for, gradients


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


OTHERS = [AutomaticClipping(), GroupedClipping(), QuantileClipping(count_noise=2.0), GroupedClipping(by="parameter")]


@pytest.mark.parametrize(
    ("name", "clipping"),
    [(name, FlatClipping()) for name in [*MODELS, "repeated by reentry"]]
    + [(name, clipping) for name in ("tied", "convolution", "opaque") for clipping in OTHERS],
)
def test_sums_are_those_of_one_pass(name, clipping):
    torch.manual_seed(0)
    model = (MODELS.get(name) or (lambda: Repeated(reentrant=True)))()
    x = batch_for(name)
    for chunks in (1, 2):
        expected = gradients(model, x, memory="fast", clipping=clipping, chunks=chunks)
        assert any(part.any() for part in expected)
        assert_close(gradients(model, x, memory="two_pass", clipping=clipping, chunks=chunks), expected)


def bounds_of(model, x, *, two_passes):
    capture = GradientCapture(model, low_memory=True)
    parameters, seen = list(model.parameters()), []
    try:
        if not two_passes:
            with capture.capturing(len(x)):
                model(x).square().sum().backward()
            return capture.squared_norm_bounds([parameters])
        passes = TwoPassBackward([parameters], lambda squares: seen.append(squares) or torch.ones_like(squares))
        with capture.capturing(len(x), backward_strategy=passes):
            loss = model(x).square().sum()
            capture.backward(lambda again: loss.backward(retain_graph=again))
        return seen[0]
    finally:
        capture.detach()


@pytest.mark.parametrize("name", ["perceptron", "convolution", "tied", "checkpointed", "positions", "opaque"])
def test_bounds_are_those_of_one_pass(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), batch_for(name)
    torch.testing.assert_close(
        bounds_of(model, x, two_passes=True), bounds_of(model, x, two_passes=False), rtol=1e-9, atol=0
    )


def test_what_was_kept_of_a_layer_is_gone_before_the_one_below_is_reached(monkeypatch):
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    model = nn.Sequential(first, nn.ReLU(), last)
    uses, seen = [], []
    made = LayerCall.__init__
    monkeypatch.setattr(LayerCall, "__init__", lambda self, **given: (made(self, **given), uses.append(self))[0])
    capture = GradientCapture(model)
    passes = TwoPassBackward([list(model.parameters())], torch.ones_like)
    with capture.capturing(RECORDS, backward_strategy=passes):
        hidden = model[1](first(batch_for("")))
        hidden.register_hook(lambda _: seen.append((any(use.saved or use.memo for use in uses), set(passes.sums))))
        loss = last(hidden).square().sum()
        capture.backward(lambda again: loss.backward(retain_graph=again))
    assert seen == [(False, set()), (False, set(last.parameters()))]
    assert len(uses) >= 2
    assert capture.layer_calls() == []


@pytest.mark.parametrize("name", ["perceptron", "checkpointed", "checkpointed by reentry", "convolution", "positions"])
def test_a_record_that_is_not_finite_adds_nothing(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), batch_for(name)
    expected = gradients(model, x[[0, 1, 3, 4]], memory="fast")
    for value in (torch.inf, torch.nan):
        x[2] = value
        assert_close(gradients(model, x, memory="two_pass"), expected)


@pytest.mark.parametrize("name", ["tied", "repeated", "positions", "opaque"])
def test_every_record_keeps_the_bound_alone(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), batch_for(name)
    for record in x.split(1):
        found = gradients(model, record, memory="two_pass")
        assert torch.cat([part.flatten() for part in found]).double().norm() <= 0.3 * (1 + 1e-6)


def test_a_record_whose_terms_cancel_keeps_the_bound():
    torch.manual_seed(0)
    model = nn.Linear(48, 48)
    inputs, signs = torch.randn(1, 1, 48).expand(1, 64, 48), torch.tensor([1e4, -1e4]).repeat(32)
    capture = GradientCapture(model, low_memory=True)
    for records in (1, 3):
        passes = TwoPassBackward([list(model.parameters())], lambda squares: 0.3 / squares.sqrt().clamp(min=0.3))
        with capture.capturing(records, backward_strategy=passes):
            loss = (model(inputs.expand(records, -1, -1)).tanh() * signs[None, :, None]).sum()
            loss = loss + model(torch.randn(records, 64, 48)).sum()
            capture.backward(lambda again, loss=loss: loss.backward(retain_graph=again))
        into = {}
        capture.add_backward_sums(into)
        assert torch.cat([part.flatten() for part in into.values()]).double().norm() <= records * 0.3 * (1 + 1e-6)


class Unlike(nn.Module):
    """Masks that are drawn again when the block is run again."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 3), reentrant

    def forward(self, x):
        x = x.clone().requires_grad_(self.reentrant)
        block = checkpoint(
            lambda x: self.first(F.dropout(x)), x, use_reentrant=self.reentrant, preserve_rng_state=False
        )
        return self.last(block)


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_differ_are_refused(reentrant):
    with pytest.raises(PrivacyError, match="must repeat the first exactly"):
        gradients(Unlike(reentrant=reentrant), batch_for(""), memory="two_pass")


class Rearranged(nn.Module):
    """The same numbers in both passes, in another order or with other signs, where the block is run again."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = nn.Linear(4, 6), change
        self.weights = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        block = checkpoint(lambda x: self.inner(self.change(x)), x, use_reentrant=False, preserve_rng_state=False)
        return (block * self.weights).flatten(1)


def shuffled(x):
    return x[:, torch.randperm(x.shape[1])]


def flipped(x):
    return x * (2 * torch.randint(2, (1, x.shape[1], 1)) - 1)


@pytest.mark.parametrize("change", [shuffled, flipped])
def test_passes_that_see_the_same_numbers_at_other_places_are_refused(change):
    """A record's norm would be that of one order, and its sum that of another."""
    torch.manual_seed(0)
    with pytest.raises(PrivacyError, match="must repeat the first exactly"):
        gradients(Rearranged(change), torch.randn(8, 5, 4), memory="two_pass")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("size", [9, 501, 20_011])
def test_a_fingerprint_tells_places_and_signs(dtype, size):
    values = (3 * torch.randn(size, generator=torch.Generator().manual_seed(0))).to(dtype)
    prints = {
        int(tensor_fingerprint(one))
        for one in (values, -values, values.flip(0), values.roll(1), values + (values == 0))
    }
    assert len(prints) == 4 + bool((values == 0).any())
    assert int(tensor_fingerprint(values.clone())) in prints
    assert int(tensor_fingerprint(torch.cat([values, values])[size:])) == int(tensor_fingerprint(values))


def recorded(model, run):
    capture = GradientCapture(model)
    try:
        with capture.capturing(RECORDS, backward_strategy=TwoPassBackward([list(model.parameters())], torch.ones_like)):
            run(model, capture)
        capture.add_backward_sums({})
    finally:
        capture.detach()


def twice(model, capture):
    for _ in range(2):
        loss = model(batch_for("")).square().sum()
        capture.backward(lambda again, loss=loss: loss.backward(retain_graph=again))


def past_the_capture(model, _):
    model(batch_for("")).square().sum().backward()


def not_at_all(model, _):
    model(batch_for(""))


def beside(model, capture):
    loss = model(batch_for("")).square().sum() + model.weight.square().sum()
    capture.backward(lambda again: loss.backward(retain_graph=again))


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        (twice, PrivacyError, "once in a batch that is clipped in two passes"),
        (past_the_capture, PrivacyError, "one of the two passes"),
        (not_at_all, PrivacyError, "must be run backward"),
        (beside, UncapturedParameter, "through a captured layer"),
    ],
)
def test_anything_but_two_passes_is_refused(run, error, words):
    with pytest.raises(error, match=words):
        recorded(nn.Linear(6, 3), run)


def test_gradients_of_inputs_alone_are_no_pass():
    model, x = nn.Linear(6, 3), batch_for("")
    capture = GradientCapture(model)
    with capture.capturing(RECORDS, backward_strategy=TwoPassBackward([list(model.parameters())], torch.ones_like)):
        loss = model(x.requires_grad_()).square().sum()
        capture.backward(lambda again: loss.backward(inputs=[x], retain_graph=True) or again)
        capture.backward(lambda again: loss.backward(retain_graph=again))
    into = {}
    capture.add_backward_sums(into)
    assert into[model.weight].any()


def test_a_parameter_that_turns_up_again_costs_one_more_pass_once():
    torch.manual_seed(0)
    model, x = Repeated(reentrant=True), batch_for("")
    capture, shared, runs = GradientCapture(model), set(), []
    for _ in range(2):
        with capture.capturing(
            RECORDS, backward_strategy=TwoPassBackward([list(model.parameters())], torch.ones_like, shared=shared)
        ):
            loss = model(x).square().sum()
            capture.backward(lambda again, loss=loss: runs.append(again) or loss.backward(retain_graph=again))
        capture.add_backward_sums({})
    assert runs == [True, True, False, True, False]
    assert shared == set(model.inner.parameters())


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def test_fit_reaches_the_weights_of_one_pass():
    data = (batch_for("").repeat(8, 1), torch.arange(8 * RECORDS) % 3)
    plan = Plan(noise_multiplier=0.5, max_grad_norm=0.3, sample_rate=0.5, steps=4, expected_batch_size=20.0, delta=1e-5)
    reached = []
    for memory in ("fast", "two_pass"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))
        rng = KeyedRNG(seed=3, reproducible=True)
        performance = PerformanceOptions(clipping_mode=memory, microbatch_size=8)
        result = fit(model, loss_of, data, plan, performance=performance, rng=rng, progress=False)
        reached.append([p.detach() for p in model.parameters()])
        assert result.guarantee.epsilon == pytest.approx(plan.guarantee().epsilon)
    assert_close(*reached)


# ── a loop of one's own ─────────────────────────────────────────────────────────────────────────────────────


def in_a_loop(memory, step, *, microbatch_size=None, criterion=None):
    torch.manual_seed(0)
    model = MODELS["dropping"]()
    data = TensorDataset(batch_for("").repeat(2, 1), torch.arange(2 * RECORDS) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(clipping_mode=memory, seed=3, reproducible=True)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=RECORDS),
        noise_multiplier=0.5,
        max_grad_norm=0.3,
        microbatch_size=microbatch_size,
        criterion=criterion,
    )
    for x, y in loader:
        step(model, x, y)
        optimizer.step()
    engine.detach()
    return [parameter.detach() for parameter in model.parameters()]


def usual(model, x, y):
    F.cross_entropy(model(x), y).backward()


def with_its_own_graph(model, x, y):
    torch.autograd.backward(F.cross_entropy(model(x), y), None, True)


@pytest.mark.parametrize(
    ("step", "options"),
    [(usual, {"microbatch_size": 3}), (with_its_own_graph, {}), (usual, {"criterion": F.cross_entropy})],
)
def test_a_loop_reaches_the_weights_of_one_pass(step, options):
    assert_close(in_a_loop("two_pass", step, **options), in_a_loop("fast", step, **options))


def two_losses(model, x, y):
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def test_two_backward_passes_of_a_loop_are_refused_by_name():
    with pytest.raises(PrivacyError, match="once in a batch that is clipped in two passes"):
        in_a_loop("two_pass", two_losses)


def test_an_unknown_mode_is_refused():
    with pytest.raises(InvalidArgument, match="clipping_mode must be one of"):
        PrivacyEngine(clipping_mode="three-pass")


@pytest.mark.parametrize(
    ("clipping", "options", "words"),
    [(AdaClip(), {}, "got .*every record's gradient"), (FlatClipping(), {"secure_mode": True}, "with secure mode")],
)
def test_what_needs_every_gradient_is_refused_by_name(clipping, options, words):
    data = (batch_for(""), torch.zeros(RECORDS).long())
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=0.3,
        sample_rate=0.1,
        steps=1,
        expected_batch_size=1.0,
        delta=1e-5,
        clipping=clipping,
        **options,
    )
    with pytest.raises(InvalidArgument, match=words):
        fit(
            nn.Linear(6, 3),
            loss_of,
            data,
            plan,
            performance=PerformanceOptions(clipping_mode="two_pass"),
            progress=False,
        )
