"""Parameters that a module's own forward reads: exact without a second run, dropout beside them included."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agreement import check, check_on_one_seed
from sordino.errors import PrivacyError, RecordCountMismatch, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture
from strategies import record_counts, seeds


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Toy(nn.Module):
    """A module given by its parameters, its parts and a function of itself; it counts its forward passes."""

    def __init__(self, forward, shapes, **parts):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, part in parts.items():
            setattr(self, name, part)
        self.body, self.runs = forward, 0

    def forward(self, *args):
        self.runs += 1
        return self.body(self, *args)


def followed(model, loss, *batch):
    """`check`, and that nothing was run again for the private gradient."""
    check(model, loss, *batch)
    capture = GradientCapture(model)
    before = model.runs
    with capture.capturing(records=batch[0].shape[0]):
        loss(model, *batch).sum().backward()
    capture.squared_norms()
    capture.detach()
    assert model.runs == before + 1, "the module was run again"


def squares(model, *batch):
    return model(*batch).square().flatten(1).sum(1)


OPERATIONS = {
    "add": (lambda s, x: x + s.p, (4,)),
    "in place": (lambda s, x: torch.tanh(x).add_(s.p), (3, 4)),
    "augmented": (lambda s, x: _augmented(x, s.p), (4,)),
    "from the left": (lambda s, x: 2 - s.p * x, (3, 4)),
    "divide": (lambda s, x: x / s.p.exp(), (4,)),
    "one row": (lambda s, x: x * s.p, (1, 3, 4)),
    "scalar": (lambda s, x: x * s.p, ()),
    "where": (lambda s, x: torch.where(x > 0, x, s.p), (4,)),
    "lerp": (lambda s, x: torch.lerp(x, x.tanh(), s.p), (4,)),
    "slice": (lambda s, x: x + s.p[:, :3], (1, 5, 4)),
    "row of a table": (lambda s, x: x + s.p[torch.arange(3)], (7, 4)),
    "one plus": (lambda s, x: x * (1.0 + s.p.float()), (4,)),
    "transposed": (lambda s, x: x * s.p.t() + s.p.T, (4, 3)),
    "softmax of a parameter": (lambda s, x: x * s.p.softmax(-1), (4,)),
    "twice": (lambda s, x: (x * s.p).tanh() * s.p + s.p, (4,)),
    "matmul": (lambda s, x: x @ s.p, (4, 5)),
    "matmul with a computed matrix": (lambda s, x: x @ (s.p * 2), (4, 5)),
    "vector": (lambda s, x: (x @ s.p)[..., None], (4,)),
    "functional linear": (lambda s, x: F.linear(x, s.p, s.p[:, 0]), (5, 4)),
    "batched product": (lambda s, x: s.p @ x.transpose(1, 2), (1, 2, 4)),
    "layer norm": (lambda s, x: F.layer_norm(x, (4,), s.p[0], s.p[1]), (2, 4)),
    "rms norm": (lambda s, x: s.p * x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), (4,)),
    "class token": (lambda s, x: torch.cat([s.p.expand(x.shape[0], -1, -1), x], dim=1), (1, 1, 4)),
    "repeated token": (lambda s, x: torch.cat((x, s.p.repeat(x.shape[0], 2, 1)), 1), (1, 1, 4)),
    "vector as a token": (lambda s, x: torch.cat([s.p.expand(len(x), 1, 4), x], dim=-2), (4,)),
    "expanded like": (lambda s, x: x + s.p.expand_as(x), (4,)),
    "stacked": (lambda s, x: torch.stack([x, s.p.expand(x.shape[0], 3, 4)], dim=1), (3, 4)),
    "permuted": (lambda s, x: x.permute(0, 2, 1) * s.p, (3,)),
    "dtype": (lambda s, x: x.double() * s.p.double(), (4,)),
    "data of a parameter is a constant": (lambda s, x: x * s.p + s.p.detach() * s.p.data, (4,)),
    "queries": (lambda s, x: F.scaled_dot_product_attention(s.p.expand(x.shape[0], -1, -1), x, x), (1, 2, 4)),
}


def _augmented(x, p):
    y = x.tanh()
    y += p
    y *= p
    return y


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_a_parameter_in_an_operation_is_exact_without_a_second_run(name):
    operation, shape = OPERATIONS[name]
    for records in (0, 1, 3, 5):
        followed(Toy(operation, {"p": shape}), squares, x_of(records, 3, 4))


@settings(deadline=None, max_examples=40)
@given(
    records=record_counts,
    middle=st.lists(st.integers(1, 4), max_size=2),
    kept=st.integers(0, 3),
    ones=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=seeds,
)
def test_broadcast_parameters_of_every_shape_are_exact(records, middle, kept, ones, seed):
    shape = (*middle, 3)[-kept:] if kept else ()
    shape = tuple(1 if one else size for one, size in zip(ones, shape, strict=False))
    model = Toy(lambda s, x: (x * s.a + s.b).tanh() - s.a, {"a": shape, "b": shape})
    followed(model, squares, x_of(records, *middle, 3, seed=seed % 1000))


@pytest.mark.parametrize("table", [(6, 4), (3, 4)])
def test_lookups_by_records_are_exact(table):
    ids = torch.tensor([[0, 2, 2], [1, 0, 1], [2, 2, 2], [0, 0, 1]])
    followed(Toy(lambda s, i: F.embedding(i, s.p, padding_idx=1), {"p": table}), squares, ids)
    followed(Toy(lambda s, i: s.p[i] * s.p[0], {"p": table}), squares, ids)
    followed(Toy(lambda s, i: s.p[i - 3], {"p": table}), squares, ids)


class VisionTransformer(nn.Module):
    """Its root owns a class token, a position table and a scale."""

    def __init__(self, dropout):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, 2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale, self.head = nn.Parameter(torch.randn(8)), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.encoder(self.dropout(x + self.positions))
        return self.head(x[:, 0] * self.scale)


def test_a_vision_transformer_whose_root_owns_parameters_is_exact_and_runs_once():
    torch.manual_seed(0)
    followed(VisionTransformer(0.0), squares, x_of(4, 1, 4, 4))
    x = x_of(4, 1, 4, 4)
    check_on_one_seed(VisionTransformer(0.2), lambda m: squares(m, x), 4)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


class Language(nn.Module):
    """A causal transformer of one's own, with a raw matrix, masks, and dropout in functions."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.qkv, self.out = nn.Parameter(torch.randn(8, 24) / 4), nn.Linear(8, 8)
        self.norm, self.register = RMSNorm(8), nn.Parameter(torch.randn(2, 8))
        self.gamma = nn.ParameterDict({"first": torch.randn(8), "second": torch.randn(8)})
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())
        self.runs = 0

    def forward(self, ids):
        self.runs += 1
        batch, steps = ids.shape
        x = self.table(ids) + self.positions[:steps]
        h = self.norm(x)
        q, k, v = (t.view(batch, steps, 2, 4).transpose(1, 2) for t in (h @ self.qkv).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(4)
        scores = scores.masked_fill(~self.mask[:steps, :steps], -1e9)
        shares = F.dropout(scores.softmax(-1), 0.1, training=self.training)
        mixed = (shares @ v).transpose(1, 2).reshape(batch, steps, 8)
        x = x + self.gamma["first"] * self.out(mixed)
        x = F.dropout(x, 0.1, training=self.training) * self.gamma["second"]
        x = torch.cat([self.register.unsqueeze(0).expand(batch, -1, -1), self.norm(x)], dim=1)
        return x @ self.table.weight.t().detach()


def test_a_language_model_of_ones_own_is_exact_and_runs_once():
    torch.manual_seed(0)
    model = Language().eval()
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))
    followed(model, squares, ids)
    check_on_one_seed(model.train(), lambda m: squares(m, ids), 4)


