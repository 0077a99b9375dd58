"""Random numbers of private batches: secret states, and the user's own put back."""

import functools
import gc
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from sordino import Plan, PrivacyEngine, fit
from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.randomness import KeyedRNG
from sordino.training import PerformanceOptions, generators
from sordino.training.generators import PrivateGenerators, owned_generators, private_generators
from sordino.training.probing.snapshots import preserve_rng_state

RECORDS, FEATURES = 24, 5


def stream(name: int = 0, rng: KeyedRNG | None = None):
    return (rng or KeyedRNG()).stream("test", step=name)


def draws() -> list[object]:
    """Numbers of all three generators, also those that come in pairs."""
    return [
        torch.rand(2).tolist(),
        torch.randn(3).tolist(),
        np.random.rand(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    ]


def seed(number: int = 0, *, pairs: int = 0) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
    for _ in range(pairs):
        torch.randn(1), np.random.randn(), random.gauss(0, 1)


# --- the states ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["words", "functions"])
def _way(request, monkeypatch):
    """States of NumPy and Python are copied in memory, or through their own functions where that is not known to do."""
    assert generators._NUMPY_IS_KNOWN
    assert generators._PYTHON_MEMORY is not None
    if request.param == "functions":
        monkeypatch.setattr(generators, "_NUMPY_IS_KNOWN", False)
        monkeypatch.setattr(generators, "_PYTHON_MEMORY", None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_the_users_draws_go_on_as_if_nothing_had_been_drawn(pairs):
    seed(1, pairs=pairs)
    expected = [draws() for _ in range(30)]
    seed(1, pairs=pairs)
    found = []
    for number in range(30):
        with private_generators(stream(number)):
            for _ in range(number % 5):
                draws()
        found.append(draws())
    assert found == expected


@pytest.mark.usefixtures("_way")
def test_secret_draws_follow_from_the_key_and_not_from_the_seed():
    key, found = KeyedRNG(), []
    for public, name, rng in ((1, 0, key), (2, 0, key), (1, 1, key), (1, 0, KeyedRNG())):
        # A pair of normal numbers that is half used up must not be used in the secret part.
        seed(public, pairs=1)
        with private_generators(stream(name, rng)):
            found.append(draws())
    assert found[0] == found[1]
    for other in found[2:]:
        assert all(one != two for one, two in zip(found[0], other, strict=True))


def test_the_generators_differ_from_each_other():
    # NumPy and Python make the same floats of the same words.
    with private_generators(stream()):
        assert np.random.rand() != random.random()


def test_states_that_close_out_of_order_end_with_the_users():
    seed(3)
    expected = draws()
    for first, second in ((0, 1), (1, 0)):
        seed(3)
        opened = [PrivateGenerators(stream(0)), PrivateGenerators(stream(1))]
        inside = draws()
        opened[first].close()
        if first == 0:
            assert draws() != inside != expected
        opened[second].close()
        opened[first].close()
        assert draws() == expected


def test_a_seed_within_a_block_is_refused_and_kept_for_torch():
    seed(4)
    with pytest.raises(NonPrivateStep, match="must keep their states"), private_generators(stream()):
        torch.manual_seed(5)
    assert torch.initial_seed() == 5
    with private_generators(stream()), torch.random.fork_rng():
        # What a checkpointed forward pass does.
        state = torch.get_rng_state()
        torch.rand(3)
        torch.set_rng_state(state)
    assert torch.initial_seed() == 5


def test_another_bit_generator_of_numpy_is_put_back_too():
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        np.random.randn()
        state = np.random.get_state(legacy=False)
        with private_generators(stream()):
            inside = np.random.randn(3)
        after = np.random.randn(3)
        np.random.set_state(state)
        assert np.array_equal(after, np.random.randn(3))
        assert not np.array_equal(after, inside)
    finally:
        np.random.set_bit_generator(kept)


# --- generators of the user's own ------------------------------------------------------------------------------------

GLOBAL_GENERATOR = np.random.default_rng(0)


def uses_a_global(item: Tensor) -> Tensor:
    return item + float(GLOBAL_GENERATOR.normal())


class Transform:
    own = np.random.RandomState(0)

    def __init__(self) -> None:
        self.python = random.Random(0)


class Owner:
    def __init__(self, *, made: bool = True) -> None:
        closed_over = np.random.Generator(np.random.Philox(0))
        self.torch = torch.Generator().manual_seed(0)
        self.transforms = [Transform()]
        self.steps = {"a": functools.partial(uses_a_global), "b": lambda item: item + closed_over.normal()}
        self.closed_over = closed_over if made else None
        self.secure, self.table, self.shared = random.SystemRandom(), np.zeros(3), torch.default_generator

    def draws(self) -> list[object]:
        return [
            torch.rand(2, generator=self.torch).tolist(),
            torch.randn(1, generator=self.torch).item(),
            GLOBAL_GENERATOR.normal(),
            Transform.own.randn(),
            self.transforms[0].python.gauss(0, 1),
            self.steps["b"](0.0),
        ]


def test_own_generators_are_found_wherever_they_are_kept():
    owner = Owner()
    found = owned_generators(owner)
    expected = [owner.torch, GLOBAL_GENERATOR, Transform.own, owner.transforms[0].python, owner.closed_over]
    assert sorted(map(id, found)) == sorted(map(id, expected))
    assert owned_generators(TensorDataset(torch.ones(3)), default_collate) == []


def test_own_generators_draw_secret_numbers_and_go_on():
    owner, key = Owner(), KeyedRNG()
    GLOBAL_GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    Transform.own.seed(0)
    found = owned_generators(owner)
    first, copies = owner.draws(), []
    for _ in range(2):
        with private_generators(stream(0, key), found):
            copies.append(owner.draws())
    after = owner.draws()
    assert copies[0] == copies[1]
    other = Owner()
    GLOBAL_GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    Transform.own.seed(0)
    assert other.draws() == first
    assert other.draws() == after
    assert all(one != two for one, two in zip(first, copies[0], strict=True))


# --- training --------------------------------------------------------------------------------------------------------

START = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)).state_dict()


