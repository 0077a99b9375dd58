"""nn.LSTM, nn.GRU, nn.RNN: torch's outputs, exact gradients, with dropout and packed sequences."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from agreement import check, check_on_one_seed
from sordino.errors import RecordCountMismatch, UncapturedParameter
from sordino.gradients import GradientCapture, recurrent_cells
from strategies import record_counts, seeds, sizes

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

CELLS = [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)]


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def last_of(state):
    """The sum of squares of the last states of each record."""
    states = state if isinstance(state, tuple) else (state,)
    return torch.stack([(s * (i + 1)).square().sum((0, 2)) for i, s in enumerate(states)]).sum(0)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), records=record_counts, steps=st.integers(1, 6), d=sizes, h=st.integers(2, 5), seed=seeds)
def test_recurrent_layers_with_every_option_are_exact(data, records, steps, d, h, seed):
    make = data.draw(st.sampled_from(CELLS), label="cell")
    batch_first, given_state = data.draw(st.booleans(), label="batch_first"), data.draw(st.booleans(), label="state")
    options = {
        "num_layers": data.draw(st.integers(1, 2), label="layers"),
        "bidirectional": data.draw(st.booleans(), label="bidirectional"),
        "bias": data.draw(st.booleans(), label="bias"),
    }
    if make is nn.LSTM and data.draw(st.booleans(), label="projected"):
        options["proj_size"] = h - 1
    torch.manual_seed(seed)
    layer = make(d, h, batch_first=batch_first, **options)
    rows = options["num_layers"] * (1 + options["bidirectional"])

    def loss(m, x, first, cell):
        state = None
        if given_state:
            state = first.transpose(0, 1).contiguous()
            state = (state, cell.transpose(0, 1).contiguous()) if make is nn.LSTM else state
        output, last = m(x if batch_first else x.transpose(0, 1), state)
        return output.square().sum((1 if batch_first else 0, 2)) + last_of(last)

    width = options.get("proj_size", h)
    check(layer, loss, x_of(records, steps, d), x_of(records, rows, width), x_of(records, rows, h, seed=5))


@pytest.mark.parametrize("make", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_packed_sequences_are_exact_in_any_order(make, bidirectional, ordered):
    torch.manual_seed(0)
    layer = make(3, 4, num_layers=2, bidirectional=bidirectional, batch_first=True)
    lengths = torch.tensor([5, 4, 4, 1] if ordered else [2, 5, 1, 4])

    def loss(m, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
        output, last = m(packed)
        padded = pad_packed_sequence(output, batch_first=True, total_length=5)[0]
        weights = torch.arange(1.0, 6.0).to(padded)[:, None]
        return (padded * weights).square().sum((1, 2)) + last_of(last)

    check(layer, loss, x_of(4, 5, 3), lengths)


def test_a_packed_sequence_with_a_state_and_projection_is_exact():
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, proj_size=2, batch_first=True)

    def loss(m, x, lengths, h, c):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, last = m(packed, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return pad_packed_sequence(output, batch_first=True, total_length=5)[0].square().sum((1, 2)) + last_of(last)

    check(layer, loss, x_of(4, 5, 3), torch.tensor([2, 5, 1, 4]), x_of(4, 1, 2), x_of(4, 1, 4, seed=5))


@pytest.mark.parametrize("make", [*CELLS, lambda *a, **k: nn.LSTM(*a, proj_size=2, **k)])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_both_libraries_of_the_loops_give_torchs_outputs_and_exact_gradients(make, library, monkeypatch):
    if library == "torch":
        monkeypatch.setattr(recurrent_cells, "_MOST", -1)
    torch.manual_seed(0)
    layer = make(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    lengths = torch.tensor([2, 5, 1, 4])

    def loss(m, x, lengths):
        packed, last = m(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        output = pad_packed_sequence(packed, batch_first=True, total_length=5)[0]
        return (output * x.sum(2, keepdim=True)).square().sum((1, 2)) + last_of(last)

    check(layer, loss, x_of(4, 5, 3), lengths)
    layer, x = layer.double(), x_of(4, 5, 3).double()
    expected, last = layer(x)
    capture = GradientCapture(layer)
    with capture.capturing(records=4):
        output, state = layer(x)
        output.sum().backward()
    pairs = zip([expected, *last], [output, *state], strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("make", CELLS)
def test_states_close_to_zero_are_exact(make):
    torch.manual_seed(0)
    layer = make(3, 4, batch_first=True, bias=False)
    x = x_of(4, 5, 3) * torch.tensor([1e-6, 1e-3, 1.0, 3.0])[:, None, None]
    check(layer, lambda m, x: m(x)[0].sum((1, 2)), x)


@pytest.mark.parametrize("make", CELLS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_between_layers_draws_torchs_numbers(make, packed, batch_first):
    torch.manual_seed(0)
    layer = make(3, 4, num_layers=3, dropout=0.4, bidirectional=True, batch_first=batch_first)
    x, lengths = x_of(4, 5, 3), torch.tensor([2, 5, 1, 4])
    x = x if batch_first else x.transpose(0, 1).contiguous()

    def loss(m):
        inputs = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False) if packed else x
        output, last = m(inputs)
        output = pad_packed_sequence(output, batch_first)[0] if isinstance(output, PackedSequence) else output
        return output.square().sum((1 if batch_first else 0, 2)) + last_of(last)

    check_on_one_seed(layer, loss, 4)


def test_norms_under_a_known_dropout_mask_are_exact(monkeypatch):
    kept = torch.tensor([0.0, 2.0, 2.0, 0.0])
    torch.manual_seed(0)
    first, second = nn.LSTM(3, 4), nn.LSTM(4, 4)
    stacked = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    for i, layer in enumerate((first, second)):
        for name, parameter in layer.named_parameters():
            stacked.get_parameter(name.replace("l0", f"l{i}")).data.copy_(parameter.data)
    pair = nn.ModuleList([first, second])
    x = x_of(5, 3, 3)
    results = []
    for model, run in [(stacked, lambda m: m(x)[0]), (pair, lambda m: m[1](m[0](x)[0] * kept)[0])]:
        capture = GradientCapture(model)
        with monkeypatch.context() as patch, capture.capturing(records=3):
            patch.setattr(torch, "dropout", lambda value, p, train: value * kept)
            run(model).square().sum().backward()
        results.append(capture.squared_norms())
    assert torch.allclose(*results, rtol=1e-5)


def test_a_classifier_that_reads_the_last_output_is_exact():
    class Classifier(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.embedding, self.layer, self.head = nn.Embedding(7, 3), layer, nn.Linear(8, 2)

        def forward(self, ids):
            return self.head(self.layer(self.embedding(ids))[0][:, -1])

    ids = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(1))
    for make in CELLS:
        torch.manual_seed(0)
        model = Classifier(make(3, 4, batch_first=True, bidirectional=True))
        check(model, lambda m, batch: F.cross_entropy(m(batch), batch[:, 0] % 2, reduction="none"), ids)


def test_a_layer_called_twice_with_shared_and_frozen_weights_is_exact():
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def twice(m, x):
        hidden, state = m(x)
        return m(hidden, state)[0].square().sum((1, 2))

    check(layer, twice, x_of(3, 5, 4))
    layer.weight_hh_l1 = layer.weight_hh_l0
    layer.weight_ih_l1 = layer.weight_hh_l0
    check(layer, twice, x_of(3, 5, 4))
    for frozen in ("weight_ih_l0", "bias_hh_l0", "bias_ih_l1"):
        layer.get_parameter(frozen).requires_grad_(False)
        check(layer, twice, x_of(3, 5, 4))


def test_gradients_reach_the_layers_below_and_the_first_state():
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, batch_first=True)
    x, h = x_of(3, 5, 3).requires_grad_(), x_of(1, 3, 4).requires_grad_()
    plain = torch.autograd.grad(layer(x, h)[0].square().sum(), [x, h])
    capture = GradientCapture(layer)
    with capture.capturing(records=3):
        layer(x, h)[0].square().sum().backward()
    assert torch.allclose(x.grad, plain[0], atol=1e-6)
    assert torch.allclose(h.grad, plain[1], atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", CELLS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_record_that_is_not_finite_leaves_the_others_alone_and_warns_nobody(make, poison):
    torch.manual_seed(0)
    layer = make(3, 4, batch_first=True)
    x = x_of(4, 5, 3)
    capture = GradientCapture(layer)
    norms = []
    for value in (0.0, poison):
        x[1, 2, 0] = value
        with capture.capturing(records=4):
            layer(x)[0].square().sum().backward()
        norms.append(capture.squared_norms())
    assert not norms[1][1].isfinite()
    assert torch.allclose(norms[0][[0, 2, 3]], norms[1][[0, 2, 3]])


def test_one_sequence_for_all_records_and_a_wrong_batch_are_refused():
    capture = GradientCapture(layer := nn.GRU(3, 4, batch_first=True))
    packed = pack_padded_sequence(x_of(1, 5, 3), torch.tensor([5]), batch_first=True)
    for batch in (x_of(1, 5, 3), x_of(2, 5, 3), x_of(5, 3), packed):
        with pytest.raises(RecordCountMismatch), capture.capturing(records=3):
            layer(batch)


def test_a_weight_used_outside_the_layer_is_refused():
    layer = nn.LSTM(3, 4, batch_first=True)
    capture = GradientCapture(layer)
    with capture.capturing(records=3), pytest.raises(UncapturedParameter, match="weight_hh_l0"):
        (layer(x_of(3, 5, 3))[0].sum() + layer.weight_hh_l0.square().sum()).backward()
