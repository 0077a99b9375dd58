"""Defects of a widely used federated framework, one test each: here the same situation is handled as it should be."""

import math
import random

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from sordino.clipping import QuantileClipping
from sordino.definitions import PrivacyUnit
from sordino.errors import InvalidArgument, PrivacyError
from sordino.federated import (
    DistributedGaussian,
    DistributedServer,
    LocalPrivacy,
    PrivateServer,
    SimulatedSecureAggregation,
    fed_adam,
    fed_avg,
    simulate,
    split_clients,
)
from sordino.randomness import KeyedRNG
from sordino.training import Plan


def plan(**changes):
    values = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1.0,
        "steps": 1,
        "expected_batch_size": 4.0,
        "delta": 1e-5,
        "privacy_unit": PrivacyUnit.CLIENT,
    }
    return Plan(**{**values, **changes})


def line(width=3):
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def served(updates, chosen, *, optimizer=fed_avg, seed=1, model=None):
    """The server after all rounds in which client k sends `updates[k]`; None does not answer."""
    key = KeyedRNG(seed=seed, reproducible=True)
    server = PrivateServer(model or line(), chosen, num_clients=len(updates), optimizer=optimizer, rng=key)
    with server:
        for cohort in server.rounds():
            server.finish_round(cohort, [(int(c), updates[c]) for c in cohort.clients if updates[c] is not None])
    return server


def update(*entries):
    return {"weight": torch.tensor([entries], dtype=torch.float32)}


@pytest.mark.parametrize("start", [0.1, 10.0])
def test_defect_1_an_adaptive_bound_that_runs_away_from_the_norms(start):
    """All norms 1, 50 rounds: with the wrong sign 0.1 falls to 0.00067 and 10 rises to 1484."""
    chosen = plan(
        noise_multiplier=0.01,
        max_grad_norm=start,
        steps=50,
        expected_batch_size=20.0,
        clipping=QuantileClipping(quantile=0.5, learning_rate=0.2, count_noise=0.1),
    )
    server = served([update(0, 0, 1)] * 20, chosen)
    assert 0.8 < server.bounds[0] < 1.25


def test_defect_2_a_zero_update_that_crashes_and_a_broken_one_that_poisons_the_sum():
    alone = served([None, None, None, update(0, 0, 0.5)], plan()).model.weight
    for bad in (update(0, 0, 0), update(math.nan, 0, 0), update(math.inf, 0, 0), update(0, -math.inf, math.nan)):
        server = served([bad, bad, bad, update(0, 0, 0.5)], plan())
        assert torch.equal(server.model.weight, alone)
        assert server.done == 1


def test_defect_3_a_client_whose_reported_size_is_a_lever_on_the_sensitivity():
    """A client with a hundred times the records moves the sum by no more than one with a single record."""

    def loss(model, x, y):
        return (model(x) - y).square()

    moved = []
    for records in (1, 100):
        x, y = torch.ones(99 + records, 3), torch.zeros(99 + records, 1)
        y[99:] = 1e6
        clients = split_clients((x, y), [*range(99), *[99] * records], num_clients=100)
        model = line()
        simulate(model, loss, clients, plan(expected_batch_size=100.0))
        moved.append(float(model.weight.detach().norm()) * 100)
    assert moved == pytest.approx([1.0, 1.0], rel=1e-5)
    with pytest.raises(TypeError):
        PrivateServer(line(), plan(), num_clients=4, weights=[1, 1, 1, 100])  # pyright: ignore[reportCallIssue]
    # The server's optimizer comes after the noise: it sees the noisy mean and nothing else.
    steps = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(self.param_groups[0]["params"][0].grad.clone())
            return super().step(closure)

    for optimizer in (lambda p: Watched(p, lr=1.0), fed_adam):
        served([update(9, 9, 9)] * 4, plan(noise_multiplier=5.0), optimizer=optimizer)
    assert float((steps[0] * -4 - 4 / math.sqrt(3)).abs().max()) > 0.1


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.05, False)])
def test_defect_4_noise_and_divisor_that_follow_from_who_answers(factor, good):
    """One of four answers and another is broken: the noise stays that of the plan, and so does the divisor."""
    wide = {"weight": torch.zeros(1, 40_000)}
    chosen = plan(noise_multiplier=2.0, max_grad_norm=0.5)
    server = served([wide, {"weight": torch.full((1, 40_000), math.nan)}, None, None], chosen, model=line(40_000))
    z = server.model.weight.detach().double() * 4 / (2.0 * 0.5 * factor)
    assert (abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / 40_000)) == good
    assert server.done == 1