def table(records: int = RECORDS) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return TensorDataset(x[RECORDS - records :], (x[:, 0] > 0).long()[RECORDS - records :])


class Augmented(Dataset):
    """Every item draws a number; records with a large first feature draw another one."""

    def __init__(self, draw, records: int = RECORDS) -> None:
        self.tensors, self.draw = table(records).tensors, draw

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index):
        x, y = self.tensors[0][index], self.tensors[1][index]
        noise = float(self.draw()) + (float(self.draw()) if x[0] > 1 else 0.0)
        return x + noise, y


def by_torch():
    return torch.randn(())


def by_numpy():
    return np.random.randn()


def by_python():
    return random.gauss(0, 1)


OWN = np.random.default_rng(0)


def by_own():
    return OWN.normal()


def collate_with_noise(items):
    x, y = default_collate(items)
    return x + torch.randn_like(x), y


def data_of(kind: str, records: int = RECORDS):
    """A dataset, its collate function, and whether the model has dropout."""
    if kind == "dropout":
        return table(records), None
    if kind == "collate":
        return Augmented(lambda: 0.0, records), collate_with_noise
    draw = {"torch": by_torch, "numpy": by_numpy, "python": by_python, "own": by_own}[kind]
    return Augmented(draw, records), None


def model_of(kind: str) -> nn.Module:
    middle = nn.Dropout(0.5) if kind == "dropout" else nn.Identity()
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), middle, nn.Linear(16, 2))
    model.load_state_dict(START)
    return model


def moved(model: nn.Module) -> Tensor:
    return torch.cat([(p.detach() - START[name]).flatten() for name, p in model.named_parameters()])


