"""The capture's contract: coverage, lifecycle, refusals, and the cases where other libraries are wrong."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracles
from sordino.clipping import FlatClipping
from sordino.errors import InvalidArgument, PrivacyError, RecordCountMismatch, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.gradients.interception import CAPTURING_NODES
from strategies import seeds

BOUND = 0.3


def clipped(capture, bound=BOUND):
    sums = {}
    squared = capture.squared_norms()
    capture.add_weighted_sums(FlatClipping().clip_factors(squared, max_grad_norm=bound), sums)
    return squared, sums


def check(model, loss, *batch, parameters=None, tolerance=1e-5):
    """`loss(model, batch)` gives one value per record; capture equals the oracle, C is the bound of each record."""
    wanted = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    expected = oracles.per_record_gradients(model, lambda m, record: loss(m, record).sum(), batch, wanted)
    capture = GradientCapture(model, wanted)
    with capture.capturing(records=batch[0].shape[0]):
        total = loss(model, batch).sum()
        assert capture.uncaptured_uses(total) == []
        total.backward()
    squared, sums = clipped(capture)
    compare(squared, sums, expected, wanted, tolerance)
    capture.detach()


def compare(squared, sums, expected, wanted, tolerance=1e-5):
    true = oracles.squared_norms(expected)
    assert torch.allclose(squared, true, rtol=2 * tolerance, atol=1e-9)
    assert (squared >= true * (1 - 1e-5) - 1e-12).all()
    reference = oracles.clipped_sum(expected, BOUND)
    scale = float(true.sqrt().clamp(max=BOUND).max())
    for parameter, value in zip(wanted, reference, strict=True):
        got = sums.get(parameter, torch.zeros_like(parameter))
        assert oracles.relative_error(got, value, floor=scale) < tolerance


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squares(model, batch):
    return model(*batch).square().flatten(1).sum(1)


class Toy(nn.Module):
    """A module given by a function of itself."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = forward

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


# --- uses that no layer sees -------------------------------------------------------------------------------------


def test_a_functional_use_of_a_layers_weight_is_exact_inside_the_model_and_refused_by_name_outside():
    model = Toy(lambda s, x: s.layer(x) + 50 * F.linear(torch.tanh(x), s.layer.weight), layer=nn.Linear(4, 4))
    check(model, squares, x_of(3, 4))
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        loss = (squares(model, (x_of(3, 4),)) + F.linear(x_of(3, 4), model.layer.weight).sum(1)).sum()
        assert capture.uncaptured_uses(loss) == ["layer.weight"]
        with pytest.raises(UncapturedParameter, match=r"layer\.weight"):
            loss.backward()


def test_nothing_can_be_read_after_an_uncaptured_use():
    model = Toy(lambda s, x: s.layer(x), layer=nn.Linear(4, 4))
    capture = GradientCapture(model)
    capture.start(3)
    with pytest.raises(UncapturedParameter, match=r"layer\.weight"):
        (squares(model, (x_of(3, 4),)) + F.linear(x_of(3, 4), model.layer.weight).sum(1)).sum().backward()
    capture.stop()
    with pytest.raises(UncapturedParameter, match=r"layer\.weight"):
        capture.squared_norms()
    with pytest.raises(UncapturedParameter, match=r"layer\.weight"):
        capture.add_weighted_sums(torch.zeros(3), {})
    capture.start(3)
    squares(model, (x_of(3, 4),)).sum().backward()
    assert capture.squared_norms().shape == (3,)


def test_weight_decay_in_the_loss_is_refused():
    model = nn.Linear(3, 2)
    capture = GradientCapture(model)
    with pytest.raises(UncapturedParameter), capture.capturing(records=2):
        (model(x_of(2, 3)).sum() + model.weight.square().sum()).backward()


