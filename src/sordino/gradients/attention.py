"""``F.multi_head_attention_forward`` with its projections captured (floor 1, gradients).

The same operations as torch's in the same order of random numbers, so that a seed gives the same dropout masks, but
with the records first. Legend of shapes: B records, T queries, S keys, E width, H heads, e = E/H.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from sordino.errors import RecordCountMismatch, UnsupportedModule
from sordino.gradients.rules.parts import Part, direct_rule, parts_rule
from sordino.gradients.tap import Tap

__all__ = ["attention"]


def attention(
    tap: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Float[Tensor, "T B E"], Tensor | None]:
    """Multi-head attention with the arguments of ``F.multi_head_attention_forward``."""
    if static_k is not None or static_v is not None:
        raise UnsupportedModule(f"{tap.label} must compute its keys and values, got static ones. Pass key and value.")
    _check_records(tap, query, key, value)
    if is_causal and attn_mask is None:
        raise RuntimeError("attn_mask must be given with is_causal, got none. Pass the causal mask as well.")
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None
    else:
        is_causal = is_causal and key_padding_mask is None
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,) * 3
    q, k, v = _projections(tap, (query, key, value), weights, in_proj_bias, embed_dim_to_check)
    if bias_k is not None and bias_v is not None:
        k, v = _with_biases(tap, k, v, bias_k, bias_v)
    extra = int(bias_k is not None) + int(add_zero_attn)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    mask = _mask(attn_mask, key_padding_mask, num_heads, extra, q.dtype)
    q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        mixed, shares = _with_weights(q, k, v, mask, dropout_p)
        shares = shares.mean(dim=1) if average_attn_weights else shares
    else:
        mixed, shares = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal), None
    # Time first in memory as torch's: a dropout behind it draws its mask in the order of memory.
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    part = Part(weight=tap.name(out_proj_weight), bias=tap.name(out_proj_bias))
    output = F.linear(mixed, out_proj_weight.detach(), None if out_proj_bias is None else out_proj_bias.detach())
    (output,) = tap.capture(parts_rule, _names([part]), (part,), (output,), (mixed.transpose(0, 1),), dim=1)
    return output, shares


def _check_records(tap: Tap, *inputs: Tensor) -> None:
    """A single row is refused as well: it may be one record's, which must not count for all."""
    if any(x.dim() != 3 or x.shape[1] != tap.records for x in inputs):
        raise RecordCountMismatch(
            f"the inputs of {tap.label} must have one row per record, got another number or none. "
            "Call it with a batch, and expand learned queries to it."
        )


def _names(parts: list[Part]) -> set[str]:
    return {name for part in parts for name in (part.weight, part.bias) if name is not None}


def _projections(
    tap: Tap, inputs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], bias: Tensor | None, width: int
) -> list[Float[Tensor, "B T E"]]:
    """Queries, keys and values; inputs that are one tensor, read by neighbouring rows of one weight, go together."""
    packed = weights[0] is weights[1] is weights[2]
    sources: list[tuple[Tensor, int, int]] = []
    for i, x in enumerate(inputs):
        if packed and sources and sources[-1][0] is x:
            sources[-1] = (x, sources[-1][1], i + 1)
        else:
            sources.append((x, i, i + 1))
    parts, saved, outputs = [], [], []
    for x, first, last in sources:
        rows, weight = (first * width, last * width), weights[first]
        assert weight is not None
        shift = None if bias is None else bias.detach()[rows[0] : rows[1]]
        saved.append(x.transpose(0, 1))
        outputs.append(F.linear(saved[-1], weight.detach()[rows[0] : rows[1]] if packed else weight.detach(), shift))
        own = rows if packed else None
        parts.append(Part(weight=tap.name(weight), bias=tap.name(bias), rows=own, bias_rows=rows))
    passed = tap.capture(parts_rule, _names(parts), tuple(parts), tuple(outputs), tuple(saved))
    return [chunk for output in passed for chunk in output.split(width, dim=2)]


def _with_biases(
    tap: Tap, k: Float[Tensor, "B S E"], v: Float[Tensor, "B S E"], bias_k: Tensor, bias_v: Tensor
) -> tuple[Tensor, Tensor]:
    """One more key and value, the same for every record."""
    names = [tap.name(bias_k), tap.name(bias_v)]
    copies = tuple(bias.detach().expand(tap.records, 1, -1).to(k.dtype).clone() for bias in (bias_k, bias_v))
    captured = [i for i in range(2) if names[i] is not None]
    own = tuple(str(names[i]) for i in captured)
    passed = tap.capture(direct_rule, set(own), own, tuple(copies[i] for i in captured), ()) if own else ()
    rows = list(copies)
    for i, copy in zip(captured, passed, strict=True):
        rows[i] = copy
    return torch.cat([k, rows[0]], dim=1), torch.cat([v, rows[1]], dim=1)


def _mask(
    attn_mask: Shaped[Tensor, "*any"] | None,
    key_padding_mask: Shaped[Tensor, "B S"] | None,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Float[Tensor, "#B #H #T s"] | None:
    """Both masks as one that is added to the scores; keys that were appended are always seen."""
    mask = None
    if attn_mask is not None:
        mask = F.pad(_added_mask(attn_mask, dtype), (0, extra))
        mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (mask.shape[0] // heads, heads))
    if key_padding_mask is not None:
        padding = F.pad(_added_mask(key_padding_mask, dtype), (0, extra))[:, None, None]
        mask = padding if mask is None else mask + padding
    return mask


def _added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask


def _with_weights(
    q: Float[Tensor, "B H T e"], k: Float[Tensor, "B H S e"], v: Float[Tensor, "B H S e"], mask: Tensor | None, p: float
) -> tuple[Float[Tensor, "B H T e"], Float[Tensor, "B H T S"]]:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    shares = F.softmax(scores, dim=-1)
    if p > 0.0:
        shares = F.dropout(shares, p=p)
    return shares @ v, shares
