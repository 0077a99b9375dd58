"""One contract for every (event, accountant) pair: a sound answer or a refusal, and the laws every answer obeys."""

import functools
import itertools
import math

import pytest

from sordino.accounting import ACCOUNTANTS, Accountant, Interval, delta, epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    ParallelComposed,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    RepeatAndSelect,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    ShuffledEpochs,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
    from_json,
    to_json,
)

ADD, REPLACE, ZERO = NeighboringRelation
NOISE = Gaussian(noise_multiplier=4.0)

EVENTS: dict[str, Event] = {
    "gaussian": NOISE,
    "laplace": Laplace(noise_multiplier=8.0),
    "poisson gaussian": PoissonSampled(sample_rate=0.1, event=NOISE),
    "poisson laplace": PoissonSampled(sample_rate=0.1, event=Laplace(noise_multiplier=4.0)),
    "poisson pure": PoissonSampled(sample_rate=0.1, event=PureDP(epsilon=0.5)),
    "truncated poisson": TruncatedPoissonSampled(sample_rate=0.1, dataset_size=1000, max_batch_size=250, event=NOISE),
    "fixed size": SampledWithoutReplacement(dataset_size=100, sample_size=10, event=NOISE),
    "with replacement": SampledWithReplacement(dataset_size=60, sample_size=3, event=NOISE),
    "group": GroupPoissonSampled(sample_rate=0.05, group_size=3, event=NOISE),
    "random distance": GaussianMixture(
        noise_multiplier=4.0, sensitivities=(0.0, 0.5, 1.0), probabilities=(0.85, 0.1, 0.05)
    ),
    "shuffled": ShuffledEpochs(epochs=2, steps_per_epoch=10, event=NOISE),
    "allocation": RandomAllocation(steps=10, participations=1, epochs=2, event=NOISE),
    "matrix": MatrixGaussian(noise_multiplier=8.0, sensitivity=2.0),
    "discrete gaussian": DiscreteGaussian(stddev=4.0, sensitivity=1),
    "discrete laplace": DiscreteLaplace(scale=8.0, sensitivity=2),
    "pure": PureDP(epsilon=0.2),
    "approximate": ApproximateDP(epsilon=0.2, delta=1e-9),
    "zcdp": ZeroConcentratedDP(rho=0.02),
    "response": RandomizedResponse(epsilon=0.2, categories=3),
    "bounded range": BoundedRange(epsilon=0.2),
    "selection": RepeatAndSelect(event=NOISE, distribution="negative_binomial", mean=5.0, shape=1.0),
    "parallel": ParallelComposed(events=(NOISE, Laplace(noise_multiplier=8.0))),
    "mixed": Composed(events=(NOISE, PureDP(epsilon=0.2), PoissonSampled(sample_rate=0.1, event=NOISE))),
}
# Every event has at least one sound accountant under each relation but these.
REFUSED = {
    ("shuffled", ADD),
    ("group", REPLACE),
    ("random distance", REPLACE),
    ("parallel", REPLACE),
    ("poisson laplace", REPLACE),
    ("poisson pure", REPLACE),
}
NAMES = [known.name for known in ACCOUNTANTS]


@functools.cache
def ask(event: Event, accountant: str, neighboring_relation: NeighboringRelation, target: float = 1e-5) -> float | None:
    """The reported ε, or None where the accountant refuses."""
    try:
        return epsilon(event, target, neighboring_relation=neighboring_relation, accountant=accountant).upper
    except (UnsupportedEvent, AccountingError):
        return None


@functools.cache
def answered(event: Event, neighboring_relation: NeighboringRelation) -> Interval:
    """The front door's own answer at δ = 1e-5."""
    return epsilon(event, 1e-5, neighboring_relation=neighboring_relation)


PAIRS = list(itertools.product(EVENTS, NAMES))


@pytest.mark.parametrize("name", EVENTS)
def test_json_carries_every_event_both_ways(name):
    assert from_json(to_json(EVENTS[name])) == EVENTS[name]


@pytest.mark.parametrize("known", ACCOUNTANTS, ids=NAMES)
def test_every_accountant_has_the_interface(known: Accountant):
    assert known.name.islower()
    assert isinstance(known.automatic, bool)