def test_a_training_pass_outside_a_recording_gives_no_ordinary_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    capture = GradientCapture(model)
    with pytest.raises(UncapturedParameter):
        model(x_of(2, 3)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    with capture.capturing(records=2):
        model(x_of(2, 3)).sum().backward()
    with pytest.raises(UncapturedParameter):
        model(x_of(2, 3)).sum().backward()


def test_a_backward_through_an_earlier_recording_is_refused():
    model = nn.Linear(3, 2)
    capture = GradientCapture(model)
    capture.start(2)
    loss = model(x_of(2, 3)).sum()
    capture.start(2)
    with pytest.raises(PrivacyError):
        loss.backward()
    assert capture.squared_norms().tolist() == [0, 0]


def test_a_backward_after_the_norms_were_read_is_refused():
    model = nn.Linear(3, 2)
    capture = GradientCapture(model)
    capture.start(2)
    loss = model(x_of(2, 3)).sum()
    loss.backward(retain_graph=True)
    capture.squared_norms()
    with pytest.raises(PrivacyError):
        loss.backward()
    with pytest.raises(PrivacyError):
        capture.add_weighted_sums(torch.ones(2), {})


def test_gradients_of_gradients_are_refused():
    model = nn.Linear(3, 1)
    capture = GradientCapture(model)
    x = x_of(2, 3).requires_grad_()
    with pytest.raises(PrivacyError, match="create_graph"), capture.capturing(records=2):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_gradients_for_inputs_alone_are_not_captured():
    model = nn.Linear(3, 1)
    capture = GradientCapture(model)
    x = x_of(2, 3).requires_grad_()
    with capture.capturing(records=2):
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(gradient[0], model.weight[0])
    assert capture.squared_norms().tolist() == [0, 0]


def test_a_kept_input_that_is_overwritten_before_reading_is_refused():
    model = nn.Linear(3, 1)
    capture = GradientCapture(model)
    x = x_of(2, 3)
    with capture.capturing(records=2):
        model(x).sum().backward()
    x.zero_()
    with pytest.raises(PrivacyError, match="in-place"):
        capture.squared_norms()


# --- tied and shared parameters ----------------------------------------------------------------------------------


def language_model(order):
    embedding, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = embedding.weight
    parts = {"embedding": embedding, "head": head}

    def forward(s, ids):
        if order == "twice":
            hidden = torch.tanh(s.embedding(ids)) + s.embedding(ids.flip(1))
            return s.head(hidden) + s.head(hidden.square())
        return s.head(torch.tanh(s.embedding(ids)))

    return Toy(forward, **(parts if order != "reversed" else dict(reversed(parts.items()))))


@pytest.mark.parametrize("order", ["plain", "reversed", "twice"])
def test_a_language_model_with_tied_embedding_is_exact(order):
    torch.manual_seed(0)
    model = language_model(order)
    ids = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(1))

    def loss(m, batch):
        return F.cross_entropy(m(batch[0]).transpose(1, 2), batch[0].roll(1, 1), reduction="none").sum(1)

    check(model, loss, ids)


def test_a_linear_layer_tied_to_a_custom_module_is_exact():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    other = Toy(lambda s, x: x @ s.matrix, matrix=layer.weight)
    check(Toy(lambda s, x: s.other(torch.tanh(s.layer(x))), layer=layer, other=other), squares, x_of(5, 4))


def test_a_layer_called_several_times_is_exact():
    torch.manual_seed(0)
    model = Toy(lambda s, x: s.a(torch.tanh(s.a(torch.tanh(s.a(x))))), a=nn.Linear(4, 4))
    check(model, squares, x_of(5, 4))
    check(model, squares, x_of(5, 6, 4))


@pytest.mark.parametrize(
    ("part", "shape"),
    [(nn.Conv1d(3, 3, 3, padding=1), (5, 3, 6)), (nn.LayerNorm(6), (5, 3, 6)), (nn.GroupNorm(1, 3), (5, 3, 6))],
)
def test_convolutions_and_norms_called_twice_are_exact(part, shape):
    torch.manual_seed(0)
    check(Toy(lambda s, x: s.a(torch.tanh(s.a(x))) * 1.5, a=copy.deepcopy(part)), squares, x_of(*shape))


def test_two_layers_that_share_only_the_bias_are_exact():
    torch.manual_seed(0)
    a, b = nn.Linear(3, 4), nn.Linear(4, 4)
    b.bias = a.bias
    model = Toy(lambda s, x: s.b(torch.tanh(s.a(x))), a=a, b=b)
    check(model, squares, x_of(5, 3))
    check(model, squares, x_of(5, 6, 3))


def test_tied_embeddings_with_their_own_paddings_are_exact():
    torch.manual_seed(0)
    a, b = nn.Embedding(4, 3, padding_idx=0), nn.Embedding(4, 3, padding_idx=1)
    b.weight = a.weight
    ids = torch.tensor([[0, 1, 2], [1, 1, 3], [0, 0, 2]])
    check(Toy(lambda s, ids: s.a(ids) * 2 + s.b(ids).tanh(), a=a, b=b), squares, ids)


