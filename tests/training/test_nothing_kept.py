"""After a training nothing of single records is left in what `fit`, an engine or a server hand back."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leftovers import RECORDS, found_in, found_in_folder, marked
from sordino import Plan, PrivacyEngine, fit
from sordino.definitions import PrivacyUnit
from sordino.federated import PrivateServer
from sordino.training import PerformanceOptions
from sordino.training.averaging import TailWeightAverage


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 2))


PLAN = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=3, expected_batch_size=100.0, delta=1e-5)


@pytest.mark.parametrize("memory", ["fast", "low_memory", "two_pass"])
def test_what_fit_returns_and_writes_holds_no_record(tmp_path, memory):
    rows = marked()
    data = torch.from_numpy(rows), torch.from_numpy((rows[:, 0] > 0).astype(np.int64))
    model = network()
    result = fit(
        model,
        losses,
        data,
        PLAN,
        progress=False,
        run_folder=tmp_path / "run",
        averaging=TailWeightAverage(fraction=0.5),
        performance=PerformanceOptions(clipping_mode=memory, microbatch_size=40),
    )
    assert found_in(result, rows) == []
    assert found_in(model, rows) == []
    assert found_in_folder(tmp_path, rows) == []


def test_a_model_and_an_optimizer_hold_no_record_after_a_loop():
    rows = marked()
    data = TensorDataset(torch.from_numpy(rows), torch.from_numpy((rows[:, 0] > 0).astype(np.int64)))
    model, optimizer = network(), None
    optimizer = torch.optim.Adam(model.parameters())
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    del x, y, loader
    engine.detach()
    assert found_in(model, rows) == []
    assert found_in(optimizer, rows) == []


def test_a_server_holds_no_update_after_its_rounds(tmp_path):
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        steps=2,
        expected_batch_size=float(RECORDS),
        delta=1e-5,
        privacy_unit=PrivacyUnit.CLIENT,
    )
    rows = marked()
    with PrivateServer(nn.Linear(4, 1, bias=False), plan, num_clients=RECORDS, run_folder=tmp_path / "run") as server:
        for cohort in server.rounds():
            server.finish_round(cohort, [(int(client), [rows[client : client + 1]]) for client in cohort.clients])
    assert [way for way in found_in(server, rows) if "clients" not in way] == []
    assert found_in_folder(tmp_path, rows) == []
