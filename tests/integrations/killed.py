"""Trains through a library in children that are killed, resumes them, and notes every batch whose records were read.

The parent never trains: each child is forked from it, so that one import serves many crashes.
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.runs import RunFolder
from sordino.training.loop_hooks import LoopHooks
from sordino.training.step import PrivateStep

STEPS, EVERY = 8, 3
# Where a child dies: a method, whether before or after it, and what it stands for.
PLACES = {
    "before a line": (RunFolder, "append", "before"),
    "after a line": (RunFolder, "append", "after"),
    "records read": (LoopHooks, "set_microbatch", "after"),
    "gradient written": (PrivateStep, "finish", "after"),
}


def records():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def parts():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        DataLoader(TensorDataset(*records()), batch_size=6),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        return {"logits": self.layer(x)}


# --- the libraries -----------------------------------------------------------------------------------------------


def huggingface(folder, resume):
    from transformers import TrainingArguments

    from sordino.integrations.huggingface import PrivacyArguments, PrivateTrainer

    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=6,
        max_steps=STEPS,
        save_steps=EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    x, y = records()
    trainer = PrivateTrainer(
        Net(),
        arguments,
        privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5),
        train_dataset=[{"x": row, "labels": label} for row, label in zip(x, y, strict=True)],
    )
    whole = any((folder / "out").glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=(whole if resume is None else str(folder / "out" / resume)) or None)
    return trainer.guarantee(), trainer.engine, trainer.state.global_step


def lightning(folder, resume):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, index):
            return F.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    privacy = PrivacyCallback(PrivacyArguments(noise_multiplier=1.0, delta=1e-5))
    keep = ModelCheckpoint(folder / "kept", filename="{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
    trainer = L.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[privacy, keep],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    path = "last" if resume is None else str(folder / "kept" / resume)
    trainer.fit(Module(), DataLoader(TensorDataset(*records()), batch_size=6), ckpt_path=path)
    return privacy.guarantee(), privacy.engine, trainer.global_step


def accelerate(folder, resume):
    from accelerate import Accelerator

    from sordino.integrations.accelerate import prepare_private

    accelerator, engine = Accelerator(cpu=True), PrivacyEngine(run_folder=folder / "run")
    model, optimizer, loader = parts()
    model, optimizer, loader = prepare_private(
        accelerator,
        engine,
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    done = 0
    names = sorted(path.parent.name for path in folder.glob("state-*/whole"))
    if resume or names:
        name = resume or names[-1]
        accelerator.load_state(str(folder / name))
        done = int(name.removeprefix("state-"))
    while done < STEPS:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % EVERY == 0:
                accelerator.save_state(str(folder / f"state-{done}"))
                (folder / f"state-{done}" / "whole").touch()
            if done == STEPS:
                break
    accelerator.end_training()
    return engine.guarantee(1e-5), engine, done


def own_loop(folder, resume):
    engine = PrivacyEngine(run_folder=folder / "run")
    model, optimizer, loader = parts()
    given = {"module": model, "optimizer": optimizer, "data_loader": loader}
    model, optimizer, loader = engine.make_private(**given, noise_multiplier=1.0, max_grad_norm=1.0)
    done = 0
    names = sorted(path.name for path in folder.glob("at-*.safetensors"))
    if resume or names:
        name = resume or names[-1]
        engine.load_checkpoint(path=folder / name, module=model, optimizer=optimizer)
        done = int(name.removeprefix("at-").removesuffix(".safetensors"))
    while done < STEPS:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % EVERY == 0:
                path = folder / f"at-{done}.safetensors"
                engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
            if done == STEPS:
                break
    engine.close_run_folder(model)
    return engine.guarantee(1e-5), engine, done


# --- one child ---------------------------------------------------------------------------------------------------


def witnessed(folder):
    """Note each logical batch on the disk as soon as its records were read."""
    file = os.open(folder / "read", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    hand_out = LoopHooks.set_microbatch

    def noting(session, chunk, batch, rows):
        if chunk.index == 0:
            os.write(file, b".")
        return hand_out(session, chunk, batch, rows)

    LoopHooks.set_microbatch = noting


def dying(owner, name, when, count):
    """SIGKILL at the `count`-th call of a method."""
    method, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(None)
        if when == "before" and len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        found = method(*args, **kwargs)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, wrapped)


def saving_dies(library, count):
    """SIGKILL when the `count`-th checkpoint is being written."""
    import safetensors.torch

    dying(
        *{"huggingface": (safetensors.torch, "save_file"), "own_loop": (Path, "replace")}.get(library, (torch, "save")),
        "before",
        count,
    )


def child(library, folder, *, place=None, count=0, resume=None):
    """Whether the child was killed; what it told is in ``told.json``."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
            witnessed(folder)
            if place == "saving":
                saving_dies(library, count)
            elif place is not None:
                owner, name, when = PLACES[place]
                dying(owner, name, when, count)
            with contextlib.redirect_stdout(io.StringIO()):
                guarantee, engine, done = globals()[library](folder, resume)
            told = {"epsilon": guarantee.epsilon, "path": str(engine.journal.path), "done": done}
            (folder / "told.json").write_text(json.dumps(told))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(number, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return False


if __name__ == "__main__":
    chosen, root, asked = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    seen = []
    for number, crashes in enumerate(asked):
        here = root / str(number)
        here.mkdir()
        os.chdir(here)
        kills = sum(child(chosen, here, **crash) for crash in crashes)
        seen.append(
            {"kills": kills, "read": (here / "read").stat().st_size, **json.loads((here / "told.json").read_text())}
        )
    (root / "seen.json").write_text(json.dumps(seen))
