"""A record whose terms are huge and cancel: what is released for it stays below the bound, in single precision."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
from sordino.clipping import FlatClipping
from sordino.gradients import GradientCapture, numerics
from sordino.gradients.rules.base import additions, unit, weighted_product
from strategies import seeds

BOUND = 1.0


class Twice(nn.Module):
    """One layer called on almost the same input with opposite signs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - self.layer(x * (1 + 1e-6))


class Tied(nn.Module):
    """An embedding and a head that share their table; the input's entries are ids and scales at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 1e3).clamp(max=1e9).long() % 20
        return self.head(self.embedding(ids) * x[..., :1])


class Custom(nn.Module):
    """A bare matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Lookup(nn.Module):
    """Ids from the signs of the input, so that one id is looked up many times."""

    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(3, 4, mode="sum") if bag else nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[..., 0] > 0).long() + 1)


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.layer, self.copies = layer, copies

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.copies)[0]


class ChannelsFirst(nn.Module):
    """Positions last; two-dimensional layers see them as a square or a row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.dims = layer, getattr(layer, "kernel_size", (1,))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        if len(self.dims) == 2:
            height = int(x.shape[2] ** 0.5)
            x = x.unflatten(2, (height, -1)) if x.shape[2] % height == 0 else x[:, :, None]
        return self.layer(x)


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "a narrow linear layer": (6, lambda: nn.Linear(6, 5)),
    "a linear layer": (32, lambda: nn.Linear(32, 32)),
    "a wide linear layer": (64, lambda: nn.Linear(64, 64)),
    "a wider linear layer without bias": (200, lambda: nn.Linear(200, 150, bias=False)),
    "a linear layer called twice": (6, lambda: Twice(nn.Linear(6, 6))),
    "a wide linear layer called twice": (64, lambda: Twice(nn.Linear(64, 64))),
    "a tied table": (6, Tied),
    "a bare matrix": (6, Custom),
    "an embedding": (1, Lookup),
    "a bag": (1, lambda: Lookup(bag=True)),
    "a layer norm": (6, lambda: nn.LayerNorm(6)),
    "a layer norm called twice": (6, lambda: Twice(nn.LayerNorm(6))),
    "an rms norm": (6, lambda: nn.RMSNorm(6)),
    "a group norm": (6, lambda: ChannelsFirst(nn.GroupNorm(2, 6))),
    "a one-dimensional convolution": (64, lambda: ChannelsFirst(nn.Conv1d(64, 64, 1))),
    "a narrow convolution": (6, lambda: ChannelsFirst(nn.Conv1d(6, 8, 3, padding=1))),
    "a two-dimensional convolution": (8, lambda: ChannelsFirst(nn.Conv2d(8, 8, 3, padding=1))),
    "a wide convolution": (64, lambda: ChannelsFirst(nn.Conv2d(64, 64, 3, padding=1))),
    "a grouped convolution": (64, lambda: ChannelsFirst(nn.Conv2d(64, 64, 3, padding=1, groups=4))),
    "a convolution called twice": (6, lambda: Twice(ChannelsFirst(nn.Conv1d(6, 6, 3, padding=1)))),
    "a transposed convolution": (6, lambda: ChannelsFirst(nn.ConvTranspose1d(6, 6, 3, padding=1))),
    "a recurrent layer": (6, lambda: First(nn.LSTM(6, 5, batch_first=True))),
    "an attention layer": (8, lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), copies=3)),
}


def hostile(name: str, positions: int, size: float, weight: float, pattern: str, generator: torch.Generator) -> Tensor:
    """[1, T, d+1]: inputs, and in the last column a factor on the output at each position."""
    width = MODELS[name][0]
    x = torch.randn(1, 1, width, generator=generator).expand(1, positions, width) * size
    if pattern == "random":
        x = torch.randn(1, positions, width, generator=generator) * size
    if pattern == "one vector":
        x = torch.full((1, positions, width), size)
    half = torch.randn(positions // 2, generator=generator)
    factors = torch.cat([half, -half, torch.full((positions % 2,), 1e-3)])
    factors = factors[torch.randperm(positions, generator=generator)] * weight
    factors[0] += 1
    return torch.cat([x, factors[None, :, None]], dim=2)


def released(
    model: nn.Module, records: Tensor, directions: Tensor
) -> tuple[dict[nn.Parameter, Tensor], Tensor, Tensor]:
    """The clipped sum, squared norms and squared bounds, with the outputs weighed by the records' own factors."""
    capture = GradientCapture(model)
    with capture.capturing(records=records.shape[0]):
        out = model(records[..., :-1])
        if any(isinstance(module, ChannelsFirst) for module in model.modules()):
            out = out.flatten(2).transpose(1, 2)
        out = out if out.dim() == 3 else out[:, None]
        factors = records[:, : out.shape[1], -1:]
        (out * factors * directions[: out.shape[2]]).sum().backward()
    norms, bounds = capture.squared_norms(), capture.squared_norm_bounds()
    sums: dict[nn.Parameter, Tensor] = {}
    capture.add_weighted_sums(FlatClipping().clip_factors(bounds, max_grad_norm=BOUND), sums)
    capture.detach()
    assert not (bounds < norms).any()
    return sums, norms, bounds


