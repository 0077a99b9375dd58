"""The pipelines by name, one line each (floor 6). A module is imported when its pipeline is asked for.

Modules of pipelines import what the base installation lacks inside functions, so that every pipeline can be listed.
"""

from collections.abc import Mapping
from importlib import import_module

from sordino import checks
from sordino.recipes.pipeline import Pipeline

__all__ = ["PIPELINES", "pipeline_called"]

PIPELINES: Mapping[str, str] = {
    "adult-logistic": "sordino.recipes.adult:ADULT_LOGISTIC",
    "adult-mlp": "sordino.recipes.adult:ADULT_MLP",
    "efficientnet": "sordino.recipes.image_transfer:EFFICIENTNET",
    "efficientnet-small": "sordino.recipes.image_transfer:EFFICIENTNET_SMALL",
    "hashed-words": "sordino.recipes.hashed_words:HASHED_WORDS",
    "logistic-pixels": "sordino.recipes.logistic_pixels:LOGISTIC_PIXELS",
    "logistic-sgd": "sordino.recipes.logistic_pixels:LOGISTIC_SGD",
    "lora": "sordino.recipes.lora:LORA",
    "minilm": "sordino.recipes.text_transfer:MINILM",
    "patches": "sordino.recipes.patches:PATCHES",
    "pca-mlp": "sordino.recipes.pca_mlp:PCA_MLP",
    "scatter": "sordino.recipes.scatter:SCATTER",
    "scatter-sgd": "sordino.recipes.scatter:SCATTER_SGD",
    "tanh-cnn": "sordino.recipes.tanh_cnn:TANH_CNN",
    "wrn": "sordino.recipes.wrn:WRN",
    "wrn-fast": "sordino.recipes.wrn:WRN_FAST",
}
"""Names, and where the pipelines are: ``module:NAME``."""


def pipeline_called(name: str) -> Pipeline:
    """The pipeline of this name.

    Raises:
        InvalidArgument: there is none.

    Example:
        >>> pipeline_called("pca-mlp").public_inputs
        ()
    """
    checks.one_of(PIPELINES, recipe=name)
    module, _, attribute = PIPELINES[name].partition(":")
    pipeline = getattr(import_module(module), attribute)
    assert isinstance(pipeline, Pipeline)
    assert pipeline.name == name
    return pipeline
