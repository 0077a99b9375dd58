import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import PerformanceOptions, Plan, fit
from sordino.clipping import QuantileClipping
from sordino.errors import InvalidArgument, UnsupportedModule
from sordino.randomness import KeyedRNG
from sordino.schedules import ExponentialSchedule
from sordino.training.compiled_step import padded_size


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def trained(model: nn.Module, *, compile: bool, **changes: object) -> Tensor:
    values = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.1,
        "steps": 6,
        "expected_batch_size": 16.0,
        "delta": 1e-5,
    }
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(160, 7, generator=generator), torch.randint(3, (160,), generator=generator)
    fit(
        model,
        cross_entropy,
        data,
        Plan(**{**values, **changes}),
        performance=PerformanceOptions(compile=compile),
        rng=KeyedRNG(seed=3, reproducible=True),
        progress=False,
    )
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_compiled_training_ends_where_ordinary_training_does() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    torch.testing.assert_close(trained(model(), compile=True), trained(model(), compile=False), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clipping": QuantileClipping(count_noise=5.0)}, "clipping norm that adapts"),
        ({"max_grad_norm": ExponentialSchedule(start=1.0, end=0.5)}, "schedule of max_grad_norm"),
        ({"secure_mode": True}, "secure mode"),
    ],
)
def test_plans_that_cant_be_compiled_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        trained(nn.Linear(7, 3), compile=True, **changes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_a_model_that_draws_random_numbers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModule, match="random numbers"):
        trained(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)), compile=True)


class _Attending(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(7, 3 * 8), nn.Linear(4, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).view(len(x), 3, 1, 2, 4).unbind(1)
        return self.out(F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)).mean((1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*_prims_common.*:FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_attention_that_drops_nothing_draws_nothing_and_is_compiled() -> None:
    torch.manual_seed(1)
    model = _Attending(dropout=0.0)
    compiled, ordinary = (trained(copy.deepcopy(model), compile=way, steps=2) for way in (True, False))
    torch.testing.assert_close(compiled, ordinary, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
@pytest.mark.parametrize("way", ["attention", "bernoulli"])
def test_what_draws_random_numbers_stays_refused_by_name(way: str) -> None:
    torch.manual_seed(1)
    builds = {
        "attention": lambda: _Attending(dropout=0.3),
        "bernoulli": lambda: nn.Sequential(nn.Linear(7, 5), nn.FeatureAlphaDropout(0.2), nn.Linear(5, 3)),
    }
    with pytest.raises(UnsupportedModule, match="random numbers"):
        trained(builds[way](), compile=True)


def test_without_a_compiler_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InvalidArgument, match="C\\+\\+ compiler"):
        trained(nn.Linear(7, 3), compile=True)


def test_sizes_are_public_few_and_large_enough() -> None:
    for expected in (1.0, 16.0, 100.0, 512.0, 4096.0):
        for records in range(1, int(2 * expected) + 2):
            size = padded_size(records, expected)
            assert records <= size < records + 4 * expected**0.5 + 1
        likely = range(int(expected - 2 * expected**0.5), int(expected + 2 * expected**0.5) + 1)
        assert len({padded_size(max(records, 1), expected) for records in likely}) <= 4
