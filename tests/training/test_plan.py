"""The plan: one record from which clipping, noise, divisor and event are derived."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import Gaussian, NonPrivate, NoOp, PoissonSampled, SelfComposed
from sordino.sampling import PoissonSampling, ShuffledSampling
from sordino.training.charging import ChargeLog
from sordino.training.plan import PerformanceOptions, Plan

PLAN = Plan(
    noise_multiplier=4.0, max_grad_norm=0.5, sample_rate=0.01, steps=10_000, expected_batch_size=600.0, delta=1e-5
)
REPLACE = replace(PLAN, neighboring_relation=NeighboringRelation.REPLACE_ONE)


def test_the_guarantee_is_the_published_value():
    # Abadi et al. 2016 state 1.26 by the moments accountant for this run; tight accounting gives 0.94687.
    guarantee = PLAN.guarantee()
    assert round(guarantee.epsilon, 5) == 0.94687
    assert guarantee.describe().startswith("(ε = 0.95, δ = 1e-05)-differentially private: unit one record")


def test_clipping_noise_and_event_follow_one_record():
    halved = replace(PLAN, max_grad_norm=0.25)
    assert halved.step_plan(0).mechanism.stddev == PLAN.step_plan(0).mechanism.stddev / 2 == 1.0
    assert halved.step_plan(0).max_grad_norm == halved.step_plan(0).sensitivity == 0.25
    assert halved.step_event() == PLAN.step_event(), "the event knows no scale, only noise over sensitivity"
    # Replacing a record moves the sum twice as far.
    assert REPLACE.step_plan(0).mechanism.stddev == 2 * PLAN.step_plan(0).mechanism.stddev
    assert PLAN.step_event() == PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
    with pytest.raises(FrozenInstanceError):
        PLAN.max_grad_norm = 1.0


def test_events_count_steps_or_epochs():
    assert PLAN.event(3) == SelfComposed(event=PLAN.step_event(), count=3)
    assert PLAN.event(0) == NoOp()
    assert PLAN.sampler == PoissonSampling(sample_rate=0.01)
    shuffled = replace(REPLACE, poisson_sampling=False)
    assert shuffled.sampler == ShuffledSampling(steps_per_epoch=100)
    assert shuffled.event(250) == SelfComposed(event=Gaussian(noise_multiplier=4.0), count=3)


def test_shuffled_epochs_have_no_guarantee_when_neighbors_add_or_remove():
    with pytest.raises(UnknownSampler, match="replace_one"):
        replace(PLAN, poisson_sampling=False)


@pytest.mark.parametrize("neighboring_relation", list(NeighboringRelation))
def test_a_target_is_met_from_below_with_hardly_any_slack(neighboring_relation):
    plan = Plan.for_epsilon(
        target_epsilon=2.0,
        delta=1e-6,
        sample_rate=0.05,
        steps=200,
        max_grad_norm=1.0,
        expected_batch_size=50.0,
        neighboring_relation=neighboring_relation,
    )
    assert 1.999 < plan.guarantee().epsilon <= 2.0
    by_rdp = plan.with_target_epsilon(2.0, accountant="rdp")
    assert by_rdp.noise_multiplier > plan.noise_multiplier


def test_no_noise_is_marked_as_not_private():
    bare = replace(PLAN, noise_multiplier=0.0)
    assert bare.step_event() == NonPrivate(reason="noise_multiplier is 0")
    assert "NOT private" in bare.guarantee().describe()
    assert bare.guarantee(steps=0).epsilon == 0


def test_a_public_size_is_said():
    assert "public" not in PLAN.guarantee(steps=1).describe()
    assert "size of the dataset" in replace(PLAN, dataset_size_is_public=True).guarantee(steps=1).describe()


def test_json_holds_the_whole_plan_and_nothing_else():
    assert Plan.from_json(REPLACE.to_json()) == REPLACE
    body = json.loads(PLAN.to_json())
    for broken in (body | {"extra": 1}, {name: value for name, value in body.items() if name != "delta"}, [body]):
        with pytest.raises(InvalidArgument):
            Plan.from_json(json.dumps(broken))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -1.0),
        ("max_grad_norm", 0.0),
        ("sample_rate", 0.0),
        ("sample_rate", 1.5),
        ("steps", -1),
        ("steps", 2.0),
        ("expected_batch_size", 0.0),
        ("delta", 0.0),
        ("delta", 1.0),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument, match=f"^{name} must be"):
        replace(PLAN, **{name: value})


def test_words_become_relations_and_units():
    plan = replace(PLAN, neighboring_relation="replace_special", privacy_unit="user")
    assert plan.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
    assert plan.privacy_unit is PrivacyUnit.USER


def test_a_chunk_holds_at_least_one_record():
    assert PerformanceOptions(microbatch_size=1).microbatch_size == 1
    with pytest.raises(InvalidArgument):
        PerformanceOptions(microbatch_size=0)


def test_charges_only_grow_and_survive_json():
    charges, gaussian = ChargeLog(), Gaussian(noise_multiplier=1.0)
    assert charges.event() == NoOp()
    charges.add(gaussian, 2)
    charges.add(gaussian)
    assert charges.event() == SelfComposed(event=gaussian, count=3)
    again = ChargeLog()
    again.load_state_dict(json.loads(json.dumps(charges.state_dict())))
    again.load_state_dict(charges.state_dict())
    assert again.event() == SelfComposed(event=gaussian, count=6)
    for state in ({}, {"schema": 2, "history": []}, {"schema": 1, "history": [[{"kind": "unknown"}, 1]]}):
        with pytest.raises(InvalidArgument):
            again.load_state_dict(state)
    assert again.event() == SelfComposed(event=gaussian, count=6)
