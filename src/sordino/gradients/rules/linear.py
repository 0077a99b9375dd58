"""Linear layers on inputs of any rank.

Per record the weight gradient is ``G^T A`` over T positions. With T = 1 its norm factors into |a|·|g|; otherwise the
cost model picks a kernel. Legend: A = inputs [B, T, d], G = output gradients [B, T, p].
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sordino.gradients.numerics import (
    ProductFormat,
    chunks,
    compute_dtype,
    grams,
    guard_holds,
    is_away,
    is_tracing_graph,
    joint_squared_norms,
    per_record_product,
    product_format,
    product_operands,
    row_squared_norms,
)
from sordino.gradients.rules.base import (
    TIMED_RECORDS,
    GramRounding,
    GramTerms,
    Kernel,
    LayerCall,
    LayerRule,
    Rounding,
    alone_error,
    cheapest_kernel,
    chunk_records,
    gram_rounding,
    gram_sizes,
    kernel_costs,
    layer_rule,
    sum_error,
    usual_gram_rounding,
    weighted_product,
    weighted_sum,
)
from sordino.shapes import Float

# Names in a use's memo, which no parameter has: the allowance of a ghost norm and the lengths of its terms, or what
# they are computed from together with those of other layers.
GHOST_ROUNDING, GHOST_LENGTHS = "rounding of the ghost norm", "lengths of the terms"
_SQUARES, _NORM_OF_INPUTS, _NORM_OF_GRADS = "squares of the positions", "norm of the inputs", "norm of the gradients"
_WAITING = (_SQUARES, _NORM_OF_INPUTS, _NORM_OF_GRADS)
GHOST_MEMO = (GHOST_ROUNDING, GHOST_LENGTHS, *_WAITING)
# A ghost norm this far below the sum of squared position norms has cancelled and is recomputed.
_CANCELLED = 0.05


@dataclass(frozen=True, kw_only=True)
class SharedBias:
    """The context of a use whose bias stands for several parameters with one gradient."""

    count: int


@layer_rule(nn.Linear)
class LinearRule(LayerRule):
    """nn.Linear: ghost, stored or norm-only kernel for T > 1, the product of norms for T = 1."""

    # Whether the weight has the shape (inputs, outputs).
    is_transposed: ClassVar[bool] = False

    def measure(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
        """Each record's squared norm over weight and bias, as far as they are in `names`, or what was kept of them."""
        inputs, grads = product_operands(use.saved[0], use.grad)
        if inputs.shape[:-1].numel() == use.records:
            total = row_squared_norms(grads)
            if "weight" in names:
                lengths = row_squared_norms(inputs)
                total *= lengths.add_(_biases(use, names))
            return total
        inputs, grads = num_positions(use)
        if "weight" not in names:
            use.memo["bias"] = _over_positions(grads)
            return [use.memo["bias"]] * _biases(use, names)
        return _measured(use, inputs, grads, biases=_biases(use, names), transposed=self.is_transposed)

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """``G^T A`` for the weight, the sum over positions for the bias."""
        inputs, grads = num_positions(use)
        if name == "bias":
            return _over_positions(grads)
        return _weight_gradients(inputs, grads, transposed=self.is_transposed)

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """One matrix product for the weight, one matrix-vector product for the bias."""
        sums: dict[str, Tensor] = {}
        inputs, grads = product_operands(use.saved[0], use.grad)
        weights = weights.to(compute_dtype(inputs, grads))
        time_first = inputs.dim() == grads.dim() == 3 and all(
            x.transpose(0, 1).is_contiguous() for x in (inputs, grads)
        )
        if time_first:
            inputs, grads = inputs.transpose(0, 1), grads.transpose(0, 1)
        rows_a, rows_g = [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in (inputs, grads)]
        positions = rows_g.shape[0] // use.records
        if time_first:
            weights_of_rows = weights.repeat(positions)
        else:
            one_each = positions == 1 or is_away(rows_g)
            weights_of_rows = weights if one_each else weights.repeat_interleave(positions)
        for name in names:
            if name in use.memo:
                sums[name] = weighted_sum(use.memo[name], weights)
            elif name == "weight":
                left, right = (rows_a, rows_g) if self.is_transposed else (rows_g, rows_a)
                sums[name] = weighted_product(left, right, weights_of_rows)
            elif positions == 1:
                # A record of one position is one term: it has no partial sums that could be longer than its gradient.
                sums[name] = weights @ rows_g.to(weights.dtype)
            elif is_away(rows_g) and not is_tracing_graph():
                alone = grads.reshape(-1, use.records, grads.shape[-1]) if time_first else _positions(grads)
                sums[name] = weights @ _over_positions(alone.transpose(0, 1) if time_first else alone)
            else:
                ones = rows_g.new_ones(1).expand(len(rows_g), 1)
                sums[name] = weighted_product(rows_g, ones, weights_of_rows)[:, 0]
        return sums

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | GramRounding | None:
        """One product for the sum, and for a norm that was not a ghost norm one more product per record."""
        positions, product = self.terms(use), use.product
        missing = set(names) - use.memo.keys()
        if not missing or (positions <= 1 and not product.weighted):
            return None
        error = sum_error(product, use.records * positions)
        if product.away:
            # Biases are added up over a record's positions, then over records.
            error = max(error, (positions + use.records + 2) * product.addition)
        terms = self._gram_terms(use, names)
        if terms is not None:
            return GramRounding(terms=terms, error=error)
        squares = use.memo.get(GHOST_ROUNDING)
        if squares is None:
            error += alone_error(product, positions) if positions > 1 else 0
            squares = torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        return Rounding(squares=squares, length=error * self.term_lengths(use, missing))

    def terms(self, use: LayerCall) -> int:
        """Positions."""
        return use.saved[0].shape[1:-1].numel()

    def term_lengths(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """``Σ_t |a_t||g_t|`` from the ghost norm, otherwise the product of the norms over all positions."""
        known = use.memo.get(GHOST_LENGTHS)
        if known is not None:
            return known
        names = set(names)
        terms = self._gram_terms(use, names)
        if terms is not None:
            return gram_rounding([terms])[1][0]
        inputs = torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        seen, grads = product_operands(use.saved[0], use.grad)
        if "weight" in names:
            inputs += row_squared_norms(seen)
        # A bias is one more input that is always 1.
        inputs += self.terms(use) * _biases(use, names)
        return inputs.mul_(row_squared_norms(grads)).sqrt_()

    def _gram_terms(self, use: LayerCall, names: Iterable[str]) -> GramTerms | None:
        inputs = use.saved[0].shape[-1] + _biases(use, names)
        return waiting_terms(use, use.product, inputs=inputs, outputs=use.grad.shape[-1])

    def merge(self, uses: list[LayerCall], names: frozenset[str]) -> LayerCall | None:
        """Several calls are one call on all their positions: the sums over positions add up."""
        if "weight" not in names:
            return None
        flat = [num_positions(use) for use in uses]
        inputs = torch.cat([inputs for inputs, _ in flat], dim=1)
        grads = torch.cat([grads for _, grads in flat], dim=1)
        return replace(uses[0], saved=(inputs,), grads=(grads,), memo={}, versions=())


def _biases(use: LayerCall, names: Iterable[str]) -> int:
    """How many parameters the bias stands for; none where it isn't asked for."""
    if "bias" not in names:
        return 0
    return use.context.count if isinstance(use.context, SharedBias) else 1


def num_positions(use: LayerCall) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T p"]]:
    """Inputs and output gradients of a linear layer with all middle dimensions as one, as they are multiplied."""
    inputs, grads = product_operands(use.saved[0], use.grad)
    return _positions(inputs), _positions(grads)


def _over_positions(grads: Float[Tensor, "B T p"]) -> Float[Tensor, "B p"]:
    return grads.sum(1, dtype=compute_dtype(grads))


def _positions(x: Float[Tensor, "B *T d"]) -> Float[Tensor, "B T d"]:
    positions = 1
    for size in x.shape[1:-1]:
        positions *= size
    return x.reshape(x.shape[0], positions, x.shape[-1])


def matrix_per_record_gradient(
    inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, kind: str = "matmul"
) -> Float[Tensor, "B p d"]:
    """``G^T A`` of each record, with sums over at most a piece of positions whose results are added."""
    piece = product_format(inputs, grads).piece
    if inputs.shape[1] <= piece:
        return per_record_product(grads, inputs, kind=kind)
    pieces = zip(inputs.split(piece, dim=1), grads.split(piece, dim=1), strict=True)
    first, *others = (per_record_product(g, a, kind=kind) for a, g in pieces)
    for other in others:
        first += other
    return first


def _weight_gradients(
    inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, transposed: bool
) -> Float[Tensor, "B *shape"]:
    """``G^T A`` of each record, or ``A^T G``: in the weight's own layout, so that no sum is transposed afterwards."""
    return matrix_per_record_gradient(grads, inputs) if transposed else matrix_per_record_gradient(inputs, grads)


def _measured(
    use: LayerCall, inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, biases: int, transposed: bool
) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
    """``‖G^T A‖²`` of each record by the cheapest kernel, plus ``‖Σ_t g_t‖²`` for each of the `biases`.

    The stored kernel gives its per-record gradients, which are in ``use.memo``, too; the ghost kernel puts there what
    its rounding depends on.
    """
    kernel = _kernel(use, inputs, grads, biases)
    return _by_kernel(kernel, use, inputs, grads, biases=biases, transposed=transposed)


def _kernel(use: LayerCall, inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], biases: int) -> Kernel:
    records, positions, width = inputs.shape
    product = product_format(inputs, grads)
    costs = kernel_costs(records, positions, width, grads.shape[2], low_memory=use.low_memory, product=product)
    if use.timings is None:
        return cheapest_kernel(costs)

    def attempt(kernel: Kernel) -> Tensor:
        a, g = (x.new_ones(TIMED_RECORDS, *x.shape[1:]) for x in (inputs, grads))
        trial = replace(use, memo={}, records=TIMED_RECORDS, saved=(a,), grads=(g,))
        weights = g.new_ones(TIMED_RECORDS)
        _by_kernel(kernel, trial, a, g, biases=biases)
        if "weight" in trial.memo:
            return weighted_sum(trial.memo["weight"], weights)
        return weighted_product(g.flatten(0, 1), a.flatten(0, 1), weights.repeat_interleave(positions))

    sizes = {"positions": positions, "inputs": width, "outputs": grads.shape[2], "biases": biases}
    return use.timings.fastest("linear", sizes, costs, attempt, like=grads)


