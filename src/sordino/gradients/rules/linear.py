"""Linear layers on inputs of any rank (floor 1, gradients).

Per record the weight gradient is ``G^T A`` over T positions. With T = 1 its norm factors into |a|·|g|; otherwise the
cost model picks a kernel. Legend: A = inputs [B, T, d], G = output gradients [B, T, p].
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.gradients.numerics import compute_dtype, row_squared_norms
from sordino.gradients.rules.cost import choose_kernel, chunk_records
from sordino.gradients.rules.rule import LayerRule, Use, layer_rule, weigh

__all__ = ["LinearRule", "ghost_sum", "matrix_per_example", "matrix_squared_norms", "positions_of"]

# Rounding of a Gram entry, relative to the lengths of its two vectors, in units of single-precision epsilon.
_GRAM_ROUNDING = 4.0
# A ghost norm this far below the sum of squared position norms has cancelled and is recomputed.
_CANCELLED = 0.05


@layer_rule(nn.Linear)
class LinearRule(LayerRule):
    """nn.Linear: ghost, stored or norm-only kernel for T > 1, the product of norms for T = 1."""

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared norm over weight and bias, as far as they are in `names`."""
        inputs, grads = use.saved[0], use.grad
        if inputs.shape[:-1].numel() == use.records:
            total = row_squared_norms(grads)
            if "weight" in names:
                lengths = row_squared_norms(inputs)
                total *= lengths.add_(1) if "bias" in names else lengths
            return total
        inputs, grads = positions_of(use)
        if "weight" not in names:
            return super().squared_norms(use, names)
        if "bias" in names:
            return matrix_squared_norms(use, inputs, grads, with_sum=True)
        return matrix_squared_norms(use, inputs, grads, with_sum=False)

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """``G^T A`` for the weight, the sum over positions for the bias."""
        inputs, grads = positions_of(use)
        return grads.sum(1) if name == "bias" else matrix_per_example(inputs, grads)

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """One matrix product for the weight, one matrix-vector product for the bias."""
        sums: dict[str, Tensor] = {}
        dtype = compute_dtype(use.saved[0], use.grad)
        weights = weights.to(dtype)
        both = (use.saved[0], use.grad)
        # The order of the rows doesn't matter to the sum: time first in memory stays as it is.
        time_first = use.grad.dim() == 3 and use.grad.stride(1) > use.grad.stride(0)
        if time_first:
            both = tuple(tensor.transpose(0, 1) for tensor in both)
        rows_a, rows_g = (tensor.to(dtype).reshape(-1, tensor.shape[-1]) for tensor in both)
        positions = rows_g.shape[0] // use.records
        if positions == 1:
            per_row = weights
        else:
            per_row = weights.repeat(positions) if time_first else weights.repeat_interleave(positions)
        for name in names:
            if name in use.memo:
                sums[name] = weigh(use.memo[name], weights)
            elif name == "bias":
                sums[name] = per_row @ rows_g
            elif rows_a.shape[1] < rows_g.shape[1]:
                sums[name] = rows_g.t() @ (rows_a * per_row[:, None])
            else:
                sums[name] = (rows_g * per_row[:, None]).t() @ rows_a
        return sums

    def merge(self, uses: list[Use], names: frozenset[str]) -> Use | None:
        """Several calls are one call on all their positions: the sums over positions add up."""
        if "weight" not in names:
            return None
        flat = [positions_of(use) for use in uses]
        inputs = torch.cat([inputs for inputs, _ in flat], dim=1)
        grads = torch.cat([grads for _, grads in flat], dim=1)
        return replace(uses[0], saved=(inputs,), grads=(grads,), memo={}, versions=())


def positions_of(use: Use) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T p"]]:
    """Inputs and output gradients of a linear layer with all middle dimensions as one, in the computing type."""
    (inputs,), grads = use.saved, use.grad
    dtype = compute_dtype(inputs, grads)
    return _positions(inputs.to(dtype)), _positions(grads.to(dtype))


def _positions(x: Float[Tensor, "B *T d"]) -> Float[Tensor, "B T d"]:
    positions = 1
    for size in x.shape[1:-1]:
        positions *= size
    return x.reshape(x.shape[0], positions, x.shape[-1])


def matrix_per_example(inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"]) -> Float[Tensor, "B p d"]:
    """``G^T A`` of each record."""
    return torch.bmm(grads.transpose(1, 2), inputs)


def matrix_squared_norms(
    use: Use, inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, with_sum: bool
) -> Float[Tensor, " B"]:
    """``‖G^T A‖²`` of each record by the cheapest kernel, plus ``‖Σ_t g_t‖²`` when `with_sum`.

    The stored kernel leaves its per-record gradients in ``use.memo``.
    """
    records, positions, width = inputs.shape
    kernel = choose_kernel(records, positions, width, grads.shape[2])
    if kernel == "ghost":
        return _ghost(inputs, grads, with_sum=with_sum)
    total = torch.zeros(records, dtype=torch.float64, device=grads.device)
    if with_sum:
        use.memo["bias"] = grads.sum(1)
        total += row_squared_norms(use.memo["bias"])
    if kernel == "stored":
        use.memo["weight"] = matrix_per_example(inputs, grads)
        return total + row_squared_norms(use.memo["weight"])
    return total + _norm_only(inputs, grads)


def _norm_only(inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"]) -> Float[Tensor, " B"]:
    step = chunk_records(inputs.shape[0], inputs.shape[2] * grads.shape[2])
    parts = [
        row_squared_norms(matrix_per_example(a, g)) for a, g in zip(inputs.split(step), grads.split(step), strict=True)
    ]
    return torch.cat(parts)


def _ghost(inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, with_sum: bool) -> Float[Tensor, " B"]:
    step = chunk_records(inputs.shape[0], inputs.shape[1] ** 2)
    parts = []
    for a, g in zip(inputs.split(step), grads.split(step), strict=True):
        grams = torch.bmm(a, a.transpose(1, 2))
        if with_sum:
            # A bias is one more input that is always 1.
            grams += 1

        def exact(index: Tensor, a: Tensor = a, g: Tensor = g) -> Float[Tensor, " B"]:
            a, g = a.index_select(0, index).double(), g.index_select(0, index).double()
            total = _norm_only(a, g)
            return total + row_squared_norms(g.sum(1)) if with_sum else total

        parts.append(ghost_sum(grams, g, exact))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=grads.device)


def ghost_sum(
    grams: Float[Tensor, "B T T"], grads: Float[Tensor, "B T p"], exact: Callable[[Tensor], Float[Tensor, " b"]]
) -> Float[Tensor, " B"]:
    """``Σ_{s,t} grams[s, t]·⟨g_s, g_t⟩`` of each record, never below the true squared norm.

    The sum may cancel: its rounding error is proportional to the squared position norms ``Σ_t |a_t|²|g_t|²``, so a
    small multiple of that is added, and a record whose sum is far below it, or out of the range of single precision,
    is recomputed.

    Args:
        grams: inner products of the inputs at every two positions; overwritten.
        grads: output gradients.
        exact: the squared norms of the records with the given indices, from their gradients.
    """
    grams *= torch.bmm(grads, grads.transpose(1, 2))
    scale = grams.diagonal(dim1=1, dim2=2).double().sum(1)
    total = grams.sum((1, 2)).double() + _GRAM_ROUNDING * torch.finfo(grads.dtype).eps * scale
    sound = (total > _CANCELLED * scale) & (total > 1e-24) & (total < 1e36)
    if not bool(sound.all()):
        index = (~sound).nonzero().flatten()
        total[index] = exact(index)
    return total
