"""Correlated noise in training: matched to the batches, whitened by its strategy, charged, resumed; or refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sordino import accounting, fit
from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, NonPrivateStep, PrivacyError, UnknownSampler
from sordino.events import Gaussian, MatrixGaussian, NonPrivate, NoOp, PoissonSampled, SelfComposed
from sordino.gradients import GradientCapture
from sordino.ledger import Ledger
from sordino.mechanisms.correlated import (
    BandedInverse,
    BinaryTree,
    CyclicPoisson,
    FixedEpochOrder,
    MinSeparation,
    SingleParticipation,
    noise_matrix,
    optimize_banded,
    optimize_buffered,
)
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedClipping
from sordino.runs import RunFolder
from sordino.sampling import CyclicPoissonSampling, FixedBatchSampling, Microbatch
from sordino.schedules import LinearSchedule
from sordino.training import CorrelatedNoise, Plan, PrivateStep, charging
from sordino.training.charging import step_charge
from sordino.verification import verify

STEPS = 12
CYCLES = CyclicPoisson(groups=4, sample_rate=0.125)
BANDED = optimize_banded(4, steps=STEPS)
NOISES = {
    "cycles": (CorrelatedNoise(strategy=BANDED, participation=CYCLES), {"sample_rate": 0.125}),
    "epochs": (
        CorrelatedNoise(strategy=BANDED, participation=FixedEpochOrder(steps_per_epoch=4)),
        {"sample_rate": 0.25, "poisson_sampling": False},
    ),
    "inverse": (
        CorrelatedNoise(
            strategy=BandedInverse.square_root(bands=4, steps=STEPS), participation=MinSeparation(min_separation=3)
        ),
        {"sample_rate": 0.25, "poisson_sampling": False},
    ),
    "buffers": (
        CorrelatedNoise(
            strategy=optimize_buffered(2, steps=STEPS, participation=FixedEpochOrder(steps_per_epoch=6)),
            participation=FixedEpochOrder(steps_per_epoch=6),
        ),
        {"sample_rate": 1 / 6, "poisson_sampling": False},
    ),
    "tree": (
        CorrelatedNoise(strategy=BinaryTree(steps=STEPS), participation=SingleParticipation()),
        {"sample_rate": 1 / STEPS, "poisson_sampling": False},
    ),
}
CLIPPINGS = [
    FlatClipping(),
    AutomaticClipping(),
    PsacClipping(),
    GlobalClipping(threshold=2.0),
    GroupedClipping(by="parameter"),
]
RELATIONS = list(NeighboringRelation)


def plan(name="cycles", **changes):
    noise, options = NOISES[name]
    values = {
        "noise_multiplier": 1.5,
        "max_grad_norm": 0.5,
        "steps": STEPS,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
        "correlated_noise": noise,
    }
    return Plan(**{**values, **options, **changes})


def records(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model, x, y):
    return (model(x) - y).square().sum(1)


def released(model, the_plan, *, leave_out=()):
    """The private gradients of all steps on empty batches, times the divisor: the noise, one row a step."""
    capture = GradientCapture(model)
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=3, reproducible=True))
    rows = []
    for step in range(the_plan.steps):
        chunk = Microbatch(step=step, index=0, is_last=True, indices=np.empty(0, dtype=np.int64))
        if step in leave_out:
            rows.append(None)
            continue
        with private.capturing(chunk):
            pass
        private.add(chunk)
        private.finish()
        rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double())
    capture.detach()
    return [None if row is None else row * the_plan.step_plan(0).expected_batch_size for row in rows]


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
def test_the_strategy_whitens_what_a_run_adds_to_the_declared_scale(name, clipping, neighboring_relation):
    the_plan = plan(name, clipping=clipping, neighboring_relation=neighboring_relation)
    noise = torch.stack(released(nn.Linear(150, 40), the_plan)).numpy()
    white = the_plan.correlated_noise.strategy.matrix() @ noise
    mechanism = the_plan.mechanism
    expected = 1.5 * mechanism.sensitivity * 0.5 * neighboring_relation.sensitivity_factor
    # 72 480 draws in all: 3 % is eleven standard errors, a scale 5 % off fails.
    assert white.std() == pytest.approx(expected, rel=0.03)
    assert white.std() != pytest.approx(expected * 1.05, rel=0.03)
    correlation = np.corrcoef(white)
    assert np.abs(correlation - np.eye(STEPS)).max() < 6 / np.sqrt(noise.shape[1])
    assert np.abs(np.corrcoef(noise) - np.eye(STEPS)).max() > 0.2, "as emitted, the steps hang together"
    assert np.allclose(noise, noise_matrix(the_plan.correlated_noise.strategy) @ white, atol=1e-3 * expected)


def test_an_abandoned_step_takes_its_noise_along():
    whole = released(nn.Linear(5, 2), plan())
    gaps = released(nn.Linear(5, 2), plan(), leave_out=(0, 3, 4))
    # The draws have fresh names, so only the law can be compared: the covariance of what is left is that of the whole.
    assert sum(row is None for row in gaps) == 3
    assert len(whole) == len(gaps)
    noise = released(nn.Linear(300, 60), plan(), leave_out=(0, 3, 4))
    kept = [step for step in range(STEPS) if step not in (0, 3, 4)]
    rows = np.stack([noise[step].numpy() for step in kept])
    inverse = noise_matrix(BANDED)[kept]
    expected = inverse @ inverse.T * plan().mechanism.stddev ** 2
    assert np.allclose(np.cov(rows), expected, atol=0.05 * expected.max())


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
def test_one_record_moves_each_step_by_its_bound_and_only_where_it_may_take_part(name, clipping):
    the_plan = plan(name, noise_multiplier=0.0, clipping=clipping)
    sampler, features = the_plan.sampler, records(40)
    steps = {}
    for step in range(STEPS):
        indices = sampler.draw(dataset_size=40, step=step, rng=KeyedRNG(seed=1, reproducible=True))
        for index in indices.tolist():
            steps.setdefault(index, []).append(step)
    for taken in steps.values():
        apart = np.diff(taken)
        participation = the_plan.correlated_noise.participation
        assert len(taken) <= participation.max_participations(STEPS)
        assert (apart >= participation.min_separation).all()
        if isinstance(participation, FixedEpochOrder | CyclicPoisson):
            assert len({step % participation.min_separation for step in taken}) == 1
    model = network()
    capture = GradientCapture(model)
    sums = []
    for rows in (np.arange(6), np.arange(5)):
        private = PrivateStep(capture, the_plan, KeyedRNG())
        chunk = Microbatch(step=0, index=0, is_last=True, indices=rows)
        with private.capturing(chunk):
            losses(model, *(part[rows] for part in features)).sum().backward()
        private.add(chunk)
        private.finish()
        sums.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) * 8.0)
    assert float((sums[0] - sums[1]).norm()) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("population", [0, 1, 7, 40])
def test_a_record_that_leaves_its_number_vacant_moves_no_other_record(population):
    key = KeyedRNG(seed=1, reproducible=True)
    for sampler in (CyclicPoissonSampling(groups=3, sample_rate=0.2), FixedBatchSampling(steps_per_epoch=3)):
        for step in range(9):
            drawn = sampler.draw(dataset_size=population, step=step, rng=key)
            longer = sampler.draw(dataset_size=population + 1, step=step, rng=key)
            assert (np.diff(drawn) > 0).all()
            assert (drawn % 3 == step % 3).all()
            assert longer[longer < population].tolist() == drawn.tolist()


def test_cyclic_sampling_draws_members_of_the_group_at_the_group_rate():
    sampler = CyclicPoissonSampling(groups=5, sample_rate=0.04)
    sizes = [len(batch) for batch in sampler.batches(dataset_size=5000, first_step=0, steps=200, rng=KeyedRNG())]
    assert np.mean(sizes) == pytest.approx(200, abs=5)
    assert sampler.event(Gaussian(noise_multiplier=2.0)).sample_rate == pytest.approx(0.2)
    assert [sampler.num_charges(steps) for steps in (0, 1, 5, 6)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
def test_a_run_is_charged_for_exactly_its_mechanism(name, neighboring_relation, tmp_path):
    the_plan = plan(name, neighboring_relation=neighboring_relation)
    result = fit(network(), losses, records(48), the_plan, progress=False, run_folder=tmp_path / "run")
    charged = [line.event for line in RunFolder.open(tmp_path / "run") if not isinstance(line.event, NoOp)]
    if name == "cycles":
        assert charged == [PoissonSampled(sample_rate=0.5, event=Gaussian(noise_multiplier=1.5))] * 3
    else:
        (event,) = charged
        assert isinstance(event, MatrixGaussian)
        assert event == the_plan.event()
        assert event.noise_multiplier / event.sensitivity == pytest.approx(1.5)
    exact = accounting.epsilon(the_plan.mechanism.event(), 1e-5, neighboring_relation=neighboring_relation)
    assert result.guarantee.epsilon == pytest.approx(exact.upper, rel=1e-9)
    assert result.guarantee.sampler == the_plan.sampler.describe()
    keep = "records keep their numbers when one is added or removed" in result.guarantee.caveats
    assert keep == (neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert verify(tmp_path / "run").passed


def test_without_noise_the_run_is_not_private():
    bare = plan(noise_multiplier=0.0)
    assert bare.event() == NonPrivate(reason="noise_multiplier is 0")
    assert bare.event(0) == NoOp()
    assert bare.guarantee().epsilon == np.inf


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"noise_multiplier": LinearSchedule(start=2.0, end=1.0)},
            InvalidArgument,
            "must be None with a schedule",
        ),
        ({"max_grad_norm": LinearSchedule(start=2.0, end=1.0)}, InvalidArgument, "must be None with a schedule"),
        (
            {"expected_batch_size": LinearSchedule(start=2.0, end=1.0)},
            InvalidArgument,
            "must be None with a schedule",
        ),
        ({"clipping": QuantileClipping(count_noise=9.0)}, InvalidArgument, "QuantileClipping"),
        (
            {"clipping": AdaClip()},
            InvalidArgument,
            "correlated_noise must be None with .*AdaClip",
        ),
        ({"clipping": ProjectedClipping(projections=8)}, InvalidArgument, "must be None with .*Projected"),
        ({"steps": STEPS + 1}, InvalidArgument, "steps must be those of the noise's strategy"),
        ({"sample_rate": 0.1}, InvalidArgument, "sample_rate must be that of the noise's participation"),
        ({"poisson_sampling": False}, UnknownSampler, "got CyclicPoisson"),
        ({"correlated_noise": NOISES["epochs"][0]}, UnknownSampler, "must be CyclicPoisson with Poisson sampling"),
        ({"correlated_noise": NOISES["tree"][0]}, UnknownSampler, "must be CyclicPoisson with Poisson sampling"),
        ({"correlated_noise": "banded"}, InvalidArgument, "correlated_noise must be None or CorrelatedNoise"),
    ],
)
def test_unsound_combinations_are_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        plan(**changes)


@pytest.mark.parametrize(
    "participation",
    [
        FixedEpochOrder(steps_per_epoch=3),
        MinSeparation(min_separation=5),
        MinSeparation(min_separation=4, participations=2),
    ],
    ids=repr,
)
def test_fixed_batches_that_break_the_participation_are_refused(participation):
    noise = CorrelatedNoise(strategy=BANDED, participation=participation)
    with pytest.raises(UnknownSampler, match="participation must allow 3 participations of a record, 4 steps apart"):
        plan("epochs", correlated_noise=noise)
    assert plan(
        "epochs", correlated_noise=replace(noise, participation=MinSeparation(min_separation=3, participations=3))
    )


def test_more_bands_than_groups_are_refused():
    with pytest.raises((PrivacyError, InvalidArgument), match=r"bands|groups"):
        plan(correlated_noise=CorrelatedNoise(strategy=optimize_banded(5, steps=STEPS), participation=CYCLES))


@pytest.mark.parametrize("name", NOISES)
def test_a_plan_with_noise_survives_json(name):
    the_plan = plan(name)
    again = Plan.from_json(the_plan.to_json())
    assert again == the_plan
    assert hash(again) == hash(the_plan)
    assert again.event() == the_plan.event()
    with pytest.raises(InvalidArgument, match="correlated_noise must hold"):
        Plan.from_json(json.dumps(json.loads(the_plan.to_json()) | {"correlated_noise": {"strategy": {}}}))


def test_trained_parameters_stay_fixed_under_correlated_noise():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    capture = GradientCapture(model)
    private = PrivateStep(capture, plan(), KeyedRNG())
    model[0].requires_grad_(False)
    empty = np.empty(0, dtype=np.int64)
    with private.capturing(Microbatch(step=0, index=0, is_last=True, indices=empty)):
        pass
    private.add(Microbatch(step=0, index=0, is_last=True, indices=empty))
    private.finish()
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    with pytest.raises(NonPrivateStep, match="correlated noise"):
        private.capturing(Microbatch(step=1, index=0, is_last=True, indices=empty))


def test_the_best_noise_for_a_target_is_bands_when_epochs_are_few_and_independent_when_they_are_many():
    options = {"delta": 1e-5, "max_grad_norm": 1.0, "expected_batch_size": 10.0, "correlated_noise": "auto"}
    few = Plan.for_epsilon(target_epsilon=8.0, sample_rate=0.05, steps=40, **options)
    assert few.correlated_noise is not None
    assert few.correlated_noise.strategy.bands > 1
    assert 7.9 < few.guarantee().epsilon <= 8.0
    many = Plan.for_epsilon(target_epsilon=0.5, sample_rate=0.5, steps=100, **options)
    assert many.correlated_noise is None
    assert 0.49 < many.guarantee().epsilon <= 0.5
    with pytest.raises(InvalidArgument, match='got "auto"'):
        Plan.for_epsilon(target_epsilon=1.0, sample_rate=LinearSchedule(start=0.1, end=0.2), steps=4, **options)


@pytest.mark.parametrize("name", ["cycles", "epochs"])
def test_a_given_noise_is_calibrated_with_its_own_events(name):
    calibrated = plan(name).with_target_epsilon(2.0)
    assert 1.99 < calibrated.guarantee().epsilon <= 2.0
    assert calibrated.correlated_noise == plan(name).correlated_noise


# --- stopping and resuming ---------------------------------------------------------------------------------------


class Crash(Exception):
    """Stands for a process that ends in the middle."""


def run_until(path, the_plan, stop=None, error=Crash, **options):
    def on_step(done):
        if done == stop:
            raise error

    where = {"resume_from": path} if path.exists() else {"run_folder": path}
    return fit(
        network(),
        losses,
        records(48),
        the_plan,
        progress=False,
        checkpoint_every=5,
        on_step=on_step,
        **where,
        **options,
    )


@pytest.mark.parametrize("name", ["cycles", "epochs"])
def test_a_run_that_stopped_cleanly_goes_on_at_no_cost_of_its_own(name, tmp_path):
    the_plan, path = plan(name), tmp_path / "run"
    stopped = run_until(path, the_plan, stop=6, error=KeyboardInterrupt)
    assert stopped.interrupted
    assert verify(path).passed
    result = run_until(path, the_plan)
    assert result.steps == STEPS
    assert not (path / "checkpoint.safetensors").exists(), "it would hold noise that the released model has in it"
    assert result.guarantee.epsilon == pytest.approx(the_plan.guarantee().epsilon, rel=1e-9)
    assert verify(path).passed


@pytest.mark.parametrize("name", ["cycles", "epochs"])
def test_steps_that_were_lost_and_come_again_are_charged_as_a_branch(name, tmp_path):
    the_plan, path = plan(name), tmp_path / "run"
    with pytest.raises(Crash):
        run_until(path, the_plan, stop=7)
    result = run_until(path, the_plan)
    lines = [line for line in RunFolder.open(path) if not isinstance(line.event, NoOp)]
    assert lines[-1].step == 5
    assert lines[-1].event == the_plan.mechanism.branch_event(5)
    assert result.guarantee.epsilon > the_plan.guarantee().epsilon * 1.01
    assert verify(path).passed


def test_a_resumed_run_that_leaves_the_branch_out_does_not_verify(tmp_path, monkeypatch):
    the_plan, path = plan(), tmp_path / "run"
    with pytest.raises(Crash):
        run_until(path, the_plan, stop=9)
    assert step_charge(the_plan, 5, first=5) == NoOp()
    assert step_charge(the_plan, 5, first=5, repeats=True) == the_plan.mechanism.branch_event(5)
    assert step_charge(the_plan, 8, first=5, repeats=True) == NoOp()
    monkeypatch.setattr(
        charging, "step_charge", lambda plan, step, *, first, repeats: step_charge(plan, step, first=first)
    )
    run_until(path, the_plan)
    found = verify(path)
    assert not found.passed
    assert "charges another event than the plan's" in found.item("plan").detail


def test_resumed_noise_goes_on_from_the_buffers():
    model, the_plan = nn.Linear(250, 60), plan()
    rows, state = [], None
    for segment in (range(7), range(7, STEPS)):
        capture = GradientCapture(model)
        private = PrivateStep(capture, the_plan, KeyedRNG())
        if state is not None:
            private.load_state_dict(state)
        for step in segment:
            chunk = Microbatch(step=step, index=0, is_last=True, indices=np.empty(0, dtype=np.int64))
            with private.capturing(chunk):
                pass
            private.add(chunk)
            private.finish()
            rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double() * 8.0)
        state = private.state_dict()
        capture.detach()
    white = BANDED.matrix() @ torch.stack(rows).numpy()
    assert white.std(1) == pytest.approx(np.full(STEPS, the_plan.mechanism.stddev), rel=0.03)
    assert np.abs(np.corrcoef(white) - np.eye(STEPS)).max() < 6 / np.sqrt(white.shape[1])


def test_noise_does_not_go_on_without_its_state():
    late = PrivateStep(GradientCapture(nn.Linear(2, 1)), plan(), KeyedRNG(), after_step=4)
    with pytest.raises(NonPrivateStep, match="from the state after step 4"):
        late.capturing(Microbatch(step=5, index=0, is_last=True, indices=np.empty(0, dtype=np.int64)))
    private = PrivateStep(GradientCapture(nn.Linear(2, 1)), plan(), KeyedRNG())
    with pytest.raises(InvalidArgument, match="must be one of this plan"):
        private.load_state_dict({"bounds": {"bounds": None}, "noise": None, "losses": None})


def test_a_ledger_holds_the_whole_of_a_correlated_run(tmp_path):
    the_plan = plan("epochs")
    account = Ledger(tmp_path / "privacy.db").declare("data", epsilon=20.0, delta=1e-5)
    fit(network(), losses, records(48), the_plan, progress=False, ledger=account)
    assert account.spent().epsilon >= the_plan.guarantee().epsilon * (1 - 1e-9)


def test_shuffled_and_poisson_plans_without_noise_are_charged_as_before():
    before = Plan(
        noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=7, expected_batch_size=4.0, delta=1e-5
    )
    assert before.mechanism is None
    assert before.event() == SelfComposed(
        event=PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=1.0)), count=7
    )
