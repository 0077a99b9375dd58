"""Cohorts, updates and the noisy mean: what one client can move, what is divided by, what is charged."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from sordino import accounting
from sordino.clipping import AdaClip, AutomaticClipping, GroupedClipping, QuantileClipping
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.events import Gaussian, PoissonSampled
from sordino.federated import (
    DistributedGaussian,
    DistributedServer,
    PrivateServer,
    fed_adam,
    fed_avg,
    fed_yogi,
    simulate,
)
from sordino.federated.updates import clipped_update
from sordino.gradients import Contributions
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedClipping
from sordino.sampling import Microbatch
from sordino.training import LossRelease, Plan, distributed


def plan(**changes):
    values = {
        "noise_multiplier": 1.0,
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


def one_round(updates, plan, *, model=None, seed=1, optimizer=fed_avg, population=None):
    model = line() if model is None else model
    server = PrivateServer(
        model,
        plan,
        num_clients=len(updates) if population is None else population,
        rng=KeyedRNG(seed=seed, reproducible=True),
        optimizer=optimizer,
    )
    with server:
        for cohort in server.rounds():
            server.finish_round(cohort, [(int(c), updates[c]) for c in cohort.clients if updates[c] is not None])
    return model, server


def update(*entries):
    return {"weight": torch.tensor([entries], dtype=torch.float32)}


QUIET = {"noise_multiplier": 0.0}


def test_the_model_moves_by_the_clipped_sum_over_the_planned_cohort():
    model, _ = one_round([update(3, 4, 0), update(0.0, 0.1, 0), None, update(0, 0, -1)], plan(**QUIET))
    assert model.weight[0].tolist() == pytest.approx([0.6 / 4, 0.9 / 4, -0.25], abs=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        update(math.nan, 0, 0),
        update(math.inf, 0, 0),
        {"weight": torch.ones(1, 4)},
        {"other": torch.ones(1, 3)},
        {"weight": torch.ones(1, 3), "num_batches_tracked": torch.ones(1)},
        update(3e38, 3e38, 3e38),
    ],
    ids=["nan", "inf", "shape", "name", "one too many", "huge"],
)
def test_a_broken_update_contributes_at_most_the_bound_and_stops_nothing(bad):
    model, _ = one_round([bad, update(0, 0, 1)], plan(**QUIET))
    others, _ = one_round([None, update(0, 0, 1)], plan(**QUIET))
    moved = (model.weight - others.weight).norm() * 4
    assert moved <= 1 + 1e-5
    if "huge" not in str(bad) and not (bad.get("weight", torch.zeros(1)) == 3e38).any():
        assert moved == 0


@pytest.mark.parametrize("clipping", [None, AutomaticClipping(), GroupedClipping(by="layer"), AdaClip()], ids=str)
@pytest.mark.parametrize("size", [1e-12, 0.3, 1.0, 1e3, 1e30])
def test_no_client_moves_the_sum_by_more_than_the_bound(clipping, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def zeros(scale):
        return {name: scale * torch.randn_like(value) for name, value in model.named_parameters()}

    some = [zeros(0.1), zeros(0.5)]
    chosen = plan(**QUIET, **({} if clipping is None else {"clipping": clipping}))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = []
    for updates in ([*some, None], [*some, zeros(size)]):
        model.load_state_dict(before)
        one_round(updates, chosen, model=model)
        after.append(torch.cat([value.detach().double().flatten() for value in model.parameters()]))
    assert float((after[1] - after[0]).norm()) * 4 <= 1 + 1e-4


@pytest.mark.parametrize(("stddev", "good"), [(1.0, True), (1.05, False)])
def test_noise_has_exactly_the_declared_variance(stddev, good):
    model = line(40_000)
    one_round([None] * 4, plan(noise_multiplier=2.0, max_grad_norm=0.5), model=model)
    z = model.weight.detach().double() * 4 / (2.0 * 0.5 * stddev)
    assert (abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / 40_000)) == good


def test_replacing_a_client_doubles_the_noise():
    model = line(40_000)
    one_round([None] * 4, plan(neighboring_relation=NeighboringRelation.REPLACE_ONE), model=model)
    assert float(model.weight.detach().std()) * 4 == pytest.approx(2.0, rel=0.02)


def test_rounds_are_charged_as_steps_of_the_plan_even_when_they_are_lost():
    chosen = plan(sample_rate=0.1, steps=5)
    server = PrivateServer(line(), chosen, num_clients=50)
    with server:
        rounds = server.rounds()
        next(rounds)
        cohort = next(rounds)
        server.finish_round(cohort, [])
    event = PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=1.0))
    expected = accounting.epsilon(accounting_compose(event, 2), 1e-5).upper
    assert server.guarantee().epsilon == pytest.approx(expected, rel=1e-6)
    assert server.guarantee().privacy_unit is PrivacyUnit.CLIENT
    assert server.done == 2


def accounting_compose(event, count):
    from sordino.events import SelfComposed

    return SelfComposed(event=event, count=count)


def test_clients_are_drawn_independently_at_the_rate():
    server = PrivateServer(line(), plan(sample_rate=0.2, steps=400, expected_batch_size=20.0), num_clients=100)
    with server:
        drawn = [cohort.clients for cohort in server.rounds()]
    counts = np.bincount(np.concatenate(drawn), minlength=100)
    sizes = np.array([len(one) for one in drawn])
    assert abs(counts.mean() / 400 - 0.2) < 4 * math.sqrt(0.16 / 40_000)
    # Independent draws make the size of a cohort binomial: variance 16, not 0 as for cohorts of a fixed size.
    assert 16 * 0.7 < sizes.var() < 16 * 1.4


def test_an_adaptive_bound_follows_the_median_of_the_norms_from_both_sides():
    for start in (0.05, 60.0):
        chosen = plan(
            noise_multiplier=0.1,
            max_grad_norm=start,
            steps=120,
            expected_batch_size=50.0,
            clipping=QuantileClipping(quantile=0.5, learning_rate=0.2, count_noise=2.5),
        )
        updates = [update(0, 0, 1 + client / 50) for client in range(50)]
        _, server = one_round(updates, chosen)
        assert server.bounds[0] == pytest.approx(1.5, rel=0.15)


def test_a_client_that_was_not_asked_or_answers_twice_loses_the_round():
    server = PrivateServer(line(), plan(steps=3), num_clients=4)
    with server:
        for cohort, answers in zip(server.rounds(), ([(7, update(1, 0, 0))], [(1, update(1, 0, 0))] * 2), strict=False):
            with pytest.raises(InvalidArgument, match="each at most once"):
                server.finish_round(cohort, answers)
        assert server.model.weight.abs().max() == 0
        assert server.done == 0


def test_a_round_is_finished_once_and_only_inside_the_block():
    server = PrivateServer(line(), plan(steps=2), num_clients=4)
    with pytest.raises(NonPrivateStep, match="with block"):
        next(server.rounds())
    with server:
        rounds = server.rounds()
        first = next(rounds)
        server.finish_round(first, [])
        with pytest.raises(NonPrivateStep, match="rounds"):
            server.finish_round(first, [])
    with pytest.raises(NonPrivateStep, match="with block"):
        server.finish_round(first, [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy_unit": PrivacyUnit.RECORD}, "client or user"),
        ({"clipping": ProjectedClipping(projections=4)}, "ProjectedClipping"),
    ],
)
def test_plans_that_do_not_speak_of_clients_are_refused(changes, words):
    with pytest.raises(InvalidArgument, match=words):
        PrivateServer(line(), plan(**changes), num_clients=4)


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(InvalidArgument, match="Unfreeze"):
        PrivateServer(line().requires_grad_(False), plan(), num_clients=4)


@pytest.mark.parametrize("optimizer", [fed_adam, fed_yogi])
def test_server_optimizers_see_only_the_noisy_mean(optimizer):
    """The same noisy mean, whatever the updates were: what the optimizer does is post-processing."""
    one, _ = one_round([update(5, 0, 0)] * 4, plan(noise_multiplier=1.0), optimizer=optimizer)
    two, _ = one_round([update(1, 0, 0)] * 4, plan(noise_multiplier=1.0), optimizer=optimizer)
    assert torch.allclose(one.weight, two.weight, atol=1e-4)


def test_yogi_steps_as_its_formula_says():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    stepper = fed_yogi([parameter], learning_rate=0.1, adaptivity=0.01)
    theta, m, v = parameter.detach().double().numpy().copy(), np.zeros(2), np.full(2, 1e-4)
    for gradient in ([0.3, -0.1], [0.2, 0.4], [0.0, -0.5]):
        g = np.array(gradient)
        parameter.grad = torch.tensor(gradient)
        stepper.step()
        m = 0.9 * m + 0.1 * g
        v = v - 0.01 * np.sign(v - g**2) * g**2
        theta = theta - 0.1 * m / (np.sqrt(v) + 0.01)
    assert parameter.detach().numpy() == pytest.approx(theta, rel=1e-5)


def test_whole_number_noise_works_for_clients_too():
    model, server = one_round([update(1, 0, 0)] * 4, plan(noise_multiplier=1e-6, secure_mode=True))
    assert model.weight[0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-3)
    assert "secure noise" in server.guarantee().describe()


def test_one_key_is_for_one_server():
    key = KeyedRNG()
    PrivateServer(line(), plan(), num_clients=4, rng=key)
    with pytest.raises(InvalidArgument, match="fresh"):
        PrivateServer(line(), plan(), num_clients=4, rng=key)


def test_asking_for_rounds_again_goes_on_and_forgets_nothing():
    server = PrivateServer(line(), plan(sample_rate=0.5, steps=6), num_clients=10)
    with server:
        for cohort, _ in zip(server.rounds(), range(4), strict=False):
            server.finish_round(cohort, [])
        spent = server.guarantee().epsilon
        numbers = [cohort.number for cohort in server.rounds()]
    # The fifth round was drawn by the loop's last question, and charged.
    assert numbers == [5]
    assert server.guarantee().epsilon >= spent
    assert server.guarantee().epsilon == pytest.approx(plan(sample_rate=0.5, steps=6).guarantee().epsilon, rel=1e-9)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        {"weight": None},
        {"weight": torch.ones(1, 3, device="meta")},
        [1],
        [],
        [[1.0, 2.0, 3.0]] * 2,
        [np.ones((3, 1))],
    ],
    ids=["none", "no tensor", "meta", "list", "nothing", "too many", "another shape"],
)
def test_no_reply_can_end_a_round(reply):
    server = PrivateServer(line(), plan(**QUIET), num_clients=2)
    with server:
        for cohort in server.rounds():
            server.finish_round(cohort, [(0, reply), (1, update(0, 0, 1))])
    assert server.model.weight.detach()[0].tolist() == pytest.approx([0, 0, 0.25], abs=1e-6)


ROW = [[0.25, -3.0, 2.0]]


class Foreign:
    """An array of another library, as NumPy sees it."""

    def __array__(self, dtype=None, copy=None):
        return np.array(ROW, dtype=dtype)


@pytest.mark.parametrize(
    "given",
    [
        {"weight": np.array(ROW, dtype=np.float32)},
        {"weight": np.array(ROW)},
        {"weight": np.array(ROW, dtype=np.float16)},
        {"weight": np.array(ROW, dtype=np.longdouble)},
        {"weight": np.array(ROW, dtype=">f4")},
        {"weight": np.asfortranarray(np.array(ROW))},
        {"weight": np.array(ROW)[:, ::-1][:, ::-1]},
        {"weight": np.array([ROW[0][::-1]])[:, ::-1]},
        {"weight": Foreign()},
        {"weight": ROW},
        {"weight": torch.tensor(ROW, dtype=torch.bfloat16)},
        {"weight": torch.tensor(ROW).to_sparse()},
        [np.array(ROW)],
        (np.array(ROW, dtype=np.float32),),
        [torch.tensor(ROW)],
        {"weight": np.array(ROW).view(np.ndarray).copy(order="F")},
    ],
)
def test_numbers_count_alike_whatever_holds_them(given):
    exact, _ = one_round([{"weight": torch.tensor(ROW)}, update(0, 0, 1)], plan(**QUIET))
    found, _ = one_round([given, update(0, 0, 1)], plan(**QUIET))
    assert exact.weight.detach().abs().sum() > 0.2
    assert torch.equal(found.weight, exact.weight)


WHOLE = [np.int8, np.int64, np.uint16, np.bool_, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers_count_too(kind):
    one = torch.ones(1, 3).to(kind) if isinstance(kind, torch.dtype) else np.ones((1, 3), dtype=kind)
    exact, _ = one_round([update(1, 1, 1)], plan(**QUIET))
    found, _ = one_round([{"weight": one}], plan(**QUIET))
    assert torch.equal(found.weight, exact.weight)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("weight", "got str"),
        (b"\0" * 12, "got bytes"),
        (7, "got int"),
        (np.ones((1, 3)), "got ndarray"),
        ({"weight": "1, 2, 3"}, "got str"),
        ({"weight": object()}, "got object"),
        ({"weight": np.array([["a", "b", "c"]])}, "got ndarray"),
        ({"weight": np.array([[1, None, 3]], dtype=object)}, "got ndarray"),
        ({"weight": [[1.0, 2.0], [3.0]]}, "got list"),
        ({"weight": np.ones((1, 3), dtype=complex)}, "got ndarray"),
        ({"weight": torch.ones(1, 3, dtype=torch.complex64)}, "real numbers"),
        ([{"weight": torch.ones(1, 3)}], "got dict"),
    ],
)
def test_an_update_of_a_type_without_numbers_is_refused_by_its_type(given, said):
    server = PrivateServer(line(), plan(**QUIET), num_clients=2)
    before = server.model.weight.detach().clone()
    with server:
        cohort = next(server.rounds())
        with pytest.raises(InvalidArgument, match=said):
            server.finish_round(cohort, [(0, update(0, 0, 1)), (1, given)])
    assert torch.equal(server.model.weight, before)


def test_losses_can_not_be_bought_from_a_server():
    with pytest.raises(InvalidArgument, match="loss_release"):
        PrivateServer(line(), plan(loss_release=LossRelease(max_loss=1.0)), num_clients=4)


def test_a_faster_mode_of_products_does_not_round_the_sum():
    server = PrivateServer(line(400), plan(**QUIET, max_grad_norm=100.0), num_clients=4)
    torch.manual_seed(0)
    given = [{"weight": torch.randn(1, 400)} for _ in range(4)]
    with server, torch.autocast("cpu", torch.bfloat16):
        for cohort in server.rounds():
            server.finish_round(cohort, enumerate(given))
    expected = sum(one["weight"].double() for one in given) / 4
    assert float((server.model.weight.detach().double() - expected).abs().max()) < 1e-6


def test_a_stack_of_updates_has_all_that_clipping_asks_for_and_is_never_recorded():
    server = PrivateServer(line(), plan(), num_clients=4)
    asked = [name for name in vars(Contributions) if not name.startswith("_")]
    assert {"names", "trainable", "squared_norm_bounds", "add_weighted_sums"} <= set(asked)
    assert all(hasattr(server._stack, name) for name in asked)
    with pytest.raises(NonPrivateStep, match="begin"):
        server._run.step.capturing(Microbatch(step=0, index=0, is_last=True, indices=np.arange(2)))
    assert not server._run.step.is_open


def test_several_processes_are_refused_before_anything_is_charged(tmp_path, monkeypatch):
    """Each would ask its own cohorts, add its own noise and state the whole bill as if it were alone."""
    mechanism = DistributedGaussian(
        shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0, clients=5, min_honest_clients=4
    )
    makes = [
        lambda: PrivateServer(line(), plan(), num_clients=4, run_folder=tmp_path / "run"),
        lambda: simulate(line(), lambda m, x: m(x), [[torch.ones(1, 3)]] * 4, plan(), run_folder=tmp_path / "run"),
        lambda: DistributedServer(line(), mechanism, rounds=1, delta=1e-5, num_clients=20),
    ]
    monkeypatch.setattr(
        distributed, "get_distributed_context", lambda: distributed.DistributedContext(rank=1, world_size=2)
    )
    for make in makes:
        with pytest.raises(InvalidArgument, match="server must be used in one process, got 2"):
            make()
    assert not (tmp_path / "run").exists()


# --- random numbers of clients ---------------------------------------------------------------------------------------


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))


def squares(model, x, y):
    return (model(x) - y).square().mean(1)


def dropout_clients(count=8):
    numbers = torch.Generator().manual_seed(0)
    return [[torch.randn(3, 4, generator=numbers), torch.randn(3, 1, generator=numbers)] for _ in range(count)]


def by_simulation(clients, together=1, seed=None):
    model = dropping()
    rng = None if seed is None else KeyedRNG(seed=seed, reproducible=True)
    simulate(model, squares, clients, plan(noise_multiplier=0.0), clients_per_batch=together, rng=rng)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_hand(clients, together=1, seed=None):
    del together
    model = dropping()
    rng = None if seed is None else KeyedRNG(seed=seed, reproducible=True)
    with PrivateServer(model, plan(noise_multiplier=0.0), num_clients=len(clients), rng=rng) as server:
        for cohort in server.rounds():
            updates = []
            for client in map(int, cohort.clients):
                gradients = torch.autograd.grad(squares(model, *clients[client]).sum(), list(model.parameters()))
                names = [name for name, _ in model.named_parameters()]
                updates.append((client, dict(zip(names, gradients, strict=True))))
            server.finish_round(cohort, updates)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


WAYS = [by_simulation, by_hand]


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("train", WAYS)
def test_a_public_seed_does_not_decide_the_masks_of_clients(train, together):
    found = []
    for _ in range(2):
        torch.manual_seed(42)
        found.append(train(dropout_clients(), together))
    assert not torch.equal(found[0], found[1])
    torch.manual_seed(42)
    first = train(dropout_clients(), together, seed=3)
    torch.manual_seed(43)
    assert torch.equal(first, train(dropout_clients(), together, seed=3))


@pytest.mark.parametrize("train", WAYS)
def test_states_after_a_round_do_not_tell_of_clients(train):
    states = []
    for count in (8, 7):
        train(dropout_clients(count))
        states.append([torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))])
    assert all(map(torch.equal, *states))


def test_leaving_a_round_puts_the_users_states_back():
    class Stop(Exception):
        pass

    torch.manual_seed(42)
    expected = torch.rand(3)
    server = PrivateServer(line(), plan(steps=2), num_clients=2)
    torch.manual_seed(42)

    def run():
        with server:
            for _ in server.rounds():
                torch.rand(5)
                raise Stop

    with pytest.raises(Stop):
        run()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_client_clips_numbers_of_eight_bits_too(kind):
    clipped = clipped_update({"weight": torch.ones(1, 4).to(kind)}, max_update_norm=1.0)
    assert torch.allclose(clipped["weight"], torch.full((1, 4), 0.5, dtype=torch.float64))
