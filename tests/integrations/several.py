"""One process of several, or one alone: trains through another library as it is told, and writes what it saw."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.errors import SordinoError
from sordino.ledger import Ledger
from sordino.training.distributed import DistributedContext

RECORDS, LOGICAL = 8, 2
RANK, COUNT = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def records():
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


class Net(nn.Module):
    """Other weights in every process, as a careless script has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(RANK)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        # What DistributedDataParallel would send around in every forward pass.
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x, labels=None):
        logits = self.layers(x) * self.scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def weights(model):
    return [value.detach().flatten().tolist() for value in model.parameters()]


def seeded(**more):
    """The same batches and the same noise, whoever takes part."""
    return PrivacyEngine(seed=7, reproducible=True, **more)


def noting_shares():
    """How many records this process gets of every logical batch."""
    shares, share = [], DistributedContext.local_indices

    def noted(ranks, indices):
        found = share(ranks, indices)
        shares.append(len(found))
        return found

    DistributedContext.local_indices = noted
    return shares


# --- Hugging Face ------------------------------------------------------------------------------------------------


def hugging_face(folder, *, noise=0.5, target=None, epochs=2, resume=None, again=None, ledger=None, **changes):
    from transformers import TrainingArguments

    from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

    model, (x, y) = Net(), records()
    data = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]
    settings = {
        "per_device_train_batch_size": LOGICAL // COUNT,
        "learning_rate": 0.01,
        "num_train_epochs": epochs,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "report_to": [],
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    trainer = PrivateTrainer(
        model,
        TrainingArguments(str(folder / "hugging"), **{**settings, **changes}),
        privacy=PrivacyArguments(
            noise_multiplier=noise if target is None else None,
            target_epsilon=target,
            delta=1e-5,
            eval_data_are_public=True,
            diagnostics="private",
        ),
        train_dataset=data,
        eval_dataset=data[:4],
        ledger=None if ledger is None else Ledger(folder / "ledger.db").account(ledger),
    )
    if ledger is resume is None:
        trainer._private.engine = seeded()
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "hugging" / resume))
    if again is not None:
        trainer.train(resume_from_checkpoint=str(folder / "hugging" / again))
    return {
        "weights": weights(model),
        "epsilon": trainer.guarantee().epsilon,
        "steps": trainer.state.global_step,
        "logged": sorted(set().union(*trainer.state.log_history)),
        "evaluated": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        "is_wrapped": trainer.model_wrapped is not model,
    }


def hugging_face_bypass(folder, *, noise):
    from integrations.test_no_silent_bypass import by_hugging_face

    return {"accuracy": by_hugging_face(noise, folder / "bypass")}


# --- accelerate --------------------------------------------------------------------------------------------------


def accelerated(folder, *, noise=0.5, epochs=2, resume=None, ledger=None, split=False):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    from sordino.integrations.accelerate import prepare_private

    AcceleratorState._reset_state()
    GradientState._reset_state()
    batches = DataLoaderConfiguration(split_batches=split)
    accelerator, model = Accelerator(cpu=True, dataloader_config=batches), Net()
    paid = None if ledger is None else Ledger(folder / "ledger.db").account(ledger)
    engine = seeded() if ledger is resume is None else PrivacyEngine(ledger=paid)
    prepared, optimizer, loader = prepare_private(
        accelerator,
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        data_loader=DataLoader(TensorDataset(*records()), batch_size=LOGICAL if split else LOGICAL // COUNT),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        microbatch_size=1,
    )
    if resume is not None:
        accelerator.load_state(str(folder / resume))
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x)["logits"], y))
                optimizer.step()
                optimizer.zero_grad()
        if ledger is resume is None:
            accelerator.save_state(str(folder / f"state-{epoch}"))
    outcome = {"weights": weights(model), "epsilon": engine.get_epsilon(1e-5), "is_wrapped": prepared is not model}
    if ledger is resume is None:
        accelerator.load_state(str(folder / "state-0"))
        outcome["gone_back"] = engine.get_epsilon(1e-5)
    return outcome


def accelerated_bypass(folder, *, noise):
    from integrations.test_no_silent_bypass import by_accelerate

    return {"accuracy": by_accelerate(noise, folder)}


# --- Lightning ---------------------------------------------------------------------------------------------------


def of_two():
    """The settings of a trainer in two processes; none in one alone."""
    return {"strategy": "ddp", "devices": COUNT} if COUNT > 1 else {"devices": 1}


def lightning_module():
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0])["logits"], batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0])["logits"], batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    return Module()


def lightning(folder, *, noise=0.5, epochs=2, resume=None, again=None, ledger=None, **changes):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback

    paid = None if ledger is None else Ledger(folder / "ledger.db").account(ledger)
    private = PrivacyArguments(noise_multiplier=noise, delta=1e-5, eval_data_are_public=True, diagnostics="private")
    callback = PrivacyCallback(private, ledger=paid)
    if ledger is resume is None:
        callback._private.engine = seeded()
    data = TensorDataset(*records())
    loader = DataLoader(data, batch_size=LOGICAL // COUNT, shuffle=True)
    public = DataLoader(TensorDataset(*(column[:4] for column in records())), batch_size=1)
    saved = folder / "lightning"

    def trained(until, path):
        checkpoints = ModelCheckpoint(saved, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        trainer = L.Trainer(
            max_epochs=until,
            callbacks=[callback, *([] if ledger else [checkpoints])],
            accelerator="cpu",
            logger=False if ledger else CSVLogger(folder / "logs"),
            enable_checkpointing=not ledger,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            **{**of_two(), **changes},
        )
        module = lightning_module()
        trainer.fit(module, loader, public, ckpt_path=None if path is None else str(saved / path))
        return trainer, module

    trainer, module = trained(epochs, resume)
    if again is not None:
        trainer, module = trained(epochs, again)
    return {
        "weights": weights(module),
        "epsilon": callback.guarantee().epsilon,
        "steps": trainer.global_step,
        "evaluated": [float(trainer.callback_metrics["val_loss"])],
        "logged": sorted(trainer.callback_metrics),
        "is_wrapped": trainer.strategy.model is not module,
        "given_back": sorted({"configure_ddp", "training_step", "save_checkpoint"} & set(vars(trainer.strategy))),
    }


def lightning_bypass(folder, *, noise):
    from integrations.test_no_silent_bypass import by_lightning

    return {"accuracy": by_lightning(noise, folder, **of_two())}


# --- processes ---------------------------------------------------------------------------------------------------


def main():
    """Each of the trainings that are asked for, in order."""
    asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    shares, seen = noting_shares(), []
    for name, settings in asked:
        shares.clear()
        try:
            outcome = globals()[name](folder, **settings)
        except SordinoError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        seen.append({**outcome, "shares": list(shares)})
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        # Nobody leaves while another still exchanges.
        while not all((folder / f"rank{rank}.json").exists() for rank in range(COUNT)):
            time.sleep(0.05)
        time.sleep(0.5)
        os._exit(0)


if __name__ == "__main__":
    main()
