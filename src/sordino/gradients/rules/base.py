"""What a layer rule is, and the table of rules.

A rule knows one family of layers: what to keep from the forward pass, and how the per-record gradients, their
squared norms and their weighted sum follow from what was kept and from the gradient at the layer's output.
Legend of shapes: B records, T positions, d inputs, p outputs.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from sordino.errors import PrivacyError, RecordCountMismatch
from sordino.gradients.numerics import (
    ProductFormat,
    compute_dtype,
    is_away,
    is_tracing_graph,
    joint_squared_norms,
    product_format,
    row_squared_norms,
    side_by_side,
    transposed_product,
    weighted_row_products,
)
from sordino.installation import cache_folder
from sordino.shapes import Float

# ----------------------------------------------------------------------------------------------------------------------
# Which exact kernel a layer takes, by a cost model.
#
# Units: one weight-gradient product is 1. The numbers were measured on one CPU thread for float32, inside whole steps
# (of convolutions with freed memory kept, of the others with arrays fresh from the system); they decide speed only,
# every kernel is exact. The choice depends on shapes alone, so that a run can be repeated; `timings` asks the clock.
# On another device than the processor costs are reckoned, not measured: multiply-adds at the speed of the format that
# the products are taken in, and the bytes that are moved.
# Legend: B records, T positions, d inputs, p outputs (weight entries: d·p).
# ----------------------------------------------------------------------------------------------------------------------


Kernel = Literal["ghost", "stored", "norm_only"]

# Work arrays are cut into chunks of records of at most this many entries (16 MB in single precision).
CHUNK_ENTRIES = 4_194_304
# Convolution gradients are formed in chunks that stay in the cache.
_CACHE_ENTRIES = 524_288
# Another device is kept busy by larger work arrays alone (256 MB).
_ENTRIES_AWAY = 67_108_864
# Stored per-record gradients may take this many times what the layer's own activations and gradients take.
_STORED_FACTOR = 8


def kernel_costs(
    records: int,
    positions: int,
    inputs: int,
    outputs: int,
    *,
    low_memory: bool = False,
    product: ProductFormat | None = None,
) -> dict[Kernel, float]:
    """What the exact norm kernels for a linear map applied at T positions cost, where they may be taken.

    - ghost: Gram matrices over positions, 1.2·T(d+p)/(dp).
    - stored: per-record gradients replace the weighted product; what is left is memory traffic, ≈ 55/T.
    - norm_only: per-record gradients are formed, squared and thrown away, 1.3.

    Where the `product` is taken away from the processor, in bytes that could be moved meanwhile, for each record:

    - ghost: two Gram matrices in single precision, read and written some ten times, and the weighted product.
    - norm_only: the gradient is written, squared in double precision and thrown away; the weighted product.
    - stored: the same, kept and read once more, and no weighted product.
    """
    entries = inputs * outputs
    may_store = entries <= _max_stored(positions, inputs, outputs, low_memory)
    may_store = may_store and records * entries <= 16 * CHUNK_ENTRIES
    if product is not None and product.away:
        formed = positions * entries / product.speed
        # Half precision has the weights in two parts; the narrower side is written with its weights.
        weighed = (2 if product.weighted and not product.formed else 1) * formed
        weighed += positions * (12 * min(inputs, outputs) + 4 * max(inputs, outputs))
        costs: dict[Kernel, float] = {
            "ghost": positions**2 * ((inputs + outputs) / product.speed + 40) + weighed,
            "norm_only": formed + 24 * entries + weighed,
        }
        if may_store:
            costs["stored"] = formed + 28 * entries
        return costs
    costs = {"ghost": 1.2 * positions * (inputs + outputs) / max(entries, 1), "norm_only": 1.3}
    if may_store:
        costs["stored"] = 0.3 + 55 / max(positions, 1)
    return costs


def convolution_kernel_costs(
    *,
    records: int,
    pixels: int | None,
    positions: int,
    channels: int,
    outputs: int,
    window: int,
    groups: int,
    low_memory: bool = False,
) -> dict[Kernel, float]:
    """What the exact norm kernels for a convolution's weight cost, where they may be taken.

    - ghost: the Gram matrix of padded pixels, summed along diagonals (an addition costs about 60 multiply-adds), or the
      pixels under each kernel offset, copied (120 multiply-adds each) and multiplied.
    - norm_only: grouped convolution gradients in small chunks, thrown away: ≈ 1 + 75/T.
    - stored: the same, kept, so that the ordinary gradient is saved, for memory traffic of ≈ 70/T.

    Args:
        records: B.
        pixels: padded input pixels per record, or None where the ghost kernel does not apply.
        positions: output pixels per record, T.
        channels: input channels.
        outputs: output channels.
        window: kernel pixels.
        groups: convolution groups.
        low_memory: spare memory, at the price of time.
    """
    entries = channels * window * outputs // groups
    costs: dict[Kernel, float] = {"norm_only": 1 + 75 / max(positions, 1)}
    if pixels is not None:
        patches, _ = patch_products(pixels=pixels, positions=positions, channels=channels, window=window)
        costs["ghost"] = (patches + positions**2 * (outputs + 60)) / max(positions * entries, 1)
    if entries <= _max_stored(positions, channels, outputs, low_memory) and records * entries <= 16 * CHUNK_ENTRIES:
        costs["stored"] = 0.1 + 70 / max(positions, 1)
    return costs


def patch_products(*, pixels: int, positions: int, channels: int, window: int) -> tuple[float, bool]:
    """Multiply-adds for the inner products of a record's patches, and whether they are taken offset by offset.

    Otherwise they come from those of all pixels, in sums along the diagonals.
    """
    additions = pixels**2 + window**0.5 * (pixels * positions + positions**2)
    of_pixels = pixels**2 * channels + 60 * additions
    of_offsets = window * positions * channels * (positions + 120)
    return min(of_pixels, of_offsets), of_offsets < of_pixels


def cheapest_kernel(costs: Mapping[Kernel, float]) -> Kernel:
    """The kernel of the least cost."""
    return min(costs, key=lambda kernel: costs[kernel])


def _max_stored(positions: int, inputs: int, outputs: int, low_memory: bool) -> int:
    """Lean gradients take no more than the output gradients that are freed for them."""
    return positions * outputs if low_memory else _STORED_FACTOR * positions * (inputs + outputs)


def chunk_records(records: int, entries_per_record: int, *, in_cache: bool = False, away: bool = False) -> int:
    """How many records fit a work array of `CHUNK_ENTRIES`, or of one that stays in the cache; at least 1.

    `away` from the processor arrays are larger.
    """
    limit = _ENTRIES_AWAY if away else _CACHE_ENTRIES if in_cache else CHUNK_ENTRIES
    return max(1, min(records, limit // max(entries_per_record, 1)))


# ----------------------------------------------------------------------------------------------------------------------
# How far rounding may carry what is released away from the gradient that was measured.
#
# A record chooses its own inputs, so it can make the terms of its gradient as large as it likes and let them cancel.
# Then the norm of the true gradient says nothing about the rounding error of a sum that was formed in single precision.
# The bound that decides the clipping factor therefore grows with the lengths of the terms, not only with the length of
# their sum. Derivation: ``docs/proofs/clipping.md``.
# ----------------------------------------------------------------------------------------------------------------------


# Positions that one matrix product adds up; longer sums are cut into pieces of this length. Each halving halves the
# allowance and doubles the additions of whole matrices.
PIECE = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Rounding:
    """What the computed squared norm and the computed sum of a use may lack, per record.

    Args:
        squares: the true squared norm is at most this much above the computed one.
        length: the distance between the record's gradient and what is released for it at weight 1.
    """

    squares: Float[Tensor, " B"]
    length: Float[Tensor, " B"]


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def additions(positions: int, piece: int = PIECE) -> int:
    """How many roundings a term passes on its way through `weighted_product` over that many positions, at most."""
    # One addition fewer than there are terms; one rounding for the weight, one for the product.
    return min(positions, piece + _pieces(positions, piece)) + 1


def _pieces(positions: int, piece: int) -> int:
    return -(-positions // piece)


def sum_error(product: ProductFormat, positions: int, *, more: int = 0) -> float:
    """How far `weighted_product` over that many positions may be off, relative to the lengths of its terms.

    Each piece's product comes in parts, which are added up with those of the others; `more` additions follow.
    """
    added = (product.parts - 1) * max(1, _pieces(positions, product.piece))
    return (additions(positions, product.piece) + added + more) * product.addition + product.weighted


def alone_error(product: ProductFormat, positions: int, *, more: int = 0) -> float:
    """The same for a record's own product, without weights."""
    rounds = additions(positions, product.piece) + product.parts - 1 + more
    return rounds * product.addition + product.formed


