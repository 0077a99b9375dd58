"""Records at the ends of floating point: no exception, no warning, nothing not finite, whatever numpy is told."""

import inspect
import warnings

import numpy as np
import pytest

import sordino.estimators as room
from sordino.estimators import HistGradientBoostingClassifier, LinearSVC, LogisticRegression
from sordino.estimators.base import PrivateEstimator, clip_rows

HUGE = float(np.finfo(np.float64).max)
EXTREME = [[HUGE, -HUGE], [HUGE, 5e-324], [5e-324, 5e-324], [1e200, 1e-200], [0.0, -HUGE]]
DECLARED = {
    "epsilon": 1.0,
    "delta": 1e-6,
    "data_norm": 1e-3,
    "bounds": (-1.0, 1.0),
    "target_bounds": (-1.0, 1.0),
    "dataset_size": 100,
    "steps": 2,
    "epochs": 1.0,
    "max_iter": 3,
}
ESTIMATORS = sorted(
    name
    for name in room.__all__
    if inspect.isclass(kind := getattr(room, name))
    if issubclass(kind, PrivateEstimator) and name != "PrivateGridSearch"
)


def _built(name):
    kind = getattr(room, name)
    accepted = kind().get_params()
    given = {key: value for key, value in DECLARED.items() if key in accepted}
    return kind(**given, **({"classes": (0, 1)} if "classes" in accepted else {}))


def _numbers(model):
    values = [value for value in vars(model).values() if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
    module = getattr(model, "module_", None)
    return values + ([] if module is None else [tensor.detach().numpy() for tensor in module.parameters()])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_fits_neither_raise_nor_break_at_the_ends_of_floating_point(name):
    generator = np.random.default_rng(0)
    records = np.vstack([generator.normal(size=(60, 2)), EXTREME])
    targets = (records[:, 0] > 0).astype(np.int64)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = _built(name).fit(records, targets)
    assert all(np.isfinite(values).all() for values in _numbers(model))


def test_losses_of_many_classes_may_underflow_in_a_fit():
    generator = np.random.default_rng(0)
    records, labels = generator.normal(size=(200, 2)), generator.integers(0, 3, 200)
    common = {"delta": 1e-6, "classes": (0, 1, 2)}
    models = [
        LogisticRegression(epsilon=50.0, data_norm=1.0, **common),
        LinearSVC(epsilon=50.0, data_norm=1.0, huber_width=1e-3, **common),
        HistGradientBoostingClassifier(
            epsilon=50.0, bounds=(-1.0, 1.0), max_iter=20, learning_rate=50.0, smoothing=0.0, **common
        ),
    ]
    for model in models:
        with np.errstate(all="raise"):
            model.fit(records, labels)


def test_the_callers_own_settings_are_as_before_after_a_fit():
    records, labels = np.eye(2), np.array([0, 1])
    with np.errstate(all="raise"):
        LogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, classes=(0, 1)).fit(records, labels)
        assert set(np.geterr().values()) == {"raise"}


@pytest.mark.parametrize("norm", [1e-60, 1e-3, 0.3, 1.0, 7.0, 1e60])
def test_unit_rows_are_at_most_one_long_for_every_float(norm):
    generator = np.random.default_rng(1)
    wild = generator.normal(size=(500, 2)) * np.exp(generator.uniform(-700, 700, (500, 1)))
    on_the_sphere = generator.normal(size=(500, 2))
    on_the_sphere *= norm / np.linalg.norm(on_the_sphere, axis=1, keepdims=True)
    rows = np.vstack([EXTREME, np.zeros((1, 2)), wild, on_the_sphere])
    found = clip_rows(rows, norm).astype(np.longdouble)
    assert np.isfinite(found).all()
    assert np.square(found).sum(axis=1).max() <= 1
    assert np.allclose(clip_rows(0.4 * on_the_sphere, norm), 0.4 * on_the_sphere / norm, rtol=1e-14)
    assert np.allclose(np.hypot(*found[:2].T), 1, rtol=1e-11)
