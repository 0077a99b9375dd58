"""Ways in which torch computes a step: each gives the clipped sum that plain autograd gives, or is refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import oracles
from sordino import PerformanceOptions, Plan, fit
from sordino.gradients import numerics

# Bounds that count rounding clip a little more.
CLOSE = 1e-3


class Attending(nn.Module):
    """A convolution, attention, a normalization and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.stem(x)).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=2))
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 5, 5, generator=generator).to(dtype), torch.randint(4, (6,), generator=generator)


def losses(model, x, y):
    return F.cross_entropy(model(x).float(), y, reduction="none")


def clipped_sum(model, batch, *, loss=losses, optimizer=None, **performance):
    """What a step of `fit` without noise gives, undone by the learning rate."""
    plan = Plan(
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        sample_rate=1.0,
        steps=1,
        expected_batch_size=6.0,
        delta=1e-5,
    )
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if optimizer is None else optimizer(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    fit(model, loss, batch, plan, optimizer=optimizer, progress=False, performance=PerformanceOptions(**performance))
    return [6 * gradient.double() for gradient in seen]


def expected(model, batch):
    gradients = oracles.per_record_gradients(model, lambda m, r: losses(m, *r).sum(), batch)
    return oracles.clipped_sum(gradients, 0.5)


def apart(got, wanted):
    """The distance, relative to the length."""
    difference = sum(float((a - b.double()).square().sum()) for a, b in zip(got, wanted, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def in_bfloat16(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return F.cross_entropy(out.float(), y, reduction="none")


@pytest.fixture(params=["processor", "another device"])
def place(request, monkeypatch):
    """The processor, and the same in the place of another device."""
    if request.param == "another device":
        monkeypatch.setattr(numerics, "_HOST", "none")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Attending()


@pytest.mark.usefixtures("place")
def test_autocast_in_bfloat16(model):
    wanted = expected(model, data())
    assert apart(clipped_sum(model, data(), loss=in_bfloat16), wanted) < 0.03


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_type(model, dtype):
    model = model.to(dtype)
    wanted = expected(model, data(dtype))
    assert apart(clipped_sum(model, data(dtype)), wanted) < (0.05 if dtype == torch.bfloat16 else CLOSE)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["plain", "flash"])
def test_kernels_of_attention(model, kernel):
    wanted = expected(model, data())
    with sdpa_kernel(kernel):
        assert apart(clipped_sum(model, data()), wanted) < CLOSE


@pytest.mark.usefixtures("place")
def test_channels_last(model):
    wanted = expected(model, data())
    x, y = data()
    model = model.to(memory_format=torch.channels_last)
    batch = x.contiguous(memory_format=torch.channels_last), y

    def loss(model, x, y):
        return losses(model, x.contiguous(memory_format=torch.channels_last), y)

    assert apart(clipped_sum(model, batch, loss=loss), wanted) < CLOSE


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_and_foreach_optimizers(model, kind, options):
    wanted = expected(model, data())
    assert apart(clipped_sum(model, data(), optimizer=lambda p: kind(p, lr=1e-3, **options)), wanted) < CLOSE


# torch warns while it compiles the probe's own functions.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
def test_a_compiled_model(model):
    wanted = expected(model, data())
    assert apart(clipped_sum(torch.compile(model, backend="aot_eager"), data()), wanted) < CLOSE


@pytest.mark.parametrize("mode", ["low_memory", "two_pass"])
def test_half_precision_in_other_ways_of_clipping(model, mode, monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    wanted = expected(model, data())
    assert apart(clipped_sum(model, data(), loss=in_bfloat16, clipping_mode=mode), wanted) < 0.03
