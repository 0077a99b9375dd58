"""Products in fewer bits, as matrix units of a card take them: what they may lose is inside each record's bound.

There is no card here. The processor is taken for another device, so that every branch for one runs; products of half
precision are exact in single precision, as on matrix units; and an emulation of the units, which cuts off what a sum
in single precision cannot hold after the terms were brought to one exponent, stands in for their additions.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
from gradients.test_cancellation import BOUND, MODELS, hostile, length, released
from sordino.clipping import AutomaticClipping
from sordino.gradients import GradientCapture, numerics
from sordino.gradients.numerics import (
    ProductFormat,
    grams,
    product_format,
    product_operands,
    row_products,
    weighted_row_products,
)
from sordino.gradients.rules import base, convolution, linear
from sordino.gradients.rules.base import LayerCall, alone_error, get_rule, joint_rounding, sum_error

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "TF32": torch.float32, "single": torch.float32}


@pytest.fixture
def away(monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")


def truncated(x: Tensor) -> Tensor:
    """The operand as units of TF32 read it: without the last 13 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def cut(x: Tensor, exponent: Tensor) -> Tensor:
    """`x` without what lies more than 23 bits below 2^exponent."""
    unit = torch.exp2(exponent - 23)
    return torch.where(exponent > -1000, (x / unit).trunc() * unit, x)


def by_units(left: Tensor, right: Tensor, block: int = 4) -> Tensor:
    """left @ right as matrix units of the first kind add: four exact products and the sum so far, cut off twice."""
    a, b = left.double(), right.double()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], block):
        terms = a[..., start : start + block, None] * b[..., None, start : start + block, :]
        terms = torch.cat([terms, total[..., None, :]], dim=-2)
        exponent = terms.abs().amax(-2).log2().floor().nan_to_num(neginf=-2000.0)
        total = cut(terms, exponent[..., None, :]).sum(-2)
        total = cut(total, total.abs().log2().floor().nan_to_num(neginf=-2000.0))
    return total.float()


