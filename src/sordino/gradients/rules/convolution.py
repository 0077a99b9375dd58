"""Convolutions in one, two and three dimensions.

A record's weight gradient is the convolution of its own input with its own output gradient. All records at once are
one convolution gradient with B times the groups. Where there are few positions and many weights (late layers), the
Gram matrices of unfolded inputs are smaller. Away from the processor, where a convolution with B times the groups is
slow, a layer is a linear map of the patches under its output positions, and its products go to the matrix units.
Legend: B records, C channels, O outputs, T positions, G groups, d = C·k inputs.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from sordino.gradients.numerics import (
    chunks,
    compute_dtype,
    is_away,
    is_tracing_graph,
    joint_squared_norms,
    product_format,
    product_operands,
    row_squared_norms,
    weighted_row_products,
)
from sordino.gradients.numerics import grams as inner_products
from sordino.gradients.rules.base import (
    PIECE,
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
    convolution_kernel_costs,
    gram_rounding,
    kernel_costs,
    layer_rule,
    patch_products,
    sum_error,
    unit,
    weighted_sum,
)
from sordino.gradients.rules.linear import (
    GHOST_LENGTHS,
    GHOST_ROUNDING,
    ghost_sum,
    keep_ghost,
    matrix_per_record_gradient,
    waiting_ghost_sum,
    waiting_terms,
)
from sordino.shapes import Float

_Sizes = Sequence[int]

# Up to so many positions copied patches and a product for each record take less time than a grouped convolution.
_FEW_POSITIONS = 100


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvolutionRule(LayerRule):
    """nn.Conv1d, nn.Conv2d, nn.Conv3d with every padding mode, groups, dilation and stride."""

    def record_dims(self, module: nn.Module) -> int:
        """Unbatched inputs have one dimension fewer and are refused."""
        return 2 + len(_convolution(module).kernel_size)

    def measure(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
        """Each record's squared norm over weight and bias, as far as they are in `names`, or what was kept of them."""
        of_bias: list[Tensor] = []
        if "bias" in names:
            use.memo["bias"] = self.per_record_gradient(use, "bias")
            of_bias.append(use.memo["bias"])
        if "weight" not in names or use.records == 0:
            return of_bias
        x, grads, padding = _padded(use)
        of_weight = _by_kernel(self._kernel(use, x, grads, padding), use, x, grads, padding)
        if not isinstance(of_weight, Tensor):
            return [*of_weight, *of_bias]
        return of_weight.add_(joint_squared_norms(of_bias)) if of_bias else of_weight

    def _kernel(self, use: LayerCall, x: Tensor, grads: Tensor, padding: _Sizes) -> Kernel:
        layer, positions = _convolution(use.module), self.terms(use)
        shape = {
            "positions": positions,
            "channels": layer.in_channels,
            "outputs": layer.out_channels,
            "window": math.prod(layer.kernel_size),
            "groups": layer.groups,
        }
        pixels = _pixels(x, padding) if layer.groups == 1 else None
        if _is_by_patches(grads):
            # The groups of a record are so many records.
            costs = kernel_costs(
                use.records * layer.groups,
                positions,
                math.prod(layer.weight.shape[1:]),
                layer.out_channels // layer.groups,
                low_memory=use.low_memory,
                product=product_format(x, grads, kind="conv"),
            )
        else:
            costs = convolution_kernel_costs(records=use.records, pixels=pixels, low_memory=use.low_memory, **shape)
        if use.timings is None:
            return cheapest_kernel(costs)

        def attempt(kernel: Kernel) -> object:
            saved, grad = (part.new_ones(TIMED_RECORDS, *part.shape[1:]) for part in (use.saved[0], use.grad))
            trial = replace(use, memo={}, records=TIMED_RECORDS, saved=(saved,), grads=(grad,))
            _by_kernel(kernel, trial, *_padded(trial))
            return self.weighted_sums(trial, ["weight"], grads.new_ones(TIMED_RECORDS))

        return use.timings.fastest(type(layer).__name__, shape | {"pixels": pixels or 0}, costs, attempt, like=grads)

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """One grouped convolution gradient for the weight, the sum over positions for the bias."""
        if name == "bias":
            return use.grad.flatten(2).sum(2, dtype=compute_dtype(use.grad))
        if use.records == 0:
            return use.grad.new_zeros((0, *_convolution(use.module).weight.shape))
        return _per_record_weight(_convolution(use.module), *_padded(use))

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """From stored gradients, or as the ordinary gradient of the weighted output gradients."""
        sums: dict[str, Tensor] = {}
        for name in names:
            if name in use.memo or name == "bias":
                stored = use.memo.get(name)
                sums[name] = weighted_sum(self.per_record_gradient(use, name) if stored is None else stored, weights)
                continue
            x, grads, padding = _padded(use)
            if _is_by_patches(grads):
                sums[name] = _weighted_patches(_convolution(use.module), x, grads, padding, weights)
                continue
            per_record = weights.to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))
            layer = _convolution(use.module)
            total: Tensor | None = None
            step = _records_at_once(use)
            for x_chunk, g_chunk in zip(x.split(step), (grads * per_record).split(step), strict=True):
                part = _weight_gradient(layer, x_chunk, g_chunk, layer.groups, layer.weight.shape, padding)
                total = part if total is None else total.add_(part)
            assert total is not None
            sums[name] = total
        return sums

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | GramRounding | None:
        """One convolution gradient for the sum, and one more per record for a norm that was not a ghost norm."""
        if not set(names) - use.memo.keys():
            return None
        if _is_by_patches(use.grad):
            return self._rounding_of_patches(use)
        positions, step = self.terms(use), _records_at_once(use)
        rounds = min(step, use.records) * positions + -(-use.records // step) + 1
        squares = use.memo.get(GHOST_ROUNDING)
        if squares is None:
            rounds += positions
            squares = torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        lengths = self.term_lengths(use, ["weight"])
        return Rounding(squares=squares, length=rounds * unit(compute_dtype(use.saved[0], use.grad)) * lengths)

    def _rounding_of_patches(self, use: LayerCall) -> Rounding | GramRounding:
        """As of a linear layer, whose records come in several chunks."""
        positions, product = self.terms(use), product_format(use.saved[0], use.grad, kind="conv")
        parts = len(list(_chunks(_convolution(use.module), *_padded(use)[:2])))
        error = sum_error(product, use.records * positions, more=2 * parts)
        terms = _gram_terms(use)
        if terms is not None:
            return GramRounding(terms=terms, error=error)
        squares = use.memo.get(GHOST_ROUNDING)
        if squares is None:
            error += alone_error(product, positions)
            squares = torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        return Rounding(squares=squares, length=error * self.term_lengths(use, ["weight"]))

    def terms(self, use: LayerCall) -> int:
        """Output positions."""
        return math.prod(use.grad.shape[2:])

    def term_lengths(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """``Σ_t |patch_t||g_t|`` from the ghost norm, otherwise the product of the norms over all positions."""
        names = set(names)
        total = super().term_lengths(use, names & {"bias"}).square_()
        known, terms = use.memo.get(GHOST_LENGTHS), _gram_terms(use)
        if "weight" in names and terms is not None:
            total += gram_rounding([terms])[1][0].square_()
        elif "weight" in names and known is not None:
            total += known.square()
        elif "weight" in names and use.records:
            layer = _convolution(use.module)
            x, grads, _ = _padded(use)
            of_x, of_g = (
                row_squared_norms(part.reshape(use.records * layer.groups, -1)).view(use.records, -1)
                for part in (x, grads)
            )
            # A pixel lies in at most this many patches.
            total += (of_x * of_g).sum(1) * math.prod(layer.kernel_size)
        return total.sqrt_()


def _convolution(module: nn.Module) -> _ConvNd:
    return cast("_ConvNd", module)


def _gram_terms(use: LayerCall) -> GramTerms | None:
    layer = _convolution(use.module)
    inputs, outputs = math.prod(layer.weight.shape[1:]), layer.out_channels
    return waiting_terms(use, product_format(use.saved[0], use.grad, kind="conv"), inputs=inputs, outputs=outputs)


def _by_kernel(
    kernel: Kernel, use: LayerCall, x: Tensor, grads: Tensor, padding: _Sizes
) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
    """Squared norms of the weight's gradients, or the kept gradients, which are in the memo, too."""
    layer = _convolution(use.module)
    if _is_by_patches(grads):
        return _norms_of_patches(kernel, use, x, grads, padding)
    if kernel == "ghost":
        return _ghost(use, x, grads, padding)
    if kernel == "stored":
        use.memo["weight"] = _per_record_weight(layer, x, grads, padding)
        return [use.memo["weight"]]
    step = chunk_records(use.records, layer.weight.numel(), in_cache=True)
    pairs = zip(x.split(step), grads.split(step), strict=True)
    return torch.cat([row_squared_norms(_per_record_weight(layer, a, g, padding)) for a, g in pairs])


def _records_at_once(use: LayerCall) -> int:
    """Records whose positions are added up by one convolution gradient; calls cost more than those of a product."""
    return max(1, 4 * PIECE // max(math.prod(use.grad.shape[2:]), 1))


def _padded(use: LayerCall) -> tuple[Tensor, Tensor, _Sizes]:
    """Input and output gradient in the computing type, and the zero padding that is left to do.

    Other padding modes, and 'same' padding that is not symmetric, are applied here.
    """
    layer = _convolution(use.module)
    x, grads = product_operands(use.saved[0], use.grad)
    dims = len(layer.kernel_size)
    both_sides = _both_sides(layer)
    if layer.padding_mode != "zeros":
        return F.pad(x, both_sides, mode=layer.padding_mode), grads, [0] * dims
    symmetric = all(both_sides[2 * i] == both_sides[2 * i + 1] for i in range(dims))
    if symmetric:
        return x, grads, [both_sides[2 * i] for i in reversed(range(dims))]
    return F.pad(x, both_sides), grads, [0] * dims


def _both_sides(layer: _ConvNd) -> list[int]:
    """Padding as `F.pad` takes it: (before, after) for each dimension, the last dimension first."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    sides: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            whole = layer.dilation[i] * (layer.kernel_size[i] - 1)
            sides += [whole // 2, whole - whole // 2]
        else:
            sides += [int(layer.padding[i])] * 2
    return sides


def _per_record_weight(
    layer: _ConvNd, x: Float[Tensor, "B C *S"], grads: Float[Tensor, "B O *T"], padding: _Sizes
) -> Float[Tensor, "B O c *k"]:
    records = x.shape[0]
    if _is_by_patches(grads):
        found = [
            matrix_per_record_gradient(patches, g, kind="conv") for _, patches, g in _patches(layer, x, grads, padding)
        ]
        return torch.cat(found).view(records, *layer.weight.shape)
    if layer.weight.shape[1] == 1:
        return _single_channel_weight(layer, x, grads, padding)
    if math.prod(grads.shape[2:]) <= _FEW_POSITIONS and layer.groups == 1 and not is_tracing_graph():
        return _weight_by_patches(layer, x, grads, padding)
    shape = (records * layer.out_channels, *layer.weight.shape[1:])
    one_x, one_g = x.reshape(1, -1, *x.shape[2:]), grads.reshape(1, -1, *grads.shape[2:])
    together = _weight_gradient(layer, one_x, one_g, records * layer.groups, shape, padding)
    return together.view(records, *layer.weight.shape)


def _weight_by_patches(
    layer: _ConvNd, x: Float[Tensor, "B C *S"], grads: Float[Tensor, "B O *T"], padding: _Sizes
) -> Float[Tensor, "B O C *k"]:
    """Patches are copied, for as many records as fit the cache, and multiplied record by record."""
    padded = F.pad(x, [pad for pad in reversed(padding) for _ in range(2)])
    # Where in a record each entry of each patch lies: (channel, kernel offset, position).
    sizes = (layer.in_channels, *layer.kernel_size, *grads.shape[2:])
    numbers = torch.arange(padded[0].numel(), device=x.device).view(padded.shape[1:])
    of_channel, *of_pixel = numbers.stride()
    offsets = [stride * step for stride, step in zip(of_pixel, layer.dilation, strict=True)]
    steps = [stride * step for stride, step in zip(of_pixel, layer.stride, strict=True)]
    index = numbers.as_strided(sizes, (of_channel, *offsets, *steps)).flatten()
    result = x.new_empty(len(x), layer.out_channels, math.prod(layer.weight.shape[1:]))
    step = chunk_records(len(x), len(index), in_cache=True)
    parts = (padded.flatten(1), grads.flatten(2), result)
    for a, g, into in zip(*(part.split(step) for part in parts), strict=True):
        patches = a.index_select(1, index).view(len(a), result.shape[2], -1)
        torch.bmm(g, patches.transpose(1, 2), out=into)
    return result.view(len(x), *layer.weight.shape)


def _single_channel_weight(
    layer: _ConvNd, x: Float[Tensor, "B C *S"], grads: Float[Tensor, "B O *T"], padding: _Sizes
) -> Float[Tensor, "B O 1 *k"]:
    """With one channel per group the input is convolved by the output gradient, stride and dilation exchanged."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(padding) - 1]
    records, channels = x.shape[:2]
    one_x, one_g = x.reshape(1, -1, *x.shape[2:]), grads.reshape(-1, 1, *grads.shape[2:])
    stride, dilation = list(layer.dilation), list(layer.stride)
    result = convolve(one_x, one_g, padding=list(padding), stride=stride, dilation=dilation, groups=records * channels)
    # Input pixels behind the last stride would give more kernel offsets than there are.
    inside = tuple(slice(0, size) for size in layer.kernel_size)
    return result[(..., *inside)].reshape(records, *layer.weight.shape)


def _weight_gradient(layer: _ConvNd, x: Tensor, grads: Tensor, groups: int, shape: _Sizes, padding: _Sizes) -> Tensor:
    # Only the shape of the weight is read when its own gradient is asked for.
    weight = x.new_empty(1).expand(tuple(shape))
    return torch.ops.aten.convolution_backward(
        grads,
        x,
        weight,
        None,
        list(layer.stride),
        list(padding),
        list(layer.dilation),
        False,
        [0] * len(layer.kernel_size),
        groups,
        [False, True, False],
    )[1]


def _pixels(x: Tensor, padding: _Sizes) -> int:
    return math.prod(size + 2 * pad for size, pad in zip(x.shape[2:], padding, strict=True))


def _patch_grams(layer: _ConvNd, x: Float[Tensor, "B C *S"], positions: _Sizes) -> Float[Tensor, "B T T"]:
    """Inner products of the input patches under every two output positions, without unfolding.

    The inner product of two patches is the sum over kernel offsets of inner products of pixels; the offsets of one
    dimension shift both pixels alike. So the pixel Gram matrix is formed once and summed along its diagonals,
    dimension by dimension. Where strides leave most pairs of pixels out, the pairs of each offset are taken apart.
    """
    sizes = x.shape[2:]
    dims = len(sizes)
    if _by_offsets(layer, x, positions):
        return _offset_grams(layer, x, positions)
    grams = inner_products(x.flatten(2).transpose(1, 2)).view(-1, *sizes, *sizes)
    for i in range(dims):
        span = layer.stride[i] * (positions[i] - 1) + 1
        total: Tensor | None = None
        for offset in range(0, layer.dilation[i] * layer.kernel_size[i], layer.dilation[i]):
            at = [slice(None)] * grams.dim()
            at[1 + i] = at[1 + dims + i] = slice(offset, offset + span, layer.stride[i])
            total = grams[tuple(at)].clone() if total is None else total.add_(grams[tuple(at)])
        assert total is not None
        grams = total
    return grams.reshape(x.shape[0], math.prod(positions), math.prod(positions))


def _by_offsets(layer: _ConvNd, x: Float[Tensor, "B C *S"], positions: _Sizes) -> bool:
    return patch_products(
        pixels=math.prod(x.shape[2:]),
        positions=math.prod(positions),
        channels=layer.in_channels,
        window=math.prod(layer.kernel_size),
    )[1]


def _offset_grams(layer: _ConvNd, x: Float[Tensor, "B C *S"], positions: _Sizes) -> Float[Tensor, "B T T"]:
    """The Gram matrices of the pixels under each kernel offset, added up."""
    total: Tensor | None = None
    for offsets in itertools.product(*(range(size) for size in layer.kernel_size)):
        at = [slice(None), slice(None)]
        for offset, count, stride, dilation in zip(offsets, positions, layer.stride, layer.dilation, strict=True):
            at.append(slice(offset * dilation, offset * dilation + stride * (count - 1) + 1, stride))
        rows = x[tuple(at)].flatten(2)
        if total is None:
            total = torch.bmm(rows.transpose(1, 2), rows)
        else:
            total.baddbmm_(rows.transpose(1, 2), rows)
    assert total is not None
    return total


def _ghost(use: LayerCall, x: Tensor, grads: Tensor, padding: _Sizes) -> Float[Tensor, " B"]:
    """``Σ_{s,t} ⟨patch_s, patch_t⟩⟨g_s, g_t⟩``, with the same care for cancellation as for linear layers."""
    layer = _convolution(use.module)
    x = F.pad(x, [pad for pad in reversed(padding) for _ in range(2)])
    flat = grads.flatten(2).transpose(1, 2)
    step = chunk_records(x.shape[0], _pixels(x, [0] * len(padding)) ** 2)
    parts = []
    for start in range(0, x.shape[0], step):
        x_chunk, g_chunk = x[start : start + step], flat[start : start + step]
        patches = _patch_grams(layer, x_chunk, grads.shape[2:])

        def exact(index: Tensor, start: int = start) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
            chosen, unpadded = index + start, [0] * len(padding)
            x_few, g_few = x.index_select(0, chosen).double(), grads.index_select(0, chosen).double()
            lengths = math.prod(layer.kernel_size) * row_squared_norms(x_few) * row_squared_norms(g_few)
            return row_squared_norms(_per_record_weight(layer, x_few, g_few, unpadded)), lengths.sqrt_()

        inputs = layer.in_channels + math.prod(layer.kernel_size)
        parts.append(ghost_sum(patches, g_chunk, exact, product_format(x, grads), inputs=inputs))
    return keep_ghost(use, parts)


# ----------------------------------------------------------------------------------------------------------------------
# Away from the processor: a linear map of patches.
# ----------------------------------------------------------------------------------------------------------------------


def _is_by_patches(grads: Tensor) -> bool:
    return is_away(grads) and not is_tracing_graph()


def _chunks(layer: _ConvNd, x: Tensor, grads: Tensor) -> Iterator[slice]:
    """Records whose patches are copied at once."""
    entries = math.prod(grads.shape[2:]) * layer.in_channels * math.prod(layer.kernel_size)
    step = chunk_records(x.shape[0], entries, away=True)
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)


def _patches(
    layer: _ConvNd, x: Tensor, grads: Tensor, padding: _Sizes
) -> Iterator[tuple[slice, Float[Tensor, "bG T d"], Float[Tensor, "bG T p"]]]:
    """Some records, the input pixels under each of their output positions, and the gradients there.

    The groups of a record follow each other.
    """
    around = [pad for pad in reversed(padding) for _ in range(2)]
    groups, kernel, positions = layer.groups, layer.kernel_size, grads.shape[2:]
    for chosen in _chunks(layer, x, grads):
        # A layer without padding is not copied for it.
        padded, g = (F.pad(x[chosen], around) if any(around) else x[chosen]).contiguous(), grads[chosen]
        records, channels = padded.shape[:2]
        of_record, of_channel, *of_pixel = padded.stride()
        steps = [stride * step for stride, step in zip(of_pixel, layer.stride, strict=True)]
        offsets = [stride * step for stride, step in zip(of_pixel, layer.dilation, strict=True)]
        of_group = of_channel * (channels // groups)
        view = padded.as_strided(
            (records, groups, *positions, channels // groups, *kernel),
            (of_record, of_group, *steps, of_channel, *offsets),
        )
        rows = records * groups
        patches = view.reshape(rows, math.prod(positions), math.prod(layer.weight.shape[1:]))
        yield chosen, patches, g.reshape(rows, layer.out_channels // groups, -1).transpose(1, 2)


def _norms_of_patches(
    kernel: Kernel, use: LayerCall, x: Tensor, grads: Tensor, padding: _Sizes
) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
    layer = _convolution(use.module)
    if kernel == "stored":
        use.memo["weight"] = _per_record_weight(layer, x, grads, padding)
        return [use.memo["weight"]]
    product = product_format(x, grads, kind="conv")
    parts: list[tuple[Tensor, ...]] = []
    for _, patches, g in _patches(layer, x, grads, padding):
        step = chunk_records(
            len(g), g.shape[1] ** 2 if kernel == "ghost" else math.prod(layer.weight.shape[1:]) * g.shape[2], away=True
        )
        for a, b in zip(chunks(patches, step), chunks(g, step), strict=True):
            if kernel == "norm_only":
                parts.append((row_squared_norms(matrix_per_record_gradient(a, b, kind="conv")),))
                continue
            if layer.groups == 1:
                parts.append(waiting_ghost_sum(inner_products(a, kind="conv"), inner_products(b, kind="conv")))
                continue
            squares, lacking, lengths = ghost_sum(
                inner_products(a, kind="conv"), b, _never, product, inputs=a.shape[2], kind="conv"
            )
            parts.append((squares, lacking, lengths.square_()))
    if kernel == "ghost" and layer.groups == 1:
        return keep_ghost(use, parts)
    squares, *rounding = (torch.cat(part).view(use.records, -1).sum(1) for part in zip(*parts, strict=True))
    if rounding:
        use.memo[GHOST_ROUNDING], use.memo[GHOST_LENGTHS] = rounding[0], rounding[1].sqrt_()
    return squares


def _never(index: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing is computed again where no value is looked at."""
    raise AssertionError(index.shape)


def _weighted_patches(
    layer: _ConvNd, x: Tensor, grads: Tensor, padding: _Sizes, weights: Float[Tensor, " B"]
) -> Float[Tensor, "O c *k"]:
    total: Tensor | None = None
    weights = weights.to(compute_dtype(x, grads))
    for chosen, patches, g in _patches(layer, x, grads, padding):
        # The positions of all records, group by group.
        a, b = (rows.unflatten(0, (-1, layer.groups)).transpose(0, 1).flatten(1, 2) for rows in (patches, g))
        part = weighted_row_products(b, a, weights[chosen].repeat_interleave(g.shape[1]), kind="conv")
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.reshape(layer.weight.shape)