def test_a_bag_tied_to_an_embedding_and_a_head_is_exact():
    torch.manual_seed(0)
    bag, table, head = nn.EmbeddingBag(4, 3, mode="mean"), nn.Embedding(4, 3), nn.Linear(3, 4)
    table.weight = head.weight = bag.weight
    ids = torch.tensor([[0, 1, 2], [1, 1, 3], [0, 0, 2]])
    model = Toy(lambda s, ids: s.head(s.bag(ids) + s.table(ids).tanh().sum(1)), bag=bag, table=table, head=head)
    check(model, squares, ids)


def test_two_layers_that_share_only_the_weight_are_exact():
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    check(Toy(lambda s, x: s.b(torch.tanh(s.a(x))), a=a, b=b), squares, x_of(5, 4))


def test_uses_that_cancel_are_not_underestimated_and_stay_bounded():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    model = Toy(
        lambda s, ids: s.head(s.embedding(ids)) - s.head(s.embedding(ids).detach() * 0.999), e=embedding, head=head
    )
    model.embedding = embedding
    check(model, lambda m, batch: m(batch[0]).flatten(1).sum(1), torch.tensor([[0, 1], [2, 2], [3, 0]]), tolerance=1e-4)


# --- several forwards and backwards ------------------------------------------------------------------------------


def test_siamese_branches_and_two_losses_in_either_order_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = (x_of(5, 4), x_of(5, 4, seed=8))
    wanted = list(model.parameters())

    def both(m, record):
        return m(record[0]).square().sum(1) + (m(record[0]) * m(record[1])).sum(1)

    expected = oracles.per_record_gradients(model, lambda m, r: both(m, r).sum(), batch)
    for reverse in (False, True):
        capture = GradientCapture(model)
        with capture.capturing(records=5):
            first, second = model(batch[0]), model(batch[1])
            model(batch[0])
            losses = [first.square().sum(), (first * second).sum()]
            for loss in reversed(losses) if reverse else losses:
                loss.backward(retain_graph=True)
        compare(*clipped(capture), expected, wanted)
        capture.detach()


def test_a_loss_scaled_by_the_batch_mean_is_undone_by_scale():
    model = nn.Linear(3, 2)
    x = x_of(4, 3)
    results = []
    for reduce, scale in [(torch.sum, 1.0), (torch.mean, 4.0)]:
        capture = GradientCapture(model)
        with capture.capturing(records=4, scale=scale):
            reduce(model(x).square().sum(1)).backward()
        results.append(clipped(capture))
        capture.detach()
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6)
    assert torch.allclose(results[0][1][model.weight], results[1][1][model.weight], rtol=1e-5)


def test_sums_of_chunks_add_up():
    model = nn.Linear(3, 2)
    x = x_of(6, 3)
    capture = GradientCapture(model)
    whole, parts = {}, {}
    for chunks, into in [([x], whole), (list(x.split(4)), parts)]:
        for chunk in chunks:
            with capture.capturing(records=chunk.shape[0]):
                model(chunk).square().sum().backward()
            capture.add_weighted_sums(FlatClipping().clip_factors(capture.squared_norms(), max_grad_norm=BOUND), into)
    assert torch.allclose(whole[model.weight], parts[model.weight], rtol=1e-5)