@pytest.fixture(params=["exact products", "emulated units"])
def units(request, monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    if request.param == "emulated units":
        monkeypatch.setattr(numerics, "_wide_product", by_units)
        monkeypatch.setattr(numerics, "_tf32_product", lambda a, b: by_units(truncated(a), truncated(b)))
    else:
        monkeypatch.setattr(
            numerics, "_tf32_product", lambda a, b: torch.bmm(truncated(a), truncated(b)) if a.numel() else a @ b
        )
    return request.param


def ask(monkeypatch, name: str) -> None:
    if name == "TF32":
        monkeypatch.setattr(numerics, "_tf32_asked", frozenset({"matmul", "conv"}))


def operands(name: str, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread * scale).clamp(-6e4, 6e4).to(FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_as_near_as_their_format_says(units, monkeypatch, name):
    ask(monkeypatch, name)
    left, right = operands(name, 2, 40, 7), operands(name, 2, 40, 5, seed=1)
    weights = torch.rand(40, generator=torch.Generator().manual_seed(2)) * 1e-3
    product = product_format(left, right)
    got = row_products(left.transpose(1, 2), right)
    true, size = (f(left.double().transpose(1, 2)) @ f(right.double()) for f in (lambda x: x, torch.abs))
    assert got.dtype == torch.float32
    error = ((got - true).abs() / size).max()
    assert error <= alone_error(product, 40)
    squares = grams(left)
    true, size = (f(left.double()) @ f(left.double()).transpose(1, 2) for f in (lambda x: x, torch.abs))
    assert ((squares - true).abs() <= ((7 + product.parts) * product.addition + product.formed) * size).all()
    got = weighted_row_products(left, right, weights)
    scaled = left.double() * weights.double()[:, None]
    true, size = (f(scaled.transpose(1, 2)) @ f(right.double()) for f in (lambda x: x, torch.abs))
    error = ((got - true).abs() / size).max()
    # Nothing is rounded to the format alone, and what is allowed is no more than what is needed a few times over.
    assert error <= sum_error(product, 40) < 2e-4 < torch.finfo(torch.bfloat16).eps / 2
    if name == "bfloat16":
        assert error > 2**-20


def test_numbers_are_taken_apart_into_two_of_eleven_bits():
    x = operands("single", 1000, scale=1e3)
    first, rest = numerics._two_parts(x)
    assert torch.equal(truncated(first), first)
    assert torch.equal(truncated(rest), rest)
    assert ((x.double() - first - rest).abs() <= 2.0**-22 * x.abs()).all()
    assert not numerics._two_parts(torch.tensor([torch.nan, torch.inf, 3e38]))[0].isfinite().any()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("positions", [0, 1, 2047, 2048, 2049, 9000])
def test_long_sums_are_products_of_pieces(away, monkeypatch, positions, swapped):
    monkeypatch.setattr(numerics, "_PIECES_AT_ONCE", 2 * 2 * 3 * 5)
    widths = (5, 3) if swapped else (3, 5)
    left, right = (operands("bfloat16", 2, positions, width, seed=width) for width in widths)
    weights = torch.rand(positions, generator=torch.Generator().manual_seed(1))
    got = weighted_row_products(left, right, weights)
    scaled = left.double() * weights[:, None]
    size = scaled.abs().transpose(1, 2) @ right.double().abs()
    error = (got - scaled.transpose(1, 2) @ right.double()).abs()
    assert got.is_contiguous()
    assert (error <= sum_error(product_format(left, right), max(positions, 1)) * size).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_may_be_that_of_several_rows(units, monkeypatch, name):
    ask(monkeypatch, name)
    left, right = operands(name, 2, 12, 3), operands(name, 2, 12, 5, seed=1)
    weights = torch.rand(4, generator=torch.Generator().manual_seed(2))
    expected = weighted_row_products(left, right, weights.repeat_interleave(3))
    assert torch.equal(weighted_row_products(left, right, weights), expected)


def test_the_rounding_of_several_layers_is_computed_together_as_of_each_alone(away):
    found = []
    for seed, (inputs, outputs) in enumerate([(8, 6), (8, 6), (6, 8)]):
        layer = nn.Linear(inputs, outputs).bfloat16()
        saved, grads = operands("bfloat16", 3, 4, inputs, seed=seed), operands("bfloat16", 3, 4, outputs, seed=seed + 9)
        use = LayerCall(
            module=layer, label="", rule=get_rule(layer), parameters=dict(layer.named_parameters()), records=3
        )
        use.saved, use.grads = (saved,), (grads,)
        use.rule.squared_norms(use, frozenset(use.parameters))
        found.append(use.rule.rounding(use, frozenset(use.parameters)))
    alone = [joint_rounding([rounding]) for rounding in found]
    together = joint_rounding(found)
    torch.testing.assert_close(together.squares, torch.stack([each.squares for each in alone]).sum(0))
    torch.testing.assert_close(together.length.square(), torch.stack([each.length.square() for each in alone]).sum(0))


def test_operands_are_those_that_autocast_took(away):
    x, g = torch.randn(2, 3), torch.randn(2, 3).bfloat16()
    assert [each.dtype for each in product_operands(x, g)] == [torch.bfloat16] * 2
    assert [each.dtype for each in product_operands(x.bfloat16(), g.float())] == [torch.float32] * 2
    assert [each.dtype for each in product_operands(x.double(), g)] == [torch.float64] * 2
    assert product_format(x, g.float()).formed == product_format(x, g.float()).weighted == 0


def test_on_the_processor_nothing_is_taken_in_fewer_bits(monkeypatch):
    monkeypatch.setattr(numerics, "_tf32_asked", frozenset({"matmul", "conv"}))
    x, g = torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()
    assert [each.dtype for each in product_operands(x, g)] == [torch.float32] * 2
    assert product_format(x, g) == numerics._SINGLE
    x = torch.randn(1, 4, 3)
    assert torch.equal(grams(x), torch.bmm(x, x.transpose(1, 2)))


LAYERS = ["a linear layer", "a linear layer called twice", "a tied table", "a bare matrix", "a narrow convolution"]
LAYERS += ["a wide convolution", "a grouped convolution", "a convolution called twice", "an attention layer"]
LAYERS += ["a one-dimensional convolution", "a layer norm called twice", "an embedding", "a recurrent layer"]
HARD = [
    (1, 1.0, 1e3, "random"),
    (4, 1.0, 3e4, "one vector"),
    (64, 1.0, 3e4, "equal rows"),
    (64, 1e-3, 1.0, "random"),
    (600, 30.0, 1e3, "one vector"),
]


# The ids of the tied table come from inputs as large as 1e9.
IN_KIND = [(name, kind) for name in LAYERS for kind in ("bfloat16", "float16", "TF32")]
IN_KIND.remove(("a tied table", "float16"))


@pytest.mark.parametrize(("name", "kind"), IN_KIND)
def test_a_record_that_cancels_releases_no_more_than_the_bound_in_fewer_bits(away, monkeypatch, name, kind):
    ask(monkeypatch, kind)
    monkeypatch.setattr(numerics, "_tf32_product", lambda a, b: torch.bmm(truncated(a), truncated(b)))
    build = MODELS[name][1]
    monkeypatch.setitem(MODELS, name, (MODELS[name][0], lambda: build().to(FORMATS[kind])))
    for seed, (positions, size, weight, pattern) in enumerate(HARD):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        model, width = MODELS[name][1](), MODELS[name][0]
        directions = torch.randn(max(width, 64) * 4, generator=generator).to(FORMATS[kind])
        bad = hostile(name, positions, size, weight, pattern, generator).to(FORMATS[kind])
        alone, *_ = released(model, bad, directions)
        assert length(alone) <= BOUND * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "TF32"])
