"""Normalization layers with a scale and a shift.

With x̂ the normalized input, a record's gradient is ``Σ_t g·x̂`` for the scale and ``Σ_t g`` for the shift. Both are
as small as the parameters, so they are kept. Statistics that torch has computed already are reused.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._C._autograd import (
    _top_saved_tensors_default_hooks,  # pyright: ignore[reportPrivateUsage]
)

from sordino.gradients.numerics import compute_dtype
from sordino.gradients.rules.base import LayerCall, LayerRule, layer_rule, only_input
from sordino.shapes import Float


def _saved_statistics(output: Tensor) -> tuple[Tensor, ...]:
    """Mean and reciprocal deviation that torch kept for its own backward, when they can be read for free."""
    node = output.grad_fn
    if node is None or _top_saved_tensors_default_hooks(False) is not None:
        return ()
    mean, deviation = getattr(node, "_saved_result1", None), getattr(node, "_saved_result2", None)
    return (mean, deviation) if isinstance(mean, Tensor) and isinstance(deviation, Tensor) else ()


@layer_rule(nn.LayerNorm)
class LayerNormRule(LayerRule):
    """nn.LayerNorm over any trailing dimensions."""

    def record_dims(self, module: nn.Module) -> int:
        """The normalized dimensions and the records'."""
        return 1 + len(getattr(module, "normalized_shape", ()))

    def save(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,
    ) -> tuple[Tensor, ...]:
        """The input, with torch's statistics where there are any."""
        return only_input(args, kwargs), *_saved_statistics(output)

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """Sum over the positions in front of the normalized dimensions."""
        trailing = len(getattr(use.module, "normalized_shape", ()))
        grads, dtype = use.grad, compute_dtype(use.grad)
        if name == "weight":
            # Half precision is widened on the way, without a copy.
            grads = self.normalized(use, tuple(range(-trailing, 0))).mul_(grads)
        between = tuple(range(1, grads.dim() - trailing))
        return grads.sum(between, dtype=dtype) if between else grads.to(dtype)

    def normalized(self, use: LayerCall, dims: tuple[int, ...]) -> Float[Tensor, "B *shape"]:
        """The normalized input x̂."""
        x, dtype = use.saved[0], compute_dtype(use.saved[0])
        if len(use.saved) == 3:
            mean, reciprocal = (statistic.to(dtype) for statistic in use.saved[1:])
        else:
            x = x.to(dtype)
            variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
            reciprocal = (variance + _epsilon(use.module, x)).rsqrt()
        return torch.addcmul(-mean * reciprocal, x, reciprocal)


@layer_rule(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """nn.RMSNorm over any trailing dimensions."""

    def save(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, ...]:
        """The input."""
        return (only_input(args, kwargs),)

    def normalized(self, use: LayerCall, dims: tuple[int, ...]) -> Float[Tensor, "B *shape"]:
        """The input over its root mean square."""
        x = use.saved[0]
        epsilon = _epsilon(use.module, x)
        x = x.to(compute_dtype(x))
        return x * (x.square().mean(dims, keepdim=True) + epsilon).rsqrt()


class ChannelNormRule(LayerRule):
    """Scale and shift per channel; a subclass says which mean and deviation each channel of each record has."""

    def record_dims(self, module: nn.Module) -> int:  # noqa: ARG002
        """Records and channels."""
        return 2

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B C"]:
        """``(Σ g·x − mean·Σ g)/deviation`` per channel, or ``Σ g``."""
        shift = use.memo.get("bias")
        if shift is None:
            shift = _over_positions(use.grad)
        if name == "bias":
            return shift
        mean, reciprocal = self.statistics(use)
        # Of two numbers in half precision one is widened by a copy, and the other on the way.
        product = use.grad.to(compute_dtype(use.grad, use.saved[0])) * use.saved[0]
        return (_over_positions(product) - mean * shift) * reciprocal

    def statistics(self, use: LayerCall) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
        """Mean and reciprocal deviation, broadcastable to [B, C]."""
        raise NotImplementedError


@layer_rule(nn.GroupNorm)
class GroupNormRule(ChannelNormRule):
    """nn.GroupNorm."""

    def save(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,
    ) -> tuple[Tensor, ...]:
        """The input, with torch's statistics where there are any."""
        return only_input(args, kwargs), *_saved_statistics(output)

    def statistics(self, use: LayerCall) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
        """One mean and deviation per group."""
        x, dtype = use.saved[0], compute_dtype(use.saved[0])
        groups = int(getattr(use.module, "num_groups"))  # noqa: B009
        if len(use.saved) == 3:
            mean, reciprocal = (s.reshape(use.records, groups).to(dtype) for s in use.saved[1:])
        else:
            x = x.to(dtype)
            rows = x.reshape(use.records, groups, x[0].numel() // groups if use.records else 1)
            variance, mean = torch.var_mean(rows, 2, correction=0)
            reciprocal = (variance + _epsilon(use.module, x)).rsqrt()
        per_group = x.shape[1] // groups
        return mean.repeat_interleave(per_group, 1), reciprocal.repeat_interleave(per_group, 1)


@layer_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(ChannelNormRule):
    """nn.InstanceNorm: one mean and deviation per record and channel, or the stored ones in eval mode."""

    def record_dims(self, module: nn.Module) -> int:
        """Unbatched inputs have one dimension fewer and are refused."""
        return {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4}.get(_base(module, nn.InstanceNorm1d, nn.InstanceNorm2d), 5)

    def statistics(self, use: LayerCall) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
        """Over the positions of each channel."""
        x = use.saved[0].to(compute_dtype(use.saved[0]))
        if isinstance(getattr(use.module, "running_mean", None), Tensor) and not use.module.training:
            return _running(use.module, x)
        variance, mean = torch.var_mean(x.flatten(2), 2, correction=0)
        return mean, (variance + _epsilon(use.module, x)).rsqrt()


@layer_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class FrozenBatchNormRule(ChannelNormRule):
    """nn.BatchNorm in eval mode: the stored statistics are constants."""

    def statistics(self, use: LayerCall) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
        """The stored statistics."""
        return _running(use.module, use.saved[0].to(compute_dtype(use.saved[0])))


def _base(module: nn.Module, *bases: type[nn.Module]) -> type[nn.Module] | None:
    return next((base for base in bases if isinstance(module, base)), None)


def _running(module: nn.Module, like: Tensor) -> tuple[Float[Tensor, "1 C"], Float[Tensor, "1 C"]]:
    mean, variance = module.get_buffer("running_mean"), module.get_buffer("running_var")
    return mean.to(like.dtype)[None], (variance.to(like.dtype)[None] + _epsilon(module, like)).rsqrt()


def _over_positions(x: Float[Tensor, "B C *T"]) -> Float[Tensor, "B C"]:
    return x.flatten(2).sum(2, dtype=compute_dtype(x)) if x.dim() > 2 else x.to(compute_dtype(x))


def _epsilon(module: nn.Module, x: Tensor) -> float:
    epsilon = getattr(module, "eps", None)
    return float(torch.finfo(x.dtype).eps if epsilon is None else epsilon)
