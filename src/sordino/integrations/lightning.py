"""Lightning's Trainer with private steps, by one callback (needs lightning).

The module, its optimizer, schedules, loggers and checkpoints stay as they are. Lightning runs the training step inside
``optimizer.step(closure)``; here it runs just before, on one chunk after another of a logical batch, so that the step
itself only writes the private gradient and takes it. In several processes the module is not wrapped: the engine adds
clipped sums up itself.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, LossShapeError, NonPrivateStep, SordinoError
from sordino.integrations.trainer_support import (
    LogicalBatch,
    LogicalBatches,
    PrivacyArguments,
    TrainerRun,
    check_count,
    check_settings,
    logical_steps_per_epoch,
)
from sordino.ledger import Account, Reservation
from sordino.runs.results import guarantee_body
from sordino.training.distributed import get_distributed_context
from sordino.training.engine import PrivacyEngine
from sordino.training.engine_run_folder import find_run_folder

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ImportError as error:
            raise SordinoError(
                f"sordino.integrations.lightning must find lightning, got {type(error).__name__}. "
                "Install sordino[lightning]."
            ) from None

__all__ = [
    "Callback",
    "LightningModule",
    "PrivacyArguments",
    "PrivacyCallback",
    "Trainer",
    "TrainingStep",
    "asks_for_last_checkpoint",
    "both",
    "check_trainer",
    "internal",
    "part_of",
    "run_chunks",
    "run_closure",
    "steps_planned",
]


# ----------------------------------------------------------------------------------------------------------------------
# Lightning under either of its names, ``lightning.pytorch`` and ``pytorch_lightning`` (needs one of them).
#
# The two packages hold the same code twice: a class of one is none of the other's.
# ----------------------------------------------------------------------------------------------------------------------


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def part_of(trainer: object, name: str) -> Any:
    """The class called `name`, such as ``strategies.DDPStrategy``, of the package that `trainer` is of."""
    package = next(
        package for kind in type(trainer).__mro__ for package in _PACKAGES if kind.__module__.startswith(f"{package}.")
    )
    return _found(package, name)


def both(name: str) -> tuple[Any, ...]:
    """The class called `name` of each package that is loaded and has it."""
    classes = [_found(package, name) for package in _PACKAGES if package in sys.modules]
    return tuple(one for one in classes if one is not None)


def _found(package: str, name: str) -> Any:
    module, _, found = name.rpartition(".")
    return getattr(import_module(f"{package}.{module}" if module else package), found, None)


# ----------------------------------------------------------------------------------------------------------------------
# A LightningModule's training step as one module, run on the chunks of a logical batch.
# ----------------------------------------------------------------------------------------------------------------------


def internal(owner: object, name: str) -> Any:
    """What Lightning keeps to itself, and a trainer that is to be private can't do without.

    Raises:
        SordinoError: this version of Lightning has no such thing.
    """
    found = getattr(owner, name, internal)
    if found is internal:
        raise SordinoError(
            f"lightning must be a version whose {type(owner).__name__} has {name}, got one without. Install 2.5 to 2.6."
        )
    return found


def asks_for_last_checkpoint(trainer: Trainer) -> bool:
    """Whether ``fit`` was called with ``ckpt_path="last"``: without one Lightning begins again."""
    if trainer.ckpt_path is not None:
        return False
    frame, fit = inspect.currentframe(), type(trainer).fit.__code__
    while frame is not None:
        if frame.f_code is fit:
            return frame.f_locals.get("ckpt_path") == "last"
        frame = frame.f_back
    return False


class TrainingStep(nn.Module):
    """The whole training step as a module, so that everything in it is tried on synthetic records.

    Args:
        module: the user's.
        step: its own ``training_step``.
    """

    def __init__(self, module: LightningModule, step: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self._step = step
        # Not numbers of its own: a module's numbers are part of what a proof is good for, and these count batches.
        self.rest: tuple[object, ...] = ()

    def forward(self, batch: object) -> Tensor:
        """The loss that ``training_step`` returns, a mean over the records or one a record."""
        output = self._step(batch, *self.rest)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise LossShapeError(
                "training_step must return a loss for every batch, a mean or one a record, got none. A record whose "
                "loss is not finite counts for nothing; return it."
            )
        return loss if loss.dim() == 0 else loss.mean()


def run_chunks(
    trainer: Trainer,
    root: TrainingStep,
    optimizer: Optimizer,
    batch: LogicalBatch,
    rest: tuple[object, ...],
    *,
    shows: bool,
) -> float | None:
    """Forward and backward of all chunks; the step that follows completes the logical batch.

    Args:
        trainer: places chunks on its device and gives the precision.
        root: the private module.
        optimizer: its own.
        batch: the logical batch.
        rest: further arguments of the training step.
        shows: whether the loss is wanted.

    Returns:
        The mean loss, which is private, or None.
    """
    strategy, module, total, chunks = trainer.strategy, cast("LightningModule", root.module), 0.0, 0
    root.rest = rest
    for chunk in batch:
        converted = trainer.precision_plugin.convert_input(chunk)
        converted = internal(module, "_on_before_batch_transfer")(converted, dataloader_idx=0)
        placed = strategy.batch_to_device(converted, dataloader_idx=0)
        with trainer.precision_plugin.train_step_context():
            loss = root(placed)
        module.backward(loss)
        chunks += 1
        if not batch.is_complete:
            # Adds this chunk to the sum; parameters change at the last one only, which Lightning's own step does.
            optimizer.step()
        if shows:
            total += float(loss.detach())
    return total / chunks if shows else None


def run_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the engine's hook: run what Lightning wants to run inside the step."""
    del optimizer
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        with torch.enable_grad():
            closure()
    return args[:1], {name: value for name, value in kwargs.items() if name != "closure"}


