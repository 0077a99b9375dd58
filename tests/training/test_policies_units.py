"""Users and micro-batches: one clipped gradient a unit, whatever its records are, by every clipping and policy."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from sordino import fit
from sordino.clipping import (
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LossShapeError
from sordino.mechanisms.correlated import CyclicPoisson, FixedEpochOrder, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.schedules import LinearSchedule
from sordino.training import CorrelatedNoise, PerformanceOptions, Plan, UnitAssignment, record_groups

CLIPPINGS = [
    FlatClipping(),
    AutomaticClipping(),
    PsacClipping(),
    GlobalClipping(threshold=2.0),
    GroupedClipping(by="layer"),
    QuantileClipping(count_noise=30.0),
]
POLICIES = {
    "sampled": {"sample_rate": 0.5},
    "scheduled": {
        "sample_rate": LinearSchedule(start=0.3, end=0.6),
        "max_grad_norm": LinearSchedule(start=0.5, end=0.2),
    },
    "cycles": {
        "sample_rate": 0.25,
        "correlated_noise": CorrelatedNoise(
            strategy=optimize_banded(2, steps=4), participation=CyclicPoisson(groups=2, sample_rate=0.25)
        ),
    },
    "epochs": {
        "sample_rate": 0.5,
        "poisson_sampling": False,
        "correlated_noise": CorrelatedNoise(
            strategy=optimize_banded(2, steps=4), participation=FixedEpochOrder(steps_per_epoch=2)
        ),
    },
}
# Units 2 and 5 have no records; unit 0 has one and unit 4 has four.
OF = np.array([4, 1, 4, 3, 0, 1, 4, 6, 4, 3, 6, 6])


def plan(**changes):
    values = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.5,
        "sample_rate": 1.0,
        "steps": 1,
        "expected_batch_size": 4.0,
        "delta": 1e-5,
        "privacy_unit": "user",
    }
    return Plan(**{**values, **changes})


def records(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator) * 3, torch.randn(count, 2, generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model, x, y):
    return (model(x) - y).square().sum(1)


def moved(data, units, the_plan, *, microbatch_size=None):
    """How far one run moves the parameters at learning rate 1, times the divisor: the sum of what the steps add."""
    model = network()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    fit(
        model,
        losses,
        data,
        the_plan,
        units=units,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        rng=KeyedRNG(seed=5, reproducible=True),
        performance=PerformanceOptions(microbatch_size=microbatch_size),
        progress=False,
    )
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return (before - after).double() * the_plan.step_plan(0).expected_batch_size


def gradient_of(rows, data, combine):
    """The slow way: plain autograd on one unit's records."""
    model = network()
    values = losses(model, data[0][rows], data[1][rows])
    (values.mean() if combine == "mean" else values.sum()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_unit_is_the_gradient_of_its_records_clipped_once(combine, most, microbatch_size):
    data, expected = records(), torch.zeros(26, dtype=torch.float64)
    for unit in range(7):
        rows = np.flatnonzero(unit == OF)[:most]
        if len(rows):
            gradient = gradient_of(rows, data, combine)
            expected += gradient * min(1.0, 0.5 / float(gradient.norm()))
    units = UnitAssignment(unit_ids=OF, num_units=7, max_records_per_unit=most, combine=combine)
    measured = moved(data, units, plan(), microbatch_size=microbatch_size)
    assert torch.allclose(measured, expected, atol=2e-5)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
@pytest.mark.parametrize("policy", POLICIES)
def test_a_unit_with_all_its_records_moves_one_step_by_at_most_the_bound(clipping, policy):
    if isinstance(clipping, QuantileClipping) and policy in ("cycles", "epochs"):
        with pytest.raises(InvalidArgument, match="QuantileClipping"):
            plan(clipping=clipping, steps=4, **POLICIES[policy])
        return
    options = {"max_grad_norm": 0.5, **POLICIES[policy], "clipping": clipping}
    steps = 4 if "correlated_noise" in options else 1
    the_plan = plan(**options, steps=steps)
    data = records()
    kept = OF != 4
    whole = moved(data, UnitAssignment(unit_ids=OF, num_units=7), the_plan)
    # One step alone: later ones would start from another model.
    if steps == 1:
        rest = moved(tuple(part[kept] for part in data), UnitAssignment(unit_ids=OF[kept], num_units=7), the_plan)
        assert float((whole - rest).norm()) <= the_plan.step_plan(0).max_grad_norm * (1 + 1e-5)
        larger = [part.clone() for part in data]
        larger[0][~kept] *= 1e4
        other = moved(tuple(larger), UnitAssignment(unit_ids=OF, num_units=7), the_plan)
        assert float((whole - other).norm()) <= 2 * the_plan.step_plan(0).max_grad_norm * (1 + 1e-5)
    assert bool(whole.isfinite().all())


def test_record_by_record_clipping_would_break_the_bound():
    data = tuple(part[OF == 4][:1].repeat(4, 1) for part in records())
    alone = moved(data, UnitAssignment(unit_ids=[0, 0, 0, 0], num_units=1), plan())
    apart = moved(data, UnitAssignment(unit_ids=[0, 1, 2, 3], num_units=4), plan())
    assert float(alone.norm()) <= 0.5 * (1 + 1e-5)
    assert float(apart.norm()) > 0.5 * 3.9


def test_one_record_that_is_not_finite_silences_its_unit_alone():
    data = records()
    kept = OF != 4
    without = moved(tuple(part[kept] for part in data), UnitAssignment(unit_ids=OF[kept], num_units=7), plan())
    for row in np.flatnonzero(OF == 4):
        broken = [part.clone() for part in data]
        broken[1][row] = math.nan
        assert torch.allclose(
            moved(tuple(broken), UnitAssignment(unit_ids=OF, num_units=7), plan()), without, atol=1e-6
        )


def test_units_without_records_are_as_if_they_were_not_there():
    data = records()
    _, packed = np.unique(OF, return_inverse=True)
    assert torch.equal(
        moved(data, UnitAssignment(unit_ids=packed, num_units=5), plan()),
        moved(data, UnitAssignment(unit_ids=OF, num_units=7), plan()),
    )
    assert float(moved(data, UnitAssignment(unit_ids=OF, num_units=50), plan(sample_rate=1e-9)).norm()) == 0.0


def test_data_sets_by_item_and_tensors_agree():
    data = records()
    by_item = moved(TensorDataset(*data), UnitAssignment(unit_ids=torch.from_numpy(OF), num_units=7), plan())
    assert torch.allclose(by_item, moved(data, UnitAssignment(unit_ids=OF.tolist(), num_units=7), plan()), atol=1e-6)


def test_the_guarantee_speaks_of_users_with_the_events_of_the_plan():
    result = fit(
        network(), losses, records(), plan(noise_multiplier=2.0, sample_rate=0.5, steps=3),
        units=UnitAssignment(unit_ids=OF, num_units=7), progress=False,
    )  # fmt: skip
    assert result.guarantee.privacy_unit is PrivacyUnit.USER
    assert result.guarantee.epsilon == result.plan.guarantee().epsilon
    assert result.guarantee.caveats == ()


# --- micro-batches -----------------------------------------------------------------------------------------------


def test_micro_batches_are_fixed_groups_of_neighbors():
    units = record_groups(10, size=4)
    assert np.asarray(units.unit_ids).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert (units.num_units, units.protects_records) == (3, True)


def test_one_record_of_a_micro_batch_moves_the_sum_by_up_to_twice_the_bound_and_never_more():
    the_plan = plan(privacy_unit="record", neighboring_relation="replace_one")
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(12, 3, generator=generator), torch.randn(12, 2, generator=generator)
    units, largest = record_groups(12, size=3), 0.0
    whole = moved(data, units, the_plan)
    for row in range(12):
        for scale in (-100.0, 0.0, 100.0):
            other = data[0].clone(), data[1].clone()
            other[1][row] = scale * (other[1][row] + 1)
            largest = max(largest, float((whole - moved(other, units, the_plan)).norm()))
    assert 0.5 * 1.2 < largest <= 1.0 * (1 + 1e-5), "more than one bound: noise for C alone would be too little"
    assert the_plan.step_plan(0).sensitivity == 1.0


@pytest.mark.parametrize("neighboring_relation", ["add_or_remove_one", "replace_special"])
def test_micro_batches_are_refused_under_other_relations(neighboring_relation):
    with pytest.raises(InvalidArgument, match="neighboring_relation must be replace_one"):
        moved(
            records(), record_groups(12, size=3), plan(privacy_unit="record", neighboring_relation=neighboring_relation)
        )


def test_groups_that_are_formed_from_a_batch_would_shift_when_a_record_leaves():
    """Why groups are fixed: consecutive records of a batch regroup, and every later group's gradient changes."""
    # Pairs pull in opposite directions, 20 against 18; across the border of two pairs they nearly cancel.
    pull = torch.tensor([20.0, 20.0, -18.0, -18.0]).repeat(6)
    data, groups = (torch.ones(24, 3), pull[:, None].repeat(1, 2)), np.arange(24) // 2
    the_plan = plan(privacy_unit="record", neighboring_relation="replace_one")
    rest = tuple(part[1:] for part in data)
    shifted = moved(rest, UnitAssignment(unit_ids=np.arange(23) // 2, num_units=12, protects_records=True), the_plan)
    fixed = moved(rest, UnitAssignment(unit_ids=groups[1:], num_units=12, protects_records=True), the_plan)
    whole = moved(data, record_groups(24, size=2), the_plan)
    assert float((whole - fixed).norm()) <= 1.0
    assert float((whole - shifted).norm()) > 4.0


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit_ids": [0.5, 1.0]}, "unit_ids must be one integer per record"),
        ({"unit_ids": [[0], [1]]}, "unit_ids must be one integer per record"),
        ({"unit_ids": [0], "max_records_per_unit": 0}, "max_records_per_unit must be"),
        ({"unit_ids": [0], "combine": "median"}, "combine must be one of"),
    ],
)
def test_unusable_units_are_refused(options, words):
    with pytest.raises(InvalidArgument, match=words):
        UnitAssignment(**{"num_units": 7, **options})


@pytest.mark.parametrize("stranger", [-1, 7, 2**62])
def test_a_record_of_an_undeclared_unit_contributes_nothing_and_raises_nothing(stranger):
    data = records()
    of = np.array(OF)
    of[3] = stranger
    kept = [row for row in range(len(of)) if row != 3]
    with_it = moved(data, UnitAssignment(unit_ids=of, num_units=7), plan())
    without = moved(tuple(part[kept] for part in data), UnitAssignment(unit_ids=of[kept], num_units=7), plan())
    assert torch.equal(with_it, without)


def test_plans_and_losses_that_do_not_fit_units_are_refused_before_a_step():
    units = UnitAssignment(unit_ids=OF, num_units=7)
    with pytest.raises(InvalidArgument, match="privacy_unit must be user or client"):
        moved(records(), units, plan(privacy_unit="record"))
    with pytest.raises(InvalidArgument, match="privacy_unit must be record with micro-batches"):
        moved(records(), record_groups(12, size=2), plan(neighboring_relation="replace_one"))
    with pytest.raises(InvalidArgument, match="one unit per record"):
        moved(records(11), units, plan())
    with pytest.raises(LossShapeError, match="one value per record"):
        fit(network(), lambda model, x, y: (model(x) - y).square(), records(), plan(), units=units, progress=False)


def test_shuffled_epochs_of_users_cost_one_event_an_epoch():
    the_plan = plan(
        noise_multiplier=3.0,
        sample_rate=0.5,
        steps=4,
        poisson_sampling=False,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    result = fit(network(), losses, records(), the_plan, units=UnitAssignment(unit_ids=OF, num_units=7), progress=False)
    assert result.guarantee.epsilon == the_plan.guarantee().epsilon
