"""Every event of a sampler can be trained: by `fit` and in custom loops, charged, verified, broken off and resumed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine, fit
from sordino.accounting import epsilon
from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import (
    Gaussian,
    NoOp,
    RandomAllocation,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
)
from sordino.ledger import Ledger
from sordino.randomness import KeyedRNG
from sordino.research.projections import ProjectedClipping
from sordino.runs import RunFolder
from sordino.schedules import ExponentialSchedule
from sordino.training import Plan
from sordino.training.adaptive_budget import AdaptiveBudget, AdaptiveBudgetRun
from sordino.verification import verify

SIZE, BATCH = 40, 8
SCHEMES = ("without_replacement", "with_replacement", "balls_in_bins")
ONE = Gaussian(noise_multiplier=2.0)
EVENTS = {
    "without_replacement": SampledWithoutReplacement(dataset_size=SIZE, sample_size=BATCH, event=ONE),
    "with_replacement": SampledWithReplacement(dataset_size=SIZE, sample_size=BATCH, event=ONE),
    "balls_in_bins": RandomAllocation(steps=5, participations=1, epochs=1, event=ONE),
}


def plan(sampling: str | None, **more) -> Plan:
    options = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 1.0,
        "sample_rate": BATCH / SIZE,
        "steps": 7,
        "expected_batch_size": float(BATCH),
        "delta": 1e-5,
        "neighboring_relation": "replace_special" if sampling == "balls_in_bins" else "replace_one",
        "sampling": sampling,
        "dataset_size": SIZE if sampling in SCHEMES[:2] else None,
    }
    return Plan(**options | more)


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(3)
    features = torch.randn(SIZE, 3, generator=source)
    return TensorDataset(features, (features[:, 0] > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def loss(module, features, labels):
    return nn.functional.cross_entropy(module(features), labels, reduction="none")


def trained(the_plan: Plan, **more):
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, fit(module, loss, data(), the_plan, optimizer=optimizer, progress=False, **more)


def seeded() -> KeyedRNG:
    return KeyedRNG(seed=5, reproducible=True)


@pytest.mark.parametrize("sampling", SCHEMES)
def test_the_plan_charges_the_samplers_event_and_says_so(sampling):
    the_plan = plan(sampling)
    uses = 2 if sampling == "balls_in_bins" else 7
    assert the_plan.step_event() == EVENTS[sampling]
    assert the_plan.event() == SelfComposed(event=EVENTS[sampling], count=uses)
    stated = the_plan.guarantee()
    assert stated.sampler == the_plan.sampler.describe()
    assert stated.epsilon == epsilon(the_plan.event(), 1e-5, neighboring_relation=the_plan.neighboring_relation).upper
    assert Plan.from_json(the_plan.to_json()) == the_plan
    assert not replace(the_plan, steps=9).poisson_sampling


@pytest.mark.parametrize("sampling", SCHEMES)
def test_a_step_is_the_noisy_clipped_sum_of_the_drawn_records_over_the_public_number(sampling):
    # Without noise the step is the sum over exactly the sampler's batch, repeats included.
    the_plan = plan(sampling, steps=1, noise_multiplier=0.0)
    drawn = the_plan.sampler.draw(dataset_size=SIZE, step=0, rng=seeded())
    module, _ = trained(the_plan, rng=seeded())
    start = model()
    features, labels = data().tensors
    total = torch.zeros(2, 4)
    for index in drawn.tolist():
        start.zero_grad()
        loss(start, features[index : index + 1], labels[index : index + 1]).sum().backward()
        gradient = torch.cat([start.weight.grad, start.bias.grad[:, None]], dim=1)
        total += gradient * min(1.0, 1.0 / float(gradient.norm()))
    moved = torch.cat([model().weight - module.weight, (model().bias - module.bias)[:, None]], dim=1)
    assert torch.allclose(moved, 0.1 * total / BATCH, atol=2e-6)


@pytest.mark.parametrize("sampling", SCHEMES)
def test_a_run_is_charged_to_the_ledger_and_verified(sampling, tmp_path):
    account = Ledger(tmp_path / "ledger.db").declare(
        "records",
        epsilon=60.0,
        delta=1e-4,
        neighboring_relation=plan(sampling).neighboring_relation,
        policy="pld" if sampling == "balls_in_bins" else "renyi",
    )
    the_plan = plan(sampling)
    _, result = trained(the_plan, run_folder=tmp_path / "run", ledger=account)
    assert account.event() == the_plan.event()
    folder = RunFolder.open(tmp_path / "run")
    events = [line.event for line in folder.entries() if hasattr(line, "event")]
    if sampling == "balls_in_bins":
        assert [isinstance(event, NoOp) for event in events] == [False, *[True] * 4, False, True]
    assert {event for event in events if not isinstance(event, NoOp)} == {EVENTS[sampling]}
    found = verify(tmp_path / "run")
    assert found.passed, found
    assert result.guarantee.sampler == the_plan.sampler.describe()


@pytest.mark.parametrize("sampling", SCHEMES)
@pytest.mark.parametrize("steps", [0, 7])
def test_a_custom_loop_draws_and_charges_the_same_events(sampling, steps):
    module = model()
    engine = PrivacyEngine(seed=2, reproducible=True)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        plan=plan(sampling, steps=steps),
    )
    sizes = []
    for _ in range(2):
        for features, labels in loader:
            sizes.append(len(features))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(features), labels).backward()
            optimizer.step()
    taken = steps or 10
    assert len(sizes) == taken
    uses = 2 if sampling == "balls_in_bins" else taken
    wanted = SelfComposed(event=EVENTS[sampling], count=uses)
    relation = plan(sampling).neighboring_relation
    assert engine.get_epsilon(1e-5) == pytest.approx(
        epsilon(wanted, 1e-5, neighboring_relation=relation).upper, rel=1e-9
    )
    if sampling != "balls_in_bins":
        assert set(sizes) == {BATCH}
    elif not steps:
        assert sum(sizes[:5]) >= SIZE  # an empty batch comes as synthetic records


def test_a_loop_that_breaks_an_epoch_off_pays_for_the_next_one_as_a_whole():
    module = model()
    engine = PrivacyEngine(seed=2, reproducible=True)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH),
        plan=plan("balls_in_bins", steps=0),
    )
    for _ in range(3):
        for number, (features, labels) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(features), labels).backward()
            optimizer.step()
            if number == 1:
                break
    wanted = epsilon(
        SelfComposed(event=EVENTS["balls_in_bins"], count=3), 1e-5, neighboring_relation="replace_special"
    ).upper
    assert engine.get_epsilon(1e-5) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [{}, {"sampling": None, "poisson_sampling": False, "neighboring_relation": "replace_one"}],
    ids=["balls in bins", "shuffled"],
)
def test_a_checkpoint_in_the_middle_of_an_epoch_is_followed_by_an_epoch_of_its_own(options, tmp_path):
    # What is left of the epoch is dealt again, and the next epoch begins inside of the loop's next pass: each is paid.
    def private():
        module, engine = model(), PrivacyEngine()
        return (
            engine,
            *engine.make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=DataLoader(data(), batch_size=BATCH),
                plan=plan(**{"sampling": "balls_in_bins", "steps": 10} | options),
            ),
        )

    def take(module, optimizer, loader, most):
        for number, (features, labels) in enumerate(loader, start=1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(features), labels).backward()
            optimizer.step()
            if number == most:
                return

    first, *parts = private()
    take(*parts, most=2)
    first.save_checkpoint(path=tmp_path / "a.safetensors", module=parts[0])
    second, *parts = private()
    second.load_checkpoint(path=tmp_path / "a.safetensors", module=parts[0])
    take(*parts, most=5)
    the_plan = plan(**{"sampling": "balls_in_bins"} | options)
    paid = epsilon(
        SelfComposed(event=the_plan.step_event(), count=3), 1e-5, neighboring_relation=the_plan.neighboring_relation
    ).upper
    assert second.get_epsilon(1e-5) >= paid * (1 - 1e-9)


@pytest.mark.parametrize("sampling", SCHEMES)
def test_a_run_that_was_broken_off_goes_on_and_a_broken_epoch_is_paid_twice(sampling, tmp_path):
    class Stop(Exception):
        pass

    def stop(step):
        if step == 3:
            raise Stop

    the_plan = plan(sampling)
    with pytest.raises(Stop):
        trained(the_plan, run_folder=tmp_path / "run", checkpoint_every=1, on_step=stop)
    _, result = trained(the_plan, resume_from=tmp_path / "run")
    assert verify(tmp_path / "run").passed
    # Steps 0-4 and 5-6 are two epochs; the part of the first that came after the break is an epoch of its own.
    uses = 3 if sampling == "balls_in_bins" else 7
    wanted = epsilon(
        SelfComposed(event=EVENTS[sampling], count=uses), 1e-5, neighboring_relation=the_plan.neighboring_relation
    ).upper
    assert result.guarantee.epsilon >= wanted * (1 - 1e-9)
    events = [line.event for line in RunFolder.open(tmp_path / "run").entries() if hasattr(line, "event")]
    assert sum(not isinstance(event, NoOp) for event in events) == uses


def test_a_transcript_of_another_sampler_than_the_plans_is_refused(tmp_path):
    trained(plan("without_replacement"), run_folder=tmp_path / "run")
    file = tmp_path / "run" / "plan.json"
    for change in (
        ('"sampling": "without_replacement"', '"sampling": "with_replacement"'),
        ('"dataset_size": 40', '"dataset_size": 80'),
    ):
        original = file.read_text()
        assert change[0] in original
        file.write_text(original.replace(*change))
        assert not verify(tmp_path / "run").passed
        file.write_text(original)


@pytest.mark.parametrize(
    ("sampling", "more", "error", "said"),
    [
        ("without_replacement", {"neighboring_relation": "add_or_remove_one"}, UnknownSampler, "replace_one"),
        ("with_replacement", {"neighboring_relation": "add_or_remove_one"}, UnknownSampler, "replace_one"),
        ("without_replacement", {"dataset_size": None}, InvalidArgument, "dataset_size must be the number"),
        ("balls_in_bins", {"dataset_size": SIZE}, InvalidArgument, "dataset_size must be None"),
        ("without_replacement", {"sample_rate": 0.21}, InvalidArgument, "Pass sample_rate=8 / 40"),
        ("without_replacement", {"sample_rate": 0.001}, InvalidArgument, "Pass sample_rate=1 / 40"),
        ("chance", {}, InvalidArgument, "sampling must be one of"),
        (
            "without_replacement",
            {"noise_multiplier": ExponentialSchedule(start=4.0, end=2.0)},
            UnknownSampler,
            "a schedule",
        ),
        ("balls_in_bins", {"noise_multiplier": ExponentialSchedule(start=4.0, end=2.0)}, UnknownSampler, "a schedule"),
        (
            "without_replacement",
            {"clipping": ProjectedClipping(projections=8), "neighboring_relation": "replace_special"},
            UnknownSampler,
            "estimated norms",
        ),
    ],
)
def test_plans_that_have_no_guarantee_are_refused_with_the_remedy(sampling, more, error, said):
    with pytest.raises(error, match=said):
        plan(sampling, **more)


@pytest.mark.parametrize("sampling", ["without_replacement", "balls_in_bins"])
def test_a_budget_that_adapts_is_refused(sampling):
    with pytest.raises(InvalidArgument, match="budget must be None"):
        AdaptiveBudgetRun(AdaptiveBudget(epsilon=1.0, choose=lambda _step, _released: 2.0), plan(sampling))


@pytest.mark.parametrize("where", ["fit", "engine"])
def test_data_of_another_size_are_refused_before_anything_is_charged(where, tmp_path):
    account = Ledger(tmp_path / "ledger.db").declare(
        "records", epsilon=60.0, delta=1e-4, neighboring_relation="replace_one"
    )
    wrong = plan("without_replacement", dataset_size=80, sample_rate=8 / 80)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def start():
        if where == "fit":
            return trained(wrong, ledger=account)
        engine = PrivacyEngine(ledger=account)
        loader = DataLoader(data(), batch_size=BATCH)
        return engine.make_private(module=module, optimizer=optimizer, data_loader=loader, plan=wrong)

    with pytest.raises(InvalidArgument, match="dataset_size must be"):
        start()
    assert isinstance(account.event(), NoOp)


def test_the_noise_of_a_target_is_the_least_and_replacing_costs_no_more_than_zeroing_out():
    asked = {
        "target_epsilon": 3.0,
        "delta": 1e-5,
        "sample_rate": 100 / 10_000,
        "steps": 500,
        "max_grad_norm": 1.0,
        "expected_batch_size": 100.0,
        "sampling": "without_replacement",
        "dataset_size": 10_000,
    }
    found = Plan.for_epsilon(neighboring_relation="replace_one", **asked)
    assert 2.99 < found.guarantee().epsilon <= 3.0
    assert replace(found, noise_multiplier=float(found.noise_multiplier) * 0.99).guarantee().epsilon > 3.0
    # For zero-out a displaced record counts too, twice the clipping norm away: the same noise in the end.
    zeroed = Plan.for_epsilon(neighboring_relation="replace_special", **asked)
    assert zeroed.step_plan(0).gradient_noise_stddev == pytest.approx(
        found.step_plan(0).gradient_noise_stddev, rel=1e-3
    )


def test_neighbors_that_zero_a_record_out_or_replace_it_draw_the_same_batches():
    for sampling in SCHEMES:
        sampler = plan(sampling).sampler
        one, other = (
            np.concatenate(list(sampler.batches(dataset_size=SIZE, first_step=0, steps=10, rng=seeded())))
            for _ in range(2)
        )
        assert (one == other).all()
    # Balls in bins also under add or remove: each of the other records falls where it falls.
    bins = plan("balls_in_bins").sampler
    more = list(bins.batches(dataset_size=SIZE + 1, first_step=0, steps=5, rng=seeded()))
    fewer = list(bins.batches(dataset_size=SIZE, first_step=0, steps=5, rng=seeded()))
    assert [batch[batch < SIZE].tolist() for batch in more] == [batch.tolist() for batch in fewer]
