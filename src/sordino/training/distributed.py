"""Several processes that train one model: one logical batch, one noise, one charge.

Every process draws the *same* logical batch from a key that the first one made, and takes its own part of it. Clipped
sums are added up over the processes; then each adds the same noise to the same sum, once. The first process charges the
ledger and writes the transcript; the others wait for its word before they read a record.

Nothing here knows how many machines there are: it is read from torch's process group.

References:
    Abadi et al. 2016, algorithm 1: a step is one sum over the logical batch, on whichever ranks its parts are computed.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sordino.errors import InvalidArgument, SordinoError
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch, split_into_microbatches
from sordino.training.exclusions import Option
from sordino.training.plan import Plan

if TYPE_CHECKING:
    from sordino.training.sharded import ShardedModel


# ----------------------------------------------------------------------------------------------------------------------
# Where processes wait for each other.
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def collective() -> Iterator[None]:
    """A block in which processes wait for each other.

    Raises:
        SordinoError: one of them is gone, or did not answer in the backend's time.
    """
    try:
        yield
    except RuntimeError as error:
        raise SordinoError(
            "all processes must take part until the end, got one that is gone or does not answer. What was charged "
            "stays charged; go on from the last checkpoint with resume_from=, with any number of processes."
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# Several processes that train one model: one logical batch, one noise, one charge.
# ----------------------------------------------------------------------------------------------------------------------


T = TypeVar("T")

# Bytes that are added up in one exchange: many small tensors would each wait for the network.
_BUCKET = 32 << 20


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """The processes of one run, and this one's place among them.

    Args:
        rank: of this process, from 0; rank zero keeps the charges.
        world_size: how many there are, ≥ 1.
        device: where tensors must lie to be exchanged.
        shards: of the model, when `fully_shard` spread its parameters over the processes.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shards: "ShardedModel | None" = None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process charges, writes and prints."""
        return self.rank == 0

    def local_indices(self, indices: np.ndarray) -> np.ndarray:
        """This process's part of a logical batch: every `count`-th record, maybe none.

        Guarantee: the parts of all processes are disjoint and make up the batch, so each record is in one sum once.
        """
        return indices if self.world_size == 1 else indices[self.rank :: self.world_size]

    def local_microbatches(
        self, indices: np.ndarray, *, step: int, microbatch_size: int | None, evenly: bool
    ) -> tuple[Microbatch, ...]:
        """This process's chunks of a logical batch; `evenly` gives all processes as many, the last ones empty."""
        own = split_into_microbatches(self.local_indices(indices), step=step, microbatch_size=microbatch_size)
        if not evenly or self.world_size == 1:
            return own
        # No rank has more than the first one.
        most = len(split_into_microbatches(indices[:: self.world_size], step=step, microbatch_size=microbatch_size))
        more = [
            Microbatch(step=step, index=number, is_last=False, indices=indices[:0]) for number in range(len(own), most)
        ]
        chunks = [*own, *more]
        return tuple(replace(chunk, is_last=chunk.index == most - 1) for chunk in chunks)

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which give the same shapes in the same order."""
        if self.world_size == 1:
            return
        for bucket in in_buckets(tensors, lambda tensor: tensor):
            flat = torch.cat([tensor.reshape(-1).to(self.device) for tensor in bucket])
            with collective():
                dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def broadcast_from_rank_zero(self, act: Callable[[], T]) -> T:
        """What `act` returns in the first process, in all of them; what it raises there, all of them raise.

        The others wait, so nothing that comes after a charge can come before it.
        """
        if self.world_size == 1:
            return act()
        outcome: list[object] = [None, None]
        own: Exception | None = None
        if self.is_rank_zero:
            try:
                outcome = [act(), None]
            except SordinoError as error:
                outcome = [None, error]
            except Exception as error:
                # No rank may be left waiting; what another kind of error says may quote a record.
                own, outcome = error, [None, SordinoError(f"the first process failed: {type(error).__name__}.")]
        with collective():
            dist.broadcast_object_list(outcome, src=0, device=self.device)
        if own is not None:
            raise own
        if outcome[1] is not None:
            raise cast("SordinoError", outcome[1])
        return cast("T", outcome[0])

    def require_same(self, **facts: object) -> None:
        """Refuse processes that were given different plans, datasets or models.

        Args:
            **facts: public, as JSON types.

        Raises:
            InvalidArgument: in all processes; names what differs.
        """
        if self.world_size == 1:
            return
        found: list[object] = [None] * self.world_size
        with collective():
            dist.all_gather_object(found, {name: json.dumps(value) for name, value in facts.items()})
        given = cast("list[dict[str, str]]", found)
        for name in facts:
            if any(one[name] != given[0][name] for one in given):
                raise InvalidArgument(
                    f"{name} must be the same in all processes, got different ones. Call with the same arguments and "
                    "the whole dataset everywhere: each process takes its own part of every batch."
                )

    @contextmanager
    def rank_zero_context(
        self,
        enter: Callable[[Account | Reservation | None], AbstractContextManager[T]],
        account: Account | Reservation | None,
    ) -> Iterator[T]:
        """Enter `enter(account)` on rank zero and `enter(None)` on the other ranks. If one rank fails, all raise."""
        manager = enter(account if self.is_rank_zero else None)
        value: list[T] = []
        self.broadcast_from_rank_zero(lambda: value.append(manager.__enter__()))
        if not self.is_rank_zero:
            value.append(manager.__enter__())
        try:
            yield value[0]
        except BaseException as error:
            if not manager.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            manager.__exit__(None, None, None)

    def with_shared_key(self, rng: KeyedRNG) -> KeyedRNG:
        """The first process's randomness, in all of them: the same batches, and the same noise on the same sum."""
        if self.world_size == 1:
            return rng
        return rng.with_shared_key(lambda key: cast("bytes", self.broadcast_from_rank_zero(lambda: key)))

    def rank_zero_last(self, act: Callable[[], None]) -> None:
        """All processes do it, the first one after the others: it may write what they read."""
        if not self.is_rank_zero:
            act()
        if self.world_size > 1:
            with collective():
                dist.barrier()
        self.broadcast_from_rank_zero(act)

    def rank_zero_first(self, act: Callable[[], T]) -> T:
        """What `act` returns, in each process its own; the others act when the first one succeeded."""
        if not self.is_rank_zero:
            self.broadcast_from_rank_zero(lambda: None)
            return act()
        made: list[T] = []
        self.broadcast_from_rank_zero(lambda: made.append(act()))
        return made[0]

    def bind(self, module: nn.Module, plan: Plan, options: Collection[Option]) -> "DistributedContext":
        """The same processes with the shards of `module`, if it is sharded; what they can't do together is refused.

        Args:
            module: the model.
            plan: of its steps.
            options: how it is trained.

        Raises:
            InvalidArgument: names what does not go together.
        """
        plan.check_options({*options, *([Option.SEVERAL_PROCESSES] if self.world_size > 1 else [])})
        # Who has a sharded model has loaded one of these; to everyone else they would cost a second.
        if sys.modules.keys().isdisjoint(("torch.distributed.fsdp", "torch.distributed.tensor")):
            return self
        from sordino.training.sharded import find_sharded_model

        shards = find_sharded_model(module, world_size=self.world_size, rank=self.rank, device=self.device)
        if shards is not None:
            plan.check_options({*options, Option.FULLY_SHARD})
        return replace(self, shards=shards)

    def full_parameters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What passes will see of the parameters that an optimizer holds; shards are gathered by all processes."""
        return list(parameters) if self.shards is None else self.shards.full_parameters(parameters)

    def owned_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What an optimizer holds of parameters that may be gathered now."""
        return list(parameters) if self.shards is None else self.shards.owned_parameters(parameters)

    def gather(self) -> None:
        """Make a sharded model whole for the passes of a step; all processes call it."""
        if self.shards is not None:
            self.shards.gather()

    def scatter(self) -> None:
        """Let go of what was gathered."""
        if self.shards is not None:
            self.shards.scatter()

    def broadcast_module(self, module: nn.Module) -> None:
        """Give all processes the first one's parameters and buffers; of shards each has its own."""
        if self.world_size == 1:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            if hasattr(tensor, "device_mesh"):
                continue
            held = tensor.detach().to(self.device).contiguous()
            with collective():
                dist.broadcast(held, src=0)
            tensor.detach().copy_(held)