def weighted_product(
    left: Float[Tensor, "K m"], right: Float[Tensor, "K n"], weights: Float[Tensor, " R"]
) -> Float[Tensor, "m n"]:
    """``Σ_k weights[k] · left[k] ⊗ right[k]`` with sums over at most a piece of positions, whose results are added.

    What a library does inside a product isn't known; what it can do wrong in so many additions is. Each weight may be
    that of K/R rows which follow each other.
    """
    if is_away(left) and not is_tracing_graph():
        return weighted_row_products(left[None], right[None], weights)[0]
    rows = left.shape[0]
    if weights.shape[0] < rows:
        weights = weights.repeat_interleave(rows // weights.shape[0])
    if 0 < rows <= PIECE:
        return _piece(left, right, weights[:, None])
    total: Tensor | None = None
    for a, b, w in zip(left.split(PIECE), right.split(PIECE), weights[:, None].split(PIECE), strict=True):
        part = _piece(a, b, w)
        total = part if total is None else total.add_(part)
    return left.new_zeros(left.shape[1], right.shape[1]) if total is None else total


def _piece(left: Float[Tensor, "K m"], right: Float[Tensor, "K n"], weights: Float[Tensor, "K 1"]) -> Tensor:
    # The weights go to the narrower side.
    if left.shape[1] >= right.shape[1]:
        return transposed_product(left, right * weights)
    return transposed_product(left * weights, right)


@dataclass(frozen=True, eq=False, kw_only=True)
class GramTerms:
    """What the rounding of ``n² = Σ_{s,t} α_st·γ_st`` depends on, with ``α_st = ⟨a_s, a_t⟩`` and ``γ_st = ⟨g_s, g_t⟩``.

    Args:
        squares: ``|a_t|²`` and ``|g_t|²``.
        norms: ‖α‖ and ‖γ‖.
        product: how inner products are taken.
        inputs: how many products an entry of α adds up.
        outputs: the same of γ.
    """

    squares: Float[Tensor, "B 2 T"]
    norms: tuple[Float[Tensor, " B"], Float[Tensor, " B"]]
    product: ProductFormat
    inputs: int
    outputs: int

    @property
    def constants(self) -> tuple[object, ...]:
        """What terms must share to be computed together."""
        return self.squares.shape, self.squares.dtype, self.product, self.inputs, self.outputs


def gram_sizes(
    first: Float[Tensor, "B T T"], second: Float[Tensor, "B T T"]
) -> tuple[Float[Tensor, "B 2 T"], tuple[Float[Tensor, " B"], Float[Tensor, " B"]]]:
    """The `squares` and `norms` of two Gram matrices, as `GramTerms` has them."""
    squares = torch.stack([products.diagonal(dim1=1, dim2=2) for products in (first, second)], dim=1)
    return squares, (_matrix_norm(first), _matrix_norm(second))


def gram_rounding(
    terms: Sequence[GramTerms],
) -> tuple[Float[Tensor, "L B"], Float[Tensor, "L B"], Float[Tensor, "L B"]]:
    """What the rounding of the ghost norms of L layers depends on, whose `GramTerms` have the same constants.

    An entry of α is an inner product over `inputs` numbers: its error is at most `inputs` roundings of the product of
    the two lengths and what its `product` loses besides, and the other matrix says how much that counts: with lengths a
    and the other matrix γ together ``Σ_{s,t} a_s a_t |γ_st| ≤ Σ_t a_t² · ‖γ‖``.

    Returns:
        Per layer and record a bound on what n² may lack, the terms' lengths ``Σ_t a_t g_t``, and ``Σ_t a_t² g_t²``.
    """
    product, inputs, outputs = terms[0].product, terms[0].inputs, terms[0].outputs
    of_inputs, of_outputs = (
        (length + 2 + product.parts) * product.addition + product.formed for length in (inputs, outputs)
    )
    # All layers and both matrices at once, for each operation takes its time on another device: [L, B, 2, T].
    squares = terms[0].squares[None] if len(terms) == 1 else torch.stack([each.squares for each in terms])
    squares = squares.to(torch.float64, copy=True).clamp_(min=0)
    sums = squares.sum(3)
    norms = (
        torch.stack([norm for each in terms for norm in each.norms]).double().view(len(terms), 2, -1).transpose(1, 2)
    )
    if is_away(norms) and not is_tracing_graph():
        norms = _raised(norms, sums * (1 + 4 * max(of_inputs, of_outputs)), squares.shape[3])
    # One rounding more for the product of the entries; results below the smallest number are lost whole.
    of_first, of_second = (norms.flip(2) * sums).unbind(2)
    lacking = (of_inputs * of_first).add_(of_second, alpha=of_outputs)
    scale = squares.prod(2).sum(2)
    lengths = squares.sqrt_()
    lost_first, lost_second = lengths.sum(3).square_().unbind(2)
    tiny = torch.finfo(terms[0].squares.dtype).tiny
    lacking.add_(lost_first, alpha=tiny * outputs).add_(lost_second, alpha=tiny * inputs)
    return lacking, lengths.prod(2).sum(2), scale


def _matrix_norm(products: Float[Tensor, "B T T"]) -> Float[Tensor, " B"]:
    """The norm of each record's matrix, in float64; away from the processor in the matrix's type, see `_raised`."""
    if not is_away(products) or is_tracing_graph():
        return row_squared_norms(products).sqrt_()
    return torch.linalg.vector_norm(products, dim=(1, 2))


def _raised(norms: Float[Tensor, "L B 2"], most: Float[Tensor, "L B 2"], positions: int) -> Float[Tensor, "L B 2"]:
    """Norms whose squares were taken in single precision, a little larger.

    A sum along a tree is off by far less than 2⁻¹⁶, and an entry whose square is below the smallest number counts as
    2⁻⁶³. Where squares leave the range of single precision, the norm is at most the sum of the diagonal, with its
    rounding: `most`.
    """
    return torch.minimum(norms.mul_(1 + 2.0**-16).add_(positions * 2.0**-63), most)


# What a ghost norm is raised by, in single-precision epsilons of the squared position norms: the usual rounding.
_GRAM_ROUNDING = 4.0


def usual_gram_rounding(scale: Float[Tensor, "*B"], dtype: torch.dtype) -> Float[Tensor, "*B"]:
    """What a ghost norm is raised by for the usual rounding; `scale` is ``Σ_t a_t² g_t²``."""
    return _GRAM_ROUNDING * torch.finfo(dtype).eps * scale


@dataclass(frozen=True, eq=False, kw_only=True)
class GramRounding:
    """The `Rounding` of a ghost norm that was left to be computed together with others.

    Args:
        terms: of its matrices.
        error: how far the computed sum may be off, relative to the lengths of the terms.
    """

    terms: GramTerms
    error: float


def joint_rounding(roundings: Sequence[Rounding | GramRounding]) -> Rounding:
    """That of several uses of different parameters, of which there is at least one."""
    alike: dict[object, list[GramRounding]] = defaultdict(list)
    parts: list[Rounding] = []
    for each in roundings:
        if isinstance(each, Rounding):
            parts.append(each)
        else:
            alike[each.terms.constants, each.error].append(each)
    for group in alike.values():
        lacking, lengths, scale = gram_rounding([each.terms for each in group])
        lacking += usual_gram_rounding(scale, group[0].terms.squares.dtype)
        parts.append(Rounding(squares=lacking.sum(0), length=group[0].error * lengths.square_().sum(0).sqrt_()))
    if len(parts) == 1:
        return parts[0]
    squares = torch.stack([part.squares for part in parts]).sum(0)
    return Rounding(squares=squares, length=torch.stack([part.length for part in parts]).square_().sum(0).sqrt_())


# ----------------------------------------------------------------------------------------------------------------------
# Which exact kernel is fastest here, by the clock.
#
# The cost model of `cost` knows one processor; this measures. For every shape of a layer each kernel takes the norms
# and the weighted sum of a few synthetic records, a few times, once and for all: choices are kept in a file.
# All kernels are exact, so a choice changes rounding and speed alone. No record of the user's is timed, so a
# choice says nothing of any.
# ----------------------------------------------------------------------------------------------------------------------


# Synthetic records that kernels are timed on.
TIMED_RECORDS = 8
# A kernel that the cost model holds this much slower than the best is not tried.
_HOPELESS = 6.0
_ROUNDS = 3


class KernelTimings:
    """The fastest kernels that were measured on this machine.

    Args:
        file: where choices are kept between processes; None for the user's cache folder.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or cache_folder() / "kernels.json"
        self._chosen = _read(self._file)

    def fastest(
        self,
        layer: str,
        sizes: Mapping[str, int],
        costs: Mapping[Kernel, float],
        attempt: Callable[[Kernel], object],
        *,
        like: torch.Tensor,
    ) -> Kernel:
        """The kernel that took the least time for this shape.

        Args:
            layer: the kind of layer.
            sizes: what describes the shape, the number of records left out.
            costs: the kernels that may be taken, and what the cost model thinks of them.
            attempt: takes the norms and the weighted sum of `TIMED_RECORDS` synthetic records by a kernel.
            like: a tensor of the computing type, where the work is done.
        """
        expected = cheapest_kernel(costs)
        if len(costs) == 1 or is_tracing_graph() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
            return expected
        name = _name(layer, sizes, costs, like)
        known: Kernel | None = next((kernel for kernel in costs if kernel == self._chosen.get(name)), None)
        if known is None:
            tried: list[Kernel] = [kernel for kernel, cost in costs.items() if cost <= _HOPELESS * costs[expected]]
            seconds: dict[Kernel, float] = {kernel: _seconds(attempt, kernel, like.device) for kernel in tried}
            known = self._chosen[name] = cheapest_kernel(seconds)
            self._keep()
        return known

    def _keep(self) -> None:
        """Another process may have kept choices meanwhile; a cache that can't be written is done without."""
        together = _read(self._file) | self._chosen
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(together, indent=0, sort_keys=True))
            temporary.replace(self._file)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def _read(file: Path) -> dict[str, str]:
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {name: kernel for name, kernel in kept.items() if isinstance(kernel, str)} if isinstance(kept, dict) else {}


