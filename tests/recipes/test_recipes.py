import math

import numpy as np
import pytest
import torch
from torch import nn

from sordino.data import DatasetSplits, Records, load_dataset
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.randomness import KeyedRNG
from sordino.recipes import MODELS, TrainingConfig, accuracy, non_private_baseline, recommend_config, train_with_config


def recipe_for(model: str = "logistic", **changes: object) -> TrainingConfig:
    facts: dict[str, object] = {
        "shape": (1, 28, 28),
        "classes": 10,
        "dataset_size": 60_000,
        "target_epsilon": 3.0,
        "delta": 1e-5,
    }
    return recommend_config(model, **{**facts, **changes})  # pyright: ignore[reportArgumentType]


def made_up(n: int = 400, *, public: bool = True) -> DatasetSplits:
    """Two classes that a plane tells apart."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(2 * n, 6)).astype(np.float32)
    labels = (features[:, 0] + features[:, 1] > 0).astype(np.int64)
    return DatasetSplits(
        name="plane",
        train=Records(features[:n], labels[:n]),
        test=Records(features[n:], labels[n:]),
        labels=("below", "above"),
        public=public,
        source="made up",
        license="none",
        schema=None,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target_epsilon", [0.5, 1.0, 8.0])
def test_a_recipe_never_exceeds_its_target(model: str, target_epsilon: float) -> None:
    recipe = recipe_for(model, target_epsilon=target_epsilon)
    spent = recipe.plan.guarantee()
    assert 0.97 * target_epsilon < spent.epsilon <= target_epsilon
    assert "the size of the dataset is treated as public" in spent.caveats


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("population", [100, 3000, 60_000])
def test_the_noise_gathered_in_a_weight_stays_below_one(model: str, population: int) -> None:
    recipe = recipe_for(model, dataset_size=population, target_epsilon=0.5)
    plan = recipe.plan
    noise = plan.noise_multiplier * plan.max_grad_norm / plan.expected_batch_size
    gathered = math.sqrt(plan.steps) * recipe.learning_rate / (1 - recipe.momentum) * noise
    assert 0 < gathered <= 1.0 + 1e-9
    assert plan.expected_batch_size == pytest.approx(plan.sample_rate * population)


def test_a_delta_that_would_allow_whole_records_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="below 1 / dataset_size"):
        recipe_for(dataset_size=1000, delta=1e-3)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="logistic, mlp, cnn"):
        recipe_for("forest")


def test_a_model_of_ones_own_gets_a_recipe() -> None:
    def tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    recipe = recommend_config(tiny, shape=(6,), classes=2, dataset_size=400, target_epsilon=4.0, delta=1e-4, steps=3)
    result = train_with_config(made_up(), recipe, progress=False)
    assert isinstance(result.model, nn.Linear)
    assert (recipe.model, result.steps) == ("tiny", 3)


class Lines:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def append(self, *, step: int, event: Event, epsilon: float) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_training_a_recipe_learns_and_charges_every_step(model: str) -> None:
    data, lines = made_up(3000), Lines()
    recipe = recommend_config(model, shape=(6,), classes=2, dataset_size=3000, target_epsilon=2.0, delta=1e-4)
    result = train_with_config(data, recipe, transcript=lines, progress=False)
    assert data.test is not None
    assert lines.steps == list(range(recipe.plan.steps))
    assert result.guarantee.epsilon <= 2.0
    assert accuracy(result.model, data.test) > 0.9


def test_a_recipe_for_another_shape_is_refused() -> None:
    recipe = recommend_config("logistic", shape=(7,), classes=2, dataset_size=400, target_epsilon=2.0, delta=1e-4)
    with pytest.raises(InvalidArgument, match="shape"):
        train_with_config(made_up(), recipe, progress=False)


def test_the_twin_is_refused_for_private_data_and_learns_on_public_data() -> None:
    recipe = recommend_config("logistic", shape=(6,), classes=2, dataset_size=400, target_epsilon=2.0, delta=1e-4)
    with pytest.raises(InvalidArgument, match="public"):
        non_private_baseline(made_up(public=False), recipe)
    data = made_up()
    assert data.test is not None
    assert accuracy(non_private_baseline(data, recipe), data.test) > 0.95


def test_accuracy_is_the_share_of_right_labels_and_leaves_the_modes_alone() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.9).eval()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, 0], -x[:, 0]], dim=1)

    model = Fixed()
    features = np.array([[1.0], [1.0], [-1.0], [-1.0]], dtype=np.float32)
    records = Records(features, np.array([0, 1, 1, 1], dtype=np.int64))
    assert accuracy(model, records) == 0.75
    assert (model.training, model.dropout.training) == (True, False)


def test_adult_at_epsilon_one_reaches_83_percent() -> None:
    # Five runs measured 84.7 to 84.9 %; the model without privacy about 84.7 %.
    adult = load_dataset("adult")
    recipe = recommend_config("logistic", shape=(104,), classes=2, dataset_size=30162, target_epsilon=1.0, delta=1e-5)
    result = train_with_config(adult, recipe, progress=False, rng=KeyedRNG())
    assert adult.test is not None
    assert result.guarantee.epsilon <= 1.0
    assert accuracy(result.model, adult.test) >= 0.83