# ----------------------------------------------------------------------------------------------------------------------
# Which settings of a Lightning trainer can be private, and how many steps they come to.
# ----------------------------------------------------------------------------------------------------------------------


_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
# They look at batches, or train besides the steps that are planned. Subclasses do too.
_CALLBACKS = {
    "BatchSizeFinder": "tries steps that are not charged",
    "DeviceStatsMonitor": "logs memory, which follows the size of the batch",
    "GradientAccumulationScheduler": "changes the batch on the way",
    "LearningRateFinder": "tries steps that are not charged",
    "ModelPruning": "puts other parameters in the place of those that are trained",
    "SpikeDetection": "looks at the loss of a batch and leaves batches out",
    "ThroughputMonitor": "logs sizes of batches",
}
# Classes that were looked through; one of another kind, or a subclass, may step, sum or show in unknown ways.
_PRECISION_PLUGINS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_PROFILERS = ("PassThroughProfiler", "SimpleProfiler", "AdvancedProfiler")
_LOOPS = {"loops._FitLoop": "", "loops._TrainingEpochLoop": "epoch_loop"}


def steps_planned(trainer: Trainer, an_epoch: int) -> int:
    """How many steps the training will have in all.

    Args:
        trainer: with its limits.
        an_epoch: logical batches an epoch.

    Raises:
        InvalidArgument: the trainer has no limit.
    """
    limit = trainer.limit_train_batches
    taken = min(an_epoch, limit) if isinstance(limit, int) else int(an_epoch * limit)
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if (epochs is None or epochs < 0) and steps < 0:
        raise InvalidArgument(
            "max_epochs or max_steps must be given to the trainer with target_epsilon, got neither: the noise follows "
            "from the number of steps. Give one, or noise_multiplier."
        )
    found = [steps] if steps >= 0 else []
    found += [epochs * taken] if epochs is not None and epochs >= 0 else []
    return min(found)


def check_trainer(trainer: Trainer, module: LightningModule, privacy: PrivacyArguments) -> None:
    """Refuse what couples records, needs a gradient that isn't there, or shows what is private.

    Raises:
        InvalidArgument: names the setting.
    """
    evaluates = trainer.enable_validation
    plugin, profiler = trainer.precision_plugin, internal(trainer, "profiler")
    clips = (
        type(module).configure_gradient_clipping is not part_of(trainer, "LightningModule").configure_gradient_clipping
    )
    refused = {
        "automatic_optimization": not module.automatic_optimization,
        "strategy": not _is_private(trainer),
        "sync_batchnorm": getattr(trainer.strategy, "_layer_sync", None) is not None,
        "precision": trainer.precision not in _PRECISIONS
        or not _is_one_of(trainer, plugin, "plugins", _PRECISION_PLUGINS),
        "profiler": not _is_one_of(trainer, profiler, "profilers", _PROFILERS),
        "fit_loop": not _has_stock_loops(trainer),
        "gradient_clip_val": trainer.gradient_clip_val is not None,
        "configure_gradient_clipping": clips,
        "overfit_batches": internal(trainer, "overfit_batches") != 0,
        "detect_anomaly": bool(internal(trainer, "_detect_anomaly")),
        "reload_dataloaders_every_n_epochs": internal(trainer, "reload_dataloaders_every_n_epochs") != 0,
        "val_dataloaders": evaluates and not privacy.eval_data_are_public,
    }
    check_settings(refused, _WHY)
    check_count("devices", trainer.world_size, 'Give the trainer their number and strategy="ddp".')
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for name, why in _CALLBACKS.items():
            if isinstance(callback, both(f"callbacks.{name}")):
                own = type(callback).__name__
                got = f"a {own}" if own == name else f"{own}, which is one"
                raise InvalidArgument(f"callbacks must be without {name}, got {got}: it {why}. Leave it out.")


