"""The room itself: light to import, every mechanism alike on the outside."""

import dataclasses
import subprocess
import sys

import pytest

import sordino.mechanisms
from sordino.events import Event, from_json, to_json
from sordino.mechanisms import (
    AboveThreshold,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    ExponentialMechanism,
    GaussianBudget,
    GaussianMechanism,
    GeneralizedExponentialMechanism,
    GeometricMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    LaplaceMechanism,
    PermuteAndFlip,
    PrivateCount,
    PrivateCovariance,
    PrivateHistogram,
    PrivateMean,
    PrivateQuantile,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
    RandomizedResponseMechanism,
    ReportNoisyMax,
)
from sordino.randomness import KeyedRNG

PURE, GAUSSIAN = PureBudget(epsilon=0.7), GaussianBudget(noise_multiplier=2.0)
ALL = [
    AboveThreshold(epsilon=0.7, sensitivity=1.0, threshold=0.0),
    GaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0),
    DiscreteGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0),
    DiscreteLaplaceMechanism(epsilon=0.7, l1_sensitivity=1.0),
    ExponentialMechanism(epsilon=0.7, sensitivity=1.0),
    GeneralizedExponentialMechanism(epsilon=0.7, sensitivities=(1.0, 2.0)),
    GeometricMechanism(epsilon=0.7),
    GridGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0),
    KNormMechanism(epsilon=0.7, sensitivity=1.0, norm=2, dimension=3),
    LaplaceMechanism(epsilon=0.7, l1_sensitivity=1.0),
    PermuteAndFlip(epsilon=0.7, sensitivity=1.0),
    PrivateCount(budget=PURE),
    PrivateCovariance(budget=GAUSSIAN, data_norm=1.0, columns=2),
    PrivateHistogram(budget=PURE, categories=("a", "b")),
    PrivateMean(budget=PURE, bounds=(0.0, 1.0)),
    PrivateQuantile(epsilon=0.7, quantile=0.5, bounds=(0.0, 1.0)),
    PrivateSecondMoment(budget=PURE, data_norm=1.0, columns=2),
    PrivateSum(budget=PURE, bounds=((0.0, 1.0), (0.0, 2.0))),
    RandomizedResponseMechanism(epsilon=0.7),
    ReportNoisyMax(epsilon=0.7, sensitivity=1.0),
]
EACH = pytest.mark.parametrize("mechanism", ALL, ids=lambda mechanism: type(mechanism).__name__)


def test_numpy_mechanisms_never_import_torch():
    code = (
        "import sys; import sordino.mechanisms as m; "
        "[getattr(m, n) for n in m.__all__ if n not in ('TensorGaussianMechanism', 'standard_normal')]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_load_and_unknown_ones_say_so():
    assert set(sordino.mechanisms.__all__) <= set(dir(sordino.mechanisms))
    with pytest.raises(AttributeError, match="no attribute 'Wishart'"):
        _ = sordino.mechanisms.Wishart


@EACH
def test_a_mechanism_is_a_frozen_value_with_a_release_and_an_event(mechanism):
    assert dataclasses.is_dataclass(mechanism)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.epsilon = 100.0
    assert isinstance(mechanism.event(), Event)
    assert from_json(to_json(mechanism.event())) == mechanism.event()
    assert callable(mechanism.release)
    assert mechanism == dataclasses.replace(mechanism, rng=KeyedRNG())


@EACH
def test_a_mechanism_does_not_show_its_key(mechanism):
    assert "rng" not in repr(mechanism)


@EACH
def test_an_event_is_accounted_at_no_more_than_the_declared_budget(mechanism):
    accounting = pytest.importorskip("sordino.accounting")
    event = mechanism.event()
    gaussian = isinstance(mechanism, GaussianMechanism | GridGaussianMechanism | PrivateCovariance)
    if gaussian or isinstance(mechanism, DiscreteGaussianMechanism):
        reference = accounting.epsilon(GaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0).event(), 1e-6)
        spent = accounting.epsilon(event, 1e-6)
        assert spent.upper <= reference.upper * (1.0 + 1e-9 if gaussian else 1.15)
    else:
        assert accounting.epsilon(event, 0.0).upper == pytest.approx(0.7, rel=1e-7)