def test_learned_queries_go_into_captured_modules():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def pool(s, x):
        return s.attention(s.q.expand(x.shape[0], -1, -1), x, x)[0] + s.linear(s.q)

    followed(Toy(pool, {"q": (1, 2, 4)}, attention=attention, linear=nn.Linear(4, 4)), squares, x_of(5, 3, 4))


def test_a_parameter_shared_between_a_layer_and_a_bare_use_is_exact():
    torch.manual_seed(0)
    model = Toy(lambda s, x: s.layer(x.tanh()) @ s.matrix + s.matrix[0], {}, layer=nn.Linear(4, 4))
    model.matrix = model.layer.weight
    followed(model, squares, x_of(5, 3, 4))


def test_nested_modules_and_frozen_neighbors_are_exact():
    torch.manual_seed(0)
    inner = Toy(lambda s, x: x * s.a + s.b, {"a": (4,), "b": (4,)})
    model = Toy(lambda s, x: s.inner(s.inner(x) + s.p) * s.q, {"p": (3, 4), "q": (4,)}, inner=inner)
    followed(model, squares, x_of(5, 3, 4))
    inner.a.requires_grad_(False)
    model.q.requires_grad_(False)
    followed(model, squares, x_of(5, 3, 4))


def test_parameters_that_the_optimizer_does_not_hold_are_left_alone():
    model = Toy(lambda s, x: (x * s.a + s.b) @ s.c, {"a": (4,), "b": (4,), "c": (4, 4)})
    capture = GradientCapture(model, [model.a])
    x = x_of(3, 2, 4)
    with capture.capturing(records=3):
        squares(model, x).sum().backward()
    sums = {}
    capture.add_weighted_sums(torch.ones(3), sums)
    capture.detach()
    (expected,) = torch.autograd.grad(squares(model, x).sum(), [model.a])
    assert set(sums) == {model.a}
    assert torch.allclose(sums[model.a], expected, rtol=1e-5)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# --- what is not followed ----------------------------------------------------------------------------------------