def test_a_layer_skipped_in_the_next_step_contributes_nothing_from_the_last():
    model = Toy(lambda s, x, short: s.a(x) if short else s.b(s.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    capture = GradientCapture(model)
    with capture.capturing(records=2):
        model(x_of(2, 3), False).square().sum().backward()
    clipped(capture)
    with capture.capturing(records=2):
        model(x_of(2, 3), True).square().sum().backward()
    _, sums = clipped(capture)
    assert model.b.weight not in sums
    assert model.a.weight in sums


# --- frozen, unfrozen, partial -----------------------------------------------------------------------------------


def test_layers_frozen_and_unfrozen_later_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    capture = GradientCapture(model)
    assert capture.trainable() == [model[2].weight]
    for frozen in (model[2].bias, model[0].weight, model[0].bias):
        frozen.requires_grad_(True)
        wanted = [p for p in model.parameters() if p.requires_grad]
        expected = oracles.per_record_gradients(model, lambda m, r: squares(m, r).sum(), (x_of(3, 4),))
        with capture.capturing(records=3):
            squares(model, (x_of(3, 4),)).sum().backward()
        squared, sums = clipped(capture)
        assert set(sums) == set(wanted)
        compare(squared, sums, expected, wanted)
    model[0].requires_grad_(False)
    with capture.capturing(records=3):
        squares(model, (x_of(3, 4),)).sum().backward()
    assert set(clipped(capture)[1]) == {model[2].weight, model[2].bias}


def test_a_body_that_the_optimizer_does_not_hold_is_untouched_and_keeps_no_activations():
    model = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2))
    capture = GradientCapture(model, model[2].parameters())
    kept = []
    with capture.capturing(records=3), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        body = model[:2](x_of(3, 4))
        assert not body.requires_grad
    assert kept == []
    with capture.capturing(records=3):
        squares(model, (x_of(3, 4),)).sum().backward()
    _, sums = clipped(capture)
    assert set(sums) == set(model[2].parameters())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert capture.names == {model[2].weight: "2.weight", model[2].bias: "2.bias"}


def test_a_model_can_be_captured_once_at_a_time():
    model = nn.Sequential(nn.Linear(2, 2))
    capture = GradientCapture(model)
    with pytest.raises(InvalidArgument, match="captured once"):
        GradientCapture(nn.Sequential(model, nn.Linear(2, 2)))
    GradientCapture(copy.deepcopy(model)).detach()
    capture.detach()
    GradientCapture(model).detach()


def test_a_layer_unfrozen_in_the_middle_of_a_recording_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    expected = oracles.per_record_gradients(model.requires_grad_(True), lambda m, r: squares(m, r).sum(), (x_of(3, 4),))
    model[0].requires_grad_(False)
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        model[0].requires_grad_(True)
        squares(model, (x_of(3, 4),)).sum().backward()
    compare(*clipped(capture), expected, list(model.parameters()))
    with pytest.raises(UncapturedParameter):
        F.linear(x_of(3, 4), model[0].weight).sum().backward()


def test_a_parameter_of_another_model_is_refused():
    with pytest.raises(InvalidArgument, match="parameters"):
        GradientCapture(nn.Linear(2, 2), nn.Linear(2, 2).parameters())


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3).requires_grad_(False)]
)
def test_batch_normalisation_in_training_mode_is_refused_and_in_eval_mode_accepted(layer):
    model = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer), nn.Linear(3, 1))
    with pytest.raises(UnsupportedModule, match=r"1 \(BatchNorm1d\).*GroupNorm"):
        GradientCapture(model)
    model[1].eval()
    before = copy.deepcopy(model[1].state_dict())
    check(model, squares, x_of(4, 3))
    assert all(torch.equal(before[name], value) for name, value in model[1].state_dict().items())
    capture = GradientCapture(model)
    model.train()
    with pytest.raises(UnsupportedModule, match="BatchNorm1d"), capture.capturing(records=4):
        model(x_of(4, 3))


def test_batch_statistics_without_running_ones_are_refused_in_eval_mode_too():
    with pytest.raises(UnsupportedModule):
        GradientCapture(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval())


def test_instance_normalisation_that_tracks_statistics_is_refused_in_training_mode():
    with pytest.raises(UnsupportedModule, match="track_running_stats=False"):
        GradientCapture(nn.InstanceNorm1d(3, track_running_stats=True))


def test_time_folded_into_the_batch_is_refused_without_printing_the_record_count():
    model = Toy(lambda s, x: s.layer(x.reshape(-1, x.shape[-1])), layer=nn.Linear(4, 2))
    capture = GradientCapture(model)
    with pytest.raises(RecordCountMismatch, match=r"layer \(Linear\)") as caught, capture.capturing(records=17):
        model(x_of(17, 19, 4))
    assert not any(number in str(caught.value) for number in ("17", "19", str(17 * 19)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 2), (3,)), (nn.Conv2d(3, 2, 1), (3, 4, 4)), (nn.Conv1d(3, 2, 1), (3, 4)), (nn.LayerNorm(3), (3,))],
)
def test_an_input_without_a_record_dimension_is_refused(layer, shape):
    capture = GradientCapture(layer)
    with pytest.raises(RecordCountMismatch), capture.capturing(records=3):
        layer(x_of(*shape))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_look_at_the_whole_batch_are_refused(options):
    with pytest.raises(UnsupportedModule, match=next(iter(options))):
        GradientCapture(nn.Embedding(3, 2, **options))


