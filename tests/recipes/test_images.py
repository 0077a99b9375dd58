import pytest

from sordino.data import DatasetSplits, load_dataset
from sordino.errors import DataUnavailable
from sordino.recipes import accuracy, get_recipe, recommend_config, train_with_config

pytestmark = pytest.mark.slow


def on_this_machine(name: str) -> DatasetSplits:
    try:
        return load_dataset(name)
    except DataUnavailable:
        pytest.skip(f"{name} is not on this machine")


# Each gate lies a percent or more below the lowest of the runs that `sordino.recipes.training_config` lists.
@pytest.mark.parametrize(
    ("name", "model", "target_epsilon", "gate"),
    [
        ("fashion-mnist", "logistic", 4.6, 0.81),
        ("fashion-mnist", "mlp", 3.0, 0.82),
        ("fashion-mnist", "cnn", 3.0, 0.84),
    ],
)
def test_the_recipe_reaches_its_accuracy(name: str, model: str, target_epsilon: float, gate: float) -> None:
    data = on_this_machine(name)
    recipe = recommend_config(
        model,
        shape=data.train.record_shape,
        classes=len(data.labels),
        dataset_size=len(data.train),
        target_epsilon=target_epsilon,
        delta=1e-5,
    )
    result = train_with_config(data, recipe, progress=False)
    assert data.test is not None
    assert result.guarantee.epsilon <= target_epsilon
    assert accuracy(result.model, data.test) >= gate


# Each floor lies about a percent below the mean of three seeds in docs/results.md.
@pytest.mark.parametrize(
    ("name", "recipe", "target_epsilon", "floor"),
    [
        ("fashion-mnist", "logistic-pixels", 0.5, 0.805),
        ("fashion-mnist", "logistic-pixels", 3.0, 0.83),
        ("fashion-mnist", "tanh-cnn", 1.0, 0.845),
        ("mnist", "pca-mlp", 0.5, 0.91),
        ("mnist", "pca-mlp", 2.0, 0.95),
    ],
)
def test_the_pipeline_stays_above_its_floor(name: str, recipe: str, target_epsilon: float, floor: float) -> None:
    data = on_this_machine(name)
    assert data.test is not None
    fitted = get_recipe(recipe).fit(data, epsilon=target_epsilon, delta=1e-5)
    assert fitted.guarantee.epsilon <= target_epsilon
    assert fitted.accuracy(data.test) >= floor
