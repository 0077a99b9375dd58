"""Models that `fully_shard` spread over the processes: gathered for the passes of a step, stepped in shards.

Before a step's first pass all parameters are gathered, and the capture reads the ordinary modules that they are then;
no further exchange happens until the step's sums are whole, so processes may have different numbers of chunks. Each
parameter's clipped sum is then scattered, so that every process holds its rows of it; they get the noise of their
place and become the gradient of the shard. The optimizer only ever sees shards.

References:
    Abadi et al. 2016, algorithm 1: the noise is added entry by entry, on the rank that holds the entry.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from sordino.errors import InvalidArgument
from sordino.mechanisms.tensor_noise import ShardGaussianMechanism, ShardSlice, TensorGaussianMechanism
from sordino.training.accumulators import accumulation_dtype
from sordino.training.distributed import collective, in_buckets

# What keeps torch from sharding again after each pass, and from averaging gradients: there are none.
_QUIET = {
    "post_forward_mesh_info": None,
    "reduce_grads": False,
    "all_reduce_grads": False,
    "reshard_after_backward": False,
}


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a whole tensor that each process holds: as many for all, but for the last ones.

    Args:
        shape: of the whole; a single number counts as one row.
        ranks: number of processes.
        rank: of this process.
    """

    shape: tuple[int, ...]
    ranks: int
    rank: int

    @property
    def each(self) -> int:
        return -(-self.shape[0] // self.ranks)

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def first(self) -> int:
        return min(self.rank * self.each, self.shape[0])

    @property
    def count(self) -> int:
        return min(self.each, self.shape[0] - self.first)

    @property
    def part(self) -> ShardSlice:
        return ShardSlice(first=self.first * self.width, whole=self.shape[0] * self.width)

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.first : self.first + self.count]

    def copy_rows_to(self, whole: Tensor, flat: Tensor) -> None:
        """Write the rows of every process into its row of `flat`, shape (ranks, each · width); the rest stays."""
        for part, rows in zip(flat, whole.split(self.each), strict=False):
            part[: rows.numel()].view(rows.shape).copy_(rows)


