"""Hugging Face accelerate with private steps (needs accelerate).

``accelerator.prepare`` wraps loader and optimizer, and what it makes of a loader can't be accounted for. So the engine
goes first: it gets the parts as they are, and accelerate gets what comes back. In several processes the model is not
wrapped: the engine adds clipped sums up itself.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino.clipping import Clipping
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, SordinoError
from sordino.integrations.trainer_support import (
    begin_run,
    check_count,
    check_settings,
    logical_steps_per_epoch,
    resume_run,
    write_guarantee,
    write_note,
)
from sordino.schedules import Schedule
from sordino.training.distributed import get_distributed_context
from sordino.training.engine import PrivacyEngine
from sordino.training.loader import PrivateLoader

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device


except ImportError as error:
    raise SordinoError(
        f"sordino.integrations.accelerate must find accelerate, got {type(error).__name__}. "
        "Install sordino[huggingface]."
    ) from None

__all__ = ["DeviceLoader", "check_launch", "check_whole", "prepare_private", "unwrapped"]


# ----------------------------------------------------------------------------------------------------------------------
# accelerate's launches: which can be private, and models that it doesn't wrap (needs accelerate).
# ----------------------------------------------------------------------------------------------------------------------


_LAUNCHES = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_launch(accelerator: Accelerator) -> None:
    """Refuse launches in which processes hold parts of a model, or accelerate steps by itself.

    Raises:
        InvalidArgument: names the setting.
    """
    kind, shape = str(accelerator.distributed_type.value), accelerator.parallelism_config
    if kind not in _LAUNCHES:
        raise InvalidArgument(
            f"distributed_type of accelerate must be one of {', '.join(_LAUNCHES)} for a private run, got {kind}: it "
            "takes the model or the step apart. Use data parallelism (torchrun), or sordino.fit with fully_shard."
        )
    if shape is not None and shape.total_size != shape.dp_replicate_size:
        raise InvalidArgument(
            "parallelism_config of accelerate must be data parallelism alone for a private run, got tensor, context, "
            "sequence or sharded parallelism. Leave it out."
        )
    hint = (
        "On processors pass cpu=True (use_cpu=True to TrainingArguments), and let accelerate start the process group."
    )
    check_count("num_processes of accelerate", accelerator.num_processes, hint)


def check_whole(model: nn.Module) -> None:
    """Refuse a model of which this process holds a part.

    Raises:
        InvalidArgument: a parameter is a shard.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise InvalidArgument(
            "model must be whole in every process, got one with sharded parameters (tensor parallelism, "
            "fully_shard). Load it without; a model that fully_shard took trains with sordino.fit."
        )


def unwrapped(accelerator: Accelerator) -> None:
    """Have `accelerator` prepare models without `DistributedDataParallel`.

    Its means of gradients are no clipped sums, which the engine exchanges itself, once a step. And it would wait for
    the other processes in forward and backward passes, of which each may have another number.
    """
    vars(accelerator)["prepare_model"] = partial(accelerator.prepare_model, evaluation_mode=True)


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face accelerate with private steps (needs accelerate).
# ----------------------------------------------------------------------------------------------------------------------


_NOTE = "sordino-{}.json"
# Whose run folders an accelerator's states belong to, in order.
_ENGINES: WeakKeyDictionary[Accelerator, list[PrivacyEngine]] = WeakKeyDictionary()