def test_defect_4_cohorts_and_noise_that_anybody_can_replay():
    """Seeding numpy, random and torch changes nothing and repeats nothing; cohorts are no fixed-size draw."""
    drawn, weights = [], []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        server = PrivateServer(
            line(), plan(noise_multiplier=1.0, sample_rate=0.5, steps=40, expected_batch_size=50.0), num_clients=100
        )
        with server:
            for cohort in server.rounds():
                drawn.append(tuple(cohort.clients))
                server.finish_round(cohort, [])
        weights.append(server.model.weight.detach())
    assert len(set(drawn)) == 80
    assert not torch.equal(*weights)
    assert len({len(cohort) for cohort in drawn}) > 5


@pytest.mark.parametrize("epsilon", [10.0, 20.0, 50.0])
def test_defect_5_a_sensitivity_beside_the_clip_and_a_formula_beyond_its_range(epsilon):
    """The classical formula gives 10.39 at ε = 10, 25.4 at 20 and 96.4 at 50."""
    with pytest.raises(TypeError):
        LocalPrivacy(epsilon=1.0, delta=1e-5, max_update_norm=1.0, sensitivity=0.1)  # pyright: ignore[reportCallIssue]
    local = LocalPrivacy(epsilon=epsilon, delta=1e-5, max_update_norm=1.0)

    def delta(stddev):
        ratio = 2.0 / stddev
        return norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(-ratio / 2 - epsilon / ratio)

    assert delta(local.stddev) <= 1e-5
    assert delta(2.0 * math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon) > 1e-5, "the formula claims too much"
    local.privatize(update(1, 0, 0))
    assert local.guarantee().epsilon <= epsilon


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.05, False)])
def test_defect_6_noise_that_is_logged_and_then_thrown_away(factor, good):
    """What leaves the client is the clipped update plus noise of the size that it states."""
    local = LocalPrivacy(epsilon=8.0, delta=1e-5, max_update_norm=1.0, rng=KeyedRNG(seed=3, reproducible=True))
    given = {"weight": torch.full((1, 40_000), 1.0)}
    sent = local.privatize(given)["weight"].double()
    assert torch.equal(given["weight"], torch.ones(1, 40_000))
    z = (sent - 1 / 200) / (local.stddev * factor)
    assert (abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / 40_000)) == good


def test_defect_7_shares_of_noise_for_another_cohort_than_the_one_that_answers():
    """Planned 20, connected 4: refused before anybody is asked; with too few shares no sum is opened."""
    mechanism = DistributedGaussian(
        shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0, clients=20, min_honest_clients=16, bits=20
    )
    with pytest.raises(InvalidArgument, match="num_clients"):
        DistributedServer(line(), mechanism, rounds=1, delta=1e-5, num_clients=4)
    with DistributedServer(line(), mechanism, rounds=1, delta=1e-5, num_clients=100) as server:
        cohort = next(server.rounds())
        asked = cohort.clients.tolist()
        assert len(asked) == 20
        masks = SimulatedSecureAggregation(
            clients=asked, size=mechanism.size, bits=mechanism.bits, least=mechanism.min_honest_clients
        )
        message = mechanism.encode(update(0, 0, 1), round_number=0, rng=KeyedRNG())
        assert message.dtype == np.int64
        sent = {client: masks.mask(client, message) for client in asked[:15]}
        with pytest.raises(PrivacyError, match="at least 16"):
            masks.unmask(sent)
    # The noise is discrete and added by the clients; 16 shares are the variance that is claimed.
    assert 16 * mechanism.stddev**2 * mechanism.granularity**2 == pytest.approx(mechanism.sensitivity**2, rel=1e-6)
