"""One account for everything that reads a dataset: preprocessing, estimators, `fit`, engines, searches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import accounting
from sordino.definitions import PrivacyUnit
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.estimators import GaussianNB, LogisticRegression, StandardScaler
from sordino.events import PoissonSampled, SelfComposed, compose
from sordino.ledger import Account
from sordino.runs import RunFolder
from sordino.training.charging import BlockCharger
from sordino.training.engine import PrivacyEngine
from sordino.training.fit import fit
from sordino.training.plan import Plan

PLAN = Plan(
    noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.1, steps=40, expected_batch_size=6.0, delta=1e-5
)  # fmt: skip
X, Y = torch.zeros(60, 3), torch.zeros(60).long()


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train(plan=PLAN, data=(X, Y), **options):
    return fit(nn.Linear(3, 2), loss, data, plan, progress=False, **options)


def engine_loader(engine, sigma=4.0, **options):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(X, Y), batch_size=6),
        noise_multiplier=sigma, max_grad_norm=1.0, **options,
    )  # fmt: skip
    return loader


def drain(loader, *, epochs):
    for _ in range(epochs):
        for _ in loader:
            pass


class Untouchable(TensorDataset):
    """A dataset of known structure whose records must not be read."""

    def __getitem__(self, index):
        raise AssertionError("a record was read")


# --- fit ---------------------------------------------------------------------------------------------------------


def test_fit_charges_the_whole_plan_in_a_few_lines(account):
    train(plan=replace(PLAN, steps=100), ledger=account)
    assert account.event() == replace(PLAN, steps=100).event()
    kinds = [line.kind for line in account.history()]
    assert kinds[:2] == ["declare", "reserve"]
    assert len(kinds) <= 2 + 32
    assert account.remaining().open_reservations == 0


def test_fit_is_refused_before_a_record_is_read(ledger):
    account = ledger.declare("small", epsilon=0.2, delta=1e-5)
    with pytest.raises(BudgetExceeded):
        train(data=Untouchable(X, Y), ledger=account)
    assert len(account.history()) == 1


def test_every_step_is_in_the_ledger_before_it_is_done(account):
    def count(done):
        assert account.event() != PLAN.event(0)
        assert account.event().count >= done

    train(ledger=account, on_step=count)


def test_an_interrupted_fit_gives_the_rest_back_and_keeps_what_was_paid(account):
    def stop(done):
        if done == 50:
            raise KeyboardInterrupt

    result = train(plan=replace(PLAN, steps=320), ledger=account, on_step=stop)
    assert result.interrupted
    assert result.charged_steps <= account.event().count <= result.charged_steps + 10
    assert account.remaining().open_reservations == 0


def test_a_failing_fit_keeps_what_was_paid(account):
    def fail(done):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        train(plan=replace(PLAN, steps=320), ledger=account, on_step=fail)
    assert account.event() == replace(PLAN, steps=10).event()
    assert account.remaining().open_reservations == 0


def test_shuffled_epochs_are_charged_by_the_epoch(ledger):
    account = ledger.declare("x", epsilon=8.0, delta=1e-5, neighboring_relation="replace_one")
    plan = replace(PLAN, poisson_sampling=False, neighboring_relation="replace_one", steps=25)
    train(plan=plan, ledger=account)
    assert account.event() == plan.event()
    assert account.event().count == 3


def test_a_run_folder_names_the_lines_that_paid(account, tmp_path):
    train(plan=replace(PLAN, steps=3), ledger=account, run_folder=tmp_path / "run")
    digests = {line.digest for line in account.history()}
    named = [line.charge for line in RunFolder.open(tmp_path / "run")]
    assert len(named) == 3
    assert set(named) <= digests
    assert account.history()[-1].run == "run"


def test_another_relation_or_unit_is_refused(account, ledger):
    with pytest.raises(InvalidArgument, match="neighboring_relation must be"):
        train(plan=replace(PLAN, neighboring_relation="replace_one"), ledger=account)
    users = ledger.declare("users", epsilon=3.0, delta=1e-5, privacy_unit=PrivacyUnit.USER)
    with pytest.raises(InvalidArgument, match="privacy_unit must be"):
        train(ledger=users)
    train(plan=replace(PLAN, privacy_unit=PrivacyUnit.USER), ledger=users)


def test_a_planned_account_pays_from_its_reservations(ledger):
    account = ledger.declare("planned", epsilon=3.0, delta=1e-5, policy="pld")
    with account.reserve(compose([PLAN.event(), PLAN.event()]), note="two runs") as both:
        train(ledger=both)
        train(ledger=both)
    assert account.spent().epsilon == pytest.approx(replace(PLAN, steps=80).guarantee().epsilon)
    with pytest.raises(BudgetExceeded):
        train(ledger=account)


# --- engines -----------------------------------------------------------------------------------------------------


def test_two_engines_an_estimator_and_a_scaler_share_one_account(account):
    for sigma in (4.0, 5.0):
        loader = engine_loader(PrivacyEngine(ledger=account), sigma)
        drain(loader, epochs=2)
    numbers = np.zeros((40, 2))
    StandardScaler(epsilon=0.3, delta=1e-6, bounds=(0.0, 1.0), ledger=account).fit(numbers)
    LogisticRegression(
        epsilon=0.5, delta=0.0, data_norm=1.0, classes=(0, 1), regularization=1.0, ledger=account
    ).fit(numbers, [0, 1] * 20)  # fmt: skip
    parts = [line.event for line in account.history() if line.kind == "charge"]
    assert {line.note for line in account.history()[1:]} == {"engine", "StandardScaler", "LogisticRegression"}
    # The batch at which an epoch ended without a step begins the next one: 19 batches in two epochs of ten.
    steps = [SelfComposed(event=PoissonSampled(sample_rate=0.1, event=part), count=19) for part in _gaussians(parts)]
    assert account.event().events[:2] == tuple(steps)
    alone = sum(accounting.epsilon(event, 1e-5).upper for event in account.event().events)
    assert account.spent().epsilon < 0.8 * alone
    assert account.spent().epsilon <= 3.0


def _gaussians(parts):
    inner = [part.event if isinstance(part, SelfComposed) else part for part in parts]
    return dict.fromkeys(step.event for step in inner if isinstance(step, PoissonSampled))


def test_an_engine_stops_at_the_cap_with_the_last_step_that_fits(ledger):
    account = ledger.declare("small", epsilon=0.5, delta=1e-5)
    engine = PrivacyEngine(ledger=account)
    loader = engine_loader(engine, sigma=3.0)
    with pytest.raises(BudgetExceeded):
        drain(loader, epochs=1000)
    assert engine.event() == account.event()
    step = PoissonSampled(sample_rate=0.1, event=accounting_step(3.0))
    with pytest.raises(BudgetExceeded):
        account.check_charge(step)
    assert engine.get_epsilon(1e-5) <= 0.5


def accounting_step(sigma):
    return replace(PLAN, noise_multiplier=sigma).step_plan(0).event


def test_an_engine_with_a_target_is_refused_before_it_starts(ledger):
    account = ledger.declare("small", epsilon=0.5, delta=1e-5)
    model = nn.Linear(3, 2)
    with pytest.raises(BudgetExceeded):
        PrivacyEngine(ledger=account).make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=6),
            target_epsilon=2.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
        )  # fmt: skip
    assert len(account.history()) == 1


# --- estimators --------------------------------------------------------------------------------------------------


def bayes(account, epsilon=0.5):
    return GaussianNB(epsilon=epsilon, delta=0.0, classes=(0, 1), bounds=(-1.0, 1.0), ledger=account)


ROWS, LABELS = np.tile([[0.5, -0.5], [-0.5, 0.5]], (30, 1)), np.tile([0, 1], 30)


def test_an_estimator_charges_before_it_reads_and_is_refused_over_budget(ledger):
    account = ledger.declare("x", epsilon=1.0, delta=0.0)
    bayes(account, 0.6).fit(ROWS, LABELS)
    late = bayes(account, 0.6)
    with pytest.raises(BudgetExceeded):
        late.fit(ROWS, LABELS)
    assert not hasattr(late, "guarantee_")
    assert account.spent().epsilon == pytest.approx(0.6)


def test_the_ledger_survives_clone_and_pickling(ledger):
    account = ledger.declare("x", epsilon=3.0, delta=0.0)
    model = bayes(account)
    for copy in (clone(model), pickle.loads(pickle.dumps(model)), clone(clone(model))):
        assert copy.get_params()["ledger"] == account
        assert isinstance(copy.ledger, Account)
        copy.fit(ROWS, LABELS)
    assert account.spent().epsilon == pytest.approx(1.5)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_grid_search_charges_every_fit(ledger, jobs):
    account = ledger.declare("x", epsilon=10.0, delta=0.0)
    search = GridSearchCV(bayes(account), {"epsilon": [0.5, 1.0]}, cv=2, n_jobs=jobs, error_score="raise")
    search.fit(ROWS, LABELS)
    charges = [line for line in account.history() if line.kind == "charge"]
    assert len(charges) == 2 * 2 + 1
    assert account.spent().epsilon == pytest.approx(2 * 0.5 + 2 * 1.0 + search.best_params_["epsilon"])


def test_a_grid_search_is_refused_where_the_budget_ends(ledger):
    account = ledger.declare("x", epsilon=1.2, delta=0.0)
    search = GridSearchCV(bayes(account), {"epsilon": [0.5, 0.6]}, cv=2, error_score="raise")
    with pytest.raises(BudgetExceeded):
        search.fit(ROWS, LABELS)
    assert account.spent().epsilon == pytest.approx(1.0)


# --- paying ahead ------------------------------------------------------------------------------------------------


class Counting:
    """A purse with room for so many steps."""

    def __init__(self, room):
        self.room, self.calls = room, []

    def charge(self, event, **_):
        steps = event.count if isinstance(event, SelfComposed) else 1
        if sum(self.calls) + steps > self.room:
            raise BudgetExceeded("full")
        self.calls.append(steps)
        return type("Receipt", (), {"digest": str(len(self.calls))})


@pytest.mark.parametrize(("room", "coming"), [(10_000, 10_000), (9_999, 10_000), (1, 50), (0, 5), (37, 1000)])
def test_paying_ahead_is_never_behind_and_reaches_the_cap(room, coming):
    purse = Counting(room)
    prepaid = BlockCharger(
        purse, PLAN.step_event, note="", neighboring_relation=PLAN.neighboring_relation, privacy_unit=PLAN.privacy_unit
    )  # fmt: skip
    done = 0
    try:
        for step in range(coming):
            prepaid.charge(step, coming=coming - step)
            done += 1
            assert sum(purse.calls) >= done
    except BudgetExceeded:
        pass
    assert done == min(room, coming) == sum(purse.calls)
    assert len(purse.calls) <= 50
