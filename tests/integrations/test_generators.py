"""Random numbers in other libraries' trainers: a public seed decides nothing, and checkpoints don't tell of records."""

import glob
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from sordino import PrivacyEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RECORDS, LENGTH = 12, 6


def table(records):
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[:records], (x[:records, 0] > 0).long())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


def moved(model, start):
    return torch.cat([(p.detach() - start[name]).flatten() for name, p in model.named_parameters()])


def copied(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def by_huggingface(folder, records):
    import transformers

    from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

    words = torch.randint(3, 20, (RECORDS, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    start = copied(model)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=RECORDS,
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
    )
    PrivateTrainer(
        model,
        arguments,
        privacy=PrivacyArguments(noise_multiplier=0.0, delta=1e-5),
        train_dataset=[{"input_ids": row, "labels": row} for row in words[:records]],
    ).train()
    (file,) = glob.glob(f"{folder}/checkpoint-*/rng_state*.pth")
    return moved(model, start), torch.load(file, weights_only=False)


def by_accelerate(folder, records):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import set_seed

    from sordino.integrations.accelerate import prepare_private

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    model = network()
    start, accelerator = copied(model), Accelerator(cpu=True)
    set_seed(42)
    model, optimizer, loader = prepare_private(
        accelerator,
        PrivacyEngine(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(table(records), batch_size=records),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.save_state(str(folder / "state"))
    (file,) = glob.glob(f"{folder}/state/random_states_0.pkl")
    return moved(model, start), torch.load(file, weights_only=False)


def by_lightning(folder, records):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Module()
    start = copied(module)
    lightning.seed_everything(42, workers=True)
    trainer = lightning.Trainer(
        callbacks=[PrivacyCallback(PrivacyArguments(noise_multiplier=0.0, delta=1e-5))],
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, DataLoader(table(records), batch_size=records))
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return moved(module, start), states


def same(one, other):
    """Whether two saved states are equal, whatever they are made of."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((torch.as_tensor(np.asarray(one)) == torch.as_tensor(np.asarray(other))).all())
    return one == other


@pytest.mark.parametrize("train", [by_huggingface, by_accelerate, by_lightning])
def test_a_public_seed_decides_nothing_and_states_do_not_tell_of_records(train, tmp_path):
    runs = []
    for number, records in enumerate((RECORDS, RECORDS, RECORDS - 1)):
        random.seed(1)
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(train(folder, records))
    assert (runs[0][0] - runs[1][0]).norm() > 0
    # Python's: the tests' type checker draws from it, more or less often.
    states = [{name: state for name, state in run[1].items() if name not in {"python", "random_state"}} for run in runs]
    assert any("torch" in name or "cpu" in name for name in states[0])
    assert same(states[0], states[1])
    assert same(states[0], states[2])
