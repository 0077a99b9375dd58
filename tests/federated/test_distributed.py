"""Noise in shares: what one client can move, what the sum's noise is, and how close it is to what is claimed."""

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from sordino.definitions import NeighboringRelation
from sordino.errors import BudgetExceeded, InvalidArgument, NonPrivateStep, PrivacyError
from sordino.federated import DistributedGaussian, DistributedServer, SimulatedSecureAggregation
from sordino.federated.secure_aggregation import rotate, rotate_back, signs
from sordino.ledger import Ledger
from sordino.randomness import KeyedRNG


def mechanism(width=50, **changes):
    values = {
        "shapes": {"weight": (1, width)},
        "max_update_norm": 1.0,
        "noise_multiplier": 0.5,
        "clients": 10,
        "min_honest_clients": 10,
        "bits": 22,
    }
    return DistributedGaussian(**{**values, **changes})


def seeded(seed):
    return KeyedRNG(seed=seed, reproducible=True)


def test_the_rotation_is_the_matrix_of_walsh_and_hadamard():
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turn = signs(16, seeded(1).stream("turn", step=0))
    x = np.arange(11.0)
    expected = matrix @ (np.pad(x, (0, 5)) * turn) / 4
    assert rotate(x, turn) == pytest.approx(expected, abs=1e-12)
    assert rotate_back(rotate(x, turn), turn, dimension=11) == pytest.approx(x, abs=1e-12)


def test_the_mean_of_all_updates_comes_back():
    chosen = mechanism(noise_multiplier=1e-3)
    torch.manual_seed(0)
    updates = [{"weight": torch.randn(1, 50) / 20} for _ in range(10)]
    total = sum(chosen.encode(one, round_number=3, rng=seeded(k)) for k, one in enumerate(updates))
    mean = chosen.decode(total % chosen.modulus, round_number=3)["weight"]
    expected = torch.stack([one["weight"] for one in updates]).mean(0).double()
    noise = chosen.noise_multiplier * chosen.sensitivity / 10 + chosen.granularity
    assert float((mean - expected).abs().max()) < 5 * noise


@pytest.mark.parametrize("size", [0.0, 1e-9, 0.3, 1.0, 50.0, 1e30])
@pytest.mark.parametrize("bits", [12, 30])
def test_no_rounded_update_is_longer_than_the_sensitivity(size, bits):
    chosen = mechanism(bits=bits, noise_multiplier=2.0)
    torch.manual_seed(1)
    flat = chosen._flat({"weight": torch.full((1, 50), 1.0) * size + torch.rand(1, 50) * size / 10})
    lengths = []
    for seed in range(40):
        whole = chosen._rounded(flat, 0, seeded(seed))
        lengths.append(math.sqrt(sum(int(v) ** 2 for v in whole)) * chosen.granularity)
    assert max(lengths) <= chosen.sensitivity * (1 + 1e-12)
    if size == 1.0 and bits == 30:
        assert min(lengths) > 0.999


def test_rounding_is_repeated_until_the_norm_fits_and_stays_nearly_unbiased():
    chosen = mechanism(bits=14, noise_multiplier=2.0)
    flat = chosen._flat({"weight": torch.full((1, 50), 1.0)})
    mean = np.mean([chosen._rounded(flat, 0, seeded(seed)) for seed in range(400)], axis=0)
    exact = rotate(flat, chosen._turn(0)) / chosen.granularity
    assert np.abs(mean - exact).max() < 5 * 0.5 / 20


