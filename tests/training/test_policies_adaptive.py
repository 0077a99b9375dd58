"""Noise chosen on the way: the filter is asked before the batch is drawn, and its budget is never exceeded."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from sordino import accounting, fit
from sordino.clipping import (
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import ApproximateDP, Composed, Gaussian, PoissonSampled, ZeroConcentratedDP
from sordino.ledger import Ledger
from sordino.mechanisms.correlated import CyclicPoisson, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.training import AdaptiveBudget, CorrelatedNoise, Plan, StepParameters, UnitAssignment
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.charging import PlannedCharges
from sordino.training.private_run import PrivateRun

DATA = torch.randn(60, 3), torch.zeros(60).long()


def plan(**changes):
    values = {
        "noise_multiplier": 10.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1.0,
        "steps": 50,
        "expected_batch_size": 60.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


class Lines:
    """A transcript in memory."""

    def __init__(self):
        self.events, self.epsilons = [], []

    def append(self, *, step, event, epsilon):
        assert step == len(self.events)
        self.events.append(event)
        self.epsilons.append(epsilon)


# Golden: ρ of (1, 1e-5) is 0.0305566, a step of σ = 10 costs 0.005; μ of (1, 1e-5) is 1/3.730632 (analytic Gaussian).
def drawn(adaptive, *, dataset_size, steps, rng=None):
    """The batches of a run under a budget that adapts."""
    the_plan = plan(steps=steps)
    run = PrivateRun(
        the_plan,
        rng=KeyedRNG() if rng is None else rng,
        charges=PlannedCharges(the_plan, adaptive=adaptive),
        adaptive=adaptive,
    )
    return list(run.batches(dataset_size=dataset_size))


@pytest.mark.parametrize(("name", "steps"), [("zcdp", 6), ("gaussian", 7), ("auto", 7)])
def test_at_noise_ten_the_budget_of_one_admits_six_steps_by_zcdp_and_seven_by_gdp(name, steps):
    asked, lines = [], Lines()

    def choose(step, released):
        asked.append((step, released.remaining))
        return 10.0

    budget = AdaptiveBudget(epsilon=1.0, choose=choose, filter=name)
    model = nn.Linear(3, 2)
    result = fit(model, losses, DATA, plan(), budget=budget, transcript=lines, progress=False)
    assert (result.steps, result.charged_steps, result.budget_exhausted) == (steps, steps, True)
    assert [step for step, _ in asked] == list(range(steps + 1)), "the next step was asked for, and refused"
    assert lines.events == [Gaussian(noise_multiplier=10.0)] * steps
    assert set(lines.epsilons) == {1.0}
    assert asked[0][1] == 1.0
    assert asked[-1][1] == pytest.approx(
        1 - steps * (0.005 / 0.0305565952 if name == "zcdp" else 0.01 * 3.730631635**2)
    )
    assert (result.guarantee.epsilon, result.guarantee.delta) == (1.0, 1e-5)
    assert result.guarantee.sampler == "full batches"
    assert ("zCDP" if name == "zcdp" else "Gaussian") in result.guarantee.accountant
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), "the last model is kept"


def test_a_run_within_its_budget_takes_all_its_steps():
    result = fit(
        nn.Linear(3, 2), losses, DATA, plan(steps=4), progress=False,
        budget=AdaptiveBudget(epsilon=1.0, choose=lambda step, released: 20.0 - step),
    )  # fmt: skip
    assert (result.steps, result.budget_exhausted, result.guarantee.epsilon) == (4, False, 1.0)


def test_a_choice_sees_the_last_private_gradient_and_nothing_else():
    seen = []

    def choose(step, released):
        seen.append(released.last_gradient_norm)
        return 10.0 if released.last_gradient_norm is None else 30.0

    fit(nn.Linear(300, 200), lambda model, x: model(x).sum(1), (torch.zeros(9, 300),), plan(steps=3), progress=False,
        budget=AdaptiveBudget(epsilon=1.0, choose=choose))  # fmt: skip
    assert seen[0] is None
    noise = math.sqrt(300 * 200 + 200) / 60
    assert seen[1] == pytest.approx(10 * noise, rel=0.05)
    assert seen[2] == pytest.approx(30 * noise, rel=0.05)


@pytest.mark.parametrize(
    "clipping",
    [
        FlatClipping(),
        AutomaticClipping(),
        PsacClipping(),
        GlobalClipping(threshold=2.0),
        GroupedClipping(by="parameter"),
        QuantileClipping(count_noise=60.0),
    ],
    ids=lambda clipping: clipping.describe(),
)
@pytest.mark.parametrize(
    "neighboring_relation", list(NeighboringRelation), ids=lambda neighboring_relation: neighboring_relation.value
)
@pytest.mark.parametrize("owner", [None, [0, 0, 1, 2, 2, 2, 4, 4, 4]], ids=["records", "users"])
def test_each_step_has_the_noise_that_was_chosen_under_every_clipping(clipping, neighboring_relation, owner):
    norms, chosen = [], [20.0, 30.0]

    def choose(step, released):
        norms.append(released.last_gradient_norm)
        return StepParameters(noise_multiplier=chosen[min(step, 1)], max_grad_norm=0.5)

    the_plan = plan(
        clipping=clipping,
        neighboring_relation=neighboring_relation,
        steps=3,
        privacy_unit="record" if owner is None else "user",
    )
    fit(
        nn.Linear(300, 200),
        lambda model, x: 1e-3 * model(x).sum(1),
        (torch.zeros(9, 300),),
        the_plan,
        units=None if owner is None else UnitAssignment(unit_ids=owner, num_units=5),
        budget=AdaptiveBudget(epsilon=4.0, choose=choose),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        progress=False,
    )
    for norm, multiplier in zip(norms[1:], chosen, strict=True):
        measured = norm * 60 / math.sqrt(300 * 200 + 200) / (0.5 * neighboring_relation.sensitivity_factor)
        cost = measured**-2
        if isinstance(clipping, QuantileClipping):
            cost += 0.25 * (neighboring_relation.sensitivity_factor / clipping.count_noise) ** 2
        assert cost**-0.5 == pytest.approx(multiplier, rel=0.03)
        if isinstance(clipping, QuantileClipping):
            break  # Its bound has moved by the second step.


@pytest.mark.parametrize("name", ["zcdp", "gaussian", "renyi"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "neighboring_relation", list(NeighboringRelation), ids=lambda neighboring_relation: neighboring_relation.value
)
def test_no_sequence_of_choices_gets_past_the_budget(name, seed, neighboring_relation):
    rate = 0.2 if name == "renyi" else 1.0
    generator = np.random.default_rng(seed)

    def choose(step, released):
        greedy = (
            generator.choice([0.3, 1.0, 3.0, 10.0, 100.0]) if released.remaining > 0.1 else generator.uniform(1, 60)
        )
        return StepParameters(noise_multiplier=greedy, sample_rate=generator.uniform(0.01, 0.5) if rate < 1 else None)

    run = AdaptiveBudgetRun(
        AdaptiveBudget(epsilon=2.0, choose=choose, filter=name),
        plan(sample_rate=rate, neighboring_relation=neighboring_relation),
    )
    taken = drawn(run, dataset_size=30, steps=40)
    events = [run.charged_at(step) for step in range(len(taken))]
    if events:
        # A fixed sequence with the same events is private by plain composition: an independent accountant agrees.
        assert (
            accounting.epsilon(Composed(events=tuple(events)), 1e-5, neighboring_relation=neighboring_relation).upper
            <= 2.0
        )
    assert run.is_spent == (len(taken) < 40)


def test_a_step_is_refused_before_its_batch_is_drawn():
    class Watched(KeyedRNG):
        drawn = 0

        def stream(self, *args, **kwargs):
            Watched.drawn += 1
            return super().stream(*args, **kwargs)

    run = AdaptiveBudgetRun(AdaptiveBudget(epsilon=0.5, choose=lambda *_: 0.1), plan(sample_rate=0.5))
    assert drawn(run, dataset_size=30, steps=40, rng=Watched()) == []
    assert run.is_spent
    assert Watched.drawn == 0


def test_rates_and_bounds_may_be_chosen_under_the_renyi_filter():
    lines = Lines()
    budget = AdaptiveBudget(
        epsilon=3.0,
        choose=lambda step, released: StepParameters(
            noise_multiplier=4.0, max_grad_norm=0.5, sample_rate=0.1 + 0.05 * step
        ),
    )
    result = fit(nn.Linear(3, 2), losses, DATA, plan(sample_rate=0.1, steps=5), budget=budget, transcript=lines,
                 progress=False)  # fmt: skip
    rates = [event.sample_rate for event in lines.events]
    assert rates == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert "Rényi filter" in result.guarantee.accountant
    run = AdaptiveBudgetRun(budget, plan(sample_rate=0.1, steps=5))
    assert len(drawn(run, dataset_size=9, steps=2)) == 2
    assert run.step_plan(1).expected_batch_size == pytest.approx(90.0)
    assert run.step_plan(1).sensitivity == 0.5


def test_the_filter_of_sampled_batches_uses_the_order_that_lasts_longest_for_the_plan():
    run = AdaptiveBudgetRun(
        AdaptiveBudget(epsilon=2.0, choose=lambda *_: 2.0), plan(sample_rate=0.05, noise_multiplier=2.0)
    )
    taken = len(drawn(run, dataset_size=1, steps=5000))
    step = PoissonSampled(sample_rate=0.05, event=Gaussian(noise_multiplier=2.0))
    best = accounting.epsilon(Composed(events=(step,) * taken), 1e-5).upper
    assert 1.6 < best <= 2.0, "within what Rényi accounting loses against the exact value"


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"filter": "gaussian"}, {"sample_rate": 0.5}, "filter must be renyi with sampled batches"),
        ({"filter": "zcdp"}, {"sample_rate": 0.5}, "filter must be renyi with sampled batches"),
        ({}, {"poisson_sampling": False, "neighboring_relation": "replace_one"}, "None with shuffled epochs"),
        (
            {},
            {
                "sample_rate": 0.1,
                "correlated_noise": CorrelatedNoise(
                    strategy=optimize_banded(2, steps=50), participation=CyclicPoisson(groups=2, sample_rate=0.1)
                ),
            },
            "correlated noise",
        ),
        ({"choose": lambda *_: 0.0}, {}, "noise_multiplier must be"),
        ({"choose": lambda *_: math.nan}, {}, "noise_multiplier must be"),
        ({"choose": lambda *_: StepParameters(noise_multiplier=9.0, sample_rate=0.5)}, {}, "sample_rate must stay 1"),
    ],
)
def test_unsound_combinations_are_refused_by_name(options, changes, words):
    budget = AdaptiveBudget(**{"epsilon": 1.0, "choose": lambda *_: 10.0, **options})
    with pytest.raises(InvalidArgument, match=words):
        fit(nn.Linear(3, 2), losses, DATA, plan(**changes), budget=budget, progress=False)


def test_a_filter_that_is_none_and_a_delta_that_is_not_the_plans_are_refused():
    with pytest.raises(InvalidArgument, match="filter must be one of"):
        AdaptiveBudget(epsilon=1.0, choose=lambda *_: 10.0, filter="pld")
    with pytest.raises(InvalidArgument, match="delta must be the plan's"):
        AdaptiveBudgetRun(AdaptiveBudget(epsilon=1.0, choose=lambda *_: 10.0, delta=1e-6), plan())


def test_a_ledger_holds_the_whole_budget_from_the_start(tmp_path):
    ledger = Ledger(tmp_path / "privacy.db")
    for name, sampled, event in (
        ("gaussian", 1.0, Gaussian(noise_multiplier=3.7306316)),
        ("zcdp", 1.0, ZeroConcentratedDP(rho=0.0305565952)),
        ("renyi", 0.1, ApproximateDP(epsilon=1.0, delta=1e-5)),
    ):
        budget = AdaptiveBudget(epsilon=1.0, choose=lambda *_: 30.0, filter=name)
        made = AdaptiveBudgetRun(budget, plan(sample_rate=sampled)).event()
        assert accounting.epsilon(made, 1e-5).upper == pytest.approx(accounting.epsilon(event, 1e-5).upper, rel=1e-5)
        assert accounting.epsilon(made, 1e-5).upper <= 1.0 + 1e-9
        room = (1.9, 1e-4) if name == "renyi" else (1.2, 3e-5)
        account = ledger.declare(name, epsilon=room[0], delta=room[1])
        fit(nn.Linear(3, 2), losses, DATA, plan(sample_rate=sampled, steps=2), budget=budget, ledger=account,
            progress=False)  # fmt: skip
        assert account.spent().epsilon > 0.5, "two steps alone would be a tenth of it"
        with pytest.raises(BudgetExceeded):
            fit(nn.Linear(3, 2), losses, DATA, plan(sample_rate=sampled, steps=2), budget=budget, ledger=account,
                progress=False)  # fmt: skip


def test_the_unit_and_relation_of_the_plan_are_in_the_guarantee():
    result = fit(
        nn.Linear(3, 2), losses, DATA, plan(steps=1, privacy_unit="user", neighboring_relation="replace_one"),
        budget=AdaptiveBudget(epsilon=1.0, choose=lambda *_: 30.0), progress=False,
    )  # fmt: skip
    assert result.guarantee.privacy_unit is PrivacyUnit.USER
    assert result.guarantee.neighboring_relation is NeighboringRelation.REPLACE_ONE
    assert "every record is taken to be all that its user gave" in result.guarantee.caveats
