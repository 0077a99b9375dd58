"""Which settings of a Lightning trainer can be private, and how many steps they come to (floor 4, integrations)."""

from sordino.errors import InvalidArgument
from sordino.integrations.arguments import PrivacyArguments
from sordino.integrations.lightning_packages import LightningModule, Trainer, both, part_of
from sordino.integrations.lightning_steps import internal
from sordino.integrations.processes import check_count

__all__ = ["check_trainer", "not_public", "steps_planned"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
# They look at batches, or train besides the steps that are planned. Subclasses do too.
_CALLBACKS = {
    "BatchSizeFinder": "tries steps that nobody charges",
    "DeviceStatsMonitor": "logs memory, which follows the size of the batch",
    "GradientAccumulationScheduler": "changes the batch on the way",
    "LearningRateFinder": "tries steps that nobody charges",
    "ModelPruning": "puts other parameters in the place of those that are trained",
    "SpikeDetection": "looks at the loss of a batch and leaves batches out",
    "ThroughputMonitor": "logs sizes of batches",
}
# Classes that were looked through; one of another kind, or a subclass, may step, sum or show in ways that nobody saw.
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
    for name, is_refused in refused.items():
        if is_refused:
            raise InvalidArgument(f"{name} must be left at its default for a private run, got {_WHY[name]}")
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
    """Whether the loops are Lightning's own: another one may take steps that nobody charges."""
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


def not_public(what: str) -> InvalidArgument:
    """What is raised when private records would be evaluated."""
    return InvalidArgument(
        f"eval_data_are_public must be True for {what}, got False: no noise covers what is measured on private "
        "records. Declare it, or buy an evaluation from the budget (docs/report.md)."
    )


_WHY = {
    "automatic_optimization": "False: steps that the module takes by itself can't be followed. Use automatic "
    "optimization with one optimizer, or PrivacyEngine in a loop of your own.",
    "strategy": "one that takes the module apart, averages by itself, or starts processes that end with the training. "
    'Use one device, or strategy="ddp".',
    "sync_batchnorm": "True: records would touch each other across processes. Use a normalisation within each record.",
    "precision": 'one with a loss scaler, which looks at raw gradients, or an unknown one. Use "bf16-mixed".',
    "profiler": 'one that writes down shapes of batches, or an unknown one. Use "simple" or "advanced".',
    "fit_loop": "a loop of another class, whose steps nobody knows. Leave it out, or write the loop with "
    "PrivacyEngine.",
    "configure_gradient_clipping": "one of the module's own, which would find no gradient: each record's gradient is "
    "clipped here. Leave it out, and set max_grad_norm in PrivacyArguments.",
    "gradient_clip_val": "a value: each record's gradient is clipped here. Set max_grad_norm in PrivacyArguments.",
    "overfit_batches": "a value: it fixes the batches. Use limit_train_batches for a short run.",
    "detect_anomaly": "True: an error would tell that a record's gradient is not a number. Leave it out.",
    "reload_dataloaders_every_n_epochs": "a number: the data set must stay the same. Leave it out.",
    "val_dataloaders": "data that were not declared public. Pass eval_data_are_public=True if they are, or "
    "limit_val_batches=0.",
}