def _by_kernel(
    kernel: Kernel,
    use: LayerCall,
    inputs: Float[Tensor, "B T d"],
    grads: Float[Tensor, "B T p"],
    *,
    biases: int,
    transposed: bool = False,
) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
    if kernel == "ghost":
        return _ghost(use, inputs, grads, biases=biases)
    if biases:
        use.memo["bias"] = _over_positions(grads)
    of_biases = [use.memo["bias"]] * biases if biases else []
    if kernel == "stored":
        use.memo["weight"] = _weight_gradients(inputs, grads, transposed=transposed)
        return [use.memo["weight"], *of_biases]
    total = _norm_only(inputs, grads)
    return total.add_(joint_squared_norms(of_biases)) if of_biases else total


def _norm_only(inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"]) -> Float[Tensor, " B"]:
    step = chunk_records(inputs.shape[0], inputs.shape[2] * grads.shape[2], away=is_away(grads))
    parts = [
        row_squared_norms(matrix_per_record_gradient(a, g))
        for a, g in zip(chunks(inputs, step), chunks(grads, step), strict=True)
    ]
    return torch.cat(parts)


def _ghost(
    use: LayerCall, inputs: Float[Tensor, "B T d"], grads: Float[Tensor, "B T p"], *, biases: int
) -> Float[Tensor, " B"]:
    step = chunk_records(inputs.shape[0], inputs.shape[1] ** 2, away=is_away(grads))
    product = product_format(inputs, grads)
    waits = is_away(grads) and not is_tracing_graph()
    if waits and biases:
        use.memo["bias"] = _over_positions(grads)
    parts: list[tuple[Tensor, ...]] = []
    for a, g in zip(chunks(inputs, step), chunks(grads, step), strict=True):
        products = grams(a)
        if biases:
            products += biases
        if waits:
            parts.append(waiting_ghost_sum(products, grams(g)))
            continue

        def exact(index: Tensor, a: Tensor = a, g: Tensor = g) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
            a, g = a.index_select(0, index).double(), g.index_select(0, index).double()
            lengths = (row_squared_norms(a) + biases * a.shape[1]) * row_squared_norms(g)
            total = _norm_only(a, g)
            return total + biases * row_squared_norms(g.sum(1)), lengths.sqrt_()

        parts.append(ghost_sum(products, g, exact, product, inputs=a.shape[2] + biases))
    return keep_ghost(use, parts)


def keep_ghost(use: LayerCall, parts: Sequence[tuple[Tensor, ...]]) -> Float[Tensor, " B"]:
    """The squared norms out of what `ghost_sum` or `waiting_ghost_sum` gave for each chunk; the rest is kept."""
    if not parts:
        return torch.zeros(0, dtype=torch.float64, device=use.grad.device)
    total, *kept = parts[0] if len(parts) == 1 else [torch.cat(part) for part in zip(*parts, strict=True)]
    names = (GHOST_ROUNDING, GHOST_LENGTHS) if len(kept) == 2 else _WAITING
    use.memo.update(zip(names, kept, strict=True))
    return total


def waiting_ghost_sum(products: Float[Tensor, "B T T"], own: Float[Tensor, "B T T"]) -> tuple[Tensor, ...]:
    """`ghost_sum` away from the processor, of both Gram matrices; `products` are overwritten.

    Its rounding is left to be computed together with that of other layers, see `waiting_terms`.
    """
    squares, norms = gram_sizes(products, own)
    return products.mul_(own).sum((1, 2), dtype=torch.float64), squares, *norms


def waiting_terms(use: LayerCall, product: ProductFormat, *, inputs: int, outputs: int) -> GramTerms | None:
    """What the rounding of the use's ghost norm depends on, where it was left to be computed with others'."""
    squares = use.memo.get(_SQUARES)
    if squares is None:
        return None
    norms = use.memo[_NORM_OF_INPUTS], use.memo[_NORM_OF_GRADS]
    return GramTerms(squares=squares, norms=norms, product=product, inputs=inputs, outputs=outputs)


def ghost_sum(
    products: Float[Tensor, "B T T"],
    grads: Float[Tensor, "B T p"],
    exact: Callable[[Tensor], tuple[Float[Tensor, " b"], Float[Tensor, " b"]]],
    product: ProductFormat,
    *,
    inputs: int,
    kind: str = "matmul",
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """``Σ_{s,t} products[s, t]·⟨g_s, g_t⟩`` of each record, with what its rounding depends on.

    The sum may cancel. A small multiple of ``Σ_t |a_t|²|g_t|²``, the usual size of its rounding error, is added; a
    record whose sum is far below that, or out of the range of single precision, is recomputed in double precision.
    Away from the processor it is not looked for: what the sum lacks is bounded whether it cancels or not, and the
    record is clipped by that bound.

    Args:
        products: inner products of the inputs at every two positions; overwritten.
        grads: output gradients.
        exact: squared norms, and lengths of the terms or more, of the records with the given indices.
        product: how inner products are taken.
        inputs: how many products each entry of `products` adds up.
        kind: of product, as of `row_products`.

    Returns:
        Per record the squared norm, how much more the true one can be, and ``Σ_t |a_t||g_t|``.
    """
    own = grams(grads, kind=kind)
    sizes, norms = gram_sizes(products, own)
    terms = GramTerms(squares=sizes, norms=norms, product=product, inputs=inputs, outputs=grads.shape[2])
    squares, lengths, scale = (of_layers[0] for of_layers in gram_rounding([terms]))
    products *= own
    total = products.sum((1, 2), dtype=torch.float64) + usual_gram_rounding(scale, own.dtype)
    if is_away(total) and not is_tracing_graph():
        return total.clamp_(min=0), squares, lengths
    sound = (total > _CANCELLED * scale) & (total > 1e-24) & (total < 1e36)
    if not guard_holds(sound):
        index = (~sound).nonzero().flatten()
        total[index], lengths[index] = exact(index)
        squares[index] = 0
    return total, squares, lengths


# ----------------------------------------------------------------------------------------------------------------------
# Linear layers that keep their matrix as (inputs, outputs), as GPT-2 implementations do.
#
# Hugging Face's ``Conv1D`` flattens its input to rows before it multiplies, so its records can't be followed inside;
# the layer as a whole is a linear map like any other. It is recognized by its name, without importing it.
# ----------------------------------------------------------------------------------------------------------------------


@layer_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """``x W + b`` with W of shape (inputs, outputs): the same products with their factors exchanged."""

    is_transposed: ClassVar[bool] = True