def test_without_the_rounding_in_the_bound_a_record_would_release_more(away, monkeypatch, kind):
    """Terms that cancel exactly, as they are: what the weighted ones lose in two parts is all that is released."""
    ask(monkeypatch, kind)
    monkeypatch.setattr(numerics, "_tf32_product", lambda a, b: torch.bmm(truncated(a), truncated(b)))
    monkeypatch.setattr(linear, "cheapest_kernel", lambda costs: "norm_only")
    some = torch.randint(1, 127, (2, 200), generator=torch.Generator().manual_seed(0))
    factors = torch.cat([*some, -some.sum(0)])[None, :, None].to(FORMATS[kind]) * 128
    model = nn.Linear(32, 32, bias=False).to(FORMATS[kind])

    def of_one_record() -> float:
        capture = GradientCapture(model)
        with capture.capturing(records=1):
            (model(torch.ones(1, 600, 32).to(FORMATS[kind])) * factors).sum().backward()
        sums: dict[nn.Parameter, Tensor] = {}
        clipping = AutomaticClipping(stability=1e-4 / 3)
        capture.add_weighted_sums(clipping.clip_factors(capture.squared_norm_bounds(), max_grad_norm=1.0), sums)
        capture.detach()
        return length(sums)

    assert of_one_record() <= 1 + 1e-6
    for name in ("_OF_HALF", "_TF32"):
        known = getattr(numerics, name)
        bare = {"weighted": 0.0, "formed": 0.0, "addition": 0.0}
        lax = (
            {key: replace(each, **bare) for key, each in known.items()}
            if name == "_OF_HALF"
            else replace(known, **bare)
        )
        monkeypatch.setattr(numerics, name, lax)
    assert of_one_record() > 1.1


@pytest.mark.parametrize("kernel", ["ghost", "norm_only"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "TF32", "single"])
@pytest.mark.parametrize("positions", [1, 128, 512])
def test_what_the_bound_costs(away, monkeypatch, kind, positions, kernel):
    """Ordinary records are clipped to nearly the bound: the ratio of bound and true norm, less one, is printed."""
    ask(monkeypatch, kind)
    monkeypatch.setattr(linear, "cheapest_kernel", lambda costs: kernel)
    torch.manual_seed(0)
    model = nn.Linear(96, 128).to(FORMATS[kind])
    x = torch.randn(4, positions, 96).to(FORMATS[kind]).requires_grad_()
    directions = torch.randn(4, positions, 128).to(FORMATS[kind])
    capture = GradientCapture(model)
    with capture.capturing(records=4):
        (model(x) * directions).sum().backward()
    bounds = capture.squared_norm_bounds().sqrt()
    a, g = x.detach().double(), directions.double()
    true = ((g.transpose(1, 2) @ a).flatten(1).square().sum(1) + g.sum(1).square().sum(1)).sqrt()
    capture.detach()
    ratio = bounds / true - 1
    print(f"{kind}, {positions} positions, {kernel}: {float(ratio.max()):.1e}")
    assert float(ratio.min()) >= -1e-6
    assert float(ratio.max()) < 0.02