# --- what models do ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(seed=seeds, positions=st.integers(1, 4))
def test_position_ids_of_one_row_are_expanded_to_all_records(seed, positions):
    torch.manual_seed(seed)
    model = Toy(
        lambda s, x: s.out(torch.tanh(s.inner(x) + s.position(torch.arange(x.shape[1])[None]))),
        inner=nn.Linear(3, 4),
        position=nn.Embedding(6, 4),
        out=nn.Linear(4, 2),
    )
    check(model, squares, x_of(5, positions, 3, seed=seed))


def test_inplace_activation_and_inplace_residual_are_exact():
    torch.manual_seed(0)

    def forward(s, x):
        out = F.relu(s.a(x), inplace=True)
        out = s.norm(s.b(out))
        out += x
        return F.relu_(out)

    for a, b, norm, x in [
        (nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1), nn.GroupNorm(1, 3), x_of(4, 3, 5, 5)),
        (nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3), x_of(4, 3)),
        (nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3), x_of(4, 2, 3)),
    ]:
        check(Toy(forward, a=a, b=b, norm=norm), squares, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_exact_in_both_variants(reentrant):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 4))

    def forward(s, x):
        hidden = s.first(x)
        return s.last(checkpoint(s.inner, hidden, use_reentrant=reentrant) if s.checkpointed else s.inner(hidden))

    model = Toy(forward, first=nn.Linear(4, 4), inner=inner, last=nn.Linear(4, 2))
    model.checkpointed = False
    expected = oracles.per_record_gradients(model, lambda m, r: squares(m, r).sum(), (x_of(5, 4),))
    model.checkpointed = True
    capture = GradientCapture(model)
    with capture.capturing(records=5):
        squares(model, (x_of(5, 4),)).sum().backward()
    compare(*clipped(capture), expected, list(model.parameters()))
    assert all(p.requires_grad for p in model.parameters())


def test_autocast_keeps_norms_and_sums_consistent():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
    x = x_of(5, 8)
    expected = oracles.per_record_gradients(model, lambda m, r: squares(m, r).sum(), (x,))
    capture = GradientCapture(model)
    with capture.capturing(records=5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.float().square().sum().backward()
    squared, sums = clipped(capture)
    assert torch.allclose(squared, oracles.squared_norms(expected), rtol=0.1)
    assert all(value.dtype == torch.float32 for value in sums.values())


def test_reading_inside_autocast_is_as_precise_as_outside():
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        squares(model, (x_of(3, 5, 40),)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        squared, sums = clipped(capture)
    expected = oracles.per_record_gradients(model, lambda m, r: squares(m, r).sum(), (x_of(3, 5, 40),))
    compare(squared, sums, expected, list(model.parameters()))


def test_flags_are_restored_when_a_layer_raises():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))
    capture = GradientCapture(model)
    with pytest.raises(RuntimeError), capture.capturing(records=2):
        model(x_of(2, 3))
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(PrivacyError):
        capture.squared_norms()


