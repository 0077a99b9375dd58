import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Performance, Plan, fit
from sordino.clipping import QuantileClipping
from sordino.errors import InvalidArgument, UnsupportedModule
from sordino.randomness import Randomness
from sordino.schedules import Exponential
from sordino.training.fitting.compiled import padded_size


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
        performance=Performance(compile=compile),
        randomness=Randomness(seed=3, reproducible=True),
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
        ({"clipping": QuantileClipping(count_noise=5.0)}, "bounds that adapt"),
        ({"max_grad_norm": Exponential(start=1.0, end=0.5)}, "schedule of max_grad_norm"),
        ({"secure_noise": True}, "secure_noise"),
    ],
)
def test_plans_that_cant_be_compiled_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        trained(nn.Linear(7, 3), compile=True, **changes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
def test_a_model_that_draws_random_numbers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModule, match="random numbers"):
        trained(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)), compile=True)


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
