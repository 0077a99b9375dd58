"""Recipes (floor 6): models, plans and optimizers that reach good accuracy without tuning on the private records."""

from sordino.recipes.defaults import ModelFactory, Recipe, recommend
from sordino.recipes.methods import METHODS, TableMethod
from sordino.recipes.models import MODELS, UnitNorm, cnn, logistic, mlp
from sordino.recipes.running import accuracy, non_private_twin, train
from sordino.recipes.tables import Table, table

__all__ = [
    "METHODS",
    "MODELS",
    "ModelFactory",
    "Recipe",
    "Table",
    "TableMethod",
    "UnitNorm",
    "accuracy",
    "cnn",
    "logistic",
    "mlp",
    "non_private_twin",
    "recommend",
    "table",
    "train",
]
