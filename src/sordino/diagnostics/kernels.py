"""Jacobians and tangent kernels of a model on a batch, layer by layer (floor 4).

Legend: N records, K outputs, D parameters. Under gradient flow of the mean loss over N records the outputs move by
df/dt = −(1/N) H e, with H = J Jᵀ (NK × NK) and e = ∂ℓ/∂f.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from sordino.errors import InvalidArgument

__all__ = ["Kernels", "RecordLoss", "cross_entropy", "kernels"]

Floats = NDArray[np.float64]
RecordLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (N, K), labels (N,)) ↦ losses (N,)."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each record, shape (N,)."""
    return F.cross_entropy(outputs, labels, reduction="none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """A model at one point, seen from a batch.

    Args:
        layers: name of each layer with parameters.
        jacobians: ∂f/∂w of each layer, (N·K, D_layer), float64.
        slopes: e = ∂ℓ/∂f, (N·K,).
        records: N.
    """

    layers: tuple[str, ...]
    jacobians: tuple[Floats, ...]
    slopes: Floats
    records: int

    def gradients(self, layer: int) -> Floats:
        """Each record's gradient of one layer, (N, D_layer)."""
        weighted = self.jacobians[layer] * self.slopes[:, None]
        return weighted.reshape(self.records, -1, weighted.shape[1]).sum(axis=1)

    def squared_norms(self) -> Floats:
        """Squared gradient norm of each record in each layer, (layers, N)."""
        return np.stack([(self.gradients(k) ** 2).sum(axis=1) for k in range(len(self.layers))])

    def kernel(self, factors: Floats) -> Floats:
        """Σ over layers of H_r C_r, (NK, NK).

        Args:
            factors: the clip factor of each record in each layer, (layers, N).
        """
        outputs = len(self.slopes) // self.records
        return sum(
            ((J @ J.T) * np.repeat(row, outputs)[None, :] for J, row in zip(self.jacobians, factors, strict=True)),
            np.zeros((len(self.slopes),) * 2),
        )


def kernels(model: nn.Module, features: Tensor, labels: Tensor, *, loss: RecordLoss = cross_entropy) -> Kernels:
    """Jacobians and slopes in double precision, at the model's weights.

    Guarantee: none; of public records only.

    Args:
        model: features (N, …) ↦ outputs (N, K), each record alone; used in evaluation mode, left unchanged.
        features: (N, …); N · K · parameters numbers must fit into memory.
        labels: (N,).
        loss: of each record.
    """
    if len(features) != len(labels) or not len(labels):
        raise InvalidArgument("features and labels must have one row a record and at least one, got others.")
    point = {name: value.detach().double() for name, value in model.state_dict().items() if value.is_floating_point()}
    trained = {name: point.pop(name) for name, value in model.named_parameters() if value.requires_grad}
    x = features.double() if features.is_floating_point() else features
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:

        def outputs(weights: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(model, {**point, **weights}, (one.unsqueeze(0),)).squeeze(0)

        with torch.no_grad():
            jacobian = vmap(jacrev(outputs), in_dims=(None, 0))(trained, x)
            values = vmap(outputs, in_dims=(None, 0))(trained, x)
    finally:
        for module, mode in modes:
            module.training = mode
    values = values.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(loss(values, labels).sum(), values)
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in trained))
    rows = values.numel()
    parts = {
        layer: [jacobian[name].reshape(rows, -1) for name in trained if name.rpartition(".")[0] == layer]
        for layer in layers
    }
    return Kernels(
        layers=layers,
        jacobians=tuple(torch.cat(parts[layer], dim=1).cpu().numpy() for layer in layers),
        slopes=slopes.reshape(-1).cpu().numpy(),
        records=len(labels),
    )
