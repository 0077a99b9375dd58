"""What is charged is what ran, and the target is never exceeded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from conformance_adapter import held, one_step

DELTA = 1e-5


def data(records=40):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(records, 3, generator=generator), torch.randint(0, 2, (records,)))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def silent(model, batch):
    return (0 * model(batch[0])).sum(1).mean()


def test_a_resumed_run_has_the_epsilon_of_the_uninterrupted_one_and_other_noise(library):
    def run(private, steps):
        noise = []
        for _ in range(steps):
            noise += [p.clone() for p in one_step(private, silent)]
        return noise

    options = {"batch_size": 8, "noise_multiplier": 1.0}
    whole = library.make_private(nn.Linear(3, 2), data(), **options)
    run(whole, 7)
    first = library.make_private(nn.Linear(3, 2), data(), **options)
    before = run(first, 4)
    resumed = library.resume(first, nn.Linear(3, 2), data(), **options)
    after = run(resumed, 3)
    assert resumed.epsilon(DELTA) == whole.epsilon(DELTA)
    values = torch.cat([part.flatten() for part in before + after])
    assert len(values.unique()) == len(values), "no noise value comes twice"


@pytest.mark.parametrize(
    "length",
    [1, 2, 3, 10, 117, 2000, *(pytest.param(length, marks=pytest.mark.slow) for length in range(4, 2000, 57))],
)
def test_the_target_epsilon_is_never_exceeded(library, length):
    loader = DataLoader(TensorDataset(torch.zeros(length, 2)), batch_size=1)
    private = library.make_private_with_epsilon(
        nn.Linear(2, 1), loader, target_epsilon=1.0, target_delta=DELTA, epochs=1, max_grad_norm=1.0
    )
    for _ in private.loader:
        pass
    spent = private.epsilon(DELTA)
    assert 0.99 < spent <= 1.0


def test_epsilon_is_zero_before_the_first_batch_and_infinite_without_noise(library):
    private = library.make_private(nn.Linear(3, 2), data())
    assert private.epsilon(DELTA) == 0
    one_step(private, cross_entropy)
    assert private.epsilon(DELTA) == float("inf")
    assert "NOT private" in private.engine.guarantee(DELTA).describe()


def test_epsilon_is_monotone_in_everything(library):
    base = {"sample_rate": 0.02, "noise_multiplier": 1.0, "steps": 100, "delta": 1e-5}
    reference = library.epsilon_of(**base)
    assert library.epsilon_of(**base | {"steps": 200}) > reference
    assert library.epsilon_of(**base | {"sample_rate": 0.03}) > reference
    assert library.epsilon_of(**base | {"noise_multiplier": 0.9}) > reference
    assert library.epsilon_of(**base | {"delta": 1e-6}) > reference
    assert library.epsilon_of(**base | {"delta": 0.5}) >= 0


def test_every_logical_batch_is_charged_once_however_it_is_split(library):
    spent = []
    for microbatch_size in (None, 3):
        private = library.make_private(
            nn.Linear(3, 2), data(), batch_size=8, noise_multiplier=1.0, microbatch_size=microbatch_size
        )
        for batch in private.loader:
            cross_entropy(private.model, batch).backward()
            private.optimizer.step()
        spent.append(private.epsilon(DELTA))
    assert spent[0] == spent[1]
    assert held(private)
