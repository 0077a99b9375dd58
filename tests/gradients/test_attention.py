"""nn.MultiheadAttention and the transformers on it: torch's outputs, exact gradients, dropout included."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agreement import check, check_on_one_seed
from sordino.errors import RecordCountMismatch, UncapturedParameter
from sordino.gradients import GradientCapture
from strategies import seeds


def x_of(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perturbed(module, seed=0):
    """Biases start at zero; every parameter gets a value of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


@settings(deadline=None, max_examples=50)
@given(
    data=st.data(), records=st.sampled_from([1, 2, 5]), queries=st.integers(1, 4), keys=st.integers(1, 4), seed=seeds
)
def test_attention_with_every_option_is_exact(data, records, queries, keys, seed):
    def flag(name):
        return data.draw(st.booleans(), label=name)

    torch.manual_seed(seed)
    inputs = data.draw(st.sampled_from(["self", "one_memory", "three"]), label="inputs")
    keys = queries if inputs == "self" else keys
    widths = {"kdim": 3, "vdim": 5} if inputs == "three" and flag("widths") else {}
    batch_first, need_weights, average = flag("batch_first"), flag("need_weights"), flag("average")
    options = {"bias": flag("bias"), "add_bias_kv": flag("bias_kv"), "add_zero_attn": flag("zero")}
    layer = perturbed(nn.MultiheadAttention(4, 2, batch_first=batch_first, **options, **widths), seed)
    mask = data.draw(st.sampled_from(["none", "bool", "float", "causal", "three_dimensions"]), label="mask")
    padding = data.draw(st.sampled_from(["none", "bool", "float"]), label="padding")
    # torch deprecates masks of two types.
    if padding != "none" and mask != "none":
        padding = "bool" if mask in ("bool", "causal") else "float"

    def loss(m, q, k, v):
        n = q.shape[0]
        call = {"need_weights": need_weights, "average_attn_weights": average}
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        if mask == "bool":
            call["attn_mask"] = later
        if mask == "float":
            call["attn_mask"] = later.to(q) * -2.0
        if mask == "causal":
            call |= {"attn_mask": later, "is_causal": True}
        if mask == "three_dimensions":
            call["attn_mask"] = (
                (-(q[:, :, None, :1] - 0.1).abs()).expand(n, queries, keys, 2).movedim(3, 1).flatten(0, 1)
            )
        if padding == "bool":
            call["key_padding_mask"] = (torch.arange(keys) > 0).expand(n, keys)
        if padding == "float":
            call["key_padding_mask"] = v[:, :, 0]
        if inputs == "self":
            k = v = q
        if inputs == "one_memory":
            k = v
        shaped = {id(t): t if batch_first else t.transpose(0, 1) for t in (q, k, v)}
        output, weights = m(shaped[id(q)], shaped[id(k)], shaped[id(v)], **call)
        assert (weights is None) == (not need_weights)
        values = output.square().sum((1 if batch_first else 0, 2))
        return values if weights is None else values + (weights.flatten(1) * 0.7).square().sum(1)

    sizes = widths or {"kdim": 4, "vdim": 4}
    batch = (x_of(records, queries, 4), x_of(records, keys, sizes["kdim"]), x_of(records, keys, sizes["vdim"], seed=5))
    check(layer, loss, *batch)


def test_attention_without_records_is_empty():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
    check(layer, lambda m, x: m(x, x, x)[0].square().sum((1, 2)), x_of(0, 3, 4))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 3, "vdim": 5}])
def test_attention_dropout_draws_torchs_numbers(need_weights, batch_first, widths):
    torch.manual_seed(0)
    layer = perturbed(nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=batch_first, add_bias_kv=True, **widths))
    q, k, v = x_of(3, 5, 8), x_of(3, 4, widths.get("kdim", 8)), x_of(3, 4, widths.get("vdim", 8), seed=5)
    q, k, v = (t if batch_first else t.transpose(0, 1) for t in (q, k, v))

    def loss(m):
        output = m(q, k, v, need_weights=need_weights)[0]
        return output.square().sum((1 if batch_first else 0, 2))

    check_on_one_seed(layer, loss, 3)


