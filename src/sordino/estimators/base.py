"""What every private estimator shares: declarations, randomness, and charges.

Parameters are stored and nothing else happens before `fit`, as scikit-learn's `clone` expects. `fit` charges first and
reads records then; all that changes the guarantee is a parameter, so it is known before the data are.
"""

import math
import multiprocessing
import os
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Self, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.validation import validate_data

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, InvalidArgument, MissingDeclaration, UnsupportedEvent
from sordino.events import ApproximateDP, Event, NonPrivate, PureDP, compose
from sordino.ledger import Account, Reservation
from sordino.mechanisms import DiscreteLaplaceMechanism, GridGaussianMechanism, PureBudget
from sordino.mechanisms.base import (
    Bounds,
    FloatArray,
    Numbers,
    category_codes,
    checked_bounds,
    not_numeric,
    to_float_array,
)
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG

# ----------------------------------------------------------------------------------------------------------------------
# What an estimator does with the records it is given, before any proof applies.
#
# Shapes, types and the number of columns are public: wrong ones are refused. Entries are private: none raises, none is
# quoted. A missing entry is the middle of what was declared, as it is when a table is read from a file (`data.tables`).
# A record with an undeclared label, or whose target is no finite number, keeps its index and contributes nothing,
# so the same rule serves every neighboring relation.
# ----------------------------------------------------------------------------------------------------------------------


Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[np.generic]
ColumnBounds: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
_Value = TypeVar("_Value")

# Rows at the boundary are kept this much inside, so that rounding can't lengthen them past it.
_INSIDE = 1e-12


def require_declared(value: _Value | None, *, name: str, meaning: str) -> _Value:
    """The value, if it was declared."""
    if value is None:
        raise MissingDeclaration(
            f"{name} must be declared ({meaning}), got None. Take it from public knowledge, never from the data."
        )
    return value


def validate_matrix(X: Numbers, *, estimator: BaseEstimator, reset: bool) -> FloatArray:
    """X as a fresh float64 [n, d], NaN where an entry is missing. Sets or checks the number of columns."""
    if issparse(X):
        raise InvalidArgument("X must be dense, got a sparse container. Convert it with .toarray().")
    if getattr(getattr(X, "dtype", None), "kind", "") == "c":
        raise InvalidArgument("X must be real. Complex data not supported: split real and imaginary parts.")
    _check_not_objects(X, "X")
    array = to_float_array(X, "X")
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidArgument(
            f"X must be a matrix, one row a record, with at least one column, got {array.ndim} dimensions"
            f"{' and 0 feature(s) while a minimum of 1 is required' if array.ndim == 2 else ''}. Reshape your data."
        )
    validate_data(estimator, cast("str", X), reset=reset, skip_check_array=True)  # its stub knows only the default
    return array


def fill_missing(
    records: FloatArray, *, bounds: tuple[FloatArray, FloatArray] | None = None, middle: npt.ArrayLike = 0.0
) -> FloatArray:
    """Records [n, d] in which every entry is finite, each record changed by itself.

    Args:
        records: with NaN where an entry is missing.
        bounds: declared (lower, upper) [d]: NaN becomes their middle and ±∞ the nearer one.
        middle: without bounds, what NaN and ±∞ become: 0, or the declared center [d].
    """
    if bounds is None:
        return np.where(np.isfinite(records), records, middle)
    lower, upper = bounds
    found = np.where(np.isnan(records), lower / 2 + upper / 2, records)
    return np.where(np.isinf(found), np.clip(found, lower, upper), found)


