"""Lookup tables.

A record's gradient has at most T non-zero rows; it is never formed densely. Positions with the same id in the same
record are added up first, by keys ``record · V + id``. Legend: B records, T positions, V rows, d columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModule
from sordino.gradients.numerics import compute_dtype, is_away, is_tracing_graph, row_products, row_squared_norms
from sordino.gradients.rules.base import LayerCall, LayerRule, Rounding, chunk_records, layer_rule, only_input, unit
from sordino.gradients.rules.linear import LinearRule, num_positions
from sordino.shapes import Float, Int

# The name in a use's memo, which no parameter has, of each position's segment: what positions with one id share.
_SEGMENTS = "segments"


@layer_rule(nn.Embedding)
class EmbeddingRule(LayerRule):
    """nn.Embedding with ids of any rank, and padding_idx."""

    names: ClassVar[frozenset[str]] = frozenset({"weight"})

    def refusal(self, module: nn.Module) -> str | None:
        """Renormalizing the table or weighing by batch frequency depends on all records."""
        if getattr(module, "max_norm", None) is not None:
            return "max_norm=None, got a table that is renormalized by the ids it sees"
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq=False, got gradients weighed by the frequencies in the batch"
        return None

    def record_dims(self, module: nn.Module) -> int:  # noqa: ARG002
        """Ids may be one per record."""
        return 1

    def squared_norms(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:  # noqa: ARG002
        """Sparse segment sums, then the norms of the segments."""
        ids, grads = self.lookups(use)
        rows = _rows(use.module)
        total = torch.zeros(use.records, dtype=torch.float64, device=grads.device)
        if ids.numel() == 0:
            return total
        offsets = rows * torch.arange(use.records, device=ids.device)[:, None]
        keys = (ids + offsets).flatten()
        if _has_fixed_sizes(ids):
            segments, count = _numbered(keys), keys.numel()
            use.memo[_SEGMENTS] = segments.view(ids.shape)
            records = torch.zeros_like(keys).scatter_(0, segments, keys // rows)
            return total.index_add_(0, records, row_squared_norms(_segment_sums(segments, grads.flatten(0, 1), count)))
        segments = torch.unique(keys, return_inverse=True)[1]
        use.memo[_SEGMENTS] = segments.view(ids.shape)
        norms = row_squared_norms(grads.flatten(0, 1))
        repeated, positions = _repeated(segments)
        norms[repeated] = 0
        total += norms.view(ids.shape).sum(1)
        if positions.numel():
            sums = _segment_sums(positions, grads.flatten(0, 1)[repeated], int(positions.max()) + 1)
            owners = torch.zeros_like(positions[: sums.shape[0]]).scatter_(0, positions, repeated // ids.shape[1])
            total.index_add_(0, owners, row_squared_norms(sums))
        return total

    def per_record_gradient(self, use: LayerCall, name: str) -> Float[Tensor, "B *shape"]:  # noqa: ARG002
        """The dense gradient, for a table that is shared with a layer of another kind."""
        ids, grads = self.lookups(use)
        dense = grads.new_zeros(use.records, _rows(use.module), grads.shape[2])
        return dense.scatter_add_(1, ids[:, :, None].expand_as(grads), grads)

    def weighted_sums(
        self, use: LayerCall, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """The weighted segment sums that were measured, in their rows; without a measurement the ordinary gradient."""
        ids, grads = self.lookups(use)
        known = use.memo.get(_SEGMENTS)
        summed = grads.new_zeros(_rows(use.module), grads.shape[2])
        flat, rows = grads.flatten(0, 1), ids.flatten()
        owners = torch.arange(use.records, device=ids.device).repeat_interleave(ids.shape[1])
        if known is not None and _has_fixed_sizes(ids):
            segments = known.flatten()
            if not is_tracing_graph():
                # Of the records that are left they may be numbers beyond their count.
                segments = _numbered(segments)
            _add_segments(summed, segments, segments.numel(), flat, rows, owners, weights)
            return dict.fromkeys(names, summed)
        weighted = (grads * weights.to(grads.dtype)[:, None, None]).flatten(0, 1)
        if known is not None and known.numel():
            repeated, positions = _repeated(known.flatten())
            weighted[repeated] = 0
            if positions.numel():
                chosen = (flat[repeated], rows[repeated], owners[repeated])
                _add_segments(summed, positions, int(positions.max()) + 1, *chosen, weights)
        return dict.fromkeys(names, summed.index_add_(0, rows, weighted))

    def rounding(self, use: LayerCall, names: Iterable[str]) -> Rounding | None:
        """None on a CPU, where segments are added up in one order; compiled or elsewhere the order may change."""
        if not _has_fixed_sizes(use.grad):
            return None
        lengths = 2 * self.lookups(use)[0].shape[1] * unit(torch.float64) * self.term_lengths(use, names)
        return Rounding(squares=torch.zeros_like(lengths), length=lengths)

    def term_lengths(self, use: LayerCall, names: Iterable[str]) -> Float[Tensor, " B"]:  # noqa: ARG002
        """``Σ_t |g_t|`` or more."""
        ids, grads = self.lookups(use)
        return row_squared_norms(grads).mul_(ids.shape[1]).sqrt_()

    def terms(self, use: LayerCall) -> int:
        """Positions."""
        return self.lookups(use)[0].shape[1]

    def merge(self, uses: list[LayerCall], names: frozenset[str]) -> LayerCall | None:  # noqa: ARG002
        """Several calls are one call with all their ids."""
        looked_up = [rule.lookups(use) for use in uses if isinstance(rule := use.rule, EmbeddingRule)]
        ids = torch.cat([ids for ids, _ in looked_up], dim=1)
        grads = torch.cat([grads for _, grads in looked_up], dim=1)
        return replace(uses[0], rule=_MERGED, saved=(ids,), grads=(grads,), memo={}, versions=())

    def inner_products(self, use: LayerCall, other: LayerCall) -> Float[Tensor, " B"] | None:
        """With a linear layer that shares the table: ``Σ_{t,s} G[t, id_s] ⟨h_t, g_s⟩``."""
        if not isinstance(other.rule, LinearRule) or other.rule.is_transposed:
            return None
        ids, grads = self.lookups(use)
        hidden, logits = num_positions(other)
        # Half precision stays where the gradients came in it: nothing is rounded here.
        as_it_came = type(self) is EmbeddingRule and use.grad.dtype == hidden.dtype
        dtype = hidden.dtype if as_it_came else torch.promote_types(hidden.dtype, grads.dtype)
        hidden, grads = hidden.to(dtype), grads.to(dtype)
        step = chunk_records(use.records, hidden.shape[1] * ids.shape[1], away=is_away(hidden))
        parts = []
        for start in range(0, use.records, step):
            chunk = slice(start, start + step)
            matches = row_products(hidden[chunk], grads[chunk].transpose(1, 2))
            index = ids[chunk, None, :].expand(-1, hidden.shape[1], -1)
            parts.append((matches.double() * logits[chunk].gather(2, index)).sum((1, 2)))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=ids.device)

    def lookups(self, use: LayerCall) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T d"]]:
        """Ids and the gradient at each looked-up row; zero where the id is the padding."""
        ids, grads = use.saved[0], use.grad
        ids = ids.reshape(use.records, -1) if use.records else ids.reshape(0, 0)
        grads = grads.reshape(*ids.shape, grads.shape[-1]).to(compute_dtype(grads))
        return ids.long(), _without_padding(use.module, ids, grads)


@layer_rule(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """nn.EmbeddingBag in modes sum and mean on ids [B, T]: a lookup whose output gradient goes to every position."""

    def accepts(self, module: nn.Module) -> bool:
        """The largest-entry mode goes to the fallback."""
        return getattr(module, "mode", "") in ("sum", "mean")

    def save(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,
    ) -> tuple[Tensor, ...]:
        """Ids and the share of each position in its bag."""
        ids = only_input(args, kwargs)
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | dict(kwargs)
        if ids.dim() != 2 or given.get("offsets") is not None:
            raise UnsupportedModule(
                "an nn.EmbeddingBag must be called with ids [records, positions], got flat ids with offsets. Pad them."
            )
        shares = torch.ones(ids.shape, dtype=output.dtype, device=ids.device)
        if isinstance(weights := given.get("per_sample_weights"), Tensor):
            shares = weights.detach()
        if getattr(module, "mode", "") == "mean":
            padding = getattr(module, "padding_idx", None)
            counted = shares if padding is None else shares * (ids != padding)
            shares = counted / counted.sum(1, keepdim=True).clamp(min=1)
        return ids, shares

    def lookups(self, use: LayerCall) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T d"]]:
        """Every position of a bag receives the bag's gradient times its share."""
        ids, shares = use.saved
        dtype = compute_dtype(use.grad, shares)
        grads = use.grad.to(dtype)[:, None, :] * shares.to(dtype)[:, :, None]
        return ids.long(), _without_padding(use.module, ids, grads)


