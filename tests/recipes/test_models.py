import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import InvalidArgument
from sordino.recipes import UnitNorm, cnn, logistic, mlp
from sordino.recipes.models import convolutions


@pytest.mark.parametrize(("channels", "parameters"), [(1, 26010), (3, 26010 + 2 * 16 * 64)])
def test_the_cnn_has_the_published_number_of_parameters(channels: int, parameters: int) -> None:
    # Papernot et al. 2021, table 1: 26 010 for MNIST.
    assert sum(p.numel() for p in cnn((channels, 28, 28), 10).parameters()) == parameters


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(16, 40), st.integers(16, 40), st.integers(2, 5))
def test_the_cnns_take_images_of_any_size_from_16(channels: int, height: int, width: int, classes: int) -> None:
    for build in (cnn, convolutions):
        model = build((channels, height, width), classes)
        assert model(torch.rand(2, channels, height, width)).shape == (2, classes)


@pytest.mark.parametrize("shape", [(104,), (28, 28), (1, 15, 28)])
def test_the_cnns_refuse_what_is_no_image(shape: tuple[int, ...]) -> None:
    for build in (cnn, convolutions):
        with pytest.raises(InvalidArgument, match="Choose logistic or mlp"):
            build(shape, 2)


@pytest.mark.parametrize("build", [logistic, mlp])
def test_linear_models_flatten_records_of_any_shape(build: type[torch.nn.Module]) -> None:
    for shape in ((5,), (1, 4, 4)):
        assert build(shape, 3)(torch.rand(2, *shape)).shape == (2, 3)


def test_records_are_scaled_one_by_one_and_zeros_stay_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e20, 1e20], [0.0, 1e-20]])
    scaled = UnitNorm(2.0)(x)
    torch.testing.assert_close(scaled[0], torch.tensor([1.2, 1.6]))
    assert torch.equal(scaled[1], torch.zeros(2))
    assert scaled.isfinite().all()


def test_the_logistic_model_starts_at_the_uniform_distribution() -> None:
    assert torch.equal(logistic((7,), 3)(torch.rand(4, 7)), torch.zeros(4, 3))
