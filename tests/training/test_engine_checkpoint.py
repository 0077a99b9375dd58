import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.accounting import epsilon
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed

STEP = PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=2.0))


def made(**options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    settings = {"noise_multiplier": 2.0, "max_grad_norm": 1.0} | options
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=16), **settings
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return engine, model, optimizer, scheduler, loader


def train(parts, steps):
    _, model, optimizer, scheduler, loader = parts
    for place, (x, y) in enumerate(loader):
        if place == steps:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def save(parts, path, **more):
    engine, model, optimizer, scheduler, _ = parts
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer, scheduler=scheduler, **more)


def load(path, **options):
    parts = made(**options)
    engine, model, optimizer, scheduler, _ = parts
    return parts, engine.load_checkpoint(path=path, module=model, optimizer=optimizer, scheduler=scheduler)


def exact(steps):
    return epsilon(SelfComposed(event=STEP, count=steps), 1e-5).upper


def test_module_optimizer_scheduler_bill_and_extras_come_back(tmp_path):
    parts = made()
    train(parts, 3)
    save(parts, tmp_path / "a.safetensors", checkpoint_dict={"epoch": 2, "best": torch.ones(2)})
    again, more = load(tmp_path / "a.safetensors")
    charged = parts[0].get_epsilon(1e-5)
    assert again[0].get_epsilon(1e-5) == charged == exact(4)
    assert torch.equal(again[1].weight, parts[1].weight)
    assert again[3].last_epoch == 3
    saved, restored = parts[2].state_dict()["state"], again[2].state_dict()["state"]
    assert all(torch.equal(saved[key]["exp_avg"], restored[key]["exp_avg"]) for key in saved)
    assert more["epoch"] == 2
    assert torch.equal(more["best"], torch.ones(2))


def test_steps_after_a_load_come_on_top(tmp_path):
    parts = made()
    train(parts, 2)
    save(parts, tmp_path / "a.safetensors")
    again, _ = load(tmp_path / "a.safetensors")
    train(again, 4)
    assert again[0].get_epsilon(1e-5) == exact(3 + 4)
    save(again, tmp_path / "b.safetensors")
    third, _ = load(tmp_path / "b.safetensors")
    assert third[0].get_epsilon(1e-5) == exact(7)


def test_going_back_to_an_older_checkpoint_pays_for_what_the_newer_one_showed(tmp_path):
    parts = made()
    train(parts, 1)
    save(parts, tmp_path / "old.safetensors")
    train(parts, 4)
    save(parts, tmp_path / "new.safetensors")
    again, _ = load(tmp_path / "old.safetensors")
    # The second loop begins with the batch that the first one took last and did not step on.
    assert again[0].get_epsilon(1e-5) == parts[0].get_epsilon(1e-5) == exact(2 + 3)


def test_two_engines_that_went_on_from_one_checkpoint_are_both_on_the_bill_of_a_third(tmp_path):
    parts = made()
    train(parts, 4)
    save(parts, tmp_path / "start.safetensors")
    for name in ("one", "two"):
        again, _ = load(tmp_path / "start.safetensors")
        train(again, 4)
        save(again, tmp_path / f"{name}.safetensors")
    third, _ = load(tmp_path / "start.safetensors")
    assert third[0].get_epsilon(1e-5) == exact(4 + 4 + 4)


def test_loading_twice_counts_once(tmp_path):
    parts = made()
    train(parts, 4)
    save(parts, tmp_path / "a.safetensors")
    again, _ = load(tmp_path / "a.safetensors")
    again[0].load_checkpoint(path=tmp_path / "a.safetensors", module=again[1])
    assert again[0].get_epsilon(1e-5) == exact(4)
    parts[0].load_checkpoint(path=tmp_path / "a.safetensors", module=parts[1])
    assert parts[0].get_epsilon(1e-5) == exact(4)


def test_noise_after_a_load_is_fresh(tmp_path):
    parts = made()
    train(parts, 1)
    save(parts, tmp_path / "a.safetensors")
    ends = []
    for _ in range(2):
        again, _ = load(tmp_path / "a.safetensors")
        train(again, 1)
        ends.append(again[1].weight.detach().clone())
    assert not torch.equal(*ends)


def test_pickles_and_checkpoints_of_something_else_are_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(InvalidArgument, match="Pickle files"):
        load(file)
    save(made(), file)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be 'add_or_remove_one'"):
        load(file, neighboring_relation="replace_one")
    engine, _, _, _, _ = made()
    with pytest.raises(InvalidArgument, match=r"differs in 0\.bias"):
        engine.load_checkpoint(path=file, module=nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(InvalidArgument, match="optimizer must be Adam"):
        engine.load_checkpoint(path=file, module=nn.Linear(3, 2), optimizer=torch.optim.SGD([torch.ones(1)], lr=1.0))
