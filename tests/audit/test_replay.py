"""Replays: all public paths pass, and pipelines that leak in the ways that are known from public reports do not."""

import sys

import numpy as np
import pytest
import torch

from sordino.audit import replay
from sordino.commands.replay_cases import cases
from sordino.mechanisms import (
    AboveThreshold,
    ExponentialMechanism,
    GaussianMechanism,
    LaplaceMechanism,
    PrivateCount,
    PrivateHistogram,
    PrivateMean,
    PrivateQuantile,
    PrivateSum,
    RandomizedResponseMechanism,
    TensorGaussianMechanism,
    ThresholdedHistogram,
    make_budget,
)
from sordino.mechanisms.base import observe_releases
from sordino.randomness import KeyedRNG

CASES = list(cases())
SLOW = {
    "DPClassifier",
    "DPRegressor",
    "LogisticRegression, dp-gd",
    "LogisticRegression, dp-sgd",
    "engine",
    "fit, correlated noise",
}
D = [0.2, 0.9, 0.4]
NEIGHBOURS = [[*D, 1.0], [*D, 0.0], D[:-1]]


def key():
    return KeyedRNG(seed=1, reproducible=True)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in SLOW else []) for case in CASES],
)
def test_every_public_path_passes(case):
    report = replay(case.pipeline, case.data, case.neighbors)
    assert report.passed, report.violations
    assert report.releases
    assert report.neighbors == 4
    assert report.unmeasured in {(), ("ObjectivePerturbation",)}


def test_the_quick_paths_are_not_all_of_them_and_the_names_are_distinct():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 20
    assert set(names) >= SLOW


def laplace(value, sensitivity=1.0):
    return LaplaceMechanism(epsilon=1.0, l1_sensitivity=sensitivity, rng=key()).release(value)


def gaussian(value, sensitivity=1.0):
    mechanism = GaussianMechanism(noise_multiplier=1.0, l2_sensitivity=sensitivity, rng=key())
    return mechanism.release(value)


HONEST = {
    "sum": lambda d: laplace(sum(d)),
    "count and sum": lambda d: (
        PrivateCount(budget=make_budget(epsilon=1.0), rng=key()).release(d),
        laplace(sum(d)),
    ),
    "mean": lambda d: PrivateMean(budget=make_budget(epsilon=1.0), bounds=(0.0, 1.0), rng=key()).release(d),
    "bounded sum": lambda d: PrivateSum(budget=make_budget(epsilon=1.0), bounds=(0.0, 1.0), rng=key()).release(d),
    "histogram": lambda d: PrivateHistogram(budget=make_budget(epsilon=1.0), edges=(0.0, 0.5, 1.0), rng=key()).release(
        d
    ),
    "quantile": lambda d: PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(0.0, 1.0), rng=key()).release(d),
    "choice": lambda d: ExponentialMechanism(epsilon=1.0, sensitivity=1.0, rng=key()).release([sum(d), len(d), 0.0]),
    "threshold": lambda d: AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=1.0, rng=key()).release(
        [sum(d), len(d)]
    ),
    "session": lambda d: _asked(d),
    "open histogram": lambda d: ThresholdedHistogram(epsilon=1.0, delta=1e-3, rng=key()).release([round(x) for x in d]),
    "adaptive": lambda d: laplace(sum(d)) if laplace(len(d)) > 2 else laplace(-sum(d)),
}


def _asked(d):
    session = AboveThreshold(epsilon=1.0, sensitivity=1.0, threshold=3.0, rng=key()).session()
    answers = []
    while not session.is_over and len(answers) < 4:
        answers.append(session.ask(sum(d)))
    return answers


@pytest.mark.parametrize("name", HONEST)
def test_every_mechanism_is_seen_and_an_honest_use_passes(name):
    report = replay(HONEST[name], D, NEIGHBOURS)
    assert report.passed, report.violations
    assert report.releases


def test_local_answers_are_forced_too():
    def pipeline(d):
        return RandomizedResponseMechanism(epsilon=1.0, categories=(0, 1), rng=key()).release([round(x) for x in d])

    assert replay(pipeline, [0, 1, 1], [[1, 1, 1], [0, 0, 1]]).passed


