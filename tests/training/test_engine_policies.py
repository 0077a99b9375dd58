"""Own loops with correlated noise, users and budgets that adapt: the same parts as in `fit`, or a refusal by name."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sordino import PrivacyEngine, accounting, verify
from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.definitions import PrivacyUnit
from sordino.errors import BudgetExceeded, InvalidArgument, NonPrivateStep, UnknownSampler
from sordino.events import Composed, Gaussian, PoissonSampled, SelfComposed, compose
from sordino.ledger import Ledger
from sordino.mechanisms.correlated import CyclicPoisson, FixedEpochOrder, optimize_banded
from sordino.research import ProjectedClipping
from sordino.schedules import CosineSchedule, ExponentialSchedule, LinearSchedule, ListSchedule, StepSchedule
from sordino.training import AdaptiveBudget, CorrelatedNoise, StepParameters, UnitAssignment, record_groups

STEPS = 12
CYCLES = CorrelatedNoise(
    strategy=optimize_banded(4, steps=STEPS), participation=CyclicPoisson(groups=4, sample_rate=0.125)
)
EPOCHS = CorrelatedNoise(strategy=optimize_banded(4, steps=STEPS), participation=FixedEpochOrder(steps_per_epoch=4))


def private(model, data, *, batch_size=8, engine=None, optimizer=None, **options):
    engine = engine or PrivacyEngine()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"noise_multiplier": 1.5, "max_grad_norm": 0.5, **options}
    workers = settings.pop("num_workers", 0)
    loader = DataLoader(data, batch_size=batch_size, num_workers=workers)
    return (engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings))


def take(parts, *, most=None, loss=None):
    """Steps until the loader ends or `most` were taken; the released gradients, one row a step."""
    _, model, optimizer, loader = parts
    loss = loss or (lambda batch: model(batch[0]).square().sum(1).mean())
    rows = []
    for batch in loader:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        if loader.is_last_microbatch:
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        if most is not None and len(rows) == most:
            break
    return rows


# --- correlated noise ------------------------------------------------------------------------------------------------


def silent(count=64, width=150):
    """Records without a gradient: what is released is the noise."""
    return TensorDataset(torch.zeros(count, width))


def wide():
    return nn.Linear(150, 40, bias=False)


@pytest.mark.parametrize(
    ("noise", "options"),
    [
        (CYCLES, {}),
        (EPOCHS, {"batch_size": 16, "poisson_sampling": False}),
        (EPOCHS, {"batch_size": 16, "poisson_sampling": False, "neighboring_relation": "replace_one"}),
    ],
    ids=["cycles", "epochs", "epochs, replace one"],
)
def test_the_strategy_whitens_what_a_loop_adds_also_over_a_checkpoint(noise, options, tmp_path):
    first = private(wide(), silent(), correlated_noise=noise, **options)
    rows = take(first, most=5)
    first[0].save_checkpoint(path=tmp_path / "a.safetensors", module=first[1])
    second = private(wide(), silent(), correlated_noise=noise, **options)
    second[0].load_checkpoint(path=tmp_path / "a.safetensors", module=second[1])
    while len(rows) < STEPS:
        rows += take(second)
    expected_batch = 8.0 if noise is CYCLES else 16.0
    released = torch.stack(rows).numpy() * expected_batch
    white = noise.strategy.matrix() @ released
    factor = 2.0 if "neighboring_relation" in options else 1.0
    scale = 1.5 * 0.5 * factor * second[0].private_model(second[1]).plan.mechanism.sensitivity
    # 72 000 draws: 3 % is eleven standard errors, a scale 5 % off fails.
    assert white.std() == pytest.approx(scale, rel=0.03)
    assert white.std() != pytest.approx(scale * 1.05, rel=0.03)
    assert np.abs(np.corrcoef(white) - np.eye(STEPS)).max() < 6 / math.sqrt(released.shape[1])
    assert np.abs(np.corrcoef(released) - np.eye(STEPS)).max() > 0.2
    with pytest.raises(NonPrivateStep, match="at most 12 batches"):
        take(second)
    whole = second[0].private_model(second[1]).plan.guarantee().epsilon
    assert second[0].get_epsilon(1e-5) == pytest.approx(whole, rel=1e-9)


def identified(count=64):
    """Record i is the number i + 4."""
    return TensorDataset(4 + torch.arange(float(count))[:, None])


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_keep_the_participation_also_when_an_epoch_is_broken_off(workers):
    parts = private(nn.Linear(1, 1), identified(), correlated_noise=CYCLES, num_workers=workers)
    loader, step = parts[3], 0
    for most in (3, 1, 8):
        for place, (ids,) in enumerate(loader):
            if float(ids.max()) > 1:  # synthetic records below 1 stand for an empty batch
                assert set(((ids.flatten().long() - 4) % 4).tolist()) == {step % 4}
            parts[1](ids).square().sum(1).mean().backward()
            parts[2].step()
            step += 1
            if place + 1 == most:
                break
    assert step == STEPS


def test_cycles_are_charged_ahead_and_a_ledger_is_asked_for_the_whole_run(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("records", epsilon=9.0, delta=1e-5, policy="renyi")
    parts = private(nn.Linear(1, 1), identified(), correlated_noise=CYCLES, engine=PrivacyEngine(ledger=account))
    take(parts, most=1)
    one = parts[0].event()
    take(parts, most=3)
    assert parts[0].event() == one, "three more steps of the cycle cost nothing"
    take(parts, most=1)
    assert parts[0].event() == SelfComposed(event=one, count=2) or parts[0].event() != one
    assert account.spent().epsilon >= parts[0].get_epsilon(1e-5) * (1 - 1e-9)
    small = Ledger(tmp_path / "small.db").declare("records", epsilon=0.01, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        private(nn.Linear(1, 1), identified(), correlated_noise=CYCLES, engine=PrivacyEngine(ledger=small))


def test_two_loops_over_one_loader_are_refused_with_correlated_noise():
    parts = private(nn.Linear(1, 1), identified(), correlated_noise=CYCLES)
    one, two = iter(parts[3]), iter(parts[3])
    next(one)
    (ids,) = next(two)
    parts[1](ids).square().sum(1).mean().backward()
    parts[2].step()
    next(two)
    with pytest.raises(NonPrivateStep):
        next(one)


def test_steps_that_come_twice_are_paid_twice(tmp_path):
    first = private(wide(), silent(), correlated_noise=CYCLES)
    take(first, most=4)
    first[0].save_checkpoint(path=tmp_path / "old.safetensors", module=first[1])
    take(first, most=3)
    first[0].save_checkpoint(path=tmp_path / "new.safetensors", module=first[1])
    clean, twice = (
        private(wide(), silent(), correlated_noise=CYCLES),
        private(wide(), silent(), correlated_noise=CYCLES),
    )
    clean[0].load_checkpoint(path=tmp_path / "new.safetensors", module=clean[1])
    twice[0].load_checkpoint(path=tmp_path / "old.safetensors", module=twice[1])
    for parts, left in ((clean, 5), (twice, 8)):
        while left:
            left -= len(take(parts, most=left))
    plan = clean[0].private_model(clean[1]).plan
    assert clean[0].get_epsilon(1e-5) == pytest.approx(plan.guarantee().epsilon, rel=1e-9)
    # Two cycles were charged when the newer one was saved; from step 4 on all comes again.
    branch = Composed(events=(plan.event(7), plan.mechanism.branch_event(4)))
    assert twice[0].get_epsilon(1e-5) == pytest.approx(accounting.epsilon(branch, 1e-5).upper, rel=1e-9)
    with pytest.raises(NonPrivateStep, match="before the first step with correlated noise"):
        first[0].load_checkpoint(path=tmp_path / "old.safetensors", module=first[1])


def test_an_engine_chooses_correlated_noise_for_a_target():
    model = nn.Linear(1, 1)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(identified(), batch_size=8),
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=1.0,
        correlated_noise="auto",
    )
    plan = engine.private_model(model).plan
    assert plan.correlated_noise is not None
    assert 7.99 < plan.guarantee().epsilon <= 8.0
    assert len(loader) == 8
    assert "cyclic" in engine.guarantee(1e-5).sampler


# --- units -----------------------------------------------------------------------------------------------------------

# Units 2 and 5 have no records, unit 4 has four; one record's unit was never declared.
OF = [4, 1, 4, 3, 0, 1, 4, 6, 4, 3, 6, 6, 9]
CLIPPINGS = [
    FlatClipping(),
    AutomaticClipping(),
    PsacClipping(),
    GlobalClipping(threshold=2.0),
    GroupedClipping(by="layer"),
    QuantileClipping(count_noise=30.0),
]


def records(count=13):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=generator) * 3, torch.randn(count, 2, generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1)


def moved(data, units, *, reduction="mean", **options):
    """The sum that one step of everything releases without noise."""
    model = network()
    options = {"noise_multiplier": 0.0, "batch_size": 64, **options}
    parts = private(model, TensorDataset(*data), units=units, loss_reduction=reduction, **options)

    def loss(batch):
        values = squares(model, batch)
        return values.mean() if reduction == "mean" else values.sum()

    (row,) = take(parts, loss=loss)
    return row * units.num_units


def slow(data, units, bound=0.5):
    """Plain autograd, unit by unit."""
    total = torch.zeros(26, dtype=torch.float64)
    for unit in range(units.num_units):
        rows = np.flatnonzero(unit == np.asarray(units.unit_ids))[: units.max_records_per_unit]
        if len(rows):
            model = network()
            values = squares(model, (data[0][rows], data[1][rows]))
            (values.mean() if units.combine == "mean" else values.sum()).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
            total += gradient * min(1.0, bound / float(gradient.norm()))
    return total


@pytest.mark.parametrize(
    ("combine", "most", "reduction"),
    [("mean", None, "mean"), ("sum", None, "sum"), ("mean", 2, "sum"), ("sum", 2, "mean")],
)
@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_a_unit_in_a_loop_is_the_gradient_of_its_records_clipped_once(combine, most, microbatch_size, reduction):
    units = UnitAssignment(unit_ids=OF, num_units=7, max_records_per_unit=most, combine=combine)
    found = moved(records(), units, microbatch_size=microbatch_size, reduction=reduction)
    assert torch.allclose(found, slow(records(), units), atol=2e-5)


@pytest.mark.parametrize(
    ("clipping", "scale"), [*((clipping, 1e4) for clipping in CLIPPINGS), (AutomaticClipping(), 1e-4)], ids=str
)
def test_a_unit_in_a_loop_moves_a_step_by_at_most_the_bound(clipping, scale):
    data = records()
    data = data[0] * scale, data[1]
    kept = np.asarray(OF) != 4
    whole = moved(data, UnitAssignment(unit_ids=OF, num_units=7), clipping=clipping)
    rest = moved(
        tuple(part[kept] for part in data),
        UnitAssignment(unit_ids=np.asarray(OF)[kept], num_units=7),
        clipping=clipping,
    )
    assert float((whole - rest).norm()) <= 0.5 * (1 + 1e-5)
    broken = data[0].clone(), data[1].clone()
    broken[1][8] = math.inf
    silent_unit = moved(broken, UnitAssignment(unit_ids=OF, num_units=7), clipping=clipping)
    assert torch.allclose(silent_unit, rest, atol=1e-6), "not finite in one record: all of the unit is silent"


def test_bounds_that_adapt_count_units_and_go_on_over_a_checkpoint(tmp_path):
    units, data = UnitAssignment(unit_ids=OF, num_units=7), TensorDataset(*records())
    clipping = QuantileClipping(count_noise=5.0, learning_rate=1.0)

    def made():
        return private(network(), data, units=units, clipping=clipping, batch_size=64, noise_multiplier=0.01)

    first = made()
    for _ in range(4):
        take(first, loss=lambda batch: squares(first[1], batch).mean())
    before = first[0].private_model(first[1]).run.step.state_dict()["bounds"]["bounds"]
    assert before != [0.5]
    first[0].save_checkpoint(path=tmp_path / "a.safetensors", module=first[1])
    second = made()
    second[0].load_checkpoint(path=tmp_path / "a.safetensors", module=second[1])
    seen = []
    bounds = second[0].private_model(second[1]).run.step.bounds
    for batch in second[3]:
        squares(second[1], batch).mean().backward()
        seen.append(bounds.state_dict()["bounds"])
        second[2].step()
    assert seen == [before], "the first batch is clipped by the bounds of the checkpoint"


def test_users_are_drawn_and_named_in_the_guarantee():
    of = np.repeat(np.arange(200), 3)
    data = TensorDataset(torch.arange(600.0)[:, None])
    parts = private(nn.Linear(1, 1), data, units=UnitAssignment(unit_ids=of, num_units=200), batch_size=60)
    for (ids,) in parts[3]:
        owners, counts = np.unique(of[ids.flatten().long().numpy()], return_counts=True)
        assert set(counts) == {3}
        assert 2 <= len(owners) <= 60
    guarantee = parts[0].guarantee(1e-5)
    assert guarantee.privacy_unit is PrivacyUnit.USER
    assert "unit one user" in guarantee.describe()
    assert guarantee.sampler == "Poisson sampling at rate 0.1"
    assert parts[0].private_model(parts[1]).plan.step_plan(0).expected_batch_size == pytest.approx(20.0)
    with pytest.raises(InvalidArgument, match="privacy_unit must be the same"):
        private(nn.Linear(1, 1), data, engine=parts[0])


def test_micro_batches_are_units_of_neighboring_records_under_replace_one():
    data, units = records(12), record_groups(12, size=3)
    found = moved(data, units, neighboring_relation="replace_one")
    assert torch.allclose(found, slow(data, units), atol=2e-5)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be replace_one with micro-batches"):
        moved(data, units)


# --- budgets ---------------------------------------------------------------------------------------------------------


class Counted(Dataset):
    """Says how often it was read."""

    def __init__(self, count=60):
        self.read, self.count = 0, count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        self.read += 1
        return torch.full((3,), float(place)), torch.zeros(2)


def budget(choose=lambda step, released: 10.0, **changes):
    return AdaptiveBudget(**{"epsilon": 1.0, "delta": 1e-5, "choose": choose, **changes})


def test_a_loop_ends_when_its_budget_is_spent_and_the_last_model_stands():
    data = Counted()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = private(model, data, batch_size=60, budget=budget(), optimizer=optimizer, noise_multiplier=10.0)
    engine, loss = parts[0], lambda batch: squares(model, batch).mean()
    assert engine.get_epsilon(1e-5) == 0.0
    taken, before = 0, data.read
    for _ in range(20):
        taken += len(take(parts, loss=loss))
    # Seven steps by the Gaussian filter, see test_policies_adaptive.py.
    assert (taken, engine.budget_exhausted) == (7, True)
    assert data.read - before == 7 * 60
    assert engine.event() == SelfComposed(event=Gaussian(noise_multiplier=10.0), count=7)
    guarantee = engine.guarantee(1e-5)
    assert (guarantee.epsilon, guarantee.accountant) == (1.0, "Gaussian filter")
    assert any("budget" in caveat for caveat in guarantee.caveats)
    assert engine.get_epsilon(1e-7) > 1.0
    stands = [parameter.clone() for parameter in model.parameters()]
    assert take(parts, loss=loss) == []
    assert all(torch.equal(old, new) for old, new in zip(stands, model.parameters(), strict=True))


def test_each_step_of_a_loop_has_the_noise_and_rate_that_were_chosen():
    seen, chosen = [], [StepParameters(noise_multiplier=4.0, sample_rate=0.5), StepParameters(noise_multiplier=8.0)]

    def choose(step, released):
        seen.append(released.last_gradient_norm)
        return chosen[step]

    parts = private(wide(), silent(), batch_size=16, budget=budget(choose, epsilon=3.0), noise_multiplier=6.0)
    rows = take(parts, most=2)
    # The divisor moves with the rate: 64 records at 0.5 and 0.25.
    for row, sigma, size in zip(rows, (4.0, 8.0), (32.0, 16.0), strict=True):
        assert float(row.std()) * size / 0.5 == pytest.approx(sigma, rel=0.05)
        assert float(row.std()) * size / 0.5 != pytest.approx(sigma * 1.15, rel=0.05)
    assert seen == [None, pytest.approx(float(rows[0].norm()), rel=1e-6)]
    assert "Rényi filter" in parts[0].guarantee(1e-5).accountant


def test_checkpoints_and_resumes_share_one_budget(tmp_path):
    seen = []

    def choose(step, released):
        seen.append((step, released.remaining, released.last_gradient_norm))
        return 10.0

    def made(**changes):
        return private(wide(), silent(), batch_size=64, budget=budget(choose, **changes), noise_multiplier=10.0)

    first = made()
    for _ in range(3):
        take(first)
    first[0].save_checkpoint(path=tmp_path / "a.safetensors", module=first[1])
    take(first)
    first[0].save_checkpoint(path=tmp_path / "b.safetensors", module=first[1])
    for name, left in (("b", 3), ("a", 3)):
        # Going back to the older one pays for the step that the newer one showed.
        again = made()
        again[0].load_checkpoint(path=tmp_path / f"{name}.safetensors", module=again[1])
        seen.clear()
        taken = sum(len(take(again)) for _ in range(9))
        assert (taken, again[0].budget_exhausted) == (left, True)
        assert seen[0][0] == (4 if name == "b" else 3)
        assert seen[0][1] == pytest.approx(1 - 4 * 0.01 * 3.730631635**2, rel=1e-6)
        assert seen[0][2] is not None
        assert again[0].get_epsilon(1e-5) == 1.0
    other = made(epsilon=2.0)
    with pytest.raises(InvalidArgument, match="budget must be that of the checkpoint"):
        other[0].load_checkpoint(path=tmp_path / "a.safetensors", module=other[1])


def test_a_ledger_holds_the_budget_before_the_first_batch_and_what_a_resume_could_spend(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("records", epsilon=3.0, delta=3e-5, policy="zcdp")

    def made():
        engine = PrivacyEngine(ledger=account)
        return private(
            wide(), silent(), batch_size=64, budget=budget(filter="zcdp"), engine=engine, noise_multiplier=10.0
        )

    first = made()
    assert account.spent().epsilon == 0
    take(first)
    whole = account.event().rho
    assert whole == pytest.approx(0.0305565952, rel=1e-6)
    take(first)
    assert account.event().rho == whole
    first[0].save_checkpoint(path=tmp_path / "a.safetensors", module=first[1])
    again = made()
    again[0].load_checkpoint(path=tmp_path / "a.safetensors", module=again[1])
    take(again)
    assert sum(event.rho for event in account.event().events) == pytest.approx(2 * whole - 2 * 0.005, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": budget(), "num_workers": 1}, InvalidArgument, "num_workers must be one of"),
        ({"budget": budget(delta=None)}, InvalidArgument, "delta must be given in the budget"),
        (
            {"budget": budget(), "correlated_noise": CYCLES},
            InvalidArgument,
            "budget must be None with correlated noise",
        ),
        (
            {"budget": budget(), "poisson_sampling": False, "neighboring_relation": "replace_one"},
            InvalidArgument,
            "budget must be None with shuffled epochs",
        ),
        ({"budget": budget(filter="gaussian")}, InvalidArgument, "filter must be renyi with sampled batches"),
        (
            {"correlated_noise": CYCLES, "clipping": AdaClip()},
            InvalidArgument,
            "correlated_noise must be None with .*AdaClip",
        ),
        (
            {"correlated_noise": CYCLES, "clipping": QuantileClipping(count_noise=9.0)},
            InvalidArgument,
            "QuantileClipping",
        ),
        (
            {"correlated_noise": CYCLES, "noise_multiplier": LinearSchedule(start=2.0, end=1.0)},
            InvalidArgument,
            "correlated_noise must be None with a schedule",
        ),
        ({"correlated_noise": CYCLES, "batch_size": 16}, InvalidArgument, "sample_rate must be that of the noise's"),
        ({"correlated_noise": CYCLES, "poisson_sampling": False}, UnknownSampler, "Pass poisson_sampling=True"),
        ({"correlated_noise": EPOCHS}, UnknownSampler, "participation must be CyclicPoisson with Poisson sampling"),
        ({"correlated_noise": EPOCHS, "poisson_sampling": False}, UnknownSampler, "FixedEpochOrder"),
        ({"correlated_noise": "auto"}, InvalidArgument, "make_private_with_epsilon"),
        (
            {"correlated_noise": CYCLES, "engine": PrivacyEngine(secure_mode=True)},
            InvalidArgument,
            "secure_mode must be False",
        ),
        ({"clipping": ProjectedClipping(projections=50)}, InvalidArgument, "exact norms with a custom training loop"),
        (
            {"units": UnitAssignment(unit_ids=[0] * 64, num_units=1), "clipping": AdaClip()},
            InvalidArgument,
            "units must be None with .*AdaClip",
        ),
        (
            {"units": UnitAssignment(unit_ids=[0] * 64, num_units=1), "engine": PrivacyEngine(secure_mode=True)},
            InvalidArgument,
            "units must be None with secure mode",
        ),
        (
            {"units": UnitAssignment(unit_ids=[0] * 9, num_units=1)},
            InvalidArgument,
            "one unit per record of the dataset",
        ),
    ],
)
def test_unsound_combinations_are_refused_before_a_record_is_read(options, error, words):
    data = Counted(64)
    model = network()
    with pytest.raises(error, match=words):
        private(model, data, **options)
    assert data.read == 0
    private(model, data)  # Nothing was left behind.


def test_a_budget_is_all_that_its_engine_spends():
    parts = private(network(), Counted(), budget=budget(), noise_multiplier=10.0, batch_size=60)
    with pytest.raises(InvalidArgument, match="budget must be all that its engine spends"):
        private(network(), Counted(), engine=parts[0])
    engine = private(network(), Counted())[0]
    with pytest.raises(InvalidArgument, match="budget must be all that its engine spends"):
        private(network(), Counted(), engine=engine, budget=budget())


@pytest.mark.parametrize(
    "schedule",
    [
        ListSchedule(values=(2.0, 1.5, 1.25, 1.0)),
        StepSchedule(start=2.0, factor=0.5, every=2),
        LinearSchedule(start=2.0, end=1.0, over=3),
        ExponentialSchedule(start=2.0, end=1.0, over=3),
        CosineSchedule(start=2.0, end=1.0, over=3),
    ],
)
def test_noise_and_bound_follow_a_schedule_in_a_loop_of_ones_own(schedule, tmp_path):
    data = TensorDataset(torch.ones(32, 4))
    engine = PrivacyEngine(run_folder=tmp_path / "run")
    parts = private(nn.Linear(4, 2), data, engine=engine, noise_multiplier=schedule, max_grad_norm=schedule)
    take(parts)
    leaves = [PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=schedule.value(k))) for k in range(4)]
    assert engine.event() == compose(leaves)
    if isinstance(schedule, ListSchedule):
        with pytest.raises(InvalidArgument, match="List more"):
            take(parts)
        assert engine.event() == compose(leaves)
    engine.detach()
    assert verify(tmp_path / "run").passed


def test_a_schedule_over_the_whole_of_a_loop_without_an_end_is_refused():
    with pytest.raises(InvalidArgument, match="over"):
        private(nn.Linear(4, 2), TensorDataset(torch.ones(32, 4)), noise_multiplier=LinearSchedule(start=2.0, end=1.0))