@pytest.mark.parametrize("layer", [nn.Linear(8, 6), nn.Linear(8, 6, bias=False)])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3), (600,)])
def test_gradients_under_autocast_are_those_of_the_values_that_were_multiplied(away, layer, positions):
    torch.manual_seed(0)
    x = torch.randn(5, *positions, 8)
    capture = GradientCapture(layer)
    with capture.capturing(records=5), torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        directions = torch.randn(out.shape).bfloat16()
        (out * directions).sum().backward()
    a, g = x.bfloat16().double().reshape(5, -1, 8), directions.double().reshape(5, -1, 6)
    weight, bias = g.transpose(1, 2) @ a, g.sum(1)
    squares = weight.flatten(1).square().sum(1) + (bias.square().sum(1) if layer.bias is not None else 0)
    torch.testing.assert_close(capture.squared_norms(), squares, rtol=1e-5, atol=0)
    sums: dict[nn.Parameter, Tensor] = {}
    factors = torch.rand(5, dtype=torch.float64)
    capture.add_weighted_sums(factors, sums)
    capture.detach()
    torch.testing.assert_close(sums[layer.weight].double(), torch.tensordot(factors, weight, 1), rtol=1e-3, atol=1e-4)
    if layer.bias is not None:
        torch.testing.assert_close(sums[layer.bias].double(), torch.tensordot(factors, bias, 1), rtol=1e-5, atol=1e-5)


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (6, 9)),
    "stride and dilation": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(2, 1), padding=(2, 0)), (4, 9, 8)),
    "groups": (lambda: nn.Conv2d(6, 9, 3, groups=3, padding="same"), (6, 5, 7)),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6, stride=2), (6, 7, 7)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 6)),
    "even window": (lambda: nn.Conv1d(3, 4, 4, padding="same"), (3, 11)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),
    "wide": (lambda: nn.Conv2d(64, 96, 3, padding=1), (64, 4, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["ghost", "stored", "norm_only"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_products_of_patches(away, monkeypatch, name, kernel, dtype):
    monkeypatch.setattr(convolution, "cheapest_kernel", lambda costs: kernel)
    # Several chunks.
    monkeypatch.setattr(base, "_ENTRIES_AWAY", 2000)
    torch.manual_seed(0)
    build, shape = CONVOLUTIONS[name]
    layer = build().to(dtype)
    x = torch.randn(4, *shape).to(dtype)
    if dtype == torch.float32 and name != "wide":
        x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 3 else x
    capture = GradientCapture(layer)
    with capture.capturing(records=4):
        out = layer(x)
        directions = torch.randn(out.shape).to(dtype)
        (out * directions).sum().backward()
    squares, bounds = capture.squared_norms(), capture.squared_norm_bounds()
    sums: dict[nn.Parameter, Tensor] = {}
    factors = torch.rand(4, dtype=torch.float64)
    capture.add_weighted_sums(factors, sums)
    capture.detach()
    expected = oracles.per_record_gradients(layer, lambda m, r: (m(r[0]) * r[1]).sum(), (x, directions))
    torch.testing.assert_close(squares, oracles.squared_norms(expected), rtol=1e-5, atol=0)
    assert bool((bounds >= oracles.squared_norms(expected) * (1 - 1e-6)).all())
    assert bool(((bounds / squares).sqrt() < 1.01).all())
    for parameter, wanted in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(sums[parameter].double(), torch.tensordot(factors, wanted, 1), rtol=1e-3, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# Which kernels a card would run, from tensors without values: the meta device takes a card's ways.
# ----------------------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def on_a_card(layer: nn.Module, x: tuple[int, ...], out: tuple[int, ...], dtype: torch.dtype) -> Operations:
    """The operations of norms and sum of one layer."""
    with FakeTensorMode(), torch.no_grad(), Operations() as operations:
        saved = (torch.empty(x, device="meta", dtype=dtype),)
        grads = (torch.empty(out, device="meta", dtype=dtype),)
        rule = get_rule(layer)
        assert rule is not None
        parameters = {name: nn.Parameter(torch.empty(p.shape, device="meta")) for name, p in layer.named_parameters()}
        use = LayerCall(module=layer, label="", rule=rule, parameters=parameters, records=x[0])
        use.saved, use.grads = saved, grads
        norms = rule.squared_norms(use, frozenset(parameters))
        rounding = rule.rounding(use, frozenset(parameters))
        sums = rule.weighted_sums(use, parameters, torch.empty(x[0], device="meta", dtype=torch.float64))
        found = [norms, *sums.values()]
        if rounding is not None:
            together = joint_rounding([rounding])
            found += [together.squares, together.length]
        assert {tensor.device.type for tensor in found} == {"meta"}
        assert {name: value.shape for name, value in sums.items()} == {n: p.shape for n, p in parameters.items()}
    return operations


@pytest.mark.parametrize(
    ("records", "positions", "inputs", "outputs", "half", "single"),
    [
        # BERT-base and ViT-B/16: products of positions; GPT-2 at 1024 positions: gradients that are kept.
        (32, 128, 768, 3072, "ghost", "ghost"),
        (32, 197, 768, 768, "ghost", "ghost"),
        (8, 512, 768, 3072, "ghost", "stored"),
        (8, 1024, 768, 768, "stored", "stored"),
        # Low-rank adapters.
        (32, 512, 768, 8, "stored", "stored"),
        (32, 128, 8, 768, "stored", "stored"),
    ],
)
def test_the_kernel_of_a_linear_layer_on_a_card(records, positions, inputs, outputs, half, single):
    for dtype, expected in ((torch.bfloat16, half), (torch.float32, single)):
        with FakeTensorMode():
            a, g = (torch.empty(records, positions, width, device="meta", dtype=dtype) for width in (inputs, outputs))
            costs = base.kernel_costs(records, positions, inputs, outputs, product=product_format(a, g))
        assert base.cheapest_kernel(costs) == expected


def test_long_sums_of_a_card_are_few_products_in_half_precision():
    """64 records of 512 positions: on the processor 64 products of 512, on a card one call for each part."""
    operations = on_a_card(nn.Linear(768, 3072), (64, 512, 768), (64, 512, 3072), torch.bfloat16)
    assert operations.count["aten.bmm.dtype"] <= 6
    assert not operations.count["aten.bmm.default"]
    # The sum of the bias over records.
    assert operations.count["aten.mm.default"] <= 1
    operations = on_a_card(nn.Linear(768, 3072), (64, 512, 768), (64, 512, 3072), torch.float32)
    assert operations.count["aten.bmm.default"] <= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("layer", "x", "out"),
    [
        (nn.Conv2d(160, 160, 3, padding=1), (64, 160, 32, 32), (64, 160, 32, 32)),
        (nn.Conv2d(640, 640, 3, padding=1), (64, 640, 8, 8), (64, 640, 8, 8)),
        (nn.Conv2d(3, 768, 16, stride=16), (64, 3, 224, 224), (64, 768, 14, 14)),
        (nn.Conv2d(96, 96, 7, padding=3, groups=96), (32, 96, 56, 56), (32, 96, 56, 56)),
    ],
)
def test_a_card_runs_no_convolution_with_a_group_for_each_record(layer, x, out, dtype):
    operations = on_a_card(layer, x, out, dtype)
    assert not any("convolution" in name for name in operations.count)
    assert sum(operations.count.values()) < 400


def test_the_processor_keeps_its_kernels():
    wide = ProductFormat(addition=2.0**-24)
    for shape in ((32, 128, 768, 3072), (16, 256, 768, 768), (2, 40, 32, 32), (16, 128, 8, 256)):
        assert base.kernel_costs(*shape, product=wide) == base.kernel_costs(*shape)
