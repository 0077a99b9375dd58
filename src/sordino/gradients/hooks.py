"""The small objects that stand between torch's hooks and the capture (floor 1, gradients)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import CheckpointFunction

from sordino.errors import PrivacyError
from sordino.gradients.purity import Fingerprint
from sordino.gradients.recording import Recording
from sordino.gradients.rules.rule import Use

__all__ = [
    "CallBefore",
    "ModuleHook",
    "UseReceiver",
    "in_checkpoint",
    "in_compiled",
    "in_reentrant_forward",
    "untraced",
]

_in_compiled = False
_CHECKPOINTS = CheckpointFunction.__module__
_REENTRANT_FORWARD = CheckpointFunction.forward.__code__


def in_reentrant_forward() -> bool:
    """Whether this is the first forward pass of a block under a reentrant checkpoint."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _REENTRANT_FORWARD:
        frame = frame.f_back
    return frame is not None


def in_checkpoint() -> bool:
    """Whether a checkpointed block runs, for the first time or again in the backward pass."""
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    pack = hooks[0] if hooks is not None else None
    return getattr(pack, "__module__", None) == _CHECKPOINTS or (not torch.is_grad_enabled() and in_reentrant_forward())


def untraced(call: Callable[..., object], *arguments: object) -> object:
    """``call(*arguments)``, left alone by torch.compile where that compiles the module that the hook is on."""
    compiling = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
    return _break_graph(call, *arguments) if compiling else call(*arguments)


@torch._disable_dynamo  # pyright: ignore[reportPrivateUsage]
def _break_graph(call: Callable[..., object], *arguments: object) -> object:
    global _in_compiled  # noqa: PLW0603 (hooks run one at a time)
    before, _in_compiled = _in_compiled, True
    try:
        return call(*arguments)
    finally:
        _in_compiled = before


def in_compiled() -> bool:
    """Whether the hook that runs belongs to a module that torch.compile compiles."""
    return _in_compiled


@dataclass(frozen=True, eq=False, kw_only=True)
class CallBefore:
    """What a call that will be run again was given, ahead of any other hook."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    fingerprint: Fingerprint


@dataclass(eq=False, kw_only=True, slots=True)
class UseReceiver:
    """Hands what the backward pass brings to the recording, each gradient with the records first."""

    recording: Recording
    use: Use
    dims: tuple[int, ...] = (0,)
    check: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.recording.expect(self.use)

    def __call__(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        """Take the kept tensors and the gradient at each output."""
        if self.check is not None:
            try:
                self.check()
            except PrivacyError:
                self.recording.poison(self.use.label)
                raise
            self.check = None
        moved = (g if g is None or dim == 0 else g.movedim(dim, 0) for g, dim in zip(grads, self.dims, strict=True))
        self.recording.receive(self.use, saved, tuple(moved))


class ModuleHook:
    """A hook that belongs to one module: on a copy of the model it does nothing, and pickling drops the capture."""

    def __init__(self, call: Callable[..., object], module: nn.Module) -> None:
        self._call, self._module = call, module

    def __call__(self, module: nn.Module, *arguments: object) -> object:
        """Forward to the capture when called by its own module."""
        return untraced(self._call, module, *arguments) if module is self._module else None

    @staticmethod
    def attached_to(module: nn.Module) -> bool:
        """Whether a capture's hook belongs to `module`."""
        hooks = vars(module)["_forward_pre_hooks"].values()
        return any(isinstance(hook, ModuleHook) and hook._module is module for hook in hooks)

    def __deepcopy__(self, memo: object) -> "ModuleHook":
        return self

    def __reduce__(self) -> tuple[type["_Inert"], tuple[()]]:
        return _Inert, ()


class _Inert:
    def __call__(self, *_: object) -> None:
        return None
