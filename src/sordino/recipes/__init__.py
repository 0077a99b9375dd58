"""Recipes (floor 6): models, plans and optimizers that reach good accuracy without tuning on the private records."""

from sordino.recipes.defaults import ModelFactory, Recipe, recommend
from sordino.recipes.feature_cache import feature_cache
from sordino.recipes.methods import METHODS, TableMethod
from sordino.recipes.models import MODELS, UnitNorm, cnn, logistic, mlp
from sordino.recipes.payment import Payment, Stage
from sordino.recipes.pipeline import FittedPipeline, Pipeline
from sordino.recipes.pipelines import PIPELINES, pipeline_called
from sordino.recipes.running import accuracy, non_private_twin, train
from sordino.recipes.tables import Table, table
from sordino.recipes.task import Predictor, Prepared, Task

__all__ = [
    "FittedPipeline",
    "METHODS",
    "MODELS",
    "ModelFactory",
    "PIPELINES",
    "Payment",
    "Pipeline",
    "Predictor",
    "Prepared",
    "Recipe",
    "Stage",
    "Table",
    "TableMethod",
    "Task",
    "UnitNorm",
    "accuracy",
    "cnn",
    "feature_cache",
    "logistic",
    "mlp",
    "non_private_twin",
    "pipeline_called",
    "recommend",
    "table",
    "train",
]