def test_norms_under_a_known_dropout_mask_are_exact(monkeypatch):
    kept = torch.tensor([1.0, 0.0, 2.0, 2.0, 0.0])
    monkeypatch.setattr(F, "dropout", lambda x, p=0.5, training=True, inplace=False: x * kept.to(x))
    torch.manual_seed(0)
    layer = perturbed(nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True))
    check(layer, lambda m, x: m(x, x, x)[0].square().sum((1, 2)), x_of(3, 5, 4))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_layers_with_their_default_dropout_are_exact(norm_first, batch_first):
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "norm_first": norm_first}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **options), 2)
    x, y = x_of(3, 5, 8), x_of(3, 4, 8, seed=5)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    inner = (1 if batch_first else 0, 2)
    padded = torch.arange(5).expand(3, 5) > torch.tensor([4, 2, 3])[:, None]

    def encode(m, x=x, padded=padded):
        return m(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padded).square().sum(inner)

    def decode(m, y=y, x=x):
        y, x = (t if batch_first else t.transpose(0, 1) for t in (y, x))
        return m(y, x, tgt_mask=causal.to(y), tgt_is_causal=True).square().sum(inner)

    check_on_one_seed(encoder, encode, 3)
    check_on_one_seed(decoder, decode, 3)
    for module in (*encoder.modules(), *decoder.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    check(encoder, encode, x, padded)
    check(decoder, decode, y, x)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_whole_transformer_with_dropout_is_exact():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    x, y = x_of(3, 5, 8), x_of(3, 4, 8, seed=5)
    check_on_one_seed(model, lambda m: m(x, y).square().sum((1, 2)), 3)
    time_first = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
    check(time_first, lambda m, a, b: m(a.transpose(0, 1), b.transpose(0, 1)).square().sum((0, 2)), x, y)


def test_an_encoder_in_eval_mode_is_exact():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    check(model, lambda m, x: m(x).square().sum((1, 2)), x_of(3, 5, 8))


def test_attention_called_twice_and_with_one_weight_for_two_projections_is_exact():
    torch.manual_seed(0)
    layer = perturbed(nn.MultiheadAttention(4, 2, batch_first=True))

    def twice(m, x):
        hidden = m(x, x, x)[0]
        return m(hidden.tanh(), x, x)[0].square().sum((1, 2)) + m(hidden, hidden, x)[0].sum((1, 2))

    check(layer, twice, x_of(3, 5, 4))
    check(layer, lambda m, x: m(m(x, x, x)[0], *[m(x, x, x)[0]] * 2)[0].square().sum((1, 2)), x_of(3, 5, 4))
    shared = perturbed(nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=3))
    shared.v_proj_weight = shared.k_proj_weight
    check(shared, lambda m, x, y: m(x, y, y)[0].square().sum((1, 2)), x_of(3, 5, 4), x_of(3, 2, 3))


@pytest.mark.parametrize("frozen", [["in_proj_weight"], ["in_proj_bias", "bias_v"], ["out_proj.weight", "bias_k"]])
def test_attention_with_frozen_parts_is_exact(frozen):
    torch.manual_seed(0)
    layer = perturbed(nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True))
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    check(layer, lambda m, x: m(x, x, x)[0].square().sum((1, 2)), x_of(3, 5, 4))


def test_attention_of_a_single_sequence_is_refused():
    capture = GradientCapture(layer := nn.MultiheadAttention(4, 2))
    for x in (x_of(5, 4), x_of(5, 1, 4)):
        with pytest.raises(RecordCountMismatch), capture.capturing(records=3):
            layer(x, x, x)


def test_a_parameter_of_attention_used_outside_it_is_refused():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    capture = GradientCapture(layer)
    x = x_of(3, 5, 4)
    with capture.capturing(records=3), pytest.raises(UncapturedParameter, match="in_proj_weight"):
        (layer(x, x, x)[0].sum() + F.linear(x, layer.in_proj_weight).sum()).backward()


def test_a_subclass_with_its_own_forward_goes_through_the_fallback():
    class Scaled(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x * 2, x, x, need_weights=False)[0] * self.out_proj.bias

    torch.manual_seed(0)
    check(perturbed(Scaled(4, 2, batch_first=True)), lambda m, x: m(x).square().sum((1, 2)), x_of(3, 5, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_attention_is_exact(reentrant):
    torch.manual_seed(0)
    inner = perturbed(nn.MultiheadAttention(4, 2, batch_first=True))
    model = nn.Sequential(nn.Linear(4, 4), inner)
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(  # type: ignore[method-assign]
        lambda y: model[1](y, y, y)[0], model[0](x), use_reentrant=reentrant
    )
    plain = nn.Sequential(model[0], inner)
    plain.forward = lambda x: inner(*[model[0](x)] * 3)[0]  # type: ignore[method-assign]
    x = x_of(3, 5, 4)
    results = []
    for m in (model, plain):
        capture = GradientCapture(m)
        with capture.capturing(records=3):
            m(x).square().sum().backward()
        results.append(capture.squared_norms())
        capture.detach()
    assert torch.allclose(*results, rtol=1e-6)