def _check_not_objects(values: object, name: str) -> None:
    """Refuse an array that is declared to hold objects: of texts, every record would be missing."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        raise not_numeric(name, "object")


def encode_labels(y: Labels, classes: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """The index of each label among the declared classes [n]; −1 for one that is none of them."""
    listed = np.asarray(y).ravel() if hasattr(y, "__array__") else y
    return category_codes(listed, tuple(classes))


def scaled_targets(y: Numbers, bounds: tuple[float, float], *, center: float, half: float) -> FloatArray:
    """Targets clipped to the bounds, then (y − center)/half in [−1, 1], float64 [n]; NaN where one is not finite."""
    _check_not_objects(y, "y")
    targets = to_float_array(y, "y").ravel()
    with np.errstate(all="ignore"):  # warnings would tell of extreme targets
        scaled = np.clip((np.clip(targets, *bounds) - center) / half, -1.0, 1.0)
    scaled[~np.isfinite(targets)] = np.nan
    return scaled


def class_weights(class_weight: Mapping[Hashable, float] | None, classes: npt.NDArray[np.generic]) -> FloatArray | None:
    """The weight of each class over the largest of them [K], in [0, 1]; 1 is that of one not named. None: all alike.

    A record's contribution is multiplied by its weight, so it moves what is released by no more than without weights.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping):
        raise InvalidArgument(
            f"class_weight must be a dict of weights by class, got {class_weight!r}. How many records a class has is "
            "private: take its share from public knowledge, or from counts that were paid for (sordino describe), and "
            "give {class: 1 / (classes * share)}."
        )
    listed = classes.tolist()
    if unknown := [label for label in class_weight if label not in listed]:
        raise InvalidArgument(f"class_weight must name declared classes, got {unknown!r}. Correct it, or declare them.")
    weights = np.array([checks.non_negative(class_weight=float(class_weight.get(label, 1.0))) for label in listed])
    return weights / checks.positive(largest_class_weight=float(weights.max()))


def record_weights(sample_weight: Numbers | None, largest: float | None, records: int) -> FloatArray:
    """Weights over the largest declared one, cut to [0, 1] [n]; 1 where none are given, 0 for one that is no number."""
    if largest is not None:
        checks.positive(max_sample_weight=largest)
    if sample_weight is None:
        return np.ones(records)
    bound = require_declared(largest, name="max_sample_weight", meaning="the largest weight of a record")
    weights = to_float_array(sample_weight, "sample_weight")
    if weights.shape != (records,):
        raise InvalidArgument("sample_weight must have one entry for each row of X. Align them.")
    return np.clip(np.where(np.isnan(weights), 0.0, weights) / bound, 0.0, 1.0)


def check_one_target_per_record(y: Numbers | Labels | None, records: int) -> None:
    """Refuse targets that are not one a record; how many there are is not shown."""
    if y is None:
        raise InvalidArgument("y must be given: requires y to be passed, but the target y is None.")
    shape = np.asarray(y).shape
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise InvalidArgument(f"y must be a vector, got {len(shape)} dimensions. Give one target a record.")
    if len(shape) == 2:  # the shape is public, so the warning tells nothing
        warnings.warn("A column-vector y was passed when a 1d array was expected.", DataConversionWarning, stacklevel=3)
    if shape[0] != records:
        raise InvalidArgument(
            "y must have one entry for each row of X, got inconsistent numbers of samples. Align them."
        )


def clip_rows(rows: FloatArray, norm: float) -> FloatArray:
    """Rows divided by `norm`, and those that are then longer than 1 cut back to length 1."""
    largest = np.maximum(np.abs(rows).max(axis=1, initial=0.0, keepdims=True), norm * 2.0**-40)
    with np.errstate(all="ignore"):
        # Entries are scaled before they are divided: neither huge nor tiny ones overflow. largest/norm may, to ∞.
        directions = rows / largest
        lengths = np.sqrt(np.square(directions).sum(axis=1, keepdims=True))
        return directions * np.minimum(largest / norm, 1 / (lengths * (1 + _INSIDE)))


def normalize_rows(rows: FloatArray) -> FloatArray:
    """Rows [n, d] scaled to length 1, each by itself; zero stays zero."""
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    with np.errstate(all="ignore"):  # a warning would tell that a row is zero or extreme
        directions = np.where(largest > 0, rows / largest, 0.0)
        lengths = np.sqrt(np.square(directions).sum(axis=1, keepdims=True))
    return directions / np.maximum(lengths, 1.0)


def declared_classes(classes: Sequence[Hashable] | None) -> npt.NDArray[np.generic]:
    """The declared classes as an array of at least two, all different."""
    listed = require_declared(classes, name="classes", meaning="all labels that may occur")
    array = np.asarray(listed)
    if array.ndim != 1 or len(array) < 2 or len(set(array.tolist())) != len(array):
        raise InvalidArgument(f"classes must be at least two different labels, got {listed!r}. List each once.")
    return array