LEAKY = {
    "a result beside the releases": (lambda d: (laplace(sum(d)), max(d)), "un-noised result"),
    "a domain taken from the data": (lambda d: {x: laplace(d.count(x)) for x in sorted(set(d))}, "control flow"),
    "a release for some data only": (lambda d: laplace(sum(d)) if len(d) > 3 else 0.0, "control flow"),
    "one release more for large data": (
        lambda d: (laplace(sum(d)), laplace(sum(d)) if len(d) > 3 else None),
        "control flow",
    ),
    "another mechanism for large data": (lambda d: gaussian(sum(d)) if len(d) > 3 else laplace(sum(d)), "control flow"),
    "an error for some data only": (lambda d: laplace(sum(d)) if len(d) < 4 else 1 / 0, "control flow"),
    "an undeclared factor": (lambda d: laplace(3 * sum(d)), "sensitivity"),
    "a sum declared as a mean": (lambda d: laplace(sum(d), sensitivity=1 / 3), "sensitivity"),
    "a sensitivity from the data": (lambda d: laplace(sum(d), sensitivity=max(d) + 1), "parameters"),
    "a scale from the number of records": (lambda d: gaussian(sum(d) / len(d), 1 / len(d)), "parameters"),
    "a division by the number of records": (lambda d: laplace(sum(d)) / len(d), "un-noised result"),
    "a value that is no number": (lambda d: laplace(float("nan") * len(d)), "not a number"),
}


@pytest.mark.parametrize("name", LEAKY)
def test_a_leak_is_named(name):
    pipeline, kind = LEAKY[name]
    report = replay(pipeline, D, NEIGHBOURS)
    assert not report.passed
    assert kind in {violation.kind for violation in report.violations}


def test_noise_that_was_left_out_or_halved_is_named(monkeypatch):
    add_noise = TensorGaussianMechanism.add_noise_
    values = torch.ones(500)

    def pipeline(d):
        sums = sum(d) * values.clone() / 500**0.5
        TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0).add_noise_([sums], rng=key(), step=0)
        return sums

    assert replay(pipeline, D, NEIGHBOURS).passed

    def halved(self, tensors, **named):
        with observe_releases(_Deaf()):
            add_noise(TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0), tensors, **named)

    for broken, kind in ((lambda self, tensors, **named: None, "no noise"), (halved, "noise scale")):
        monkeypatch.setattr(TensorGaussianMechanism, "add_noise_", _recorded(broken))
        assert {violation.kind for violation in replay(pipeline, D, NEIGHBOURS).violations} == {kind}


class _Deaf:
    def released(self, release, draw):
        return draw()


def _recorded(broken):
    from sordino.mechanisms.base import observable_release

    def add_noise_(self, tensors, **named):
        return broken(self, tensors, **named)

    return observable_release(add_noise_)


# ── the observer ────────────────────────────────────────────────────────────────────────────────────────────


class Counting:
    def __init__(self):
        self.seen = []

    def released(self, release, draw):
        self.seen.append((type(release.mechanism).__name__, release.operation))
        return draw()


def test_nobody_is_asked_outside_the_block_and_outer_releases_hide_inner_ones():
    observer = Counting()
    quantile = HONEST["quantile"]
    with observe_releases(observer):
        quantile(D)
    quantile(D)
    assert observer.seen == [("PrivateQuantile", "release")]


def test_an_observer_does_not_change_what_is_drawn():
    with observe_releases(Counting()):
        seen = gaussian(np.arange(5.0))
    assert (seen == gaussian(np.arange(5.0))).all()


def calls_of(function):
    """The functions of this library that a call enters, in order."""
    entered = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("sordino."):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


def test_a_release_is_one_call_more_when_nobody_listens():
    mechanism = LaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0)
    release = type(mechanism).release
    bare = calls_of(lambda: release.__wrapped__(mechanism, 1.0))
    assert "LaplaceMechanism.release" in bare
    assert calls_of(lambda: release(mechanism, 1.0)) == ["observable_release.<locals>.release", *bare]