def _is_one_of(trainer: Trainer, found: object, where: str, names: tuple[str, ...]) -> bool:
    return type(found) in tuple(part_of(trainer, f"{where}.{name}") for name in names)


def _has_stock_loops(trainer: Trainer) -> bool:
    """Whether the loops are Lightning's own: another one may take steps that are not charged."""
    return all(
        type(getattr(trainer.fit_loop, inner) if inner else trainer.fit_loop) is part_of(trainer, name)
        for name, inner in _LOOPS.items()
    )


def _is_private(trainer: Trainer) -> bool:
    """Whether each process holds the whole module and lives on after training; what DDP would exchange is left out."""
    strategy = trainer.strategy
    if type(strategy) is not part_of(trainer, "strategies.DDPStrategy"):
        return type(strategy) is part_of(trainer, "strategies.SingleDeviceStrategy")
    changes = [internal(strategy, name) for name in ("_ddp_comm_hook", "_ddp_comm_state", "_model_averaging_period")]
    return internal(strategy, "_start_method") == "popen" and all(change is None for change in changes)


_WHY = {
    "automatic_optimization": "False: steps that the module takes by itself can't be followed. Use automatic "
    "optimization with one optimizer, or PrivacyEngine in a loop of your own.",
    "strategy": "one that takes the module apart, averages by itself, or starts processes that end with the training. "
    'Use one device, or strategy="ddp".',
    "sync_batchnorm": "True: records would touch each other across processes. Use a normalization within each record.",
    "precision": 'one with a loss scaler, which looks at raw gradients, or an unknown one. Use "bf16-mixed".',
    "profiler": 'one that writes down shapes of batches, or an unknown one. Use "simple" or "advanced".',
    "fit_loop": "a loop of another class, whose steps are unknown. Leave it out, or write the loop with PrivacyEngine.",
    "configure_gradient_clipping": "one of the module's own, which would find no gradient: each record's gradient is "
    "clipped here. Leave it out, and set max_grad_norm in PrivacyArguments.",
    "gradient_clip_val": "a value: each record's gradient is clipped here. Set max_grad_norm in PrivacyArguments.",
    "overfit_batches": "a value: it fixes the batches. Use limit_train_batches for a short run.",
    "detect_anomaly": "True: an error would tell that a record's gradient is not a number. Leave it out.",
    "reload_dataloaders_every_n_epochs": "a number: the dataset must stay the same. Leave it out.",
    "val_dataloaders": "data that were not declared public. Pass eval_data_are_public=True if they are, or "
    "limit_val_batches=0.",
}


# ----------------------------------------------------------------------------------------------------------------------
# Lightning's Trainer with private steps, by one callback (needs lightning).
# ----------------------------------------------------------------------------------------------------------------------