def declared_relation(neighboring_relation: str) -> NeighboringRelation:
    """The neighboring relation of this name."""
    return NeighboringRelation(checks.one_of(list(NeighboringRelation), neighboring_relation=neighboring_relation))


def declared_norm(data_norm: float | None) -> float:
    """The declared largest norm of a record, > 0."""
    return checks.positive(data_norm=require_declared(data_norm, name="data_norm", meaning="the largest norm of a row"))


def declared_size(dataset_size: int | None) -> int:
    """The declared number of records, ≥ 1."""
    meaning = "the public number of records, or a public guess of it"
    return checks.integer(1, dataset_size=require_declared(dataset_size, name="dataset_size", meaning=meaning))


def column_bounds(bounds: ColumnBounds | None, columns: int) -> tuple[FloatArray, FloatArray]:
    """(lower, upper), one number a column each; a single number serves all columns."""
    ends = require_declared(bounds, name="bounds", meaning="(lower, upper) of the columns")
    if len(ends) != 2:
        raise InvalidArgument(f"bounds must be a pair (lower, upper), got {len(ends)} parts. Declare them so.")
    lower, upper = (np.asarray(end, dtype=np.float64) for end in ends)
    if any(end.ndim > 1 or (end.ndim == 1 and len(end) != columns) for end in (lower, upper)):
        raise InvalidArgument(f"bounds must be numbers or vectors of {columns} entries. Declare one of each a column.")
    lower, upper = np.broadcast_to(lower, columns), np.broadcast_to(upper, columns)
    with np.errstate(all="ignore"):
        fine = np.isfinite(lower) & np.isfinite(upper) & (lower < upper) & np.isfinite(upper - lower)
    if not fine.all():
        raise InvalidArgument("bounds must be finite with lower < upper in every column. Declare public bounds.")
    checks.in_range(2.0**-400, 2.0**400, smallest_range=float((upper - lower).min()), hint="Rescale the column.")
    checks.in_range(2.0**-400, 2.0**400, largest_range=float((upper - lower).max()), hint="Rescale the column.")
    return lower.copy(), upper.copy()


# ----------------------------------------------------------------------------------------------------------------------
# The fits of an estimator, of its clones and of its copies, which scikit-learn's searches and calibration make.
#
# All of them share one log of what was charged, and each states the composition of what is in it. The log is kept
# outside the estimators: scikit-learn allows a clone no attributes but its parameters. Pickles hold it, and
# a copy that comes back into the process finds the log it left; a clone elsewhere can't tell the others that it fits.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """One fit: what it did, and its own guarantee."""

    event: Event
    guarantee: Guarantee
    name: str


