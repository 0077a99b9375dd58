"""Slow, obvious references: every record's gradient by plain autograd, one record at a time."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Record = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Record], Tensor]


def per_record_gradients(
    model: nn.Module, loss: Loss, batch: Record, parameters: Sequence[nn.Parameter] | None = None
) -> list[Tensor]:
    """For each parameter a float64 tensor [B, *shape]: the gradient of ``loss(model, (record,))`` of that record alone.

    `loss` gets a batch of one record and returns a scalar. The model runs in double precision, without hooks.
    """
    twin = _bare_twin(model)
    names = {id(p): name for name, p in model.named_parameters()}
    own = dict(twin.named_parameters())
    wanted = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    targets = [own[names[id(p)]] for p in wanted]
    rows: list[list[Tensor]] = [[] for _ in targets]
    for b in range(batch[0].shape[0]):
        record = tuple(_double(tensor[b : b + 1]) for tensor in batch)
        value = loss(twin, record)
        gradients = torch.autograd.grad(value, targets, allow_unused=True)
        for row, target, gradient in zip(rows, targets, gradients, strict=True):
            row.append(torch.zeros_like(target) if gradient is None else gradient)
    return [
        torch.stack(row) if row else torch.zeros(0, *t.shape).double() for row, t in zip(rows, targets, strict=True)
    ]


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """[B]: squared norm of each record's gradient over all parameters."""
    return torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)


def clipped_sum(gradients: Sequence[Tensor], max_grad_norm: float) -> list[Tensor]:
    """``Σ_b min(1, C/‖g_b‖) g_b`` for each parameter."""
    factors = (max_grad_norm / squared_norms(gradients).sqrt()).clamp(max=1)
    return weighted_sums(gradients, factors)


def weighted_sums(gradients: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """``Σ_b w_b g_b`` for each parameter."""
    return [torch.tensordot(weights.double(), g, dims=1) for g in gradients]


def relative_error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest expected magnitude."""
    if got.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor, 1e-30)
    return float((got.double() - expected.double()).abs().max()) / scale


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def _bare_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin
