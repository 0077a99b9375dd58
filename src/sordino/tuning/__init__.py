"""Private choice of settings (floor 5): every run that looks at private records is on the bill, and so is the choice.

    tune                 many private runs, one winner, one charge made before the first of them
    RandomStopping, …    how many runs, or how to choose among all
    tune_on_part         settings from small samples, then one run on everything
    transfer             settings from public records, then one private run: nothing of the search is on the bill
    PrivateRandomSearch  the same over estimators, as scikit-learn calls it
    recommend_settings   batch size, steps, noise, clipping and learning rate by published rules, without data

Example:
    >>> from sordino.events import PureDP
    >>> from sordino.tuning import RandomStopping
    >>> RandomStopping(mean=10, shape=1.0).event(PureDP(epsilon=0.1))
    Selection(event=PureDP(epsilon=0.1), distribution='negative_binomial', mean=10, shape=1.0)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sordino.tuning.choosing import ExponentialChoice, GeneralizedChoice
    from sordino.tuning.part import tune_on_part
    from sordino.tuning.random_search import PrivateRandomSearch
    from sordino.tuning.scaling import Settings, recommend_settings
    from sordino.tuning.search import Tuned, tune
    from sordino.tuning.share import PrivateScore, Share
    from sordino.tuning.space import Choice, Integers, LogUniform, SearchSpace, Uniform
    from sordino.tuning.stopping import PoissonStopping, RandomStopping, ThresholdStopping
    from sordino.tuning.transferring import transfer

__all__ = [
    "Choice",
    "ExponentialChoice",
    "GeneralizedChoice",
    "Integers",
    "LogUniform",
    "PoissonStopping",
    "PrivateRandomSearch",
    "PrivateScore",
    "RandomStopping",
    "SearchSpace",
    "Settings",
    "Share",
    "ThresholdStopping",
    "Tuned",
    "Uniform",
    "recommend_settings",
    "transfer",
    "tune",
    "tune_on_part",
]

_HOMES = {
    "Choice": "space",
    "ExponentialChoice": "choosing",
    "GeneralizedChoice": "choosing",
    "Integers": "space",
    "LogUniform": "space",
    "PoissonStopping": "stopping",
    "PrivateRandomSearch": "random_search",
    "PrivateScore": "share",
    "RandomStopping": "stopping",
    "SearchSpace": "space",
    "Settings": "scaling",
    "Share": "share",
    "ThresholdStopping": "stopping",
    "Tuned": "search",
    "Uniform": "space",
    "recommend_settings": "scaling",
    "transfer": "transferring",
    "tune": "search",
    "tune_on_part": "part",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.tuning' has no attribute {name!r}")
    value = getattr(import_module(f"sordino.tuning.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
