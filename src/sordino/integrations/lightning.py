"""Lightning's Trainer with private steps, by one callback (floor 4, integrations; needs lightning).

The module, its optimizer, schedules, loggers and checkpoints stay as they are. Lightning runs the training step inside
``optimizer.step(closure)``; here it runs just before, on one chunk after another of a logical batch, so that the step
itself only writes the private gradient and takes it. In several processes the module is not wrapped: the engine adds
clipped sums up itself.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
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
from sordino.integrations.processes import steps_an_epoch, take_over
from sordino.ledger import Account, Reservation
from sordino.training.drop_in.engine_checkpoint import bill_of, take_over_bills
from sordino.training.engine import PrivacyEngine
from sordino.training.fitting.display import DIAGNOSED
from sordino.training.records.loader import PrivateLoader, population_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger, Logger
    from lightning.pytorch.strategies import DDPStrategy

    from sordino.integrations.lightning_settings import check_trainer, not_public, steps_planned
    from sordino.integrations.lightning_steps import TrainingStep, internal, run_chunks, run_closure
except ImportError as error:
    raise SordinoError(
        f"sordino.integrations.lightning must find lightning, got {type(error).__name__}. Install lightning."
    ) from None

__all__ = ["PrivacyArguments", "PrivacyCallback"]

_JOURNAL = "sordino-*.json"
_SCHEMA = 1


class PrivacyCallback(Callback):
    """Makes ``Trainer.fit`` of an ordinary `LightningModule` differentially private.

    When: the training is a LightningModule with automatic optimization. For manual optimization or several optimizers
    write the loop yourself, with `PrivacyEngine`.

    Guarantee: the parameters after every step, and everything that is logged or saved, are (ε, δ)-differentially
    private as `guarantee` states. A logical batch is a Poisson sample of the loader's batch size times
    ``accumulate_grad_batches`` times the number of processes records on average, run in chunks of at most the loader's
    batch size; all processes take part in every step. What ``training_step`` logs, and the loss, go nowhere.

    Args:
        privacy: ε and δ, clipping.
        ledger: the data set's account.

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

    def __init__(self, privacy: PrivacyArguments, *, ledger: Account | Reservation | None = None) -> None:
        self.privacy, self.engine = privacy, PrivacyEngine(ledger=ledger, gradients=privacy.gradients)
        self._undo: list[Callable[[], None]] = []
        self._folders: set[Path] = set()
        self._steps_done, self._is_restored = 0, False
        self._steps_left: int | None = None
        self._was_stepped = False

    def guarantee(self) -> Guarantee:
        """What holds for all training steps so far."""
        found = self.engine.guarantee(self.privacy.delta)
        if self.privacy.diagnostics is None:
            return found
        return replace(found, caveats=(*found.caveats, DIAGNOSED))

    # --- Lightning's hooks ---------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that can't be private, before anything runs."""
        # What a checkpoint of an earlier evaluation said is no part of this.
        self._steps_done, self._is_restored = 0, False
        if stage == "fit":
            check_trainer(trainer, pl_module, self.privacy)
            if type(trainer.strategy) is DDPStrategy:
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
        if trainer.ckpt_path is not None:
            self._take_over_beside(Path(str(trainer.ckpt_path)).parent)
        source = internal(trainer.fit_loop, "_data_source")
        loader, accumulated = source.dataloader(), trainer.accumulate_grad_batches
        if not isinstance(loader, DataLoader):
            raise InvalidArgument(
                f"train_dataloaders must be one DataLoader, got {type(loader).__name__}. Join the data sets first."
            )
        steps = steps_an_epoch(loader, processes=trainer.world_size, accumulated=accumulated)
        noise = self._noise(trainer, cast("DataLoader[object]", loader), steps)
        root = TrainingStep(pl_module)
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
            LightningModule.log(
                pl_module, "epsilon", self.engine.get_epsilon(self.privacy.delta), batch_size=1, on_epoch=False
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give everything back as it was."""
        del trainer, pl_module, exception
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give everything back as it was."""
        del trainer, pl_module, stage
        self._release()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """How many steps were taken."""
        del trainer, pl_module
        self._steps_done = int(checkpoint["global_step"])

    def state_dict(self) -> dict[str, Any]:
        """What was spent, for a checkpoint."""
        return {"schema": _SCHEMA, "bill": json.dumps(bill_of(self.engine))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was spent."""
        take_over_bills(self.engine, json.loads(state_dict["bill"]), [])
        self._is_restored = True

    # --- attaching -----------------------------------------------------------------------------------------------

    def _noise(self, trainer: Trainer, loader: "DataLoader[object]", steps: int) -> float:
        self._steps_left = None
        coming = 1
        if self.privacy.target_epsilon is not None:
            coming = max(1, steps_planned(trainer, steps) - max(self._steps_done, trainer.global_step))
            self._steps_left = coming
        self._steps_done = 0
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
        return made

    def _redirect(self, trainer: Trainer, module: LightningModule, root: "TrainingStep", optimizer: Optimizer) -> None:
        strategy, silent = trainer.strategy, self.privacy.diagnostics is None
        transfer, log, save = internal(module, "_call_batch_hook"), module.log, strategy.save_checkpoint

        def training_step(batch: object, *rest: object) -> Tensor:
            loggers = trainer.loggers
            trainer.loggers = [cast("Logger", DummyLogger()) for _ in loggers]
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
            save(checkpoint, filepath, *rest, **more)
            if trainer.is_global_zero:
                self._folders.add(Path(str(filepath)).parent)
            self._write_journals()

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

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._write_journals()

    # --- the bill ------------------------------------------------------------------------------------------------

    def _write_journals(self) -> None:
        """Beside every checkpoint, what was charged up to now: also for those that were deleted or are older."""
        bill = bill_of(self.engine)
        for folder in self._folders:
            if folder.is_dir():
                text = json.dumps({"schema": _SCHEMA, "bill": bill})
                (folder / _JOURNAL.replace("*", list(bill)[-1][:16])).write_text(text)

    def _take_over_beside(self, folder: Path) -> None:
        take_over(self.engine, lambda: bill_of(self.engine), lambda: sorted(folder.glob(_JOURNAL)))
