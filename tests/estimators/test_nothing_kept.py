"""A fitted estimator holds nothing of single records: not in attributes, not in closures, not when it is pickled."""

import numpy as np
import pytest

import sordino.estimators as room
from leftovers import RECORDS, found_in, marked
from sordino.tuning import PrivateRandomSearch

DECLARED = {
    "epsilon": 10.0,
    "delta": 1e-3,
    "data_norm": 2.0,
    "classes": (0, 1),
    "bounds": (-1.0, 1.0),
    "target_bounds": (-1.0, 1.0),
    "dataset_size": RECORDS,
}


def build(name, **changes):
    kind = getattr(room, name)
    if name == "PrivateGridSearch":
        inner = room.LogisticRegression(data_norm=2.0, classes=(0, 1))
        return kind(inner, {"fit_intercept": [True, False]}, epsilon=10.0, delta=1e-3)
    accepted = kind().get_params()
    few = {"max_iter": 3} if name.startswith("Hist") else {}
    return kind(**{key: value for key, value in (DECLARED | few | changes).items() if key in accepted})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", room.__all__)
def test_a_fitted_estimator_holds_no_record(name):
    rows = marked()
    model = build(name)
    targets = rows[:, 1] if "target_bounds" in model.get_params() else (rows[:, 0] > 0).astype(int)
    model.fit(rows.astype(np.float64), targets)
    for method in ("predict", "predict_proba", "transform", "decision_function"):
        if hasattr(model, method):
            getattr(model, method)(rows)
    assert found_in(model, rows) == []


def test_the_search_for_records_finds_them_wherever_they_hide():
    rows = marked()

    class Slotted:
        __slots__ = ("held",)

    slotted = Slotted()
    slotted.held = {"a": [rows[3]]}
    for hidden in (
        {"x": rows},
        lambda: rows,
        lambda given=rows[5]: given,
        slotted,
        [memory := rows[7].tobytes()],
        rows.astype(np.float64)[2:3],
        np.array([rows[4]], dtype=object),
        (rows * 3).sum(axis=1),
        rows[9].tolist(),
    ):
        assert found_in(hidden, rows)
    assert memory
    assert found_in({"x": rows.mean(axis=0)}, rows) == []


def test_a_search_keeps_no_record():
    rows = marked()
    inner = room.LogisticRegression(data_norm=2.0, classes=(0, 1))
    search = PrivateRandomSearch(inner, {"fit_intercept": [True, False]}, epsilon=10.0, delta=1e-3)
    search.fit(rows.astype(np.float64), (rows[:, 0] > 0).astype(int))
    assert found_in(search, rows) == []