class DeviceLoader:
    """A private loader whose batches come on the accelerator's device.

    Args:
        loader: the engine's.
        accelerator: whose device it is.
    """

    def __init__(self, loader: PrivateLoader, accelerator: Accelerator) -> None:
        self._loader, self._accelerator = loader, accelerator
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        for batch in self._loader:
            yield send_to_device(batch, self._accelerator.device)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the batch that came last completes a logical batch; schedulers step here only."""
        return self._loader.is_last_microbatch


def prepare_private(
    accelerator: Accelerator,
    engine: PrivacyEngine,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[object],
    noise_multiplier: float | Schedule,
    max_grad_norm: float | Schedule,
    microbatch_size: int | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    clipping: str | Clipping = "flat",
    loss_reduction: str = "mean",
) -> tuple[nn.Module, Optimizer, DeviceLoader]:
    """`PrivacyEngine.make_private`, then ``accelerator.prepare``: your accelerate loop stays as it is.

    In several processes a logical batch has the loader's batch size times their number of records on average, as
    elsewhere in accelerate (with ``split_batches=True`` the loader's batch size); each process takes its part.

    ``accelerator.backward(loss)``, ``accelerator.accumulate(model)`` and ``accelerator.autocast()`` go on as they do;
    ``accelerator.clip_grad_norm_`` finds no gradient before the step and changes nothing. The engine has a run
    folder: the one that it was made with, or the next number in ``sordino-runs`` under ``project_dir``, or, without
    one, next to the first state that is saved. A run under ``project_dir`` that never ended, killed before its first
    state or without ``end_training``, is gone on with when a script begins again without ``load_state``: all that it
    charged is charged here too, and a warning says so. ``accelerator.load_state`` goes on in the state's run folder:
    everything in it is charged, also what came after the state. ``save_state`` and ``save_model`` write the guarantee
    next to the weights; ``end_training`` closes the run folder.

    Guarantee: that of `PrivacyEngine.make_private`.

    Args:
        accelerator: of one process or several with a whole model each, without a loss scaler, with
            ``gradient_accumulation_steps=1``.
        engine: keeps the charges.
        module: not prepared yet.
        optimizer: not prepared yet.
        data_loader: not prepared yet.
        noise_multiplier: as in `PrivacyEngine.make_private`, and all that follow.
        max_grad_norm: of one record's gradient.
        microbatch_size: most records in one forward and backward: what accumulation is for elsewhere.
        neighboring_relation: which datasets count as neighbors.
        clipping: how.
        loss_reduction: "mean" or "sum".

    Returns:
        Module, prepared optimizer and the private loader.

    Raises:
        InvalidArgument: the accelerator can't be private, or a part was prepared before.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from sordino import PrivacyEngine
        >>> model, data = torch.nn.Linear(3, 2), torch.utils.data.TensorDataset(torch.ones(64, 3))
        >>> model, optimizer, loader = prepare_private(Accelerator(cpu=True), PrivacyEngine(), module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, noise_multiplier=1.0,
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=16))
        >>> len(loader)
        4
    """
    _check(accelerator, module, optimizer, data_loader)
    processes = 1 if accelerator.split_batches else accelerator.num_processes
    # Moved first, so that nothing of the module changes once it is private.
    module.to(accelerator.device)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=data_loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=1 / logical_steps_per_epoch(data_loader, processes=processes),
        microbatch_size=microbatch_size,
        neighboring_relation=neighboring_relation,
        clipping=clipping,
        loss_reduction=loss_reduction,
    )
    # In evaluation mode it gives the model its precision, and no wrapper that takes means over processes.
    model, prepared = accelerator.prepare_model(module, evaluation_mode=True), accelerator.prepare(optimizer)
    _keep_run(accelerator, engine)
    return cast("nn.Module", model), cast("Optimizer", prepared), DeviceLoader(loader, accelerator)


def _keep_run(accelerator: Accelerator, engine: PrivacyEngine) -> None:
    """Have states say which run folder they belong to, and go on in it when they are loaded, once for an engine."""
    engines = _ENGINES.setdefault(accelerator, [])
    if any(one is engine for one in engines):
        return
    note, guarantee = _NOTE.format(len(engines)), f"guarantee-{len(engines)}.json" if engines else "guarantee.json"
    engines.append(engine)
    facts = {"training": {"trainer": "accelerate"}}
    if accelerator.project_dir is not None:
        begin_run(engine, None, under=str(accelerator.project_dir), facts=facts, joins=True)

    def save(_models: object, _weights: object, folder: str) -> None:
        if accelerator.is_main_process:
            begin_run(engine, None, under=Path(folder).absolute().parent, facts=facts)
            write_note(engine, Path(folder), note=note, guarantee=guarantee)

    def load(_models: object, folder: str) -> None:
        own = Path(folder) / note

        def read() -> Mapping[str, object]:
            if not own.is_file():
                raise InvalidArgument(
                    f"input_dir must hold {note}, got a state without it: what was spent is not known."
                )
            return cast("Mapping[str, object]", json.loads(own.read_text()))

        near = (folder, accelerator.project_dir or folder)
        resume_run(engine, read, engine.journal.path, near=near, what="input_dir", facts=facts)
        engine.start_at(
            get_distributed_context().broadcast_from_rank_zero(lambda: cast("list[int]", read()["next_steps"]))
        )

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if len(engines) == 1:
        vars(accelerator)["save_model"] = partial(_save_model, engines, accelerator.save_model)
        vars(accelerator)["end_training"] = partial(_end_training, engines, accelerator.end_training)


def _save_model(
    engines: list[PrivacyEngine], stock: Callable[..., object], model: nn.Module, save_directory: str, **options: object
) -> None:
    """The stock ``save_model``, with the guarantee of whatever made the model private next to its weights."""
    if get_distributed_context().is_rank_zero:
        for engine in engines:
            write_guarantee(engine, Path(save_directory) / "guarantee.json")
    stock(model, save_directory, **options)


def _end_training(engines: list[PrivacyEngine], stock: Callable[[], None]) -> None:
    for engine in engines:
        engine.close_run_folder()
    stock()


def _check(accelerator: Accelerator, module: nn.Module, *parts: object) -> None:
    refused = {
        "mixed_precision of accelerator": accelerator.mixed_precision not in ("no", "bf16"),
        "gradient_accumulation_steps of accelerator": accelerator.gradient_accumulation_steps != 1,
    }
    check_settings(refused, _WHY)
    check_launch(accelerator)
    check_whole(module)
    for part in (module, *parts):
        # What accelerate has prepared comes from its own modules, or is marked.
        if type(part).__module__.startswith("accelerate.") or hasattr(part, "_is_accelerate_prepared"):
            raise InvalidArgument(
                f"module, optimizer and data_loader must be as you made them, got a {type(part).__name__} that was "
                "prepared. Pass them to prepare_private, which prepares them."
            )


_WHY = {
    "mixed_precision of accelerator": 'one with a loss scaler, which looks at raw gradients. Use "bf16".',
    "gradient_accumulation_steps of accelerator": "more than one: batches between two steps would be left out. Use a "
    "larger batch_size and microbatch_size=.",
}