class _MergedLookups(EmbeddingRule):
    """Lookups of several calls, with each call's own padding taken out already."""

    def lookups(self, use: LayerCall) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T d"]]:
        return use.saved[0], use.grad


_MERGED = _MergedLookups()


def _has_fixed_sizes(tensor: Tensor) -> bool:
    """Whether no result may have a size that depends on values: in a recorded graph, and where a look is a wait."""
    return is_tracing_graph() or is_away(tensor)


def _segment_sums(segments: Int[Tensor, " n"], rows: Float[Tensor, "n d"], count: int) -> Float[Tensor, "segments d"]:
    """In double precision, so that thousands of terms that cancel leave what they add up to."""
    rows = rows.double()
    return rows.new_zeros(count, rows.shape[1]).index_add_(0, segments, rows)


def _add_segments(
    into: Float[Tensor, "V d"],
    segments: Int[Tensor, " n"],
    count: int,
    grads: Float[Tensor, "n d"],
    rows: Int[Tensor, " n"],
    owners: Int[Tensor, " n"],
    weights: Float[Tensor, " B"],
) -> None:
    """Add the weighted segment sums to their rows of the table."""
    row, owner = (segments.new_zeros(count).scatter_(0, segments, of) for of in (rows, owners))
    weighted = _segment_sums(segments, grads, count) * weights.double().index_select(0, owner)[:, None]
    into.index_add_(0, row, weighted.to(into.dtype))


def _repeated(segments: Int[Tensor, " n"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Positions whose segment has others, and a number for each of these segments. Most have one position."""
    several = torch.bincount(segments) > 1
    repeated = several[segments].nonzero().flatten()
    return repeated, (several.cumsum(0) - 1)[segments[repeated]]


def _numbered(keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The index of each key among the different ones, by operations whose results have a size known in advance."""
    ordered, order = keys.sort(stable=True)
    changes = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.zeros_like(keys).scatter_(0, order, torch.cat([torch.zeros_like(ordered[:1]), changes]))


def _rows(module: nn.Module) -> int:
    return int(getattr(module, "num_embeddings"))  # noqa: B009


def _without_padding(
    module: nn.Module, ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T d"]
) -> Float[Tensor, "B T d"]:
    padding = getattr(module, "padding_idx", None)
    return grads if padding is None else grads.masked_fill((ids == padding)[:, :, None], 0)
