"""Recipes (floor 5): models, plans and optimizers that reach good accuracy without tuning on the private records."""

from sordino.recipes.defaults import ModelFactory, Recipe, recommend
from sordino.recipes.models import MODELS, UnitNorm, cnn, logistic, mlp
from sordino.recipes.running import accuracy, non_private_twin, train

__all__ = [
    "MODELS",
    "ModelFactory",
    "Recipe",
    "UnitNorm",
    "accuracy",
    "cnn",
    "logistic",
    "mlp",
    "non_private_twin",
    "recommend",
    "train",
]