def _name(layer: str, sizes: Mapping[str, int], costs: Collection[Kernel], like: torch.Tensor) -> str:
    where = torch.cuda.get_device_name(like.device) if like.is_cuda else torch.backends.cpu.get_cpu_capability()
    facts = [
        torch.__version__,
        where,
        f"{torch.get_num_threads()} threads",
        str(like.dtype).removeprefix("torch."),
        layer,
    ]
    return " ".join([*facts, *(f"{name}={size}" for name, size in sizes.items()), "of", *sorted(costs)])


def _seconds(attempt: Callable[[Kernel], object], kernel: Kernel, device: torch.device) -> float:
    """The least time of a few rounds: what others do on the machine only adds."""
    attempt(kernel)
    best = float("inf")
    for _ in range(_ROUNDS):
        _wait(device)
        started = time.perf_counter()
        attempt(kernel)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------------------------------------------------
# What a layer rule is, and the table of rules.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class LayerCall:
    """One call of one module: what its rule kept, and the gradient that reached its output.

    Args:
        module: the module that was called.
        label: its qualified name, for messages.
        rule: the rule that reads this use.
        parameters: the module's captured parameters by name.
        records: number of records B; every kept tensor and every gradient has B as its first dimension.
        saved: what `rule.save` kept.
        grads: gradient at each output; None where no gradient arrived.
        context: what else the rule needs (never a tensor that depends on records).
        memo: intermediate results that a rule keeps between norms and sums; under a parameter's name its gradient of
            each record, whose weighted sum is then the parameter's.
        low_memory: whether rules spare memory, at the price of time.
        timings: where the fastest kernels are measured and kept; None takes the cost model's.
    """

    module: nn.Module
    label: str
    rule: "LayerRule"
    parameters: Mapping[str, nn.Parameter]
    records: int
    saved: tuple[Tensor, ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    context: object = None
    memo: dict[str, Tensor] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    low_memory: bool = False
    timings: KernelTimings | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient at the only output."""
        (grad,) = self.grads
        if grad is None:
            raise PrivacyError(f"{self.label} must have a gradient at its output to be read, got none.")
        return grad

    @property
    def product(self) -> ProductFormat:
        """How what was kept is multiplied with the gradient, where there is one of each."""
        return product_format(self.saved[0], self.grad)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(iter(self.parameters.values())).device

    def select(self, index: Tensor) -> "LayerCall":
        """The same use, restricted to the records in `index`."""
        return replace(
            self,
            records=index.numel(),
            saved=tuple(tensor.index_select(0, index) for tensor in self.saved),
            grads=tuple(None if grad is None else grad.index_select(0, index) for grad in self.grads),
            memo={name: tensor.index_select(0, index) for name, tensor in self.memo.items()},
            versions=(),
        )

    def release(self) -> None:
        """Drop the kept tensors once the rule has kept every parameter's per-record gradient instead."""
        if self.memo.keys() >= self.parameters.keys():
            self.saved, self.grads, self.versions = (), (), ()

    def weighted_sums(self, names: Sequence[str], weights: Float[Tensor, " B"]) -> dict[str, Tensor]:
        """``Σ_b weights[b] · gradient[b]`` for each of the captured parameters `names`."""
        if not self.grads:
            return {name: weighted_sum(self.memo[name], weights) for name in names}
        return self.rule.weighted_sums(self, names, weights)

    def check_unmodified(self) -> None:
        """Refuse when a kept tensor was modified in place since the backward pass.

        Raises:
            PrivacyError: norms and sums would come from different values.
        """
        if self.versions and self.versions != tuple(tensor._version for tensor in self.saved):
            raise PrivacyError(
                f"the input of {self.label} must stay as it was until the private gradient is taken, got an "
                "in-place change after the backward pass. Copy the batch instead of overwriting it."
            )


class LayerRule:
    """Base of the rules. A subclass needs `save` and `per_record_gradient`; the rest has slow, correct defaults.

    `names` are the parameters the rule knows; a module with other direct parameters, or with parametrizations, is
    not matched and goes to the functional fallback.
    """

    names: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})

    def accepts(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether this rule reads every option that `module` has set."""
        return True

    def refusal(self, module: nn.Module) -> str | None:  # noqa: ARG002
        """What `module` must be and isn't ("X=…, got …"), when no per-record gradient of it is meaningful."""
        return None

    def save(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, ...]:
        """The tensors to keep from a call, each with the records first. By default the only input."""
        return (only_input(args, kwargs),)

    def record_dims(self, module: nn.Module) -> int:  # noqa: ARG002
        """The least number of dimensions of the first kept tensor, the records' included."""
        return 2

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:
        """The gradient of each record for parameter `name`."""
        raise NotImplementedError

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared gradient norm over the parameters `names`, in float64."""
        measured = self.measure(use, names)
        if isinstance(measured, Tensor):
            return measured
        if not measured:
            return torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        return joint_squared_norms(measured)

    def measure(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"] | list[Float[Tensor, "B ..."]]:
        """What `squared_norms` gives, or the gradients that were kept for the sum, whose squares are then added up."""
        for name in names:
            use.memo[name] = self.per_record_gradient(use, name)
        return [use.memo[name] for name in names]

    @property
    def measures_kept_gradients(self) -> bool:
        """Whether every gradient per record is kept, and the norm is theirs."""
        own = type(self)
        return own.squared_norms is LayerRule.squared_norms and own.measure is LayerRule.measure

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """``Σ_b weights[b] · gradient[b]`` for each parameter in `names`."""
        sums = {}
        for name in names:
            stored = use.memo.get(name)
            sums[name] = weighted_sum(self.per_record_gradient(use, name) if stored is None else stored, weights)
        return sums

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | GramRounding | None:  # noqa: ARG002
        """How far `weighted_sums` may be from what `squared_norms` measured; read after the norms.

        None where the very gradients that were measured are weighed and added. A rule that computes its norms or its
        sums in another way must say how far apart they can be when a record's terms cancel.
        """
        return None

    def term_lengths(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:
        """``Σ_t ‖term t‖`` of each record over the terms that its gradient is added up from, or more, in float64.

        By default the gradients themselves, kept where they are small enough so that the sum weighs the same values.
        """
        total = torch.zeros(use.records, dtype=torch.float64, device=use.device)
        for name in names:
            entries = use.parameters[name].numel()
            if name not in use.memo and use.records * entries <= 4 * CHUNK_ENTRIES:
                use.memo[name] = self.per_record_gradient(use, name)
            if name in use.memo:
                total += row_squared_norms(use.memo[name])
                continue
            for index in torch.arange(use.records, device=use.device).split(chunk_records(use.records, entries)):
                total[index] += row_squared_norms(self.per_record_gradient(use.select(index), name))
        return total.sqrt_()

    def terms(self, use: LayerCall) -> int:  # noqa: ARG002
        """How many terms `term_lengths` counts."""
        return 1

    def merge(self, uses: list[LayerCall], names: frozenset[str]) -> LayerCall | None:  # noqa: ARG002
        """One use whose gradient for `names` is the sum over `uses`, or None where this rule can't build it."""
        return None

    def inner_products(self, use: LayerCall, other: LayerCall) -> Float[Tensor, " B"] | None:  # noqa: ARG002
        """Per record ⟨gradient of `use`, gradient of `other`⟩ for a shared weight, or None where it isn't known."""
        return None


def weighted_sum(per_example: Float[Tensor, "B *shape"], weights: Float[Tensor, " B"]) -> Float[Tensor, "*shape"]:
    """``Σ_b weights[b] · per_example[b]``."""
    rows = per_example.flatten(1) if per_example.dim() > 1 else per_example[:, None]
    dtype = compute_dtype(rows)
    return (weights.to(dtype) @ rows.to(dtype)).view(per_example.shape[1:])


def weighted_sums_of_kept(
    kept: Sequence[Float[Tensor, "B ..."]], weights: Float[Tensor, " b"], index: Tensor | None = None
) -> list[Tensor]:
    """``Σ_b weights[b] · gradients[b]`` of each of the `kept` gradients, in one product; they should be small.

    Of the records `index` alone, where it is given.
    """
    rows = side_by_side(kept)
    together = weighted_sum(rows if index is None else rows.index_select(0, index), weights)
    # Each in memory of its own, as later sums are added to it.
    sums = [together.new_empty(part.shape[1:]) for part in kept]
    flat = [value.view(-1) for value in sums]
    torch._foreach_copy_(flat, together.split([len(each) for each in flat]))  # pyright: ignore[reportPrivateUsage]
    return sums


def only_input(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """The one tensor that a simple layer was called with, however it was passed."""
    values = [*args, *kwargs.values()]
    if not values or not isinstance(values[0], Tensor):
        raise RecordCountMismatch("a captured layer must be called with a tensor, got something else.")
    return values[0]


_RULES: dict[type[nn.Module] | str, LayerRule] = {}
_Rule = TypeVar("_Rule", bound=LayerRule)


def layer_rule(*modules: type[nn.Module] | str) -> Callable[[type[_Rule]], type[_Rule]]:
    """Class decorator: register a rule for module classes, and for subclasses that don't override `forward`.

    A later registration for the same class replaces the earlier one. Check a new rule with `check_layer_rule`.

    Args:
        modules: the classes the rule reads, or their full names where they should not be imported for it.

    Returns:
        The decorator; the rule class must be constructible without arguments.
    """

    def register(rule: type[_Rule]) -> type[_Rule]:
        instance = rule()
        for module in modules:
            _RULES[module] = instance
        return rule

    return register


def runs_own_forward(module: nn.Module) -> bool:
    """Whether the forward of the module's class runs, at most between moves of its tensors to its device.

    `dispatch_model` of accelerate (``device_map=``) wraps every layer so; other replacements are somebody's own.
    """
    held = vars(module)
    if "forward" not in held:
        return True
    hook, inner = held.get("_hf_hook"), held.get("_old_forward")
    moves = f"{type(hook).__module__}.{type(hook).__qualname__}" == "accelerate.hooks.AlignDevicesHook"
    wraps = getattr(held["forward"], "__wrapped__", None) is inner and inner is not None
    own = getattr(inner, "__func__", None) is type(module).forward
    return moves and wraps and own and not getattr(hook, "offload", True)


def get_rule(module: nn.Module) -> LayerRule | None:
    """The rule that reads `module`, or None when only the functional fallback can.

    A rule matches the module's class or a base class whose `forward` is the one that runs, and only when every
    direct parameter is a plain `nn.Parameter` that the rule knows and nothing is parametrized.
    """
    if not runs_own_forward(module) or hasattr(module, "parametrizations"):
        return None
    for base in type(module).__mro__:
        rule = _RULES.get(base, _RULES.get(f"{base.__module__}.{base.__qualname__}"))
        if rule is None:
            continue
        own = {name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
        # A known name that is a tensor but no parameter is computed from something else (old-style weight norm).
        computed = any(isinstance(getattr(module, name, None), Tensor) for name in rule.names - own)
        plain = own <= rule.names and not computed
        return rule if type(module).forward is base.forward and plain and rule.accepts(module) else None
    return None
