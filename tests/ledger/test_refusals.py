"""A refused charge says what it costs, what is left, and what would fit; what it says is true."""

import json
import re

import pytest
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli import app
from sordino.errors import BudgetExceeded
from sordino.events import ApproximateDP, Gaussian, NonPrivate, PureDP
from sordino.ledger import Ledger

DELTA = 1e-5


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "privacy.db")
    made.create()
    return made


def refusal(account, event):
    before = len(account.history())
    with pytest.raises(BudgetExceeded) as caught:
        account.charge(event)
    assert len(account.history()) == before
    return str(caught.value)


def advised(text, name):
    return float(re.search(rf"[Cc]hoose {name} ≤ ([\d.e-]+)", text).group(1))


def gaussian(epsilon):
    noise = accounting.calibrate_noise_multiplier(
        lambda z: Gaussian(noise_multiplier=z), target_epsilon=epsilon, delta=DELTA
    )
    return Gaussian(noise_multiplier=noise)


@pytest.mark.parametrize("policy", ["renyi", "zcdp", "pld"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_what_is_advised_fits_and_hardly_more_does(ledger, policy, epsilon):
    account = ledger.declare("data", epsilon=epsilon, delta=DELTA, policy=policy)
    text = refusal(account, Gaussian(noise_multiplier=0.1))
    left = advised(text, "ε")
    assert f"ε = {left:.3g} of {epsilon:g}" in text
    assert "of ε = " in text.split("got one")[1]
    with pytest.raises(BudgetExceeded):
        account.check_charge(gaussian(1.02 * left))
    account.charge(gaussian(left))


def test_what_is_left_after_charges_is_advised(ledger):
    account = ledger.declare("data", epsilon=3.0, delta=DELTA)
    account.charge(gaussian(1.5))
    left = advised(refusal(account, gaussian(2.9)), "ε")
    assert 0 < left < 2.5
    account.charge(gaussian(left))


def test_an_event_with_a_delta_of_its_own_learns_how_much_of_it_fits(ledger):
    account = ledger.declare("data", epsilon=3.0, delta=DELTA)
    text = refusal(account, ApproximateDP(epsilon=1.0, delta=DELTA))
    assert "got one of ε = 1" in text
    delta = advised(text, "δ")
    account.charge(ApproximateDP(epsilon=1.0, delta=delta * 0.9))
    again = advised(refusal(account, ApproximateDP(epsilon=0.1, delta=delta)), "δ")
    assert delta <= DELTA / 8
    assert 0.13e-6 < again <= DELTA / 8 - 0.9 * delta
    account.charge(ApproximateDP(epsilon=0.1, delta=again))


def test_where_no_delta_is_left_the_advice_is_another_mechanism(ledger):
    account = ledger.declare("data", epsilon=3.0, delta=DELTA)
    account.charge(ApproximateDP(epsilon=1.0, delta=DELTA / 8 * (1 - 1e-9)))
    assert "is spent: use a mechanism" in refusal(account, ApproximateDP(epsilon=0.1, delta=1e-6))
    account.charge(gaussian(0.5))


def test_nothing_left_says_stop(ledger):
    account = ledger.declare("data", epsilon=1.0, delta=0.0)
    account.charge(PureDP(epsilon=1.0))
    assert "Stop: nothing is left" in refusal(account, PureDP(epsilon=0.1))


def test_an_event_without_an_epsilon_is_refused_too(ledger):
    account = ledger.declare("data", epsilon=1.0, delta=DELTA)
    assert "of ε = ∞" in refusal(account, NonPrivate(reason="printed"))


def test_history_shows_what_each_line_costs_alone(ledger):
    account = ledger.declare("data", epsilon=3.0, delta=DELTA)
    account.charge(gaussian(1.0), note="first")
    place = ledger.url
    table = CliRunner().invoke(app, ["ledger", "history", place, "data"])
    assert table.exit_code == 0
    assert "ε alone" in table.stdout
    assert "1.00" in table.stdout
    body = json.loads(CliRunner().invoke(app, ["ledger", "history", place, "data", "--json"]).stdout)
    assert [entry["epsilon_alone"] for entry in body["entries"]] == [None, pytest.approx(1.0, abs=1e-4)]
