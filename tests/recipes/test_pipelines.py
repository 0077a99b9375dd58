"""Pipelines: what they charge, in which order, what their folders say, and that a broken one would be noticed."""

import json

import pytest
from torch import nn

from patterned import DELTA, made_up
from sordino import accounting
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Gaussian, PoissonSampled, compose, to_dict
from sordino.ledger import Ledger
from sordino.randomness import KeyedRNG
from sordino.recipes import RECIPES, PreparedRecipe, Recipe, Stage, StageCharger, get_recipe
from sordino.recipes.stages import FittedModule, charge_stage, training_stage
from sordino.report import write_report
from sordino.runs import RunFolder
from sordino.training import Plan
from sordino.verification import verify


def two_stages(fit):
    """A pipeline that plans two Gaussians and does with them what `fit` does."""
    stages = (
        Stage(name="first", charges=(Gaussian(noise_multiplier=3.0),)),
        Stage(name="second", charges=(Gaussian(noise_multiplier=5.0),) * 2),
    )

    def run(records, payment):
        fit(stages, records, payment)
        return FittedModule(module=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))

    return Recipe(
        name="two",
        description="two stages",
        data_sets=("patterns",),
        prepare=lambda task: PreparedRecipe(stages=stages, fit=run, training={}),
        constants="made up",
        chosen_on=(),
        guarantee="two Gaussians",
        settings=("fixed",),
    )


def pays(stages, records, payment):
    for stage in stages:
        charge_stage(stage, payment)


# --- the frame -------------------------------------------------------------------------------------------------------


def test_the_guarantee_is_that_of_all_stages_together():
    fitted = two_stages(pays).fit(made_up(), setting="fixed", delta=DELTA)
    # μ² of Gaussians add up: 1/9 + 2/25.
    one = Gaussian(noise_multiplier=(1 / 9 + 2 / 25) ** -0.5)
    assert fitted.guarantee.epsilon == pytest.approx(accounting.epsilon(one, DELTA).upper, rel=1e-9)
    assert fitted.events == (Gaussian(noise_multiplier=3.0), *[Gaussian(noise_multiplier=5.0)] * 2)
    assert fitted.complete
    assert "the size of the dataset is treated as public" in fitted.guarantee.caveats


def test_a_charge_that_was_not_planned_is_refused_before_anything_is_read():
    def other(stages, records, payment):
        payment.charge(Gaussian(noise_multiplier=2.0))

    def twice(stages, records, payment):
        pays(stages, records, payment)
        payment.charge(Gaussian(noise_multiplier=5.0))

    def turned_round(stages, records, payment):
        pays(stages[::-1], records, payment)

    for fit in (other, twice, turned_round):
        with pytest.raises(InvalidArgument, match="that were planned"):
            two_stages(fit).fit(made_up(), setting="fixed", delta=DELTA)


def test_a_pipeline_that_stops_early_guarantees_what_it_did_and_says_so():
    def first_only(stages, records, payment):
        charge_stage(stages[0], payment)

    fitted = two_stages(first_only).fit(made_up(), setting="fixed", delta=DELTA)
    assert not fitted.complete
    spent = accounting.epsilon(Gaussian(noise_multiplier=3.0), DELTA).upper
    assert fitted.guarantee.epsilon == pytest.approx(spent, rel=1e-9)


def test_a_pipeline_that_would_cost_more_than_asked_for_is_refused():
    with pytest.raises(InvalidArgument, match=r"at most epsilon=0\.1"):
        two_stages(pays).fit(made_up(), epsilon=0.1, delta=DELTA)


@pytest.mark.parametrize("asked", [{}, {"epsilon": 1.0, "setting": "fixed"}, {"setting": "none of them"}])
def test_either_a_target_or_a_setting_is_asked_for(asked):
    with pytest.raises(InvalidArgument, match=r"epsilon must be given|setting must be"):
        two_stages(pays).fit(made_up(), delta=DELTA, **asked)


def test_a_delta_that_would_release_whole_records_is_refused():
    with pytest.raises(InvalidArgument, match="below 1 / number of records"):
        two_stages(pays).fit(made_up(), setting="fixed", delta=0.01)


def test_one_charge_on_the_account_pays_for_every_line(tmp_path):
    ledger = Ledger(tmp_path / "privacy.db")
    account = ledger.declare("patterns", epsilon=8.0, delta=DELTA)
    fitted = two_stages(pays).fit(made_up(), setting="fixed", delta=DELTA, ledger=account, run_folder=tmp_path / "run")
    (charge,) = [entry for entry in account.history() if entry.kind == "charge"]
    assert charge.event == compose(fitted.events)
    assert verify(tmp_path / "run", ledger=tmp_path / "privacy.db").item("ledger").status == "pass"


