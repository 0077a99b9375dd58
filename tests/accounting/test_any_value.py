"""Any event with any values that its class takes has an answer, or an error of the library's own.

Seeds are fixed; the values run from the smallest to the largest that anybody might write.
"""

import math
import random

import pytest

from sordino.accounting import (
    GDPFilter,
    Interval,
    RDPFilter,
    ZCDPFilter,
    ZCDPOdometer,
    delta,
    epsilon,
    renyi_divergence,
)
from sordino.accounting.api import ACCOUNTANTS
from sordino.definitions import NeighboringRelation
from sordino.errors import SordinoError
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
    from_json,
    to_json,
)


class Any:
    """Values and events from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def between(self, low: float, high: float) -> float:
        """Uniform in the logarithm, or one of the ends."""
        spread = math.exp(self.random.uniform(math.log(low), math.log(high)))
        return self.random.choice([min(max(spread, low), high), min(max(spread, low), high), low, high])

    def noise(self) -> float:
        return self.random.choice([self.between(1e-6, 1e9), self.between(0.3, 10.0)])

    def delta(self) -> float:
        return self.random.choice([self.between(1e-300, 0.5), 1e-5, 1 - 1e-12])

    def count(self) -> int:
        return self.random.choice([1, 2, int(self.between(1, 1e12)), 10**12])

    def mechanism(self) -> Event:
        noise, value = self.noise(), self.between(1e-12, 1e8)
        return self.random.choice(
            [
                Gaussian(noise_multiplier=noise),
                Gaussian(noise_multiplier=noise),
                Laplace(noise_multiplier=noise),
                DiscreteGaussian(stddev=noise, sensitivity=self.random.choice([1, 3, 10**9])),
                DiscreteLaplace(scale=noise, sensitivity=self.random.choice([1, 3, 1000])),
                PureDP(epsilon=value),
                ApproximateDP(epsilon=value, delta=self.random.choice([0.0, 1.0, self.between(1e-300, 1.0)])),
                ZeroConcentratedDP(rho=value),
                RandomizedResponse(epsilon=value, categories=self.random.choice([2, 3, 10**6])),
                BoundedRange(epsilon=value),
                MatrixGaussian(noise_multiplier=noise, sensitivity=self.noise()),
            ]
        )

    def event(self) -> Event:
        inner, rate, population = self.mechanism(), self.between(1e-12, 1.0), int(self.between(1, 1e12))
        size = min(population, int(self.between(1, 1e12)))
        sampled = self.random.choice(
            [
                inner,
                PoissonSampled(sample_rate=rate, event=inner),
                PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=self.noise())),
                SampledWithoutReplacement(dataset_size=population, sample_size=size, event=inner),
                SampledWithReplacement(dataset_size=population, sample_size=size, event=inner),
                GroupPoissonSampled(sample_rate=rate, group_size=3, event=inner),
                TruncatedPoissonSampled(sample_rate=rate, dataset_size=population, max_batch_size=size, event=inner),
                RandomAllocation(steps=size, participations=1, epochs=2, event=inner),
            ]
        )
        event = SelfComposed(event=sampled, count=self.count())
        return event if self.random.random() < 0.8 else Composed(events=(event, self.mechanism()))


def asked(question):
    """The answer, or None for an error of the library's own; any other error is the test's."""
    try:
        return question()
    except SordinoError:
        return None


@pytest.mark.parametrize("seed", range(60))
def test_every_question_has_an_answer_or_an_error_of_the_librarys_own(seed):
    given = Any(seed)
    event, neighboring_relation = given.event(), given.random.choice(list(NeighboringRelation))
    name = given.random.choice(["auto", *(known.name for known in ACCOUNTANTS)])
    wanted, at = given.delta(), given.between(1e-12, 1e8)
    assert from_json(to_json(event)) == event
    for question in (
        lambda: epsilon(event, wanted, neighboring_relation=neighboring_relation, accountant=name),
        lambda: delta(event, at, neighboring_relation=neighboring_relation, accountant=name),
    ):
        found = asked(question)
        if found is not None:
            assert isinstance(found, Interval)
            assert 0 <= found.lower <= found.upper
    divergence = asked(lambda: renyi_divergence(event, 1 + at, neighboring_relation=neighboring_relation))
    assert divergence is None or divergence >= 0
    for make in (
        lambda: ZCDPFilter(epsilon=at, delta=wanted, neighboring_relation=neighboring_relation),
        lambda: GDPFilter(epsilon=at, delta=wanted, neighboring_relation=neighboring_relation),
        lambda: RDPFilter(
            epsilon=at, delta=wanted, order=1 + given.between(1e-6, 1e8), neighboring_relation=neighboring_relation
        ),
    ):
        rule = asked(make)
        if rule is not None:
            assert asked(lambda rule=rule: rule.admit(event)) in {True, False, None}
    odometer = asked(lambda: ZCDPOdometer(delta=wanted, neighboring_relation=neighboring_relation))
    told = None if odometer is None else asked(lambda: odometer.charge(event))
    assert told is None or told >= 0


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0, 1e4, 1e9])
@pytest.mark.parametrize("wanted", [1e-300, 1e-12, 0.5, 1 - 1e-12])
def test_a_gaussian_at_any_noise_and_delta_lies_where_two_simple_bounds_say(noise, wanted):
    import mpmath as mp

    found = epsilon(Gaussian(noise_multiplier=noise), wanted)
    with mp.workdps(400):
        mu = 1 / mp.mpf(noise)

        def curve(at: mp.mpf) -> mp.mpf:
            return mp.ncdf(mu / 2 - at / mu) - mp.exp(at) * mp.ncdf(-mu / 2 - at / mu)

        assert found.lower == 0 or curve(mp.mpf(found.lower) * (1 - mp.mpf(10) ** -12)) >= wanted
        assert curve(mp.mpf(found.upper) * (1 + mp.mpf(10) ** -12)) <= wanted * (1 + mp.mpf(10) ** -10)


def test_an_atom_far_below_the_others_does_not_ask_for_a_lattice_of_its_own():
    step = PoissonSampled(sample_rate=0.5, event=ApproximateDP(epsilon=3.6e-8, delta=1.0))
    for neighboring_relation in (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL):
        found = epsilon(step, 2e-5, neighboring_relation=neighboring_relation)
        assert math.isinf(found.upper)
