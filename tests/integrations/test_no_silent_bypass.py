"""No way to train goes around the noise: with very little a model learns, with an absurd amount it learns nothing.

Each path trains on the same data: two classes, apart along one of many axes, so that a direction of noise is right on
about half of the records.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import Plan, PrivacyEngine, fit
from sordino.definitions import PrivacyUnit
from sordino.federated import LocalTraining, simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RECORDS, COLUMNS, STEPS = 512, 256, 8
LITTLE, ABSURD = 1e-3, 1e4
RATE = 0.5
# A random direction has a part of 1/√COLUMNS along the axis, 0.06, and is right on Φ(3 · 0.06 z) of the records with z
# standard normal: on more than this one in 300,000 times.
UNTAUGHT = 0.8


def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (RECORDS,), generator=generator)
    x = 0.1 * torch.randn(RECORDS, COLUMNS, generator=generator)
    x[:, 0] += 0.3 * (2 * y - 1)
    return x, y


class Linear(nn.Module):
    """Takes arguments by name and returns logits by name where labels are given, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(COLUMNS, 2)

    def forward(self, x, labels=None):
        return self.layer(x)


def accuracy(model):
    x, y = data()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def by_fit(noise, tmp_path):
    model = Linear()
    plan = Plan(
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=RATE,
        steps=STEPS,
        expected_batch_size=RATE * RECORDS,
        delta=1e-5,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    fit(
        model,
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"),
        data(),
        plan,
        optimizer=optimizer,
        progress=False,
    )
    return accuracy(model)


def parts():
    model = Linear()
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=4.0),
        "data_loader": DataLoader(TensorDataset(*data()), batch_size=int(RATE * RECORDS)),
    }


def by_engine(noise, tmp_path):
    model, optimizer, loader = PrivacyEngine().make_private(**parts(), noise_multiplier=noise, max_grad_norm=1.0)
    for _ in range(STEPS // len(loader)):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return accuracy(model)


def by_accelerate(noise, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from sordino.integrations.accelerate import prepare_private

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = prepare_private(
        accelerator, PrivacyEngine(), **parts(), noise_multiplier=noise, max_grad_norm=1.0
    )
    for _ in range(STEPS // len(loader)):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return accuracy(accelerator.unwrap_model(model))


def by_hugging_face(noise, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import TrainingArguments

    from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

    class Named(Linear):
        def forward(self, x, labels=None):
            return {"logits": self.layer(x)}

    model, (x, y) = Named(), data()
    trainer = PrivateTrainer(
        model,
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=int(RATE * RECORDS),
            max_steps=STEPS,
            learning_rate=4.0,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        privacy=PrivacyArguments(noise_multiplier=noise, delta=1e-5),
        train_dataset=[{"x": row, "labels": label} for row, label in zip(x, y, strict=True)],
    )
    trainer.train()
    return accuracy(lambda x: model(x)["logits"])


def by_lightning(noise, tmp_path, **processes):
    L = pytest.importorskip("lightning", reason="lightning is not installed")
    from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Linear()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=4.0)

    net = Net()
    L.Trainer(
        max_steps=STEPS,
        callbacks=[PrivacyCallback(PrivacyArguments(noise_multiplier=noise, delta=1e-5))],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **processes,
    ).fit(net, parts()["data_loader"])
    return accuracy(net.model)


def by_clients(noise, tmp_path):
    model, (x, y) = Linear(), data()
    clients = [(x[k : k + 4], y[k : k + 4]) for k in range(0, RECORDS, 4)]
    plan = Plan(
        noise_multiplier=noise,
        max_grad_norm=1.0,
        sample_rate=RATE,
        steps=STEPS,
        expected_batch_size=RATE * len(clients),
        delta=1e-5,
        privacy_unit=PrivacyUnit.CLIENT,
    )
    local = LocalTraining(learning_rate=4.0)
    simulate(model, lambda m, a, b: F.cross_entropy(m(a), b, reduction="none"), clients, plan, local=local)
    return accuracy(model)


PATHS = [by_fit, by_engine, by_accelerate, by_hugging_face, by_lightning, by_clients]


@pytest.mark.parametrize("path", PATHS)
def test_no_silent_bypass(path, tmp_path):
    assert path(LITTLE, tmp_path) > 0.9
    assert path(ABSURD, tmp_path) < UNTAUGHT


ESTIMATORS = [
    ("LogisticRegression", "objective"),
    ("LogisticRegression", "output"),
    ("LogisticRegression", "dp-gd"),
    ("LogisticRegression", "dp-sgd"),
    ("LinearSVC", "objective"),
    ("LinearSVC", "output"),
    ("GaussianNB", None),
    ("DPClassifier", None),
    ("WhitenedLogisticRegression", None),
    ("HistGradientBoostingClassifier", None),
]
DECLARED = {
    "data_norm": 2.0,
    "classes": (0, 1),
    "bounds": (-1.0, 1.0),
    "dataset_size": RECORDS,
    "steps": 30,
    "epochs": 4.0,
    "max_iter": 8,
    "delta": 1e-5,
}


def scored(name, method, epsilon):
    import sordino.estimators as room

    kind = getattr(room, name)
    accepted = kind().get_params()
    given = {key: value for key, value in DECLARED.items() if key in accepted} | {"epsilon": epsilon}
    x, y = data()
    made = kind(**(given if method is None else given | {"method": method}))
    return made.fit(x.numpy().astype(np.float64), y.numpy()).score(x.numpy().astype(np.float64), y.numpy())


@pytest.mark.parametrize(("name", "method"), ESTIMATORS)
def test_no_silent_bypass_in_estimators(name, method):
    """Their noise follows from ε."""
    assert scored(name, method, 1e3) > 0.85
    assert scored(name, method, 1e-4) < UNTAUGHT