class ShardedModel:
    """The parameters of one model, whole and in shards, and the way from one to the other.

    Guarantee: releases nothing. The shards of `summed` together are the sums of all processes, each entry once.

    Args:
        model: with parameters that `fully_shard` took; checked by `find_sharded_model`.
        world_size: number of processes.
        rank: of this one.
        device: where tensors must lie to be exchanged.
    """

    def __init__(self, model: nn.Module, *, world_size: int, rank: int, device: torch.device) -> None:
        self._model, self._count, self._number, self._device = model, world_size, rank, device
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # What torch's groups of parameters had in place of `_QUIET`.
        self._saved: list[tuple[object, dict[str, object]]] = []
        self._shard: dict[nn.Parameter, nn.Parameter] = {}
        self._whole: dict[nn.Parameter, nn.Parameter] = {}
        self._order: list[int] = []
        self._ordered_for: list[int] = []
        self.scatter()

    # --- gathering -----------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make every parameter whole; all processes call it together. Passes exchange nothing until `scatter`."""
        self.scatter()
        for group in _groups(self._modules):
            self._saved.append((group, {name: getattr(group, name) for name in _QUIET}))
            vars(group).update(_QUIET)
        before = dict(self._model.named_parameters())
        with collective():
            for module in self._modules:
                module.unshard()
        for name, whole in self._model.named_parameters():
            self._shard[whole], self._whole[before[name]] = before[name], whole

    def scatter(self) -> None:
        """Free what was gathered: the model holds shards again. Exchanges nothing."""
        for group, values in self._saved:
            vars(group).update(values)
        self._saved.clear()
        for module in self._modules:
            _leave_pass(module)
            module.reshard()

    def full_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Gather, and give the whole parameters of those that the optimizer holds."""
        held = list(parameters)
        self.gather()
        return [self._whole[parameter] for parameter in held]

    def owned_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What an optimizer holds of parameters that may be gathered now."""
        return [self._shard.get(parameter, parameter) for parameter in parameters]

    # --- sums ----------------------------------------------------------------------------------------------------

    def summed(self, parameters: Sequence[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> list[Tensor]:
        """This process's rows of each sum over all processes, which give the same shapes in the same order.

        Args:
            parameters: whole ones.
            sums: of this process's records; emptied on the way, so that no sum is kept next to its shard.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self._buckets(parameters, sums):
            with collective():
                if isinstance(self._shard[bucket[0]], DTensor):
                    self._scatter_sums(bucket, sums, found)
                    continue
                whole = sums.pop(bucket[0]).contiguous()
                held = whole.to(self._device)
                dist.all_reduce(held)
                found[bucket[0]] = held.to(whole.device)
        return [found[parameter] for parameter in parameters]

    def _scatter_sums(
        self, bucket: list[nn.Parameter], sums: dict[nn.Parameter, Tensor], found: dict[nn.Parameter, Tensor]
    ) -> None:
        rows = [self._rows(parameter) for parameter in bucket]
        sizes = [row.each * row.width for row in rows]
        first = sums[bucket[0]]
        flat = torch.zeros(self._count, sum(sizes), dtype=first.dtype, device=self._device)
        device = first.device
        del first
        for parameter, row, part in zip(bucket, rows, flat.split(sizes, dim=1), strict=True):
            row.copy_rows_to(sums.pop(parameter), part)
        own = flat.new_empty(flat.shape[1])
        _reduce_scatter(own, flat.view(-1))
        del flat
        for parameter, row, part in zip(bucket, rows, own.to(device).split(sizes), strict=True):
            found[parameter] = part[: row.count * row.width].view(row.count, *row.shape[1:]).clone()

    def _buckets(
        self, parameters: Sequence[nn.Parameter], sums: Mapping[nn.Parameter, Tensor]
    ) -> Iterator[list[nn.Parameter]]:
        """What is exchanged together; a parameter that is not sharded stays alone."""
        return in_buckets(parameters, sums.__getitem__, lambda one: not isinstance(self._shard[one], DTensor))

    # --- sums that are scattered while they are formed -----------------------------------------------------------

    def has_order(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it was agreed in which order the sums of `parameters` are exchanged."""
        return self._ordered_for == list(map(id, parameters))

    def agree_on_order(self, parameters: Sequence[nn.Parameter], arrived: Sequence[nn.Parameter]) -> None:
        """Exchange sums of `parameters` from now on in the order in which they `arrived` in the first process."""
        index = {parameter: number for number, parameter in enumerate(parameters)}
        order: list[object] = [[index[one] for one in dict.fromkeys([*arrived, *parameters])]]
        with collective():
            dist.broadcast_object_list(order, src=0, device=self._device)
        self._order, self._ordered_for = cast("list[int]", order[0]), list(map(id, parameters))

    def in_order(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters of each exchange."""
        sizes = {
            parameter: torch.empty((), dtype=accumulation_dtype(parameter)).expand(parameter.shape)
            for parameter in parameters
        }
        return list(self._buckets([parameters[number] for number in self._order], sizes))

    def late(self, parameters: Sequence[nn.Parameter], left: Mapping[nn.Parameter, Tensor]) -> list[list[nn.Parameter]]:
        """Those of `parameters` of which some process has a sum left, each alone."""
        has = torch.tensor([parameter in left for parameter in parameters], dtype=torch.int32, device=self._device)
        with collective():
            dist.all_reduce(has)
        return [[parameter] for parameter, here in zip(parameters, has.tolist(), strict=True) if here]

    # --- noise and gradients -------------------------------------------------------------------------------------

    def noise(
        self, mechanism: object, parameters: Sequence[nn.Parameter], extra: Sequence[Tensor]
    ) -> ShardGaussianMechanism:
        """The noise of the rows that are held here, and of what all processes hold in addition (`extra`)."""
        assert isinstance(mechanism, TensorGaussianMechanism)
        parts = [
            self._rows(parameter).part
            if isinstance(self._shard[parameter], DTensor)
            else ShardSlice(first=0, whole=parameter.numel())
            for parameter in parameters
        ]
        parts += [ShardSlice(first=0, whole=tensor.numel()) for tensor in extra]
        return ShardGaussianMechanism(mechanism=mechanism, parts=tuple(parts))

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Make `gradient`, rows of a whole parameter's, the gradient of its shard."""
        shard = self._shard[parameter]
        value = gradient.to(shard.dtype)
        shard.grad = value if not isinstance(shard, DTensor) else _like(shard, value)

    def _rows(self, parameter: nn.Parameter) -> _Rows:
        return _Rows(shape=tuple(parameter.shape), ranks=self._count, rank=self._number)


def _like(shard: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def _reduce_scatter(own: Tensor, flat: Tensor) -> None:
    """The sum of this process's stretch over all processes. Its name changed in torch 2.13."""
    reduce = cast(
        "Callable[[Tensor, Tensor], object]", getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    )
    reduce(own, flat)


def _groups(modules: Iterable[FSDPModule]) -> Iterator[object]:
    """Torch's own groups of parameters; it has no public way to read its settings."""
    for module in modules:
        state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        held = vars(state)
        groups = held["_fsdp_param_groups"] if "_fsdp_param_groups" in held else [held["_fsdp_param_group"]]
        yield from (group for group in groups if group is not None)


def _leave_pass(module: FSDPModule) -> None:
    """After a pass that an exception cut off torch would take itself to be inside it still."""
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    for one in (state, *_groups([module])):
        now = vars(one)["_training_state"]
        vars(one)["_training_state"] = type(now).IDLE
    state._state_ctx.iter_forward_root = None  # pyright: ignore[reportPrivateUsage]


# --- what is refused ---------------------------------------------------------------------------------------------


def find_sharded_model(model: nn.Module, *, world_size: int, rank: int, device: torch.device) -> ShardedModel | None:
    """The shards of a model that `fully_shard` took; None for a model whose parameters each process holds whole.

    Raises:
        InvalidArgument: parameters are spread in another way, or offloaded; names the first of them.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidArgument(
            "model must be sharded by torch.distributed.fsdp.fully_shard, got FullyShardedDataParallel, which makes "
            "one flat parameter of many. Use fully_shard."
        )
    spread = {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not spread and not modules:
        return None
    if any(isinstance(vars(group)["offload_policy"], CPUOffloadPolicy) for group in _groups(modules)):
        raise InvalidArgument(
            "offload_policy must not be CPUOffloadPolicy, got it. Leave it out: shards stay where they are."
        )
    shards = ShardedModel(model, world_size=world_size, rank=rank, device=device)
    for name, value in model.named_parameters():
        if isinstance(value, DTensor):
            _check_mesh(name, value, world_size)
    managed = {id(value) for value in _managed(modules)}
    strange = [name for name, value in spread.items() if id(value) not in managed]
    if strange:
        raise InvalidArgument(
            f"{strange[0]} must be sharded by fully_shard, got a distributed tensor of another kind (tensor parallel). "
            "Apply fully_shard alone."
        )
    return shards


def _managed(modules: Iterable[FSDPModule]) -> Iterator[nn.Parameter]:
    for group in _groups(modules):
        for one in cast("Iterable[object]", vars(group)["fsdp_params"]):
            yield cast("nn.Parameter", vars(one)["sharded_param"])


def _check_mesh(name: str, value: DTensor, count: int) -> None:
    mesh = value.device_mesh
    if mesh.ndim != 1:
        raise InvalidArgument(
            f"{name} must be sharded over a device mesh of one dimension, got {mesh.ndim}: replicas of shards (HSDP) "
            "and tensor parallel parts are not supported. Use fully_shard without a mesh."
        )
    if mesh.mesh.flatten().tolist() != list(range(count)):
        raise InvalidArgument(
            f"{name} must be sharded over all {count} processes in their order, got another mesh. Use fully_shard "
            "without a mesh."
        )
    if tuple(value.placements) != (Shard(0),):
        raise InvalidArgument(
            f"{name} must be sharded by rows, got {value.placements}. Leave shard_placement_fn out of fully_shard."
        )