def test_over_the_budget_nothing_is_read_and_no_folder_is_left(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("patterns", epsilon=0.5, delta=DELTA)
    touched = []

    def touches(stages, records, payment):
        touched.append(records)

    with pytest.raises(BudgetExceeded):
        two_stages(touches).fit(made_up(), setting="fixed", delta=DELTA, ledger=account, run_folder=tmp_path / "run")
    assert not touched
    assert not (tmp_path / "run").exists()


def test_a_failure_before_the_first_charge_leaves_no_folder_and_a_later_one_leaves_what_was_charged(tmp_path):
    def fails(stages, records, payment):
        raise RuntimeError

    def fails_later(stages, records, payment):
        charge_stage(stages[0], payment)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        two_stages(fails).fit(made_up(), setting="fixed", delta=DELTA, run_folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError):
        two_stages(fails_later).fit(made_up(), setting="fixed", delta=DELTA, run_folder=tmp_path / "some")
    assert RunFolder.open(tmp_path / "some").event() == Gaussian(noise_multiplier=3.0)


def test_a_transcript_of_stages_holds_together_and_makes_a_report(tmp_path):
    two_stages(pays).fit(made_up(), setting="fixed", delta=DELTA, run_folder=tmp_path / "run")
    found = verify(tmp_path / "run")
    assert found.passed
    assert found.item("guarantee").status == "pass"
    assert found.item("second accountant").status in {"pass", "not checked"}
    run = RunFolder.open(tmp_path / "run")
    write_report(run)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "first, second" in page
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [(stage["name"], stage["charges"][0]["count"]) for stage in plan["stages"]] == [("first", 1), ("second", 2)]


def test_a_changed_transcript_does_not_pass(tmp_path):
    two_stages(pays).fit(made_up(), setting="fixed", delta=DELTA, run_folder=tmp_path / "run")
    file = tmp_path / "run" / "transcript.jsonl"
    text = file.read_text()
    assert text.count("5.0") == 2 + 1
    file.write_text(text.replace("5.0", "9.0"))
    assert not verify(tmp_path / "run").passed


def test_a_plan_with_another_stage_does_not_pass(tmp_path):
    """The folder is made again around the changed plan, so that its chain of hashes holds."""
    two_stages(pays).fit(made_up(), setting="fixed", delta=DELTA, run_folder=tmp_path / "run")
    assert (
        verify(tmp_path / "run").item("plan").detail
        == "3 of 3 charges, in order, are the plan's: first (1), second (2)"
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    plan["stages"][1]["charges"][0]["count"] = 1
    for stages, words in ((plan["stages"], "beyond the 2"), (plan["stages"][::-1], "another event"), ([3], "garbles")):
        folder = tmp_path / f"run-{len(words)}"
        with RunFolder.create(folder, plan=json.dumps(plan | {"stages": stages})) as run:
            for number, line in enumerate(RunFolder.open(tmp_path / "run")):
                run.append(step=number, event=line.event, epsilon=line.epsilon)
        item = verify(folder).item("plan")
        assert item.status == "fail"
        assert words in item.detail


def test_a_training_stage_must_charge_what_its_own_plan_asks_for(tmp_path):
    plan = Plan(
        noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.5, steps=3, expected_batch_size=300.0, delta=DELTA
    )
    stage = training_stage(plan).to_dict()
    body = {"stages": [stage], "delta": DELTA, "neighboring_relation": "add_or_remove_one", "privacy_unit": "record"}

    def written(name, charged):
        with RunFolder.create(tmp_path / name, plan=json.dumps(body)) as run:
            for number, event in enumerate(charged):
                run.append(step=number, event=event, epsilon=None)
        return verify(tmp_path / name).item("plan")

    assert written("right", [plan.step_event()] * 3).status == "pass"
    cheaper = PoissonSampled(sample_rate=0.5, event=Gaussian(noise_multiplier=8.0))
    stage["charges"] = [{"event": to_dict(cheaper), "count": 3}]
    assert "its own plan" in written("cheaper", [cheaper] * 3).detail


def test_a_payment_is_a_transcript_for_fit():
    payment = StageCharger([Gaussian(noise_multiplier=1.0)], rng=KeyedRNG())
    payment.append(step=0, event=Gaussian(noise_multiplier=1.0), epsilon=1.0)
    assert payment.complete
    with pytest.raises(InvalidArgument):
        payment.append(step=1, event=Gaussian(noise_multiplier=1.0), epsilon=1.0)


# --- every pipeline of the list ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_pipeline_says_what_it_is(name):
    pipeline = get_recipe(name)
    assert pipeline.name == name
    assert all((pipeline.description, pipeline.data_sets, pipeline.constants, pipeline.guarantee))


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(InvalidArgument, match="pca-mlp"):
        get_recipe("nothing")
