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

from typing import TYPE_CHECKING

from sordino.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