def test_detaching_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    capture = GradientCapture(model)
    capture.detach()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    model(x_of(2, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_copy_of_the_model_is_free_of_the_capture_and_the_model_can_be_pickled():
    model = nn.Sequential(nn.Linear(3, 2))
    capture = GradientCapture(model)
    twin = copy.deepcopy(model)
    capture.start(5)
    twin(x_of(2, 3)).sum().backward()
    assert twin[0].weight.grad is not None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded(x_of(2, 3)).sum().backward()
    assert loaded[0].weight.grad is not None
    capture.stop()


def test_a_discarded_recording_frees_its_activations_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    capture = GradientCapture(model)
    kept = []
    model[1].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    gc.disable()
    try:
        with capture.capturing(records=2):
            squares(model, (x_of(2, 3),)).sum().backward()
        clipped(capture)
        capture.discard()
        assert len(kept) == 1
        assert kept[0]() is None
    finally:
        gc.enable()


def test_evaluation_without_gradients_inside_a_recording_is_left_alone():
    model = nn.Linear(3, 2)
    capture = GradientCapture(model)
    with capture.capturing(records=2):
        model(x_of(2, 3)).sum().backward()
        with torch.no_grad():
            assert model(x_of(7, 3)).shape == (7, 2)
    assert capture.squared_norms().shape == (2,)


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("positions", [(), (3,), (40,)])
def test_a_record_with_a_non_finite_feature_contributes_exactly_zero(poison, positions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    x = x_of(4, *positions, 4)
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        squares(model, (x[1:],)).sum().backward()
    _, without = clipped(capture)
    x[0].view(-1)[0] = poison
    with capture.capturing(records=4):
        squares(model, (x,)).sum().backward()
    squared, sums = clipped(capture)
    assert not squared[0].isfinite()
    assert squared[1:].isfinite().all()
    assert all(torch.allclose(sums[p], without[p], rtol=1e-6, atol=1e-7) for p in model.parameters())


def test_a_half_precision_gradient_of_small_entries_has_its_true_norm():
    layer = nn.Linear(1000, 1, bias=False).half()
    capture = GradientCapture(layer)
    with capture.capturing(records=2):
        (layer(torch.full((2, 1000), 1e-4, dtype=torch.half)) * torch.ones(2, 1)).sum().backward()
    assert capture.squared_norms().sqrt().tolist() == pytest.approx([3.16e-3] * 2, rel=2e-3)
    _, sums = clipped(capture, bound=1e-3)
    assert float(sums[layer.weight].norm()) == pytest.approx(2e-3, rel=1e-5)


@pytest.mark.parametrize("size", [1e-28, 1e-12, 1e12, 1e15])
@pytest.mark.parametrize("positions", [(), (3,), (64,)])
def test_gradients_of_extreme_size_keep_their_norm(size, positions):
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    x = x_of(3, *positions, 6) * size
    capture = GradientCapture(layer)
    with capture.capturing(records=3):
        (layer(x) * size).sum().backward()
    expected = oracles.per_record_gradients(layer, lambda m, r: (m(r[0]) * size).sum(), (x,))
    assert torch.allclose(capture.squared_norms(), oracles.squared_norms(expected), rtol=1e-5)


def test_a_ghost_norm_that_cancels_is_not_underestimated():
    torch.manual_seed(0)
    layer = nn.Linear(40, 50, bias=False)
    a = torch.randn(1, 1, 40).expand(3, 4, 40) + 1e-3 * x_of(3, 4, 40)
    g = x_of(3, 4, 50, seed=5)
    g -= g.mean(1, keepdim=True)
    capture = GradientCapture(layer)
    with capture.capturing(records=3):
        (layer(a) * g).sum().backward()
    true = oracles.squared_norms(oracles.per_record_gradients(layer, lambda m, r: (m(r[0]) * r[1]).sum(), (a, g)))
    squared = capture.squared_norms()
    assert (squared >= true * (1 - 1e-6)).all()
    assert torch.allclose(squared, true, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    seed=seeds,
    bound=st.sampled_from([1e-3, 1.0, 1e3]),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
    positions=st.sampled_from([1, 3, 20]),
)
def test_no_single_record_contributes_more_than_the_bound(seed, bound, size, positions):
    torch.manual_seed(seed)
    shared = nn.Linear(5, 5)
    model = Toy(
        lambda s, ids, x: s.head(s.norm(s.a(torch.tanh(s.a(s.embedding(ids) + x))))),
        a=shared,
        embedding=nn.Embedding(6, 5),
        norm=nn.LayerNorm(5),
        head=nn.Linear(5, 6, bias=False),
    )
    model.head.weight = model.embedding.weight
    capture = GradientCapture(model)
    ids = torch.randint(0, 6, (1, positions))
    with capture.capturing(records=1):
        (model(ids, x_of(1, positions, 5, seed=seed % 1000) * size).square().sum() * size).backward()
    _, sums = clipped(capture, bound)
    contribution = sum(float(value.double().square().sum()) for value in sums.values()) ** 0.5
    assert contribution <= bound * (1 + 1e-6)


def test_autograd_names_the_nodes_of_captured_layers_as_the_checks_expect():
    model = nn.ModuleDict({"rnn": nn.RNN(3, 4), "linear": nn.Linear(4, 2)})
    capture = GradientCapture(model)
    with capture.capturing(records=6):
        outputs, _ = model["rnn"](torch.randn(5, 6, 3))
        loss = model["linear"](outputs[-1]).sum()
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            seen.add(type(node).__name__)
            waiting += [other for other, _ in node.next_functions if other is not None]
    assert seen >= CAPTURING_NODES