@pytest.mark.parametrize(("name", "neighboring_relation"), list(itertools.product(EVENTS, NeighboringRelation)))
def test_every_event_is_answered_under_every_relation_or_refused_for_a_stated_reason(name, neighboring_relation):
    if (name, neighboring_relation) in REFUSED:
        with pytest.raises(UnsupportedEvent):
            epsilon(EVENTS[name], 1e-5, neighboring_relation=neighboring_relation)
        return
    answer = epsilon(EVENTS[name], 1e-5, neighboring_relation=neighboring_relation)
    assert 0 <= answer.lower <= answer.upper < math.inf
    assert answer.upper > 0


@pytest.mark.parametrize(("name", "accountant"), PAIRS)
def test_no_accountant_goes_below_the_certified_truth_and_steps_and_delta_count(name, accountant):
    event = SelfComposed(event=EVENTS[name], count=20)
    neighboring_relation = ZERO if name == "shuffled" else ADD
    value = ask(event, accountant, neighboring_relation)
    if value is None:
        return
    truth = answered(event, neighboring_relation)
    assert value >= truth.lower * (1 - 1e-12)
    assert not math.isnan(value)
    doubled = ask(SelfComposed(event=event, count=2), accountant, neighboring_relation)
    assert doubled is not None
    assert doubled > value or math.isinf(value)
    smaller = ask(event, accountant, neighboring_relation, 1e-7)
    assert smaller is None or smaller >= value * (1 - 1e-4)


@pytest.mark.parametrize(("name", "accountant"), PAIRS)
def test_delta_at_the_reported_epsilon_is_at_most_the_delta_asked_for(name, accountant):
    event = SelfComposed(event=EVENTS[name], count=20)
    neighboring_relation = ZERO if name == "shuffled" else ADD
    value = ask(event, accountant, neighboring_relation)
    if value is None or math.isinf(value):
        return
    back = delta(event, value, neighboring_relation=neighboring_relation, accountant=accountant)
    assert back.lower <= 1e-5 * (1 + 1e-6)
    # What is stated can be stated again, up to the conversion's slack and the lattice's width.
    assert back.upper <= 1e-5 * 1.02


@pytest.mark.parametrize("accountant", NAMES)
@pytest.mark.parametrize("event", [Gaussian(noise_multiplier=1.7), SelfComposed(event=NOISE, count=9)])
def test_a_gaussian_under_replace_one_is_what_half_the_noise_is_under_add_or_remove(accountant, event):
    # Noise is given per clipping norm here; under replace-one the sensitivity is twice that.
    def scaled(source: Event, factor: float) -> Event:
        if isinstance(source, SelfComposed):
            return SelfComposed(event=scaled(source.event, factor), count=source.count)
        assert isinstance(source, Gaussian)
        return Gaussian(noise_multiplier=source.noise_multiplier / factor)

    under_replace = ask(scaled(event, REPLACE.sensitivity_factor), accountant, REPLACE)
    under_add = ask(scaled(event, 2.0), accountant, ADD)
    if under_replace is not None and under_add is not None:
        assert under_replace == pytest.approx(under_add, rel=1e-12)
    if accountant in {"closed_form", "contour", "pld", "rdp", "zcdp", "gdp"}:
        assert under_replace is not None


@pytest.mark.parametrize("name", EVENTS)
def test_a_tight_accountant_is_never_above_a_loose_one(name):
    event = SelfComposed(event=EVENTS[name], count=20)
    neighboring_relation = ZERO if name == "shuffled" else ADD
    best = answered(event, neighboring_relation)
    for accountant in ("rdp", "zcdp", "moments"):
        value = ask(event, accountant, neighboring_relation)
        if value is not None:
            assert value >= best.lower


def test_the_exponential_mechanism_and_randomised_response_compose_a_hundredfold():
    for event in (BoundedRange(epsilon=0.1), RandomizedResponse(epsilon=0.1, categories=2)):
        for accountant in ("pld", "rdp", "zcdp", "basic", "advanced", "optimal"):
            one = ask(event, accountant, ADD)
            hundred = ask(SelfComposed(event=event, count=100), accountant, ADD)
            assert one is not None
            assert hundred is not None
            assert hundred > 4 * one


@pytest.mark.parametrize("accountant", NAMES)
def test_a_larger_sample_or_less_noise_never_costs_less_by_any_accountant(accountant):
    def run(rate: float, noise: float) -> float | None:
        step = PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise))
        return ask(SelfComposed(event=step, count=60), accountant, ADD)

    base = run(0.02, 2.0)
    if base is None:
        return
    for rate, noise in ((0.025, 2.0), (0.02, 1.6)):
        worse = run(rate, noise)
        assert worse is not None
        assert worse > base