UNFOLLOWED = {
    "einsum": (lambda s, x: torch.einsum("btd,de->bte", x, s.p), (4, 4)),
    "time first": (lambda s, x: (x.transpose(0, 1) * s.p).transpose(0, 1), (4,)),
    "time first, per time": (lambda s, x: (x.transpose(0, 1) * s.p).transpose(0, 1), (3, 1, 4)),
    "flattened": (lambda s, x: torch.addmm(s.p[0], x.reshape(-1, 4), s.p).view_as(x), (4, 4)),
    "flipped": (lambda s, x: x.reshape(-1, 4).mul(s.p).view(x.shape), (4,)),
    "written": (lambda s, x: _written(x, s.p), (4,)),
    "convolution": (lambda s, x: F.conv1d(x, s.p), (2, 3, 1)),
    "square of time": (lambda s, x: x @ x.transpose(1, 2) @ (x.transpose(0, 1) + s.p).transpose(0, 1), (4,)),
    "value of a fill": (lambda s, x: x.masked_fill(x > 0, s.p), ()),
    "flip of records and time": (lambda s, x: (x.flip(1, 0) * s.p).flip(1, 0), (3, 1)),
    "own function": (lambda s, x: x * _Doubled.apply(s.p), (4,)),
}


def _written(x, p):
    y = x.tanh()
    y[:, 0] = p
    return y


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(p):
        return p * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("name", UNFOLLOWED)
@pytest.mark.parametrize("records", [1, 3, 5])
def test_a_use_that_is_not_followed_is_run_again_and_exact(name, records):
    # Three records are as many as there are time steps: sizes alone must not decide.
    operation, shape = UNFOLLOWED[name]
    check(Toy(operation, {"p": shape}), squares, x_of(records, 3, 4))


def test_rows_of_a_table_that_meet_records_are_not_taken_for_copies():
    model = Toy(lambda s, x: x + s.p, {"p": (3, 4)})
    capture = GradientCapture(model)
    capture.start(3)
    model(x_of(3, 4)).sum().backward()
    with pytest.raises((UnsupportedModule, RecordCountMismatch)):
        capture.squared_norms()


def test_dropout_beside_a_use_that_is_not_followed_is_refused_by_name():
    capture = GradientCapture(model := Toy(lambda s, x: F.dropout((x.t() * s.p).t()), {"p": (1,)}))
    with pytest.raises(UnsupportedModule, match=r"Toy.*dropout"), capture.capturing(records=3):
        model(x_of(3, 4))


def test_a_buffer_that_changes_beside_a_followed_use_is_refused():
    def running(s, x):
        s.seen.add_(x.detach().sum(0))
        return x * s.p

    model = Toy(running, {"p": (4,)})
    model.register_buffer("seen", torch.zeros(4))
    capture = GradientCapture(model)
    with pytest.raises(UnsupportedModule, match="buffer"), capture.capturing(records=3):
        model(x_of(3, 4))


def test_an_ordinary_gradient_of_a_followed_parameter_is_refused():
    model = Toy(lambda s, x: x * s.p, {"p": (4,)})
    capture = GradientCapture(model)
    with capture.capturing(records=3), pytest.raises(UncapturedParameter, match="p"):
        (model(x_of(3, 4)).sum() + model.p.square().sum()).backward()


def test_something_derived_that_leaves_by_a_side_door_is_refused():
    kept = []

    def leak(s, x):
        kept.append(s.p * 2)
        return x * s.p

    model = Toy(leak, {"p": (4,)})
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        loss = model(x_of(3, 4)).sum() + kept[0].square().sum()
        assert capture.uncaptured_uses(loss)
        with pytest.raises(UncapturedParameter, match="p"):
            loss.backward()


def test_a_batch_that_steers_the_computation_is_run_again():
    model = Toy(lambda s, x: x * s.p * (2.0 if float(x.sum()) > 0 else 1.0), {"p": (4,)})
    capture = GradientCapture(model)
    with capture.capturing(records=3):
        model(x_of(3, 4)).sum().backward()
    capture.squared_norms()
    assert model.runs > 1


def test_a_followed_input_that_is_overwritten_before_reading_is_refused():
    model = Toy(lambda s, x: x @ s.p, {"p": (4, 4)})
    capture = GradientCapture(model)
    x = x_of(3, 2, 4)
    with capture.capturing(records=3):
        model(x).sum().backward()
    x.zero_()
    with pytest.raises(PrivacyError, match="in-place"):
        capture.squared_norms()
