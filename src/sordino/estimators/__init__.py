"""Private estimators with scikit-learn's interface: for tables, without deep nets.

What must be public is declared (`data_norm`, `bounds`, `classes`), never read from the data; `guarantee_` says
afterwards what was spent.
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names, require

if TYPE_CHECKING:
    from sordino.estimators.hist_gradient_boosting import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sordino.estimators.kmeans import KMeans
    from sordino.estimators.linear_models import LinearRegression, LinearSVC, LogisticRegression, Ridge
    from sordino.estimators.naive_bayes import GaussianNB
    from sordino.estimators.neural import DPClassifier, DPRegressor
    from sordino.estimators.preprocessing import PCA, MinMaxScaler, StandardScaler
    from sordino.estimators.random_forest import RandomForestClassifier, RandomForestRegressor
    from sordino.estimators.search import PrivateGridSearch
    from sordino.estimators.whitened_logistic import WhitenedLogisticRegression

__all__ = [
    "DPClassifier",
    "DPRegressor",
    "GaussianNB",
    "HistGradientBoostingClassifier",
    "HistGradientBoostingRegressor",
    "KMeans",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "MinMaxScaler",
    "PCA",
    "PrivateGridSearch",
    "RandomForestClassifier",
    "RandomForestRegressor",
    "Ridge",
    "StandardScaler",
    "WhitenedLogisticRegression",
]

require("estimators", "sklearn", user="sordino.estimators")
__getattr__, __dir__ = lazy_names(__name__)
