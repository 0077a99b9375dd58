"""Lightning's Trainer with private steps, by one callback (floor 4, integrations; needs lightning).

The module, its optimizer, schedules, loggers and checkpoints stay as they are. Lightning runs the training step inside
``optimizer.step(closure)``; here it runs just before, on one chunk after another of a logical batch, so that the step
itself only writes the private gradient and takes it. In several processes the module is not wrapped: the engine adds
clipped sums up itself.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, SordinoError, UnprivateStep
from sordino.integrations.arguments import PrivacyArguments, noise_for
from sordino.integrations.logical_batches import LogicalBatch, LogicalBatches
from sordino.integrations.processes import steps_an_epoch
from sordino.integrations.run_folders import begin_run, cut_off_run, resume_run
from sordino.ledger import Account, Reservation
from sordino.runs.claims import guarantee_body
from sordino.training.drop_in.journal import find_run_folder
from sordino.training.engine import PrivacyEngine
from sordino.training.processes.ranks import ranks_here
from sordino.training.records.loader import PrivateLoader, population_of

try:
    from sordino.integrations.lightning_packages import Callback, LightningModule, Trainer, part_of
    from sordino.integrations.lightning_settings import check_trainer, not_public, steps_planned
    from sordino.integrations.lightning_steps import (
        TrainingStep,
        asks_for_last_checkpoint,
        internal,
        run_chunks,
        run_closure,
    )
except ImportError as error:
    raise SordinoError(
        f"sordino.integrations.lightning must find lightning, got {type(error).__name__}. Install lightning."
    ) from None

__all__ = ["PrivacyArguments", "PrivacyCallback"]

_SCHEMA = 2


class PrivacyCallback(Callback):
    """Makes ``Trainer.fit`` of an ordinary `LightningModule` differentially private.

    When: the training is a LightningModule with automatic optimization. For manual optimization or several optimizers
    write the loop yourself, with `PrivacyEngine`.

    Guarantee: the parameters after every step, and everything that is logged or saved, are (ε, δ)-differentially
    private as `guarantee` states. A logical batch is a Poisson sample of the loader's batch size times
    ``accumulate_grad_batches`` times the number of processes records on average, run in chunks of at most the loader's
    batch size; all processes take part in every step. What ``training_step`` logs, and the loss, go nowhere. Every step
    is in the transcript of a run folder before its records are read, and a training that is resumed, from whichever
    checkpoint, is charged all that stands there. From ``setup`` to ``teardown`` a training step that no charged batch
    asked for raises.

    Args:
        privacy: ε and δ, clipping.
        ledger: the data set's account.
        run_folder: a new folder for the run's transcript and guarantee, or that of the run to go on with; by default
            the next number in ``sordino-runs`` under the trainer's ``default_root_dir``.

    Attributes:
        engine: makes the steps private and keeps the bill.

    Raises:
        InvalidArgument: when training starts: a setting of the trainer would let something through that no noise
            covers, or couples records.

    Example:
        >>> from sordino.integrations.lightning import PrivacyArguments, PrivacyCallback
        >>> callback = PrivacyCallback(PrivacyArguments(target_epsilon=3.0, delta=1e-5))
        >>> callback.guarantee().epsilon  # Trainer(callbacks=[callback]).fit(module, loader) spends it
        0.0

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        privacy: PrivacyArguments,
        *,
        ledger: Account | Reservation | None = None,
        run_folder: str | Path | None = None,
    ) -> None:
        self.privacy = privacy
        self.engine = PrivacyEngine(ledger=ledger, delta=privacy.delta, gradients=privacy.gradients)
        self._run_folder = run_folder
        self._undo: list[Callable[[], None]] = []
        self._steps_done, self._is_restored = 0, False
        self._steps_left: int | None = None
        self._was_stepped = False
        # Of a checkpoint that was loaded: which run it belongs to, and where that may lie.
        self._note: dict[str, Any] | None = None
        self._near: tuple[str, ...] = ()

    def guarantee(self) -> Guarantee:
        """What holds for all training steps so far, those of a checkpoint that was loaded among them."""
        journal = self.engine.journal
        if self._note is not None and journal.path is None and ranks_here().is_first:
            path = find_run_folder(self._note, self._places(), what="checkpoint")
            if path is not None:
                journal.look_into(path)
        return self.engine.guarantee(self.privacy.delta)

    def _places(self) -> tuple[str | Path, ...]:
        return self._near if self._run_folder is None else (self._run_folder,)

    # --- Lightning's hooks ---------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that can't be private, before anything runs."""
        # What a checkpoint of an earlier evaluation said is no part of this.
        self._steps_done, self._is_restored = 0, False
        if stage == "fit":
            check_trainer(trainer, pl_module, self.privacy)
            self._guard(pl_module)
            if type(trainer.strategy) is part_of(trainer, "strategies.DDPStrategy"):
                # What it would wrap around the module takes means of gradients, which are no clipped sums.
                internal(trainer.strategy, "configure_ddp")
                self._set(trainer.strategy, "configure_ddp", lambda: None)
        elif not self.privacy.eval_data_are_public:
            raise not_public(f"trainer.{stage}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the private step: module and optimizers stand, and nothing has been read."""
        if trainer.ckpt_path is not None and not self._is_restored:
            raise InvalidArgument(
                "ckpt_path must be a checkpoint that a run with this callback wrote, got another: what was spent is "
                "not known."
            )
        self._is_restored = False
        self._begin_run(trainer, pl_module)
        source = internal(trainer.fit_loop, "_data_source")
        loader, accumulated = source.dataloader(), trainer.accumulate_grad_batches
        if not isinstance(loader, DataLoader):
            raise InvalidArgument(
                f"train_dataloaders must be one DataLoader, got {type(loader).__name__}. Join the data sets first."
            )
        steps = steps_an_epoch(loader, processes=trainer.world_size, accumulated=accumulated)
        noise = self._noise(trainer, cast("DataLoader[object]", loader), steps)
        root = TrainingStep(pl_module, self._training_step)
        (optimizer,) = trainer.optimizers
        # Before the engine's own hook: a step gets its forward and backward passes first, and no closure.
        self._undo.append(optimizer.register_step_pre_hook(run_closure).remove)
        self._undo.append(self.engine.detach)
        private = self._attached(root, optimizer, cast("DataLoader[object]", loader), steps, noise)

        def note_step(*_: object) -> None:
            self._was_stepped = private.ends_step

        self._undo.append(optimizer.register_step_post_hook(note_step).remove)
        self._set(trainer.fit_loop, "_data_source", type(source)(LogicalBatches(private), ""))
        self._set(trainer.fit_loop, "_combined_loader", None)
        self._set(trainer, "accumulate_grad_batches", 1)
        self._redirect(trainer, pl_module, root, optimizer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Refuse steps beyond those that the noise was chosen for."""
        del trainer, pl_module, batch, batch_idx
        self._was_stepped = False
        if self._steps_left is None:
            return
        if self._steps_left == 0:
            raise UnprivateStep(
                "training must end with the steps that target_epsilon was planned for, got one more. Let max_epochs "
                "and max_steps be when the training starts."
            )
        self._steps_left -= 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the ε spent so far, as often as the trainer logs; see that the batch was stepped on."""
        del outputs, batch, batch_idx
        if not self._was_stepped:
            raise UnprivateStep(
                "optimizer.step must follow every batch, got a batch left out: leaving one out can undo what a record "
                "did. Step on every batch; accumulate_grad_batches gathers several."
            )
        every = int(internal(trainer, "log_every_n_steps"))
        if every and trainer.global_step % every == 0 and trainer.loggers:
            self.engine.journal.sync()
            type(pl_module).log(
                pl_module, "epsilon", self.engine.get_epsilon(self.privacy.delta), batch_size=1, on_epoch=False
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the disk hold all that the model cost before anything of it is shown."""
        del trainer, pl_module
        self.engine.journal.sync()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give everything back as it was."""
        del trainer, pl_module, exception
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give everything back as it was."""
        del trainer, pl_module, stage
        self._release()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """How many steps were taken, and where the run may lie."""
        del pl_module
        self._steps_done = int(checkpoint["global_step"])
        self._near = (str(trainer.ckpt_path or "."), str(trainer.default_root_dir))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: which run it belongs to, and what holds for it."""
        note = self.engine.journal.note()
        claim = {} if note["run"] is None else guarantee_body(self.engine.guarantee(self.privacy.delta))
        return {"schema": _SCHEMA, "run": json.dumps(note), "guarantee": json.dumps(claim)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember which run was loaded: what it spent is charged before the next step."""
        self._note = json.loads(state_dict["run"]) if state_dict.get("schema") == _SCHEMA else None
        self._is_restored = self._note is not None

    def _begin_run(self, trainer: Trainer, module: LightningModule) -> None:
        self.engine.journal.diagnosed |= self.privacy.diagnostics is not None
        root, target = str(trainer.default_root_dir), self.privacy.target_epsilon
        about = {"trainer": "lightning.Trainer", "model": type(module).__name__}
        facts = {"training": about, "target_epsilon": target}
        note, self._note = self._note, None
        if note is not None:
            near = (*self._places(), root)
            resume_run(self.engine, lambda: note, self._run_folder, near=near, what="ckpt_path", facts=facts)
            return
        # Asked for the last checkpoint and there is none: what was shown before the crash was charged all the same.
        last = asks_for_last_checkpoint(trainer)
        again = ranks_here().agreed(lambda: cut_off_run(root) if last else None)
        begin_run(self.engine, self._run_folder or again, under=root, facts=facts)

    # --- attaching -----------------------------------------------------------------------------------------------

    def _noise(self, trainer: Trainer, loader: "DataLoader[object]", steps: int) -> float:
        self._steps_left = None
        coming = 1
        if self.privacy.target_epsilon is not None:
            coming = max(1, steps_planned(trainer, steps) - max(self._steps_done, trainer.global_step))
            self._steps_left = coming
        records = len(population_of(loader))
        return noise_for(self.privacy, self.engine, steps=coming, sample_rate=1 / steps, records=records)

    def _attached(
        self, root: TrainingStep, optimizer: Optimizer, loader: "DataLoader[object]", steps: int, noise: float
    ) -> PrivateLoader:
        private = self.privacy
        _, _, made = self.engine.make_private(
            module=root,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=private.max_grad_norm,
            sample_rate=1 / steps,
            clipping=private.clipping,
            neighboring_relation=private.neighboring_relation,
            microbatch_size=loader.batch_size,
            public_records=private.public_records,
        )
        if self._steps_done:
            self.engine.start_at([self._steps_done])
        self._steps_done = 0
        return made

    def _redirect(self, trainer: Trainer, module: LightningModule, root: "TrainingStep", optimizer: Optimizer) -> None:
        strategy, silent = trainer.strategy, self.privacy.diagnostics is None
        transfer, log, save = internal(module, "_call_batch_hook"), module.log, strategy.save_checkpoint
        silent_logger = part_of(trainer, "loggers.logger.DummyLogger")

        def training_step(batch: object, *rest: object) -> Tensor:
            loggers = trainer.loggers
            trainer.loggers = [silent_logger() for _ in loggers]
            try:
                shown = run_chunks(trainer, root, optimizer, cast("LogicalBatch", batch), rest, shows=not silent)
            finally:
                trainer.loggers = loggers
            if shown is not None and trainer.is_global_zero:
                # On this terminal only: what is logged goes to files, callbacks and services.
                sys.stderr.write(f"private diagnostics: step {trainer.global_step + 1}, loss {shown:.4g}\n")
            # What Lightning passes on to callbacks and hooks says nothing; the gradients are with the engine.
            return torch.zeros((), device=strategy.root_device, requires_grad=True)

        def transferred(hook_name: str, batch: object, *rest: object) -> object:
            return batch if isinstance(batch, LogicalBatch) else transfer(hook_name, batch, *rest)

        def logged(*args: object, **kwargs: object) -> None:
            if trainer.validating or trainer.sanity_checking:
                log(*args, **kwargs)  # pyright: ignore[reportArgumentType]

        def saved(checkpoint: dict[str, Any], filepath: str | Path, *rest: object, **more: object) -> None:
            # Also where the states of callbacks are left out: saved weights carry their guarantee.
            checkpoint["sordino"] = self.state_dict()
            save(checkpoint, filepath, *rest, **more)

        self._set(strategy, "training_step", training_step)
        self._set(strategy, "save_checkpoint", saved)
        self._set(module, "_call_batch_hook", transferred)
        self._set(module, "log", logged)

    def _set(self, owner: object, name: str, value: object) -> None:
        """Set an attribute until training ends."""
        attributes, missing = vars(owner), object()
        before = attributes.get(name, missing)
        attributes[name] = value

        def undo() -> None:
            if before is missing:
                attributes.pop(name, None)
            else:
                attributes[name] = before

        self._undo.append(undo)

    def _guard(self, module: LightningModule) -> None:
        """Let the module's training step run where a charged batch asks for it, and nowhere else with gradients."""
        step = module.training_step
        self._training_step = step

        @wraps(step)
        def guarded(*args: object, **kwargs: object) -> object:
            if torch.is_grad_enabled():
                raise UnprivateStep(
                    "training_step must run on the batches that PrivacyCallback drew and charged, got a call from "
                    "elsewhere (a callback that trains by itself, a loop over the loader). Leave the callback out, or "
                    "call it under torch.no_grad() on public data."
                )
            return step(*args, **kwargs)

        self._set(module, "training_step", guarded)

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()
