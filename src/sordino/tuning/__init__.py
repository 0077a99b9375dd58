"""Private choice of settings: every run that looks at private records is charged, and so is the choice.

    tune                 many private runs, one winner, one charge made before the first of them
    RandomStopping, …    how many runs, or how to choose among all
    tune_on_subsample    settings from small samples, then one run on everything
    tune_on_public_data  settings from public records, then one private run: nothing of the search is charged
    PrivateRandomSearch  the same over estimators, as scikit-learn calls it
    recommend_settings   batch size, steps, noise, clipping and learning rate by published rules, without data

Example:
    >>> from sordino.events import PureDP
    >>> from sordino.tuning import RandomStopping
    >>> RandomStopping(mean=10, shape=1.0).event(PureDP(epsilon=0.1))
    RepeatAndSelect(event=PureDP(epsilon=0.1), distribution='negative_binomial', mean=10, shape=1.0)
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.tuning.methods import (
        Choice,
        ExponentialSelection,
        GeneralizedExponentialSelection,
        Integers,
        LogUniform,
        PoissonStopping,
        RandomStopping,
        SearchSpace,
        ThresholdStopping,
        Uniform,
    )
    from sordino.tuning.random_search import PrivateRandomSearch
    from sordino.tuning.recommended_settings import RecommendedSettings, recommend_settings
    from sordino.tuning.search import (
        PrivateScore,
        TrialBudget,
        TuningResult,
        tune,
        tune_on_public_data,
        tune_on_subsample,
    )

__all__ = [
    "Choice",
    "ExponentialSelection",
    "GeneralizedExponentialSelection",
    "Integers",
    "LogUniform",
    "PoissonStopping",
    "PrivateRandomSearch",
    "PrivateScore",
    "RandomStopping",
    "RecommendedSettings",
    "SearchSpace",
    "ThresholdStopping",
    "TrialBudget",
    "TuningResult",
    "Uniform",
    "recommend_settings",
    "tune",
    "tune_on_public_data",
    "tune_on_subsample",
]

__getattr__, __dir__ = lazy_names(__name__)