def record_losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def by_fit(kind, *, records=RECORDS, key=None, microbatch_size=None, steps=2):
    dataset, collate = data_of(kind, records)
    model = model_of(kind)
    plan = Plan(
        noise_multiplier=0.0, max_grad_norm=1.0, sample_rate=1.0, steps=steps, expected_batch_size=1.0, delta=1e-5
    )
    rng = None if key is None else KeyedRNG(seed=key, reproducible=True)
    fit(
        model,
        record_losses,
        dataset,
        plan,
        collate_fn=collate,
        rng=rng,
        performance=PerformanceOptions(microbatch_size=microbatch_size),
        progress=False,
    )
    return moved(model)


def private_loop(kind, *, records=RECORDS, key=None, microbatch_size=None, workers=0):
    dataset, collate = data_of(kind, records)
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine() if key is None else PrivacyEngine(seed=key, reproducible=True)
    loader = DataLoader(dataset, batch_size=len(dataset), collate_fn=collate, num_workers=workers)
    _, _, private = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1.0,
        microbatch_size=microbatch_size,
        poisson_sampling=True,
    )
    return engine, model, optimizer, private


def by_loop(kind, *, steps=2, **options):
    _, model, optimizer, private = private_loop(kind, **options)
    for _ in range(steps):
        for x, y in private:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return moved(model)


WAYS = [by_fit, by_loop, functools.partial(by_loop, workers=1)]
WAY_NAMES = ["fit", "loop", "workers"]
KINDS = ["dropout", "torch", "numpy", "python", "own", "collate"]


def seed_all():
    seed(42)
    OWN.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_a_public_seed_decides_nothing(way, kind):
    found = []
    for _ in range(2):
        seed_all()
        found.append(way(kind))
    assert (found[0] - found[1]).norm() > 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_the_key_decides_everything(way, kind):
    found = []
    for public in (1, 2):
        seed(public)
        OWN.normal()
        found.append(way(kind, key=11))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
def test_the_users_next_draws_do_not_tell_how_many_records_there_are(way, kind):
    found = []
    for records in (RECORDS, RECORDS - 1, 3):
        seed_all()
        way(kind, records=records)
        found.append([*draws(), OWN.normal()])
    assert found[0] == found[1] == found[2]
    # What is drawn for no record (parameters of the model) is the user's. (Python's: the tests' type checker draws.)
    seed_all()
    model_of(kind)
    assert found[0][:4] == draws()[:4]


class MaskedByRecord(nn.Dropout):
    """A mask that is a function of the record and of one secret number of the batch: masks that move with records."""

    def forward(self, hidden):
        secret = torch.rand([])
        key = (hidden.detach().double().tanh().sum(1, keepdim=True) + secret) * torch.arange(1, hidden.shape[1] + 1)
        # Smooth: rounding, which is another one in batches of another size, decides nothing.
        return hidden * (1 + torch.sin(10 * key)).to(hidden.dtype)


@pytest.mark.parametrize("way", [by_fit, by_loop], ids=["fit", "loop"])
def test_where_masks_move_with_their_records_one_record_moves_the_sum_by_the_clipping_norm(way, monkeypatch):
    # The coupling of the proof: the secret number has the same value whether there are more records or fewer.
    monkeypatch.setattr(nn, "Dropout", MaskedByRecord)
    found = []
    for public, records in ((1, RECORDS), (2, RECORDS - 1)):
        torch.manual_seed(public)
        found.append(way("dropout", records=records, key=5, steps=1))
    assert 0.01 < (found[0] - found[1]).norm() <= 1.0001


