"""Recipes: models, plans and optimizers that reach good accuracy without tuning on the private records."""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.recipes.models import MODELS, UnitNorm, cnn, logistic, mlp
    from sordino.recipes.recipe import (
        RECIPES,
        FittedRecipe,
        Predictor,
        PreparedRecipe,
        Recipe,
        RecipeTask,
        Stage,
        StageCharger,
        feature_cache,
        get_recipe,
    )
    from sordino.recipes.tabular import TABULAR_METHODS, TabularMethod, TabularTask, make_tabular_task
    from sordino.recipes.training_config import (
        ModelFactory,
        TrainingConfig,
        accuracy,
        non_private_baseline,
        recommend_config,
        train_with_config,
    )

__all__ = [
    "FittedRecipe",
    "MODELS",
    "ModelFactory",
    "Predictor",
    "PreparedRecipe",
    "RECIPES",
    "Recipe",
    "RecipeTask",
    "Stage",
    "StageCharger",
    "TABULAR_METHODS",
    "TabularMethod",
    "TabularTask",
    "TrainingConfig",
    "UnitNorm",
    "accuracy",
    "cnn",
    "feature_cache",
    "get_recipe",
    "logistic",
    "make_tabular_task",
    "mlp",
    "non_private_baseline",
    "recommend_config",
    "train_with_config",
]

__getattr__, __dir__ = lazy_names(__name__)
