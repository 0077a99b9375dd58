"""What a forward computes for all records alike, and hands from module to module: exact wherever it meets records."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from agreement import check, check_on_one_seed
from sordino import Plan, fit
from sordino.errors import CoupledRecords, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture

WIDTH = 4


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squares(model, *batch):
    return model(*batch).square().flatten(1).sum(1)


class Net(nn.Module):
    """Parts, parameters, and a function of itself and the inputs."""

    def __init__(self, forward, parameters=None, **parts):
        super().__init__()
        for name, shape in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = forward

    def forward(self, *args):
        return self.body(self, *args)


def embedding(rows=16):
    return nn.Embedding(rows, WIDTH)


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs)


class Sign(torch.autograd.Function):
    """A straight-through sign in the old form, without a context of its own."""

    @staticmethod
    def forward(ctx, w):
        return torch.sign(w)

    @staticmethod
    def backward(ctx, g):
        return g


class SignParametrization(nn.Module):
    def forward(self, w):
        return Sign.apply(w)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Binary(nn.Linear):
    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight), self.bias)


class Standardized(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / w.std((1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)


def positions(s, x):
    return s.head((x + s.table(torch.arange(x.shape[1]))).tanh())


def prompt(s, x):
    rows = s.layers(s.table(torch.arange(2)[None])).repeat(len(x), 1, 1)
    return s.head(torch.cat([rows, x], 1).tanh())


def recurrent_prompt(s, x):
    rows = s.head(s.lstm(s.table(torch.arange(3)[None]))[0])
    return s.body_(torch.cat([rows.repeat(len(x), 1, 1), x], 1).tanh())


def prefix(s, x):
    kv = s.layers(s.table(s.numbers[None].expand(len(x), -1))).view(len(x), -1, 2, WIDTH).permute(2, 0, 1, 3)
    k, v = (torch.cat([part, s.kv(x)], 1) for part in kv)
    return F.scaled_dot_product_attention(s.q(x), k, v)


def relative(s, x):
    steps = torch.arange(x.shape[1])
    bias = s.table((steps[:, None] - steps[None]).clamp(-3, 3) + 3).permute(2, 0, 1)[None]
    q, k = (part(x).unflatten(2, (2, 2)).transpose(1, 2) for part in (s.q, s.k))
    return (q @ k.transpose(2, 3) + bias).softmax(-1) @ k


def disentangled(s, x):
    rows = s.norm(s.table.weight)[None]
    keys = s.q(rows).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1).repeat(len(x), 1, 1)
    q = s.q(x).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
    return torch.bmm(q, keys.transpose(1, 2)).unflatten(0, (len(x), 2))


def queries(s, x):
    found = s.attention(s.table.weight[None].repeat(len(x), 1, 1), x, x)[0]
    return s.head(found.tanh())


def decoder(s, x):
    return s.head(s.decoder(s.latents.expand(len(x), -1, -1), x))


def zero_decoder(s, x):
    places = s.table.weight.unsqueeze(0).repeat(len(x), 1, 1)
    hidden = torch.zeros_like(places)
    hidden = s.norm(hidden + s.own(hidden + places, hidden + places, hidden)[0])
    return s.head(s.norm(hidden + s.cross(hidden + places, x, x)[0]))


def first_state(s, x):
    return s.rnn(x, s.h.expand(-1, len(x), -1).contiguous())[0]


def first_states(s, x):
    states = tuple(p.repeat(1, len(x), 1) for p in (s.h, s.c))
    return s.rnn(x, states)[0]


def cell_state(s, x):
    h = s.h.unsqueeze(0).expand(len(x), -1)
    for t in range(x.shape[1]):
        h = s.cell(x[:, t], h)
    return h


def hypernetwork(s, x):
    return F.linear(x, s.make(s.z).view(3, WIDTH), s.shift(s.z))


def film(s, x):
    scale, shift = s.make(s.tasks(torch.tensor(2))).chunk(2, -1)
    return s.head(x) * (1 + scale) + shift


def mixture(s, x):
    return torch.einsum("k,bktd->btd", s.prior.softmax(0), torch.stack([part(x) for part in s.parts], 1))


def codebook(s, x):
    distances = torch.cdist(x, s.table.weight[None].expand(len(x), -1, -1)).neg().softmax(-1)
    return distances @ s.table.weight


def rotary(s, x):
    angles = torch.arange(x.shape[1])[:, None] * s.log_f.exp()[None]
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q = s.q(x)
    return q * cos + torch.cat([-q[..., 2:], q[..., :2]], -1) * sin


def alibi(s, x):
    steps = torch.arange(x.shape[1])
    bias = -s.slopes.exp().view(-1, 1, 1) * (steps[None] - steps[:, None]).abs()
    q = s.q(x).unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias[None].expand(len(x), -1, -1, -1))


def tied(s, ids):
    return F.linear(s.table(ids) + s.places(torch.arange(ids.shape[1])), s.table.weight)


def tied_transposed(s, ids):
    return s.head(s.table(ids)) @ s.table.weight.t() @ s.table.weight


def zeros_plus(s, x):
    return s.rnn(x, torch.zeros(1, len(x), WIDTH) + s.h)[0]


def weighted(parts):
    return nn.ModuleList(parts)


CATALOG = {
    "positions of one dimension": lambda: Net(positions, table=embedding(), head=linear()),
    "positions as an attribute": lambda: _with_numbers(
        Net(lambda s, x: s.head(x + s.table(s.numbers)), table=embedding(), head=linear())
    ),
    "positions by a module": lambda: Net(
        lambda s, x: s.head(x + s.inner(x)),
        inner=Net(lambda s, x: s.table(torch.arange(x.shape[1]).unsqueeze(0)), table=embedding()),
        head=linear(),
    ),
    "positions handed to a module": lambda: Net(
        lambda s, x: s.head(s.inner(x, torch.arange(x.shape[1]))),
        inner=Net(lambda s, x, numbers: x * s.gain + s.table(numbers), {"gain": (WIDTH,)}, table=embedding()),
        head=linear(),
    ),
    "prompt": lambda: Net(prompt, table=embedding(), layers=nn.Identity(), head=linear()),
    "p-tuning": lambda: Net(
        prompt,
        table=embedding(),
        layers=nn.Sequential(linear(WIDTH, 6), nn.ReLU(), linear(6, WIDTH)),
        head=linear(),
    ),
    "p-tuning by a recurrent layer": lambda: Net(
        recurrent_prompt,
        table=embedding(),
        lstm=nn.LSTM(WIDTH, 3, batch_first=True, bidirectional=True),
        head=linear(6, WIDTH),
        body_=linear(),
    ),
    "prefix": lambda: _with_numbers(
        Net(
            prefix,
            table=embedding(),
            layers=nn.Sequential(linear(WIDTH, 3), nn.Tanh(), linear(3, 2 * WIDTH)),
            q=linear(),
            kv=linear(),
        )
    ),
    "relative positions": lambda: Net(relative, table=nn.Embedding(7, 2), q=linear(), k=linear()),
    "disentangled attention": lambda: Net(disentangled, table=embedding(5), norm=nn.LayerNorm(WIDTH), q=linear()),
    "queries": lambda: Net(
        queries, table=embedding(3), attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True), head=linear()
    ),
    "queries of a decoder": lambda: Net(
        decoder,
        {"latents": (1, 2, WIDTH)},
        decoder=nn.TransformerDecoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True),
        head=linear(),
    ),
    "queries that start from zero": lambda: Net(
        zero_decoder,
        table=embedding(2),
        own=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        cross=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        norm=nn.LayerNorm(WIDTH),
        head=linear(),
    ),
    "first state": lambda: Net(first_state, {"h": (1, 1, WIDTH)}, rnn=nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "first state, time first": lambda: Net(
        lambda s, x: s.rnn(x.transpose(0, 1), s.h.repeat(1, len(x), 1))[0].transpose(0, 1),
        {"h": (1, 1, WIDTH)},
        rnn=nn.GRU(WIDTH, WIDTH),
    ),
    "first states": lambda: Net(
        first_states, {"h": (2, 1, WIDTH), "c": (2, 1, WIDTH)}, rnn=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
    ),
    "first state of a cell": lambda: Net(cell_state, {"h": (WIDTH,)}, cell=nn.GRUCell(WIDTH, WIDTH)),
    "first state added to zeros": lambda: Net(
        zeros_plus, {"h": (1, 1, WIDTH)}, rnn=nn.GRU(WIDTH, WIDTH, batch_first=True)
    ),
    "scalar that is cast": lambda: Net(lambda s, x: s.head(x) * s.t.exp().to(x.dtype), {"t": ()}, head=linear()),
    "temperature": lambda: Net(
        lambda s, x: (s.head(x) / s.t.exp().clamp(max=100.0)).softmax(-1), {"t": (1,)}, head=linear()
    ),
    "class token by stack": lambda: Net(
        lambda s, x: s.head(torch.cat([torch.stack([s.token] * len(x)), x], 1)), {"token": (1, WIDTH)}, head=linear()
    ),
    "hypernetwork": lambda: Net(hypernetwork, {"z": (2,)}, make=linear(2, 3 * WIDTH), shift=linear(2, 3)),
    "task embedding": lambda: Net(film, tasks=embedding(4), make=linear(WIDTH, 2 * WIDTH), head=linear()),
    "mixture": lambda: Net(mixture, {"prior": (2,)}, parts=weighted([linear(), linear()])),
    "codebook": lambda: Net(codebook, table=embedding(3)),
    "rotary frequencies": lambda: Net(rotary, {"log_f": (2,)}, q=linear()),
    "slopes": lambda: Net(alibi, {"slopes": (2,)}, q=linear()),
    "layer scale": lambda: Net(lambda s, x: x + s.gamma * s.head(x), {"gamma": (WIDTH,)}, head=linear()),
    "straight-through": lambda: Binary(WIDTH, 3),
    "straight-through parametrization": lambda: _parametrized(linear(), SignParametrization()),
    "symmetric parametrization": lambda: _parametrized(linear(), Symmetric()),
    "weight norm of a convolution": lambda: parametrizations.weight_norm(nn.Conv1d(3, 2, 2)),
    "bilinear": lambda: Net(lambda s, x: s.mix(x, s.head(x)), mix=nn.Bilinear(WIDTH, WIDTH, 2), head=linear()),
    "bilinear with a parameter": lambda: Net(
        lambda s, x: s.mix(x, s.z.expand(*x.shape[:2], -1)), {"z": (WIDTH,)}, mix=nn.Bilinear(WIDTH, WIDTH, 2)
    ),
    "slope of a rectifier": lambda: nn.Sequential(linear(), nn.PReLU(), linear()),
    "attention with a key of its own": lambda: Net(
        lambda s, x: s.attention(x, x, x)[0],
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True),
    ),
    "matrix of a layer that is called": lambda: Net(lambda s, x: s.head(x).tanh() @ s.head.weight, head=linear()),
    "product of experts in an attribute": lambda: Net(
        lambda s, x: s.inner(x) + s.inner.kept.sum(-1, keepdim=True)[..., None],
        inner=Net(lambda s, x: _balanced(s, x), {"gate": (WIDTH, 2), "w": (2, WIDTH, WIDTH)}),
    ),
    "loss term in a dictionary": lambda: Net(
        lambda s, x: s.inner(x) + s.inner.terms["penalty"][:, None, None],
        inner=_with_terms(Net(lambda s, x: _kept_term(s, x), {"p": (WIDTH,)})),
    ),
    "parameter returned by a module": lambda: Net(
        lambda s, x: s.head(x) @ s.inner(), inner=Net(lambda s: s.p * 2, {"p": (WIDTH, WIDTH)}), head=linear()
    ),
    "one parameter, one layer, twice": lambda: Net(
        lambda s, x: s.head(s.head(s.z)[None] + s.head(x)) + s.z, {"z": (3, WIDTH)}, head=linear()
    ),
}


def _with_numbers(model):
    model.numbers = torch.arange(3)
    return model


def _with_terms(model):
    model.terms = {}
    return model


def _parametrized(layer, parametrization):
    parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


def _balanced(s, x):
    p = (x @ s.gate).softmax(-1)
    s.kept = p.square().sum((1, 2))[:, None]
    return torch.einsum("btd,edf,bte->btf", x, s.w, p)


def _kept_term(s, x):
    # Time first: not followed, run again as a whole.
    y = (x.transpose(0, 1) * s.p).transpose(0, 1)
    s.terms["penalty"] = y.square().mean((1, 2))
    return y.tanh()


@pytest.mark.parametrize("records", [1, 3, 5])
@pytest.mark.parametrize("name", CATALOG)
def test_what_is_the_same_for_all_records_is_exact(name, records):
    torch.manual_seed(0)
    # Three records are as many as there are steps: sizes alone must not decide.
    check(CATALOG[name](), squares, x_of(records, 3, WIDTH))


def check_each(model, loss, *batch):
    """Norms and the gradient of each record, by plain autograd on the model itself."""
    records, wanted = len(batch[0]), [p for p in model.parameters() if p.requires_grad]
    capture = GradientCapture(model)
    with capture.capturing(records):
        loss(model, *batch).sum().backward()
    squared, rows = capture.squared_norms(), []
    for b in range(records):
        sums = {}
        capture.add_weighted_sums(F.one_hot(torch.tensor(b), records).double(), sums)
        rows.append([sums.get(p, torch.zeros_like(p)) for p in wanted])
    capture.detach()
    for b, row in enumerate(rows):
        value = loss(model, *(tensor[b : b + 1] for tensor in batch)).sum()
        own = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        assert math.isclose(float(squared[b]), sum(float(g.double().square().sum()) for g in own), rel_tol=2e-5)
        scale = max(float(g.abs().max()) for g in own)
        for got, gradient in zip(row, own, strict=True):
            assert torch.allclose(got, gradient, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("records", [1, 3, 5])
def test_weight_norm_in_the_old_form_is_exact(records):
    torch.manual_seed(0)
    for model in (nn.utils.weight_norm(linear()), nn.Sequential(linear(), nn.utils.weight_norm(linear()), linear())):
        check_each(model, squares, x_of(records, 3, WIDTH))


@pytest.mark.parametrize("forward", [tied, tied_transposed])
@pytest.mark.parametrize("records", [1, 3, 5])
def test_a_table_that_is_read_again_as_a_matrix_is_exact(forward, records):
    torch.manual_seed(0)
    model = Net(forward, table=embedding(7), places=embedding(), head=linear())
    if forward is tied:
        del model.head
    else:
        del model.places
    check(model, squares, torch.randint(0, 7, (records, 3), generator=torch.Generator().manual_seed(1)))


def test_experts_whose_loss_term_is_read_from_an_attribute_are_exact():
    torch.manual_seed(0)
    model = Net(lambda s, x: _balanced(s, x), {"gate": (WIDTH, 2), "w": (2, WIDTH, WIDTH)})
    check(model, lambda m, x: squares(m, x) + 5 * m.kept[:, 0], x_of(5, 3, WIDTH))


@pytest.mark.parametrize("place", ["attribute", "dictionary"])
def test_a_loss_term_kept_by_a_module_that_is_run_again_is_exact(place):
    def forward(s, x):
        y = (x.transpose(0, 1) * s.p).transpose(0, 1)
        if place == "attribute":
            s.kept = y.square().sum((1, 2))
        else:
            s.terms["kept"] = [y.square().sum((1, 2))]
        return y.tanh()

    def loss(m, x):
        value = squares(m, x)
        return value + (m.kept if place == "attribute" else m.terms["kept"][0])

    check(_with_terms(Net(forward, {"p": (WIDTH,)})), loss, x_of(5, 3, WIDTH))


def test_a_loss_term_kept_outside_a_module_that_is_run_again_is_refused():
    outside = {}

    def forward(s, x):
        y = (x.transpose(0, 1) * s.p).transpose(0, 1)
        outside.setdefault("kept", y.square().sum((1, 2)))
        return y.tanh()

    model = Net(forward, {"p": (WIDTH,)})
    capture = GradientCapture(model)
    with pytest.raises((UnsupportedModule, UncapturedParameter), match=r"Net|p"), capture.capturing(3):
        (squares(model, x_of(3, 3, WIDTH)) + outside["kept"]).sum().backward()


def test_dropout_on_repeated_queries_draws_for_each_record():
    torch.manual_seed(0)
    model = Net(
        lambda s, x: s.head(torch.cat([s.drop(s.q.expand(len(x), -1, -1)), x], 1)),
        {"q": (1, 2, WIDTH)},
        drop=nn.Dropout(0.4),
        head=linear(),
    ).train()
    x = x_of(4, 3, WIDTH)
    check_on_one_seed(model, lambda m: squares(m, x), 4)


def test_rows_by_the_place_in_the_batch_are_refused_before_training():
    model = Net(lambda s, x: s.head(x + s.p[: len(x)]), {"p": (999, WIDTH)}, head=linear())
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=8.0, delta=1e-5)
    with pytest.raises(CoupledRecords):
        fit(model, squares, (x_of(8, WIDTH),), plan, progress=False)


def test_norms_and_gradients_are_those_of_each_record():
    torch.manual_seed(0)
    check_each(Net(positions, table=embedding(), head=linear()), squares, x_of(5, 3, WIDTH))


def test_records_and_steps_of_equal_number_later_are_still_told_apart():
    torch.manual_seed(0)
    model = Net(lambda s, x, numbers: s.head(x + s.table(numbers)), table=embedding(), head=linear())
    twin, numbers = copy.deepcopy(model), torch.arange(3)
    capture = GradientCapture(model)
    for records in (5, 3):
        x = x_of(records, 3, WIDTH)
        with capture.capturing(records):
            squares(model, x, numbers).sum().backward()
        for b in range(records):
            own = torch.autograd.grad(squares(twin, x[b : b + 1], numbers).sum(), list(twin.parameters()))
            wanted = sum(float(g.double().square().sum()) for g in own)
            assert math.isclose(float(capture.squared_norms()[b]), wanted, rel_tol=1e-5)
