"""Federated runs on disk and on the bill: the folder is a run as any other."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.definitions import PrivacyUnit
from sordino.errors import BudgetExceeded
from sordino.federated import LocalTraining, PrivateServer, simulate, split_clients
from sordino.ledger import Ledger
from sordino.mechanisms.correlated import MinSeparation, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.training import CorrelatedNoise, Plan
from sordino.verification import verify


def plan(**changes):
    values = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.5,
        "steps": 6,
        "expected_batch_size": 10.0,
        "delta": 1e-5,
        "privacy_unit": PrivacyUnit.CLIENT,
    }
    return Plan(**{**values, **changes})


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 3, generator=generator)
    y = (x @ torch.tensor([1.0, -2.0, 0.5]))[:, None]
    return split_clients((x, y), np.arange(200) % 20, num_clients=20)


def loss(model, x, y):
    return (model(x) - y).square()


def test_a_federated_run_can_be_verified_by_someone_else(tmp_path):
    result = simulate(nn.Linear(3, 1), loss, problem(), plan(), run_folder=tmp_path / "run")
    outcome = verify(tmp_path / "run")
    assert outcome.passed, outcome
    assert RunFolder.open(tmp_path / "run").guarantee.privacy_unit is PrivacyUnit.CLIENT
    assert result.guarantee.epsilon == RunFolder.open(tmp_path / "run").guarantee.epsilon


def test_a_run_goes_on_from_its_checkpoint_and_both_attempts_are_charged(tmp_path):
    class Cut(Exception):
        pass

    def cut(done):
        if done == 5:
            raise Cut

    model = nn.Linear(3, 1)
    with pytest.raises(Cut):
        simulate(model, loss, problem(), plan(), run_folder=tmp_path / "run", checkpoint_every=2, on_round=cut)
    result = simulate(nn.Linear(3, 1), loss, problem(), plan(), resume_from=tmp_path / "run")
    assert result.rounds == 6
    # Rounds 0–4, then again from the checkpoint after round 4 (two of four): five and two.
    assert len(list(RunFolder.open(tmp_path / "run"))) == 7
    assert result.guarantee.epsilon > plan().guarantee().epsilon
    assert verify(tmp_path / "run").passed


def test_the_account_is_charged_and_refuses_what_does_not_fit(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    whole = plan().guarantee().epsilon
    account = ledger.declare("phones", epsilon=whole * 1.2, delta=1e-5, privacy_unit=PrivacyUnit.CLIENT)
    simulate(nn.Linear(3, 1), loss, problem(), plan(), ledger=account)
    asked = []

    class Watched(LocalTraining):
        def update(self, *arguments, **named):
            asked.append(1)
            return super().update(*arguments, **named)

    with pytest.raises(BudgetExceeded):
        simulate(nn.Linear(3, 1), loss, problem(), plan(), ledger=account, local=Watched())
    assert not asked


def test_noise_with_memory_takes_back_what_it_added_over_the_rounds():
    """DP-FTRL: fixed cohorts in turn, at least five rounds apart, and banded noise."""
    steps, bands = 20, 4
    correlated = CorrelatedNoise(
        strategy=optimize_banded(bands, steps=steps), participation=MinSeparation(min_separation=4)
    )
    chosen = plan(
        sample_rate=0.2,
        steps=steps,
        expected_batch_size=4.0,
        poisson_sampling=False,
        correlated_noise=correlated,
    )
    model = nn.Linear(4000, 1, bias=False)
    nn.init.zeros_(model.weight)
    seen = []
    with PrivateServer(model, chosen, num_clients=20) as server:
        for cohort in server.rounds():
            before = model.weight.detach().clone()
            server.finish_round(cohort, [])
            seen.append((model.weight.detach() - before)[0].numpy() * 4.0)
    emitted = np.stack(seen)
    # The strategy applied to what was emitted is white, with the mechanism's own deviation.
    matrix = correlated.strategy.matrix()
    white = matrix @ emitted
    assert white.std() == pytest.approx(chosen.mechanism.stddev, rel=0.02)
    assert abs(np.corrcoef(white[3], white[2])[0, 1]) < 0.08
    assert np.corrcoef(emitted[3], emitted[2])[0, 1] < -0.2


def test_local_training_learns_and_noise_destroys():
    torch.manual_seed(0)
    quiet = plan(noise_multiplier=0.0, steps=60, max_grad_norm=10.0, sample_rate=1.0, expected_batch_size=20.0)
    local = LocalTraining(learning_rate=0.1, epochs=2, batch_size=4)
    model = simulate(nn.Linear(3, 1), loss, problem(), quiet, local=local).model
    assert model.weight.detach()[0].tolist() == pytest.approx([1.0, -2.0, 0.5], abs=0.05)
    noisy = plan(noise_multiplier=1e6, steps=5, sample_rate=1.0, expected_batch_size=20.0)
    model = simulate(nn.Linear(3, 1), loss, problem(), noisy, local=local).model
    assert model.weight.detach().abs().max() > 100


def test_buffers_of_clients_never_reach_the_server_or_each_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.named_buffers()}
    simulate(model, loss, problem(), plan(steps=2))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    seen = []

    class Watched(LocalTraining):
        def update(self, model, *arguments, **named):
            seen.append(float(model[1].running_mean.abs().sum()))
            return super().update(model, *arguments, **named)

    simulate(model, loss, problem(), plan(steps=2, sample_rate=1.0), local=Watched())
    assert len(seen) == 40
    assert set(seen) == {0.0}


def test_the_proximal_term_holds_clients_back():
    torch.manual_seed(0)
    records = problem()[0]
    free = LocalTraining(learning_rate=0.1, epochs=20)
    held = LocalTraining(learning_rate=0.1, epochs=20, proximal=5.0)

    def moved(local):
        torch.manual_seed(1)
        update = local.update(nn.Linear(3, 1), loss, records, order=KeyedRNG().stream("order", step=0))
        return float(sum(value.square().sum() for value in update.values()))

    assert moved(held) < 0.5 * moved(free)


def test_clients_without_records_move_nothing():
    clients = split_clients((torch.ones(4, 3), torch.ones(4, 1)), [0, 0, 3, 3], num_clients=5)
    assert [len(one[0]) for one in clients] == [2, 0, 0, 2, 0]
    update = LocalTraining().update(nn.Linear(3, 1), loss, clients[1], order=KeyedRNG().stream("order", step=0))
    assert all(not value.any() for value in update.values())


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(4)], ids=["plain", "batch norm"])
def test_clients_side_by_side_move_as_one_after_the_other(norm):
    """Unequal clients, some without records, several epochs and the proximal term."""
    x, y = torch.randn(200, 3), torch.randn(200, 1)
    clients = split_clients((x, y), np.arange(200) ** 2 % 23, num_clients=23)
    assert {len(one[0]) for one in clients} == {0, 9, 17, 18}
    local = LocalTraining(learning_rate=0.2, epochs=2, batch_size=9, proximal=0.5)
    found = []
    for together in (1, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), norm(), nn.Tanh(), nn.Linear(4, 1))
        key = KeyedRNG(seed=7, reproducible=True)
        before = {name: value.clone() for name, value in model.named_buffers()}
        simulate(model, loss, clients, plan(), local=local, clients_per_batch=together, rng=key)
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*found, atol=1e-5)
    assert not torch.allclose(found[0], torch.zeros(1), atol=0.1)