@dataclass(eq=False, kw_only=True)
class _FitLog:
    """The fits of estimators that were cloned or copied from each other.

    Args:
        name: the same in every process.
        process: where fits are counted: the process of the estimator that the others come from; None if elsewhere.
        fits: by name.
        left: whether one that had yet to be fitted was pickled, with a ledger, which allows fits elsewhere.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: int | None = field(default_factory=os.getpid)
    fits: dict[str, _Fit] = field(default_factory=dict)
    left: bool = False
    _stated: dict[tuple[float, int], tuple[float, float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _LOGS_BY_NAME[self.name] = self

    def add(self, fit: _Fit) -> None:
        """Count a fit, or replace what was known of it."""
        self.fits[fit.name] = fit
        self._stated.clear()

    def guarantee(self, own: _Fit, ledger: Account | Reservation | None) -> Guarantee:
        """The composition of all fits, `own` among them; of all that `ledger` holds where others may know of more."""
        fits = list((self.fits | {own.name: own}).values())
        caveats = list(dict.fromkeys(caveat for fit in fits for caveat in fit.guarantee.caveats))
        if self.left:
            return _ledger_guarantee(own.guarantee, ledger, caveats)
        if len(fits) == 1:
            return replace(own.guarantee, caveats=tuple(caveats))
        key = (own.guarantee.delta, len(fits))
        if key not in self._stated:
            self._stated[key] = _compose_fits(fits, own.guarantee)
        epsilon, delta, accountant = self._stated[key]
        return replace(
            own.guarantee,
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            sampler="; ".join(dict.fromkeys(fit.guarantee.sampler for fit in fits)),
            caveats=(
                f"{len(fits)} fits of this estimator and its clones: scores on the records, and what was chosen or "
                "calibrated by them, are not covered",
                *caveats,
            ),
        )


_LOCK = threading.RLock()
_LOGS_BY_NAME: WeakValueDictionary[str, _FitLog] = WeakValueDictionary()
_LOGS: "WeakKeyDictionary[PrivateEstimator, _FitLog]" = WeakKeyDictionary()
_CLONES: "WeakSet[PrivateEstimator]" = WeakSet()


def _compose_fits(fits: Sequence[_Fit], own: Guarantee) -> tuple[float, float, str]:
    """(ε, δ, accountant) of all fits: at the δ of `own` where ε is finite there, otherwise at the sum of their δ."""
    neighboring_relation = common_relation([fit.guarantee.neighboring_relation for fit in fits])
    event = compose([fit.event for fit in fits])
    # Basic composition holds for whatever the fits did; the last digits are kept on the safe side.
    epsilons = math.fsum(fit.guarantee.epsilon for fit in fits) * (1 + 1e-9)
    deltas = math.fsum(fit.guarantee.delta for fit in fits) * (1 + 1e-9)
    for delta in dict.fromkeys((own.delta, deltas)):
        if delta >= 1:
            break
        try:
            spent = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
        except (AccountingError, UnsupportedEvent):
            continue
        if math.isfinite(spent.upper) and not (delta == deltas and spent.upper > epsilons):
            return spent.upper, delta, spent.accountant
    return epsilons, min(deltas, 1.0), "basic_composition"


def _ledger_guarantee(own: Guarantee, ledger: Account | Reservation | None, caveats: Sequence[str]) -> Guarantee:
    """What the ledger's account holds, every fit in other processes among it; ∞ where there is no ledger any more.

    At the δ of `own` where ε is finite there, otherwise at the account's.
    """
    account = Account(url=ledger.url, name=ledger.account) if isinstance(ledger, Reservation) else ledger
    if account is None:
        event, deltas = NonPrivate(reason="fits in other processes were not counted"), [own.delta]
    else:
        event, deltas = account.event(), [own.delta, account.budget().delta]
    relation = own.neighboring_relation
    answers = [(accounting.epsilon(event, delta, neighboring_relation=relation), delta) for delta in deltas]
    spent, delta = next((answer for answer in answers if math.isfinite(answer[0].upper)), answers[0])
    caveats = ("everything charged to the ledger's account is counted: copies may be fitted elsewhere", *caveats)
    return replace(own, epsilon=spent.upper, delta=delta, accountant=spent.accountant, caveats=tuple(caveats))


def _log_of(estimator: "PrivateEstimator") -> _FitLog:
    with _LOCK:
        return _LOGS[estimator]


def independent_copy(estimator: "PrivateEstimator") -> "PrivateEstimator":
    """An unfitted copy whose fits the estimator and its clones don't count: anyone who asks for it composes them.

    Example:
        >>> from sordino.estimators import GaussianNB
        >>> model = GaussianNB(epsilon=1.0, delta=0.0, bounds=(0.0, 1.0), classes=(0, 1))
        >>> independent_copy(model).get_params() == model.get_params()
        True
    """
    made = cast("PrivateEstimator", clone(estimator))
    with _LOCK:
        _LOGS[made] = _FitLog()
        _CLONES.discard(made)
    return made


# ----------------------------------------------------------------------------------------------------------------------
# What every private estimator shares: declarations, randomness, and charges.
# ----------------------------------------------------------------------------------------------------------------------


def _silent(method: Callable[..., object]) -> Callable[..., object]:
    """`method`, where no over- or underflow warns or raises, whatever ``np.seterr`` says: it would tell of records."""

    @wraps(method)
    def quietly(*args: object, **named: object) -> object:
        with np.errstate(all="ignore"):
            return method(*args, **named)

    return quietly


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):
    """Base of the estimators: scikit-learn's parameter handling, and a privacy budget.

    Parameters are the fields of a dataclass: `__init__` stores them and does nothing else.

    Attributes:
        guarantee_: the `Guarantee` of everything that `fit` learned; of all fits where this estimator was fitted more
            than once, or clones of it were.
        events_: what the last `fit` did, one event a release.
    """

    epsilon: float | None = None
    delta: float | None = None
    random_state: int | None = None
    reproducible: bool = False
    ledger: Account | Reservation | None = None

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "fit" in vars(cls):
            setattr(cls, "fit", _silent(vars(cls)["fit"]))  # noqa: B010 (an annotation would hide the subclasses' own)

    def __new__(cls, *args: object, **named: object) -> Self:  # noqa: ARG004 (they are __init__'s)
        """An estimator with a log of its own: begun here, so that a forked process sees that it is another's."""
        made = super().__new__(cls)
        with _LOCK:
            _LOGS[made] = _FitLog()
        return made

    @property
    def guarantee_(self) -> Guarantee:
        """The guarantee of all fits of this estimator and its clones until now."""
        if "_fit" not in vars(self):
            raise AttributeError(f"{type(self).__name__} must be fitted before guarantee_ is read. Call fit.")
        return _log_of(self).guarantee(self._fit, self.ledger)

    @guarantee_.setter
    def guarantee_(self, guarantee: Guarantee) -> None:
        self._count_fit(_event_of(guarantee), guarantee)

    def __sklearn_clone__(self) -> Self:
        """A clone as scikit-learn makes it. Its fits and those of this estimator are counted together."""
        made = cast("Self", super().__sklearn_clone__())
        with _LOCK:
            _LOGS[made] = _log_of(self)
            _CLONES.add(made)
        return made

    def __getstate__(self) -> dict[str, object]:
        log = _log_of(self)
        cloned = self in _CLONES
        if "_fit" not in vars(self) and self.ledger is not None:
            log.left = True
        state = cast("dict[str, object]", super().__getstate__())
        return {**state, "_fit_log": (log.name, tuple(log.fits.values()), log.left, cloned)}

    def __setstate__(self, state: dict[str, object]) -> None:
        state = dict(state)
        shared = cast("tuple[str, tuple[_Fit, ...], bool, bool] | None", state.pop("_fit_log", None))
        super().__setstate__(state)
        if shared is None:
            return
        name, fits, left, cloned = shared
        with _LOCK:
            log = _LOGS_BY_NAME.get(name)
            if log is None:
                log = _FitLog(name=name, process=None)
            # An estimator that was saved is counted where it is loaded, except in a worker: there it is one of several.
            if log.process is None and not cloned and multiprocessing.parent_process() is None:
                log.process = os.getpid()
            log.fits = {fit.name: fit for fit in fits} | log.fits
            log.left |= left
            _LOGS[self] = log
            if cloned:
                _CLONES.add(self)

    def learned_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What `fit` learned, by name: every attribute of numbers. With the parameters it is the fitted estimator."""
        found = {
            name: np.asarray(value)
            for name, value in vars(self).items()
            if _is_learned(name) and isinstance(value, np.ndarray | float | int)
        }
        return {name: array for name, array in found.items() if array.dtype.kind in "fib"}

    def set_learned_arrays(self, arrays: Mapping[str, npt.NDArray[np.generic]], *, columns: int) -> Self:
        """Make this estimator the fitted one that `learned_arrays` came from, which had these parameters.

        No record is read and nothing is charged; `guarantee_` and `events_` are the caller's to set.

        Args:
            arrays: from `learned_arrays`.
            columns: number of columns of the records it was fitted to.
        """
        for name, array in arrays.items():
            if not _is_learned(name):
                raise InvalidArgument(
                    f"arrays must be named as attributes that fit learns, got {name!r}. The file is another one."
                )
            setattr(self, name, array.item() if array.ndim == 0 else array)
        if "classes" in self.get_params(deep=False):
            self.classes_ = declared_classes(cast("Sequence[Hashable]", self.get_params(deep=False)["classes"]))
        self.n_features_in_ = columns
        return self

    def _budget(self) -> tuple[float, float]:
        """(ε, δ) as declared; δ = 0 asks for pure privacy."""
        epsilon = checks.positive(epsilon=require_declared(self.epsilon, name="epsilon", meaning="the privacy budget"))
        delta = require_declared(
            self.delta, name="delta", meaning="well below 1 / number of records, or 0 for pure privacy"
        )
        return epsilon, checks.probability(one=False, delta=delta)

    def _randomness(self) -> KeyedRNG:
        """A fresh key for every fit; a chosen one only for runs that are marked as not private."""
        if self.random_state is None and self.reproducible:
            raise InvalidArgument("random_state must be an integer with reproducible=True, got None. Give one.")
        if self.random_state is not None and not self.reproducible:
            raise InvalidArgument(
                f"random_state must be None unless reproducible=True, got {self.random_state!r}. Anyone who knows the "
                "seed can take the noise off."
            )
        return KeyedRNG(seed=self.random_state, reproducible=self.reproducible)

    def _charge(
        self,
        events: Sequence[Event],
        *,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampler: str = "none",
        caveats: tuple[str, ...] = (),
    ) -> None:
        """Write down what is about to be spent: the one place where a fit is charged, before it reads a record."""
        check_single_process(type(self).__name__)
        epsilon, delta = self._budget()
        spent = accounting.epsilon(compose(list(events)), delta, neighboring_relation=neighboring_relation)
        # The events were made from (ε, δ), so they cost at most ε; a surplus in the last digits is the accountant's.
        if spent.upper > epsilon * (1 + 1e-9):
            raise InvalidArgument(f"events must cost at most epsilon={epsilon:g}, got more. Please report this.")
        self._check_countable(neighboring_relation)
        if self.ledger is not None:
            name = type(self).__name__
            self.ledger.charge(
                compose(list(events)),
                note=name,
                neighboring_relation=neighboring_relation,
                privacy_unit=PrivacyUnit.RECORD,
            )
        self.events_ = tuple(events)
        guarantee = Guarantee(
            epsilon=min(spent.upper, epsilon),
            delta=delta,
            accountant=spent.accountant,
            sampler=sampler,
            neighboring_relation=neighboring_relation,
            caveats=(*caveats, *((FIXED_SEED_CAVEAT,) if self.reproducible else ())),
        )
        self._count_fit(compose(list(events)), guarantee)

    def _check_countable(self, neighboring_relation: NeighboringRelation) -> None:
        """Refuse a fit that the other fits of this estimator and its clones could not be composed with."""
        log = _log_of(self)
        if log.process != os.getpid() and self.ledger is None:
            name = type(self).__name__
            raise InvalidArgument(
                f"{name} must be fitted in the process that made it, or with a ledger, got a copy in another "
                "process: its fits can't be counted there. Use n_jobs=None, or ledger=…, which counts every fit, or "
                f"make a new one: {name}(**model.get_params())."
            )
        others = {fit.guarantee.neighboring_relation for fit in list(log.fits.values())}
        if others - {neighboring_relation}:
            raise InvalidArgument(
                "neighboring_relation must be the same for all fits of an estimator and its clones, got "
                f"{', '.join(sorted({*others, neighboring_relation}))}. Make a new estimator, or choose one relation."
            )

    def _count_fit(self, event: Event, guarantee: Guarantee, *, name: str | None = None) -> None:
        """Write a fit into the log that this estimator and its clones share; one of the same name is replaced."""
        fit = _Fit(event=event, guarantee=guarantee, name=uuid.uuid4().hex if name is None else name)
        with _LOCK:
            _log_of(self).add(fit)
        self._fit = fit


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, PrivateEstimator):
    """What all classifiers share: declared classes, labels that may be others, and the class of the largest score."""

    classes: Sequence[Hashable] | None = None

    def _labels(
        self,
        y: Labels,
        records: int,
        *,
        class_weight: Mapping[Hashable, float] | None = None,
        sample_weight: Numbers | None = None,
        max_sample_weight: float | None = None,
    ) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """(index of each label among the classes, −1 for another one [n]; weights [n] in [0, 1])."""
        classes = declared_classes(self.classes)
        check_one_target_per_record(y, records)
        by_class = class_weights(class_weight, classes)
        weights = record_weights(sample_weight, max_sample_weight, records)
        found = encode_labels(y, classes.tolist())
        return found, weights if by_class is None else weights * by_class[np.maximum(found, 0)]

    def _scores(self, X: Numbers) -> FloatArray:
        """Scores [n] of the second class, or [n, K]."""
        raise NotImplementedError

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """The class of each record [n]; a missing entry is the middle of what was declared, as in `fit`."""
        scores = self._scores(X)
        return self.classes_[(scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)]


@dataclass(kw_only=True, eq=False, repr=False)
class WeightedClassifier(PrivateClassifier):
    """A classifier with scores that its users may ask for, and with weights of classes and records."""

    class_weight: Mapping[Hashable, float] | None = None
    max_sample_weight: float | None = None

    def _weighted_labels(
        self, y: Labels, records: int, sample_weight: Numbers | None
    ) -> tuple[npt.NDArray[np.int64], FloatArray]:
        return self._labels(
            y,
            records,
            class_weight=self.class_weight,
            sample_weight=sample_weight,
            max_sample_weight=self.max_sample_weight,
        )

    def decision_function(self, X: Numbers) -> FloatArray:
        """Log-odds or scores [n] of the second class, or scores [n, K]."""
        return self._scores(X)


def class_probabilities(scores: FloatArray) -> FloatArray:
    """Probabilities [n, K] of log-odds [n] of the second class, or of scores [n, K]."""
    if scores.ndim == 1:
        return np.stack([expit(-scores), expit(scores)], axis=1)
    return softmax(scores, axis=1)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):
    """What all regressors share: targets between declared bounds, and weights of records."""

    target_bounds: Bounds | None = None
    max_sample_weight: float | None = None

    def _target_ends(self) -> Bounds:
        return checked_bounds(
            require_declared(self.target_bounds, name="target_bounds", meaning="(lowest, highest) target")
        )

    def _target_scale(self) -> tuple[float, float]:
        """Center and half width of the declared targets."""
        low, high = self._target_ends()
        center = low / 2 + high / 2
        return center, max(high - center, center - low)

    def _targets(
        self, y: Numbers, records: int, sample_weight: Numbers | None, *, scale: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """((y − center)/half in [−1, 1], NaN where one is not finite [n]; weights [n] in [0, 1])."""
        check_one_target_per_record(y, records)
        weights = record_weights(sample_weight, self.max_sample_weight, records)
        center, half = scale
        return scaled_targets(y, self._target_ends(), center=center, half=half), weights


def _event_of(guarantee: Guarantee) -> Event:
    """What is known of a fit by its guarantee alone."""
    if guarantee.is_private:
        known = {"epsilon": guarantee.epsilon, "delta": guarantee.delta}
        return ApproximateDP(**known) if guarantee.delta > 0 else PureDP(epsilon=guarantee.epsilon)
    return NonPrivate(reason="a fit without a finite guarantee")


def _is_learned(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def check_single_process(name: str) -> None:
    """Refuse processes of one group, or of one launcher: each would fit again, with noise and charges of its own."""
    # Torch takes seconds to import; without it there is no group.
    if "RANK" in os.environ or "torch.distributed" in sys.modules:
        from sordino.training import distributed

        distributed.require_single_process(name)


# ----------------------------------------------------------------------------------------------------------------------
# Noisy sums of vectors.
# ----------------------------------------------------------------------------------------------------------------------


SumsMechanism: TypeAlias = GridGaussianMechanism | DiscreteLaplaceMechanism


def sums_mechanism(
    budget: Budget, *, l1_sensitivity: float, l2_sensitivity: float, dimension: int, rng: KeyedRNG
) -> SumsMechanism:
    """The release of a vector of sums: discrete Laplace noise for a pure budget, Gaussian noise on a grid otherwise."""
    if isinstance(budget, PureBudget):
        return DiscreteLaplaceMechanism(
            epsilon=budget.epsilon, l1_sensitivity=l1_sensitivity, dimension=dimension, rng=rng
        )
    return GridGaussianMechanism(
        noise_multiplier=budget.noise_multiplier, l2_sensitivity=l2_sensitivity, dimension=dimension, rng=rng
    )


def noise_stddev(mechanism: SumsMechanism) -> float:
    """Deviation of the noise on one sum."""
    return 2**0.5 * mechanism.scale if isinstance(mechanism, DiscreteLaplaceMechanism) else mechanism.stddev


# ----------------------------------------------------------------------------------------------------------------------
# What fits will cost, before a record is read, and how several fits share one budget.
#
# What an estimator spends is fixed by its parameters: the events of a fit to no records are those of any other fit. The
# contract tests hold every estimator to that.
# ----------------------------------------------------------------------------------------------------------------------


_TRIALS, _WORTHWHILE = 6, 1.01


def dry_run_events(estimator: PrivateEstimator, columns: int) -> tuple[tuple[Event, ...], NeighboringRelation]:
    """The events of a fit to records of so many columns, and their relation; no record is read, nothing is charged.

    Example:
        >>> from sordino.estimators import LogisticRegression
        >>> dry_run_events(LogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, classes=(0, 1)), 3)[0]
        (ApproximateDP(epsilon=1.0, delta=1e-06),)
    """
    trial = independent_copy(estimator).set_params(ledger=None)
    trial.fit(np.zeros((0, columns)), np.zeros(0))  # pyright: ignore[reportAttributeAccessIssue]
    return trial.events_, trial.guarantee_.neighboring_relation


def common_relation(relations: Sequence[NeighboringRelation]) -> NeighboringRelation:
    """The one relation of all; events under different ones don't add up."""
    if len(set(relations)) != 1:
        raise InvalidArgument(
            f"neighboring_relation must be the same for all fits, got {', '.join(sorted(set(relations)))}. Choose one."
        )
    return relations[0]