@pytest.mark.parametrize("bad", [torch.full((1, 50), math.nan), torch.full((1, 50), math.inf), torch.ones(50)])
def test_a_broken_update_is_encoded_as_zero(bad):
    assert not mechanism()._flat({"weight": bad}).any()


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.05, False)])
def test_the_honest_clients_noise_adds_up_to_what_is_declared(factor, good):
    chosen = mechanism(width=4096, clients=6, min_honest_clients=4)
    zero = {"weight": torch.zeros(1, 4096)}
    noise = np.concatenate(
        [
            sum(
                (chosen.encode(zero, round_number=r, rng=seeded(10 * r + k)) + chosen.modulus // 2) % chosen.modulus
                - chosen.modulus // 2
                for k in range(4)
            )
            for r in range(8)
        ]
    )
    declared = chosen.noise_multiplier * chosen.sensitivity / chosen.granularity * factor
    z = noise / declared
    assert (abs(float((z**2).mean()) - 1) < 4 * math.sqrt(2 / len(z))) == good


@pytest.mark.parametrize(("stddev", "honest"), [(0.5, 2), (0.5, 3), (0.6, 4), (0.8, 5), (1.0, 2)])
def test_a_sum_of_discrete_gaussians_is_as_close_to_one_as_the_excess_says(stddev, honest):
    """By brute force: convolve the laws and compare log probabilities with the single law of the summed variance."""
    x = np.arange(-80, 81)
    one = np.exp(-(x.astype(np.longdouble) ** 2) / (2 * np.longdouble(stddev) ** 2))
    one /= one.sum()
    total = one
    for _ in range(honest - 1):
        total = np.convolve(total, one)
    wide = np.arange(-(len(total) // 2), len(total) // 2 + 1).astype(np.longdouble)
    single = np.exp(-(wide**2) / (2 * honest * np.longdouble(stddev) ** 2))
    single /= single.sum()
    near = np.abs(wide) < 8 * stddev * math.sqrt(honest)
    apart = float(np.abs(np.log(total[near]) - np.log(single[near])).max())
    exponent = 2 * math.pi**2 * stddev**2
    excess = 10 * math.fsum(math.exp(-exponent * k / (k + 1)) for k in range(1, honest))
    assert apart <= excess
    assert apart > excess / 1000


def test_the_price_is_the_gaussians_where_shares_are_wide_and_grows_where_they_are_narrow():
    wide = mechanism(bits=30)
    assert wide.event().rho == pytest.approx(0.5 / 0.25, rel=1e-3)
    narrow = mechanism(bits=8, noise_multiplier=4.0, clients=200, min_honest_clients=200)
    assert 1 < narrow.stddev < 2
    tau, ratio = narrow.excess, math.sqrt(narrow._largest_square) / (math.sqrt(200) * narrow.stddev)
    expected = min(math.sqrt(ratio**2 + tau * narrow.size / 2), ratio + tau * math.sqrt(narrow.size))
    assert narrow.event().rho == pytest.approx(expected**2 / 2)
    assert narrow.sensitivity > 1.0


def test_sensitivity_grows_with_the_grid_and_never_falls_below_the_bound():
    steps = [mechanism(bits=bits, noise_multiplier=1.5) for bits in (10, 12, 16, 24)]
    assert all(a.sensitivity > b.sensitivity >= 1.0 for a, b in pairwise(steps))


def test_a_modulus_without_room_is_refused():
    with pytest.raises(InvalidArgument, match="more bits"):
        mechanism(bits=8, clients=100_000, min_honest_clients=100_000)


def test_masks_cancel_and_a_single_message_tells_nothing():
    masks = SimulatedSecureAggregation(clients=[3, 5, 9], size=4000, bits=20, least=2, rng=seeded(4))
    messages = {client: np.full(4000, client, dtype=np.int64) for client in (3, 5, 9)}
    sent = {client: masks.mask(client, message) for client, message in messages.items()}
    assert set(masks.unmask(sent)) == {17}
    assert set(masks.unmask({client: sent[client] for client in (3, 9)})) == {12}
    counts = np.bincount(sent[3] >> 16, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 45
    with pytest.raises(PrivacyError, match="at least 2"):
        masks.unmask({3: sent[3]})
    with pytest.raises(InvalidArgument, match="another"):
        masks.unmask({3: sent[3], 4: sent[5]})


def test_a_server_of_sums_learns_and_states_its_assumption(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare(
        "phones",
        epsilon=60.0,
        delta=1e-5,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
        privacy_unit="client",
        policy="zcdp",
    )
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    chosen = mechanism(width=3, clients=8, min_honest_clients=6)
    goal = torch.tensor([[0.3, -0.2, 0.1]])
    with DistributedServer(model, chosen, rounds=6, delta=1e-5, num_clients=20, ledger=account) as server:
        for cohort in server.rounds():
            asked = cohort.clients.tolist()
            assert len(set(asked)) == 8
            masks = SimulatedSecureAggregation(clients=asked, size=chosen.size, bits=chosen.bits, least=6)
            sent = {
                client: masks.mask(
                    client,
                    chosen.encode({"weight": goal - model.weight.detach()}, round_number=cohort.number, rng=KeyedRNG()),
                )
                for client in asked
            }
            server.finish_round(cohort, masks.unmask(sent))
    noise = 0.5 * chosen.sensitivity * math.sqrt(8 / 6) / 8
    assert float((model.weight.detach() - goal).abs().max()) < 6 * noise
    told = server.guarantee()
    assert "at least 6 clients" in told.describe()
    assert told.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
    with pytest.raises(NonPrivateStep):
        server.finish_round(cohort, masks.unmask(sent))
    small = ledger.declare(
        "few",
        epsilon=1.0,
        delta=1e-5,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
        privacy_unit="client",
        policy="zcdp",
    )
    with (
        pytest.raises(BudgetExceeded),
        DistributedServer(model, chosen, rounds=6, delta=1e-5, num_clients=20, ledger=small),
    ):
        pass


@pytest.mark.parametrize(("population", "rounds"), [(40, 500), (9, 500)])
def test_every_client_is_as_likely_to_be_asked(population, rounds):
    chosen = mechanism(width=3, clients=8, min_honest_clients=8)
    with DistributedServer(
        nn.Linear(3, 1, bias=False), chosen, rounds=rounds, delta=1e-5, num_clients=population, rng=seeded(5)
    ) as server:
        cohorts = [cohort.clients for cohort in server.rounds()]
    assert all(len(set(cohort.tolist())) == 8 and (np.diff(cohort) > 0).all() for cohort in cohorts)
    counts, share = np.bincount(np.concatenate(cohorts), minlength=population), 8 / population
    assert np.abs(counts / rounds - share).max() < 4.5 * math.sqrt(share * (1 - share) / rounds)


def test_a_cohort_of_a_hundred_million_costs_the_cohort():
    server = DistributedServer(
        nn.Linear(3, 1, bias=False), mechanism(width=3), rounds=1, delta=1e-5, num_clients=10**8, rng=seeded(5)
    )
    tracemalloc.start()
    with server:
        assert len(next(server.rounds()).clients) == 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