def length(sums: dict[nn.Parameter, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in sums.values()) ** 0.5


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=8)
@given(
    positions=st.sampled_from([1, 2, 4, 16, 64, 600]),
    size=st.sampled_from([1e-15, 1e-3, 1.0, 1e4, 1e12]),
    weight=st.sampled_from([1.0, 1e3, 3e7, 1e12, 1e18]),
    pattern=st.sampled_from(["equal rows", "random", "one vector"]),
    seed=seeds,
)
# Both biases of a recurrent layer, measured and released in different ways, once went 2·10⁻⁶ above the bound here.
@example(positions=600, size=1e-3, weight=1e18, pattern="random", seed=6193)
def test_a_record_that_cancels_releases_no_more_than_the_bound(name, positions, size, weight, pattern, seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, width = MODELS[name][1](), MODELS[name][0]
    directions = torch.randn(max(width, 64) * 4, generator=generator)
    bad = hostile(name, positions, size, weight, pattern, generator)
    alone, *_ = released(model, bad, directions)
    assert length(alone) <= BOUND * (1 + 1e-6)
    good = torch.randn(3, positions, width + 1, generator=generator)
    without, *_ = released(model, good, directions)
    together, *_ = released(model, torch.cat([good[:1], bad, good[1:]]), directions)
    moved = {p: value - without.get(p, 0) for p, value in together.items()}
    assert length(moved) <= BOUND * (1 + 1e-4)


@pytest.mark.parametrize("name", ["a linear layer", "a tied table", "an embedding", "a wide convolution"])
def test_the_same_holds_where_no_value_is_looked_at(name, monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    for positions, size, weight, pattern in [
        (4, 1.0, 3e7, "one vector"),
        (64, 1.0, 3e7, "equal rows"),
        (64, 1e4, 1e12, "one vector"),
        (64, 1e12, 1e18, "one vector"),
        (600, 1e-15, 1e18, "random"),
    ]:
        test_a_record_that_cancels_releases_no_more_than_the_bound.hypothesis.inner_test(
            name, positions, size, weight, pattern, seed=1
        )
    test_ordinary_records_lose_next_to_nothing(name)


@pytest.mark.parametrize("name", ["a narrow linear layer", "an embedding", "a wide linear layer", "a layer norm"])
def test_thousands_of_positions_that_cancel_release_no_more_than_the_bound(name):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for weight in (1.0, 1e6, 1e12):
        model = MODELS[name][1]()
        bad = hostile(name, 4096, 1.0, weight, "one vector", generator)
        alone, *_ = released(model, bad, torch.ones(256))
        assert length(alone) <= BOUND * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if "twice" not in name])
def test_ordinary_records_lose_next_to_nothing(name):
    torch.manual_seed(0)
    model, width = MODELS[name][1](), MODELS[name][0]
    records = torch.randn(8, 64, width + 1)
    _, norms, bounds = released(model, records, torch.randn(256))
    assert bool(((bounds / norms).sqrt() < 1.002).all())


@settings(deadline=None, max_examples=30)
@given(positions=st.sampled_from([1, 511, 512, 513, 1024, 3000, 5000]), seed=seeds)
def test_products_in_pieces_are_products(positions, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(positions, 5, generator=generator), torch.randn(positions, 3, generator=generator)
    weights = torch.rand(positions, generator=generator)
    expected = (left.double() * weights[:, None]).t() @ right.double()
    lengths = (left.double().abs() * weights[:, None]).t() @ right.double().abs()
    allowed = additions(positions) * unit(torch.float32) * lengths
    assert bool(((weighted_product(left, right, weights) - expected).abs() <= allowed).all())


def test_a_bound_counts_every_record_of_no_cancellation_as_it_is():
    layer = nn.Linear(5, 3)
    x = torch.randn(4, 5)
    capture = GradientCapture(layer)
    with capture.capturing(records=4):
        layer(x).square().sum().backward()
    assert torch.equal(capture.squared_norm_bounds(), capture.squared_norms())
    expected = oracles.per_record_gradients(layer, lambda m, r: m(r[0]).square().sum(), (x,))
    assert torch.allclose(capture.squared_norm_bounds(), oracles.squared_norms(expected), rtol=1e-5)