def split_budget_equally(
    build: Callable[[float, float], Sequence[PrivateEstimator]],
    *,
    columns: int,
    epsilon: float,
    delta: float,
    other_events: Sequence[Event] = (),
) -> Sequence[PrivateEstimator]:
    """Estimators with a common ε, near the largest for which all fits and `other_events` together stay within (ε, δ).

    Their events are composed by the accountant, so k fits with Gaussian noise get about ε/√k each instead of ε/k. What
    is known of a fit as (ε, δ) alone, as of objective perturbation, gains only when there are many.

    Guarantee: the fits of what is returned and `other_events` compose to at most (epsilon, delta) under their relation.

    Args:
        build: (ε, δ) of one fit ↦ the estimators, always as many. One with `num_charged_fits` does so many fits.
        columns: of the records.
        epsilon: of everything, > 0.
        delta: of everything, in [0, 1).
        other_events: what else is paid from the same budget.

    Returns:
        Estimators that are not fitted.

    Raises:
        InvalidArgument: `other_events` leave nothing.
    """
    count = checks.integer(1, estimators=sum(getattr(made, "num_charged_fits", 1) for made in build(epsilon, delta)))
    each_delta = delta / 2 / count

    def spent(share: float) -> float:
        found = [dry_run_events(estimator, columns) for estimator in build(share, each_delta)]
        neighboring_relation = common_relation([neighboring_relation for _, neighboring_relation in found])
        events = [event for events, _ in found for event in events]
        return accounting.epsilon(
            compose([*events, *other_events]), delta, neighboring_relation=neighboring_relation
        ).upper

    # Basic composition: Σ ε_i + ε of `other_events` ≤ ε, with a hair kept back for rounding.
    rest = epsilon - (accounting.epsilon(compose(list(other_events)), 0.0).upper if other_events else 0.0)
    share, high = rest / count * (1 - 1e-9), rest
    if share <= 0 or (total := spent(share)) > epsilon:
        raise InvalidArgument(
            f"epsilon must be above what is spent in addition to the fits, got {epsilon:g}. Raise it, or compare less."
        )
    for _ in range(_TRIALS):
        # What is spent grows about as the share does; a trial that spends too much is a bound for the next.
        trial = min(share * epsilon / total, math.sqrt(share * high) if high < rest else high)
        if trial < share * _WORTHWHILE:
            break
        found = spent(trial)
        if found <= epsilon:
            share, total = trial, found
        else:
            high = trial
    return build(share, each_delta)