_SCHEMA = 1


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
        ledger: the dataset's account.
        run_folder: a new folder for the run's transcript and guarantee, or that of the run to go on with; by default
            the next number in ``sordino-runs`` under the trainer's ``default_root_dir``.

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
        self._private = TrainerRun(privacy, ledger=ledger, run_folder=run_folder)
        self._undo: list[Callable[[], None]] = []
        self._steps_done, self._is_restored = 0, False
        self._was_stepped = False
        # Of a checkpoint that was loaded: which run it belongs to, and where that may lie.
        self._note: dict[str, Any] | None = None
        self._near: tuple[str, ...] = ()

    @property
    def engine(self) -> PrivacyEngine:
        """Makes the steps private and keeps the charges."""
        return self._private.engine

    def guarantee(self) -> Guarantee:
        """What holds for all training steps so far, those of a checkpoint that was loaded among them."""
        journal = self.engine.journal
        if self._note is not None and journal.path is None and get_distributed_context().is_rank_zero:
            named = self._private.run_folder
            path = find_run_folder(self._note, self._near if named is None else (named,), what="checkpoint")
            if path is not None:
                journal.look_into(path)
        return self.engine.guarantee(self.privacy.delta)

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
        else:
            self._private.require_public(f"trainer.{stage}")

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
                f"train_dataloaders must be one DataLoader, got {type(loader).__name__}. Join the datasets first."
            )
        steps = logical_steps_per_epoch(loader, processes=trainer.world_size, accumulated=accumulated)
        root = TrainingStep(pl_module, self._training_step)
        (optimizer,) = trainer.optimizers
        # Before the engine's own hook: a step gets its forward and backward passes first, and no closure.
        self._undo.append(optimizer.register_step_pre_hook(run_closure).remove)
        self._undo.append(self.engine.detach)
        first_step, self._steps_done = self._steps_done, 0
        # With a noise multiplier nothing has to be known of the steps to come.
        planned = 1 if self.privacy.target_epsilon is None else steps_planned(trainer, steps)
        private = self._private.attach(
            root,
            optimizer,
            cast("DataLoader[object]", loader),
            steps=planned - max(first_step, trainer.global_step),
            steps_per_epoch=steps,
            first_step=first_step,
            microbatch_size=loader.batch_size,
        )

        def note_step(*_: object) -> None:
            self._was_stepped = private.is_last_microbatch

        self._undo.append(optimizer.register_step_post_hook(note_step).remove)
        self._set(trainer.fit_loop, "_data_source", type(source)(LogicalBatches(private), ""))
        self._set(trainer.fit_loop, "_combined_loader", None)
        self._set(trainer, "accumulate_grad_batches", 1)
        self._redirect(trainer, pl_module, root, optimizer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Refuse steps beyond those that the noise was chosen for."""
        del trainer, pl_module, batch, batch_idx
        self._was_stepped = False
        self._private.count_step(". Let max_epochs and max_steps be when the training starts.")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the ε spent so far, as often as the trainer logs; see that the batch was stepped on."""
        del outputs, batch, batch_idx
        if not self._was_stepped:
            raise NonPrivateStep(
                "optimizer.step must follow every batch, got a batch left out: leaving one out can undo what a record "
                "did. Step on every batch; accumulate_grad_batches gathers several."
            )
        every = int(internal(trainer, "log_every_n_steps"))
        if every and trainer.global_step % every == 0 and trainer.loggers:
            type(pl_module).log(pl_module, "epsilon", self._private.epsilon(), batch_size=1, on_epoch=False)

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
        note, self._note = self._note, None
        self._private.begin(
            under=str(trainer.default_root_dir),
            training={"trainer": "lightning.Trainer", "model": type(module).__name__},
            # Asked for the last checkpoint and there is none: what was shown before the crash was charged all the same.
            continues=asks_for_last_checkpoint(trainer),
            note=None if note is None else lambda: note,
            near=self._near,
            what="ckpt_path",
        )

    # --- attaching -----------------------------------------------------------------------------------------------

    def _redirect(self, trainer: Trainer, module: LightningModule, root: "TrainingStep", optimizer: Optimizer) -> None:
        strategy, shows = trainer.strategy, self._private.shows_losses
        transfer, log, save = internal(module, "_call_batch_hook"), module.log, strategy.save_checkpoint
        silent_logger = part_of(trainer, "loggers.logger.DummyLogger")

        def training_step(batch: object, *rest: object) -> Tensor:
            loggers = trainer.loggers
            trainer.loggers = [silent_logger() for _ in loggers]
            try:
                shown = run_chunks(trainer, root, optimizer, cast("LogicalBatch", batch), rest, shows=shows)
            finally:
                trainer.loggers = loggers
            if shown is not None and trainer.is_global_zero:
                self._private.show_loss(trainer.global_step + 1, shown)
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
                raise NonPrivateStep(
                    "training_step must run on the batches that PrivacyCallback drew and charged, got a call from "
                    "elsewhere (a callback that trains by itself, a loop over the loader). Leave the callback out, or "
                    "call it under torch.no_grad() on public data."
                )
            return step(*args, **kwargs)

        self._set(module, "training_step", guarded)

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()
