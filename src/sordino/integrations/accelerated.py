"""accelerate's launches: which can be private, and models that it doesn't wrap (floor 4; needs accelerate)."""

from functools import partial

from accelerate import Accelerator
from torch import nn

from sordino.errors import InvalidArgument
from sordino.integrations.processes import check_count

__all__ = ["check_launch", "check_whole", "unwrapped"]

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
