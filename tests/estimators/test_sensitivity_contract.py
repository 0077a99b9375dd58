"""Every additive release of every estimator, found by discovery: one record more never moves it beyond its sensitivity.

A fit is recorded release by release and then replayed with one record more: each mechanism answers what it answered
before, so later releases are asked the same questions, and what goes into them may differ by that record alone.
"""

import functools

import numpy as np
import pytest

import sordino.estimators as room
from sordino.estimators.losses import HuberResidual
from sordino.mechanisms import (
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    PrivateCount,
    PrivateHistogram,
    PrivateSecondMoment,
    PrivateSum,
)

COLUMNS, CLASSES = 3, ("no", "yes", "maybe")
DECLARED = {
    "epsilon": 3.0,
    "data_norm": 2.0,
    "classes": CLASSES,
    "bounds": (-2.0, 2.0),
    "target_bounds": (-1.0, 3.0),
    "max_iter": 3,
    "n_estimators": 3,
}
ADDITIVE = {
    "LogisticRegression": ({"method": "output"}, {"method": "functional", "classes": ("no", "yes")}),
    "LinearSVC": ({"method": "output"},),
    "LinearRegression": (
        {"method": "output"},
        {"method": "adassp"},
        {"method": "sufficient-statistics"},
        {"method": "sufficient-statistics", "inference": True},
    ),
    "Ridge": ({"method": "adassp", "alpha": 5.0},),
}
# Noisy steps of the training engine and whole searches have tests of their own; one learns nothing.
ELSEWHERE = {"DPClassifier", "DPRegressor", "PrivateGridSearch", "MinMaxScaler", "WhitenedLogisticRegression"}
CASES = [
    pytest.param(name, extra, delta, id=f"{name}-{'-'.join(map(str, extra.values()))}-{delta}")
    for name in room.__all__
    if name not in ELSEWHERE
    for extra in ADDITIVE.get(name, ({},))
    for delta in (0.0, 1e-5)
    if not (extra.get("method") == "adassp" and delta == 0.0)
]
KINDS = (
    GaussianMechanism,
    DiscreteLaplaceMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    PrivateCount,
    PrivateHistogram,
    PrivateSecondMoment,
    PrivateSum,
)


def exact_value(mechanism, value):
    if isinstance(mechanism, PrivateCount):
        return len(value)
    return mechanism.exact_value(value) if hasattr(mechanism, "exact_value") else np.array(value, dtype=float)


def share_of_sensitivity(mechanism, before, after):
    """How much of its stated sensitivity a release moves by; at most 1."""
    change = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    match mechanism:
        case PrivateSecondMoment():
            change = np.ldexp(change, 2 * mechanism._exponent)
            size = np.abs(change[np.triu_indices(len(change))]).sum() if mechanism._pure else np.linalg.norm(change)
            return size / mechanism.sensitivity
        case PrivateSum():
            return np.max(np.abs(change) / np.array(mechanism.noise.sensitivities))
        case PrivateHistogram() | PrivateCount():
            return np.abs(change).sum()
        case DiscreteLaplaceMechanism():
            return np.abs(change).sum() / mechanism.l1_sensitivity
        case KNormMechanism():
            return np.linalg.norm(change.ravel(), ord=mechanism.norm) / mechanism.sensitivity
        case _:
            return np.linalg.norm(change) / mechanism.l2_sensitivity


class Tape:
    """What went into each release and what came out."""

    def __init__(self, monkeypatch):
        self.entries, self.place, self.shares, self.replaying = [], 0, [], False
        for kind in KINDS:
            monkeypatch.setattr(kind, "release", self.wrapped(kind.release))

    def wrapped(self, release):
        def taped(mechanism, value):
            drawn = release(mechanism, value)  # in the replay too: trees and centers come from the same key
            exact = exact_value(mechanism, value)
            if not self.replaying:
                self.entries.append((exact, drawn))
                return drawn
            before, answer = self.entries[self.place]
            self.place += 1
            self.shares.append(share_of_sensitivity(mechanism, before, exact))
            return answer

        return taped

    def replay(self, fit):
        self.replaying, self.place = True, 0
        fit()
        assert self.place == len(self.entries)  # as many releases, whatever the data
        self.replaying = False


def neighbors(generator, count):
    X = generator.normal(size=(count, COLUMNS))
    kind = generator.integers(0, 4)
    new = (generator.normal(size=COLUMNS), np.full(COLUMNS, 1e300), 2 * np.eye(COLUMNS)[1], np.array([2.0, -2.0, 2.0]))
    return X, generator.integers(0, 3, size=count), new[kind], generator.integers(0, 3)


def largest_share(name, extra, delta, monkeypatch):
    kind = getattr(room, name)
    given = {key: value for key, value in (DECLARED | {"delta": delta}).items() if key in kind().get_params()} | extra
    names = np.array(CLASSES) if "classes" in given else np.array([-1.0, 0.7, 3.0])
    generator = np.random.default_rng(4)
    shares = []
    for _ in range(8):
        X, y, row, label = neighbors(generator, int(generator.integers(0, 6)))
        model = kind(**given, random_state=1, reproducible=True)
        more = np.vstack([X, row]), np.append(names[y], names[label])
        with monkeypatch.context() as patched:
            tape = Tape(patched)
            model.fit(X, names[y])
            tape.replay(functools.partial(model.fit, *more))
        assert tape.shares
        shares += tape.shares
    return max(shares)


@pytest.mark.parametrize(("name", "extra", "delta"), CASES)
def test_one_record_more_never_moves_a_release_beyond_its_sensitivity(name, extra, delta, monkeypatch):
    assert 0.3 < largest_share(name, extra, delta, monkeypatch) <= 1 + 1e-6


def test_a_sensitivity_that_is_a_tenth_too_small_is_caught(monkeypatch):
    monkeypatch.setattr(HuberResidual, "lipschitz", property(lambda loss: 0.9 * loss.threshold))
    assert largest_share("HistGradientBoostingRegressor", {}, 1e-5, monkeypatch) > 1.05
