"""A loss curve bought from the budget: bounded influence, the noise that is stated on both parts, an unchanged bill."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from sordino import PerformanceOptions, PrivacyUnit, data, fit, verify
from sordino.clipping import AdaClip, FlatClipping, GroupedClipping, PsacClipping, QuantileClipping
from sordino.definitions import NeighboringRelation
from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep
from sordino.gradients import GradientCapture
from sordino.mechanisms.base import observe_releases
from sordino.mechanisms.correlated import CyclicPoisson, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedClipping
from sordino.runs import RunFolder, average_adjacent
from sordino.sampling import split_into_microbatches
from sordino.schedules import ExponentialSchedule, LinearSchedule
from sordino.training import AdaptiveBudget, CorrelatedNoise, LossRelease, Plan, PrivateStep, UnitAssignment

CURVE = LossRelease(max_loss=2.0, budget_fraction=0.1)
CLIPPINGS = [
    FlatClipping(),
    PsacClipping(),
    GroupedClipping(by="layer"),
    QuantileClipping(count_noise=30.0),
    QuantileClipping(count_noise=30.0, inner=GroupedClipping(by="parameter")),
]
RELATIONS = list(NeighboringRelation)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def plan(**changes):
    values = {
        "noise_multiplier": 1.5,
        "max_grad_norm": 0.5,
        "sample_rate": 0.5,
        "steps": 4,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
        "loss_release": CURVE,
    }
    return Plan(**{**values, **changes})


def squares(model, x, y):
    return (model(x) - y).square().sum(1)


def records(count, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


def one_step(model, table, the_plan, *, step=0, seed=1, microbatch_size=3):
    """The step after a batch of `table` taken whole."""
    capture = GradientCapture(model)
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=seed, reproducible=True))
    for chunk in split_into_microbatches(np.arange(len(table[0])), step=step, microbatch_size=microbatch_size):
        with private.capturing(chunk):
            if chunk.num_records:
                losses = squares(model, *(part[torch.from_numpy(chunk.indices)] for part in table))
                private.add_losses(losses)
                losses.sum().backward()
        private.add(chunk)
    private.finish()
    capture.detach()
    return private


class Listener:
    """Keeps what a mechanism was given, and lets nothing be drawn."""

    def released(self, release, draw):
        self.vector = torch.cat([part.detach().double().flatten() for part in release.value])
        self.mechanism = release.mechanism


def joint_vector(model, table, the_plan):
    listener = Listener()
    with observe_releases(listener):
        one_step(model, table, the_plan)
    model.zero_grad(set_to_none=True)
    return listener.vector, listener.mechanism


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize("worst", [1e-3, 1.0, 1e4, math.inf, -math.inf, math.nan])
def test_one_record_moves_gradients_and_losses_together_by_at_most_the_sensitivity(
    clipping, neighboring_relation, worst
):
    the_plan, model = plan(clipping=clipping, neighboring_relation=neighboring_relation), network()
    features, targets = records(6)
    targets[5] = worst
    whole, mechanism = joint_vector(model, (features, targets), the_plan)
    rest, _ = joint_vector(model, (features[:5], targets[:5]), the_plan)
    assert float((whole - rest).norm()) <= mechanism.l2_sensitivity * (1 + 1e-6)
    if neighboring_relation is NeighboringRelation.REPLACE_ONE:
        # Absence lies in the middle, as sampling needs it: test_joint_releases.py.
        assert float((whole - rest).norm()) <= mechanism.l2_sensitivity / 2 * (1 + 1e-6)
        other = targets.clone()
        other[5] = -7.0
        replaced, _ = joint_vector(model, (features, other), the_plan)
        assert float((whole - replaced).norm()) <= mechanism.l2_sensitivity * (1 + 1e-6)


def test_a_record_that_fills_both_bounds_moves_the_sum_by_the_whole_sensitivity():
    the_plan, model = plan(), network()
    features, targets = records(6)
    targets[5] = 100.0
    whole, mechanism = joint_vector(model, (features, targets), the_plan)
    rest, _ = joint_vector(model, (features[:5], targets[:5]), the_plan)
    assert float((whole - rest).norm()) >= mechanism.l2_sensitivity * (1 - 1e-5)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
def test_a_record_whose_loss_is_not_finite_is_as_good_as_not_there(worst):
    model, (features, targets) = network(), records(5)
    without, _ = joint_vector(model, (features[:4], targets[:4]), plan())
    targets[4] = worst
    assert torch.equal(joint_vector(model, (features, targets), plan())[0], without)


def test_a_loss_counts_from_nothing_to_the_bound():
    losses = torch.tensor([-3.0, 0.5, 1.9, 7.0, math.nan, math.inf])
    model = nn.Linear(1, 1)
    capture = GradientCapture(model)
    private = PrivateStep(capture, plan(noise_multiplier=0.0), KeyedRNG(seed=1, reproducible=True))
    for chunk in split_into_microbatches(np.arange(6), step=0, microbatch_size=4):
        with private.capturing(chunk):
            model(torch.ones(chunk.num_records, 1)).sum().backward()
            private.add_losses(losses[torch.from_numpy(chunk.indices)])
        private.add(chunk)
    private.finish()
    capture.detach()
    assert private.loss_release[0].loss == pytest.approx((0.5 + 1.9 + 2.0) / 8.0)


def test_under_replace_one_the_mean_is_counted_from_half_of_the_bound():
    losses = torch.tensor([-3.0, 0.5, 1.9, 7.0, math.nan, math.inf])
    for size, expected in ((8.0, 1.0 + (-1.0 - 0.5 + 0.9 + 1.0) / 8.0), (4.0, (0.0 + 0.5 + 1.9 + 2.0) / 4.0)):
        model = nn.Linear(1, 1)
        capture = GradientCapture(model)
        the_plan = plan(noise_multiplier=0.0, neighboring_relation="replace_one", expected_batch_size=size)
        private = PrivateStep(capture, the_plan, KeyedRNG(seed=1, reproducible=True))
        (chunk,) = split_into_microbatches(np.arange(6), step=0)
        with private.capturing(chunk):
            model(torch.ones(6, 1)).sum().backward()
            private.add_losses(losses)
        private.add(chunk)
        private.finish()
        capture.detach()
        assert private.loss_release[0].loss == pytest.approx(expected)


def test_chunks_do_not_change_the_released_loss():
    found = [
        one_step(network(), records(7), plan(noise_multiplier=0.0), microbatch_size=size).loss_release[0].loss
        for size in (1, 3, 7)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def looks_like(measured, stddev, draws):
    """Whether `measured` is a standard deviation of `draws` normal values of deviation `stddev`, at four sigma."""
    return abs(measured / stddev - 1) < 4 / math.sqrt(2 * draws)


def own_arithmetic(the_plan, sensitivity):
    """(noise on a gradient entry, noise on the loss sum) that share 1/z² as the curve says, worked out again."""
    precision = 1 / the_plan.noise_multiplier**2
    share = the_plan.loss_release.budget_fraction
    return sensitivity / math.sqrt((1 - share) * precision), the_plan.loss_release.max_loss / math.sqrt(
        share * precision
    )


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_the_gradient_carries_the_noise_that_is_stated_and_another_would_have_been_seen(neighboring_relation, share):
    the_plan = plan(
        neighboring_relation=neighboring_relation, loss_release=LossRelease(max_loss=3.0, budget_fraction=share)
    )
    model, empty = nn.Linear(300, 200), (torch.zeros(0, 300), torch.zeros(0, 200))
    gradient, _ = own_arithmetic(the_plan, 0.5 * (2 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 1))
    one_step(model, empty, the_plan)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) * 8.0
    measured = float(flat.double().square().mean().sqrt())
    assert looks_like(measured, gradient, len(flat))
    assert not looks_like(measured, 0.95 * gradient, len(flat))
    assert not looks_like(measured, 1.05 * gradient, len(flat))
    assert the_plan.step_plan(0).gradient_noise_stddev * 8.0 == pytest.approx(gradient)


@pytest.mark.parametrize(("neighboring_relation", "share"), [("add_or_remove_one", 0.02), ("replace_one", 0.5)])
def test_the_losses_carry_the_noise_that_is_stated_and_another_would_have_been_seen(neighboring_relation, share):
    the_plan = plan(
        neighboring_relation=neighboring_relation, loss_release=LossRelease(max_loss=3.0, budget_fraction=share)
    )
    _, loss = own_arithmetic(the_plan, 0.5)
    draws = 5500
    capture = GradientCapture(nn.Linear(1, 1))
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=7, reproducible=True))
    for step in range(draws):
        for chunk in split_into_microbatches(np.arange(0), step=step, microbatch_size=None):
            with private.capturing(chunk):
                pass
            private.add(chunk)
        private.finish()
    capture.detach()
    # Under replace-one losses are counted from half of the bound, which a batch of nobody is left with.
    center = 1.5 if neighboring_relation == "replace_one" else 0.0
    points = (np.array([point.loss for point in private.loss_release]) - center) * 8.0
    assert all(point.stddev == pytest.approx(loss / 8.0) for point in private.loss_release)
    spread = float(np.sqrt(np.mean(points**2)))
    assert looks_like(spread, loss, draws)
    assert not looks_like(spread, 0.95 * loss, draws)
    assert not looks_like(spread, 1.05 * loss, draws)


@pytest.mark.parametrize("inner", [FlatClipping(), GroupedClipping(by="layer")])
def test_counts_and_losses_together_cost_what_the_step_is_charged_for(inner):
    clipping = QuantileClipping(count_noise=6.0, inner=inner)
    the_plan, model = plan(clipping=clipping), network()
    _, mechanism = joint_vector(model, (torch.zeros(0, 3), torch.zeros(0, 2)), the_plan)
    groups = 1 if isinstance(inner, FlatClipping) else 2
    # What each part costs for itself, in 1/z²; together they are the plan's.
    gradient = (0.5 / mechanism.stddev) ** 2
    counts = groups * (0.5 / 6.0) ** 2
    losses = CURVE.budget_fraction / 1.5**2
    assert gradient + counts + losses == pytest.approx(1 / 1.5**2)


@pytest.mark.parametrize(
    "changes", [{}, {"sample_rate": 1.0}, {"noise_multiplier": LinearSchedule(start=2.0, end=1.0)}]
)
def test_the_bill_is_the_same_with_and_without_a_curve(changes):
    bought, plain = plan(**changes), plan(loss_release=None, **changes)
    assert bought.event() == plain.event()
    assert bought.guarantee() == plain.guarantee()
    assert [bought.step_event(step) for step in range(4)] == [plain.step_event(step) for step in range(4)]
    first = bought.step_plan(0)
    assert first.gradient_noise_stddev == pytest.approx(plain.step_plan(0).gradient_noise_stddev / math.sqrt(0.9))


def test_a_target_is_met_with_the_same_noise_multiplier():
    given = {"target_epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 50, "max_grad_norm": 1.0}
    bought = Plan.for_epsilon(**given, expected_batch_size=10.0, loss_release=CURVE)
    assert bought.noise_multiplier == Plan.for_epsilon(**given, expected_batch_size=10.0).noise_multiplier


def test_a_plan_with_released_losses_survives_json_and_other_fields_are_refused():
    the_plan = plan()
    assert Plan.from_json(the_plan.to_json()) == the_plan
    body = json.loads(the_plan.to_json())
    assert body["schema"] == 1
    without = {name: value for name, value in body.items() if name != "loss_release"}
    for broken in (body | {"schema": 2}, without, body | {"loss_release": {"max_loss": 1.0}}):
        with pytest.raises(InvalidArgument):
            Plan.from_json(json.dumps(broken))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"secure_mode": True}, "secure mode"),
        ({"clipping": AdaClip()}, "AdaClip"),
        ({"clipping": ProjectedClipping(projections=4)}, "ProjectedClipping"),
        (
            {
                "correlated_noise": CorrelatedNoise(
                    strategy=optimize_banded(2, steps=4), participation=CyclicPoisson(groups=2, sample_rate=0.5)
                )
            },
            "correlated noise",
        ),
        ({"loss_release": 2.0}, "float"),
    ],
)
def test_what_can_not_carry_a_curve_is_refused_by_name_when_the_plan_is_made(changes, name):
    with pytest.raises(InvalidArgument, match=name):
        plan(**changes)


@pytest.mark.parametrize(
    "values", [{"max_loss": 0.0}, {"max_loss": 1.0, "budget_fraction": 0.0}, {"max_loss": 1.0, "budget_fraction": 1.0}]
)
def test_a_curve_has_a_bound_and_a_share(values):
    with pytest.raises(InvalidArgument):
        LossRelease(**values)


def test_a_chunk_without_losses_is_refused_and_nothing_of_it_is_released():
    model = network()
    capture = GradientCapture(model)
    private = PrivateStep(capture, plan(), KeyedRNG(seed=1, reproducible=True))
    (chunk,) = split_into_microbatches(np.arange(3), step=0, microbatch_size=None)
    features, targets = records(3)
    with private.capturing(chunk):
        squares(model, features, targets).sum().backward()
    with pytest.raises(NonPrivateStep, match="add_losses"):
        private.add(chunk)
    assert not private.is_open
    capture.detach()


def test_compiled_steps_have_no_losses_and_say_so():
    with pytest.raises(InvalidArgument, match="compile must be False with released losses"):
        fit(network(), squares, records(8), plan(), performance=PerformanceOptions(compile=True), progress=False)


@pytest.mark.parametrize(
    "coupled",
    [
        lambda model, x, y: squares(model, x, y) + 0.1 * len(x),
        lambda model, x, y: squares(model, x, y) + squares(model, x, y).detach().mean(),
    ],
)
def test_a_loss_whose_value_alone_depends_on_other_records_is_refused(coupled):
    with pytest.raises(CoupledRecords):
        fit(network(), coupled, records(8), plan(), progress=False)


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fit_returns_one_value_a_step_and_none_without_a_curve():
    result = fit(network(), squares, records(16), plan(), progress=False)
    assert [point.step for point in result.released_losses] == [0, 1, 2, 3]
    assert fit(network(), squares, records(16), plan(loss_release=None), progress=False).released_losses is None


def test_the_curve_follows_the_true_losses_on_adult():
    adult = data.load_dataset("adult").train
    features, labels = (part[:8000] for part in adult.tensors())
    torch.manual_seed(0)
    model = nn.Linear(features.shape[1], 2)

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    truth = []

    def look(_done):
        with torch.no_grad():
            truth.append(float(loss(model, features, labels).clamp(0, 1.4).mean()))

    look(0)
    the_plan = Plan(
        noise_multiplier=8.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        steps=40,
        expected_batch_size=8000.0,
        delta=1e-5,
        loss_release=LossRelease(max_loss=1.4),
    )
    result = fit(model, loss, (features, labels), the_plan, on_step=look, progress=False)
    gaps = [(point.loss - true) / point.stddev for point, true in zip(result.released_losses, truth, strict=False)]
    assert len(gaps) == 40
    assert max(map(abs, gaps)) < 5
    assert 0.6 < float(np.std(gaps)) < 1.5
    assert result.released_losses[0].stddev < 0.02
    quarters = [point.loss for point in average_adjacent(result.released_losses, 4)]
    assert quarters[-1] < quarters[0] - 0.05


def test_a_users_loss_counts_once():
    features, targets = records(12)
    units = UnitAssignment(unit_ids=np.arange(12) // 3, num_units=4)
    the_plan = plan(
        privacy_unit=PrivacyUnit.USER, sample_rate=1.0, noise_multiplier=1e-2, steps=1, expected_batch_size=4.0
    )
    result = fit(network(), squares, (features, 100 * targets), the_plan, units=units, progress=False)
    assert result.released_losses[0].loss == pytest.approx(2.0, abs=0.1)


def test_a_budget_that_adapts_states_the_noise_of_each_step(tmp_path):
    budget = AdaptiveBudget(epsilon=5.0, choose=lambda step, released: 4.0 + step)
    the_plan, run = plan(sample_rate=1.0), tmp_path / "run"
    result = fit(network(), squares, records(8), the_plan, budget=budget, run_folder=run, progress=False)
    assert verify(run).item("loss curve").status == "pass"
    assert [point.stddev for point in result.released_losses] == pytest.approx(
        [CURVE.stddev(noise_multiplier=4.0 + step, expected_batch_size=8.0) for step in range(4)]
    )


class PowerCut(Exception):
    pass


def cut_off(folder, the_plan, *, at):
    def cut(done):
        if done == at:
            raise PowerCut

    with pytest.raises(PowerCut):
        fit(
            network(),
            squares,
            records(16),
            the_plan,
            run_folder=folder,
            checkpoint_every=2,
            on_step=cut,
            progress=False,
        )


@pytest.mark.parametrize("clipping", [FlatClipping(), QuantileClipping(count_noise=30.0)])
def test_a_resumed_run_goes_on_with_its_curve_and_verifies(tmp_path, clipping):
    the_plan = plan(steps=6, clipping=clipping, noise_multiplier=ExponentialSchedule(start=2.0, end=1.0))
    cut_off(tmp_path / "run", the_plan, at=5)
    assert RunFolder.open(tmp_path / "run").released_losses is None
    result = fit(network(), squares, records(16), the_plan, resume_from=tmp_path / "run", progress=False)
    assert [point.step for point in result.released_losses] == list(range(6))
    stored = RunFolder.open(tmp_path / "run").released_losses
    assert stored.points == result.released_losses
    assert (stored.max_loss, stored.budget_fraction) == (2.0, 0.1)
    found = verify(tmp_path / "run")
    assert found.passed
    assert found.item("loss curve").status == "pass"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["points"][2].__setitem__(2, 0.5),
        lambda body: body["points"].append([9, 1.0, body["points"][0][2]]),
        lambda body: body["points"].append(body["points"][-1]),
        lambda body: body.__setitem__("bound", 4.0),
        lambda body: body.__setitem__("budget_fraction", "much"),
        lambda body: body["points"][0].__setitem__(1, "nan"),
    ],
)
def test_a_curve_that_is_not_the_plans_is_caught(tmp_path, change):
    fit(network(), squares, records(16), plan(), run_folder=tmp_path / "run", progress=False)
    folder = RunFolder.open(tmp_path / "run")
    body = json.loads((folder.path / "loss_curve.json").read_text())
    change(body)
    folder._put_json("loss_curve.json", body)
    assert verify(folder).item("loss curve").status == "fail"


def test_a_curve_that_nobody_bought_is_caught(tmp_path):
    fit(network(), squares, records(16), plan(), run_folder=tmp_path / "one", progress=False)
    fit(network(), squares, records(16), plan(loss_release=None), run_folder=tmp_path / "other", progress=False)
    folder = RunFolder.open(tmp_path / "other")
    assert "loss curve" not in [item.name for item in verify(folder).items]
    folder.write_loss_curve(RunFolder.open(tmp_path / "one").released_losses)
    assert verify(folder).item("loss curve").status == "fail"