def get_distributed_context() -> DistributedContext:
    """The processes of torch's default process group; one when there is none.

    Raises:
        InvalidArgument: a launcher started several processes and there is no group: each would train a model of its
            own, with its own noise and its own charges.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InvalidArgument(
                f"process group must be started in each of {os.environ['WORLD_SIZE']} processes, got none. Call "
                'torch.distributed.init_process_group("gloo") first; for trainings that have nothing to do with each '
                "other take RANK and WORLD_SIZE out of the environment."
            )
        return DistributedContext()
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    return DistributedContext(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)


def require_single_process(what: str) -> None:
    """Refuse what each process would do again, with its own noise and its own charges.

    Raises:
        InvalidArgument: there are several processes.
    """
    count = get_distributed_context().world_size
    if count > 1:
        raise InvalidArgument(f"{what} must be used in one process, got {count}. Start it in one, without a launcher.")


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """The module inside a `DistributedDataParallel`, whose averaging of gradients is switched off; else `module`."""
    if not isinstance(module, DistributedDataParallel):
        return module
    # It averages gradients per process, which are no clipped sums. The engine's parameters never get ordinary ones.
    module.require_backward_grad_sync = False
    return module.module


def parameter_shapes(module: nn.Module) -> list[list[object]]:
    """Name, shape and whether it is trained, of each parameter: what processes must have alike."""
    return [
        [name, None if is_lazy(value) else list(value.shape), value.requires_grad]
        for name, value in module.named_parameters()
    ]


def in_buckets(
    items: Iterable[T], tensor_of: Callable[[T], Tensor], is_alone: Callable[[T], bool] = lambda _: False
) -> Iterator[list[T]]:
    """Neighbors whose tensors have one type and up to 32 MB together; one that `is_alone` stays so."""
    bucket: list[T] = []
    size = 0
    for item in items:
        tensor, alone = tensor_of(item), is_alone(item)
        if bucket and (alone or tensor.dtype != tensor_of(bucket[0]).dtype or size + tensor.nbytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += tensor.nbytes
        if alone:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