@pytest.mark.parametrize("way", [by_fit, by_loop], ids=["fit", "loop"])
def test_microbatches_of_one_batch_draw_different_masks(way):
    whole, parts = way("dropout", key=3), way("dropout", key=3, microbatch_size=RECORDS // 2)
    again = way("dropout", key=3, microbatch_size=RECORDS // 2)
    assert torch.equal(parts, again)
    assert (whole - parts).norm() > 0.1


# --- a loop of the user's own ----------------------------------------------------------------------------------------


def step_on(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_what_the_loop_draws_between_batches_is_its_own():
    engine, model, optimizer, private = private_loop("dropout")
    seed(9)
    expected = [draws()[:4] for _ in range(4)]
    seed(9)
    found = []
    for _ in range(2):
        for x, y in private:
            inside = torch.rand(2).tolist()
            step_on(model, optimizer, x, y)
            found.append(draws()[:4])
            assert inside != found[-1][0]
        found.append(draws()[:4])
    engine.detach()
    assert found == expected


def leave_by_break(model, optimizer, private):
    for _ in private:
        draws()
        break


def leave_by_error(model, optimizer, private):
    def loop():
        for _ in private:
            draws()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        loop()


def leave_by_close(model, optimizer, private):
    batches = iter(private)
    next(batches)
    draws()
    batches.close()


def leave_by_the_end(model, optimizer, private):
    for _ in private:
        draws()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_close, leave_by_the_end])
def test_leaving_the_loop_puts_the_users_states_back(leave):
    engine, model, optimizer, private = private_loop("dropout")
    seed(9)
    leave(model, optimizer, private)
    found = draws()[:4]
    seed(9)
    assert found == draws()[:4]
    engine.detach()


def test_detaching_puts_the_users_states_back():
    engine, _, _, private = private_loop("dropout")
    seed(9)
    batches = iter(private)
    next(batches)
    draws()
    engine.detach()
    found = draws()[:4]
    seed(9)
    assert found == draws()[:4]


def test_two_loops_at_a_time_keep_to_secret_states():
    gc.collect()
    before = len(generators._OPEN)
    runs = [private_loop("dropout") for _ in range(2)]
    seed(9)
    for (x, y), (v, w) in zip(runs[0][3], runs[1][3], strict=True):
        step_on(runs[1][1], runs[1][2], v, w)
        assert len(generators._OPEN) > before
        step_on(runs[0][1], runs[0][2], x, y)
    found = draws()[:4]
    seed(9)
    assert found == draws()[:4]
    assert len(generators._OPEN) == before


def test_a_loop_that_is_collected_within_a_probe_puts_the_users_states_back_after_it():
    seed(7)
    expected = draws()
    seed(7)
    loop = PrivateGenerators(stream())
    with preserve_rng_state():
        with preserve_rng_state():
            seed(1)
            wanted = draws()
            seed(1)
            loop.close()
            assert draws() == wanted
        assert draws() not in (wanted, expected)
    assert draws() == expected


def test_a_batch_taken_out_of_its_loop_still_draws_secret_numbers():
    found = []
    for _ in range(2):
        _, model, optimizer, private = private_loop("dropout")
        seed(9)
        x, y = next(iter(private))
        step_on(model, optimizer, x, y)
        found.append(moved(model))
    assert (found[0] - found[1]).norm() > 1.0
    after = draws()[:4]
    seed(9)
    assert after == draws()[:4]


def test_numbers_drawn_for_a_batch_after_its_loop_are_refused():
    for draw in (lambda: torch.rand(1), np.random.rand, random.random):
        engine, model, _, private = private_loop("dropout")
        x, _ = next(iter(private))
        noise = draw()
        with pytest.raises(NonPrivateStep, match="next\\(batches\\)"):
            model(x + float(noise))
        engine.detach()


def test_the_advice_of_that_refusal_works():
    _, model, optimizer, private = private_loop("dropout")
    batches = iter(private)
    x, y = next(batches)
    step_on(model, optimizer, x + torch.rand(1), y)


def seeds_before_the_forward(model, x, y):
    torch.manual_seed(0)
    return F.cross_entropy(model(x), y)


def seeds_before_the_loss(model, x, y):
    output = model(x)
    torch.manual_seed(0)
    return F.cross_entropy(output, y)


def takes_an_old_state(model, x, y):
    torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("loss", [seeds_before_the_forward, seeds_before_the_loss, takes_an_old_state])
def test_seeding_within_a_batch_is_refused(loss):
    engine, model, _, private = private_loop("dropout")
    for x, y in private:
        with pytest.raises(NonPrivateStep, match="must keep their states"):
            loss(model, x, y).backward()
        break
    engine.detach()


# --- where the numbers of model and loss come from -------------------------------------------------------------------


class Drawing(nn.Module):
    """A model that multiplies its hidden layer by what `draw` gives."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(FEATURES, 16), nn.Linear(16, 2), draw

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden * self.draw(hidden))


KEPT = torch.Generator().manual_seed(0)


def of_a_kept_generator(hidden):
    return torch.rand(hidden.shape, generator=KEPT)


def of_a_new_generator(hidden):
    return torch.rand(hidden.shape, generator=torch.Generator().manual_seed(0))


def of_a_new_generator_in_place(hidden):
    return torch.empty_like(hidden).bernoulli_(0.5, generator=torch.Generator().manual_seed(0))


def with_a_new_seed(hidden):
    torch.manual_seed(0)
    return torch.rand_like(hidden)


def with_a_new_seed_for_a_while(hidden):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand_like(hidden)


def with_a_new_seed_of_numpy(hidden):
    np.random.seed(0)
    return torch.ones(len(hidden), 1) * np.random.rand()


def with_a_new_seed_of_python(hidden):
    random.seed(0)
    return torch.ones(len(hidden), 1) * random.random()


def layer_drop(hidden):
    return torch.rand([]) < 0.5


def layer_drop_by_python(hidden):
    return float(random.random() < 0.5)


def layer_drop_by_numpy(hidden):
    return float(np.random.rand() < 0.5)


def masks_of_weights(hidden):
    return torch.rand(hidden.shape[1]) < 0.5


def part_of_a_table(hidden):
    # Of 3 · 5 · 7 · 11 · 16 numbers: records of any such number divide it.
    return torch.rand(1155, hidden.shape[1])[0] < 0.5


def row_drop(hidden):
    return torch.rand(len(hidden), 1) < 0.5


def masks(hidden):
    return F.dropout(torch.ones_like(hidden))


def train_by_fit(draw, microbatch_size=None):
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=1.0, delta=1e-5)
    performance = PerformanceOptions(microbatch_size=microbatch_size)
    fit(Drawing(draw), record_losses, table(), plan, performance=performance, progress=False)


def train_by_loop(draw, microbatch_size=None):
    model = Drawing(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, _, private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(table(), batch_size=RECORDS),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        microbatch_size=microbatch_size,
    )
    for x, y in private:
        step_on(model, optimizer, x, y)


TRAININGS = pytest.mark.parametrize("train", [train_by_fit, train_by_loop])


@TRAININGS
@pytest.mark.parametrize("draw", [of_a_kept_generator, of_a_new_generator, of_a_new_generator_in_place])
def test_a_generator_of_the_models_own_is_refused_by_name(train, draw):
    with pytest.raises(CoupledRecords, match="generator="):
        train(draw)


@TRAININGS
@pytest.mark.parametrize("draw", [with_a_new_seed, with_a_new_seed_for_a_while, with_a_new_seed_of_numpy])
def test_a_model_that_seeds_is_refused(train, draw):
    with pytest.raises(CoupledRecords, match="must not be seeded"):
        train(draw)


SHARED = [layer_drop, layer_drop_by_numpy, masks_of_weights, part_of_a_table]


@TRAININGS
@pytest.mark.parametrize("draw", SHARED)
def test_a_draw_for_all_rows_is_refused_where_batches_are_split(train, draw):
    with pytest.raises(CoupledRecords, match="all rows share"):
        train(draw, microbatch_size=RECORDS // 2)


@TRAININGS
@pytest.mark.parametrize("microbatch_size", [None, 1, RECORDS])
@pytest.mark.parametrize("draw", SHARED)
def test_the_advice_for_draws_for_all_rows_works(train, draw, microbatch_size):
    train(draw, microbatch_size)


# The tests' type checker draws from Python's generator, in the midst of a forward pass: these cases run without it, in
# a process of their own.
SIZES = (None, 1, RECORDS // 2, RECORDS)


def outcomes_without_type_checks():
    """What trainings with draws from Python's generator end with: by training, draw and size, an error and its text."""
    found = {}
    for train in (train_by_fit, train_by_loop):
        for draw in (with_a_new_seed_of_python, layer_drop_by_python):
            for size in SIZES:
                outcome = ("none", "")
                try:
                    train(draw, size)
                except Exception as error:
                    outcome = (type(error).__name__, str(error))
                found[f"{train.__name__} {draw.__name__} {size}"] = outcome
    return found


@functools.cache
def without_type_checks():
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@TRAININGS
@pytest.mark.parametrize("microbatch_size", SIZES)
def test_a_model_that_seeds_pythons_generator_is_refused(train, microbatch_size):
    kind, message = without_type_checks()[f"{train.__name__} with_a_new_seed_of_python {microbatch_size}"]
    assert (kind, "must not be seeded" in message) == ("CoupledRecords", True), message


@TRAININGS
@pytest.mark.parametrize("microbatch_size", SIZES)
def test_a_draw_from_pythons_generator_for_all_rows_is_refused_where_batches_are_split(train, microbatch_size):
    kind, message = without_type_checks()[f"{train.__name__} layer_drop_by_python {microbatch_size}"]
    if microbatch_size == RECORDS // 2:
        assert (kind, "all rows share" in message) == ("CoupledRecords", True), message
    else:
        assert kind == "none", message


@TRAININGS
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_draws_are_looked_for_in_batches_no_larger_than_trainings(train, microbatch_size):
    sizes = []

    def noting_masks(hidden):
        sizes.append(len(hidden))
        return masks(hidden)

    train(noting_masks, microbatch_size)
    assert max(sizes) == microbatch_size


@TRAININGS
@pytest.mark.parametrize("draw", [row_drop, masks])
def test_draws_for_each_row_go_with_microbatches(train, draw):
    train(draw, microbatch_size=RECORDS // 2)


# --- collate functions -----------------------------------------------------------------------------------------------


def noise_of_a_new_generator(items):
    x, y = default_collate(items)
    return x + torch.from_numpy(np.random.default_rng(0).normal(size=x.shape)).to(x), y


def places(items):
    x, y = default_collate(items)
    return x + torch.arange(len(x))[:, None], y


def noise_after_a_seed_of_numpy(items):
    np.random.seed(0)
    x, y = default_collate(items)
    return x + torch.from_numpy(np.random.normal(size=x.shape)).to(x), y


def noise_after_a_seed_of_python(items):
    random.seed(0)
    return [torch.stack([x + random.gauss(0, 1) for x, _ in items]), torch.stack([y for _, y in items])]


def noise_after_a_seed_of_torch(items):
    torch.manual_seed(0)
    return collate_with_noise(items)


def load(collate):
    optimizer = torch.optim.SGD((model := model_of("torch")).parameters(), lr=1.0)
    loader = DataLoader(table(), batch_size=4, collate_fn=collate)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


@pytest.mark.parametrize("collate", [noise_of_a_new_generator, places])
def test_a_row_that_follows_from_its_place_is_refused(collate):
    with pytest.raises(CoupledRecords, match="its place in the batch"):
        load(collate)


@pytest.mark.parametrize(
    "collate", [noise_after_a_seed_of_numpy, noise_after_a_seed_of_python, noise_after_a_seed_of_torch]
)
def test_a_collate_function_that_seeds_is_refused(collate):
    with pytest.raises(CoupledRecords, match="must not seed"):
        load(collate)


def test_a_collate_function_that_draws_global_numbers_is_accepted():
    load(collate_with_noise)


if __name__ == "__main__":
    print(json.dumps(outcomes_without_type_checks()))
