"""Which exact kernel a layer takes, by a cost model (floor 1, gradients).

Units: one weight-gradient product is 1. The numbers were measured on one CPU thread for float32, inside whole steps (of
convolutions with freed memory kept, of the others with arrays fresh from the system); they decide speed only, every
kernel is exact. The choice depends on shapes alone, so that a run can be repeated; `timings` asks the clock. Legend:
B records, T positions, d inputs, p outputs (weight entries: d·p).
"""

from collections.abc import Mapping
from typing import Literal

__all__ = [
    "CHUNK_ENTRIES",
    "Kernel",
    "cheapest",
    "chunk_records",
    "convolution_kernel_costs",
    "kernel_costs",
    "patch_products",
]

Kernel = Literal["ghost", "stored", "norm_only"]

# Work arrays are cut into chunks of records of at most this many entries (16 MB in single precision).
CHUNK_ENTRIES = 4_194_304
# Convolution gradients are formed in chunks that stay in the cache.
_CACHE_ENTRIES = 524_288
# Stored per-record gradients may take this many times what the layer's own activations and gradients take.
_STORED_FACTOR = 8


def kernel_costs(records: int, positions: int, inputs: int, outputs: int, *, lean: bool = False) -> dict[Kernel, float]:
    """What the exact norm kernels for a linear map applied at T positions cost, where they may be taken.

    - ghost: Gram matrices over positions, 1.2·T(d+p)/(dp).
    - stored: per-record gradients replace the weighted product; what is left is memory traffic, ≈ 55/T.
    - norm_only: per-record gradients are formed, squared and thrown away, 1.3.
    """
    entries = inputs * outputs
    costs: dict[Kernel, float] = {
        "ghost": 1.2 * positions * (inputs + outputs) / max(entries, 1),
        "norm_only": 1.3,
    }
    if entries <= _most_stored(positions, inputs, outputs, lean) and records * entries <= 16 * CHUNK_ENTRIES:
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
    lean: bool = False,
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
        lean: spare memory, at the price of time.
    """
    entries = channels * window * outputs // groups
    costs: dict[Kernel, float] = {"norm_only": 1 + 75 / max(positions, 1)}
    if pixels is not None:
        patches, _ = patch_products(pixels=pixels, positions=positions, channels=channels, window=window)
        costs["ghost"] = (patches + positions**2 * (outputs + 60)) / max(positions * entries, 1)
    if entries <= _most_stored(positions, channels, outputs, lean) and records * entries <= 16 * CHUNK_ENTRIES:
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


def cheapest(costs: Mapping[Kernel, float]) -> Kernel:
    """The kernel of the least cost."""
    return min(costs, key=lambda kernel: costs[kernel])


def _most_stored(positions: int, inputs: int, outputs: int, lean: bool) -> int:
    """Lean gradients take no more than the output gradients that are freed for them."""
    return positions * outputs if lean else _STORED_FACTOR * positions * (inputs + outputs)


def chunk_records(records: int, entries_per_record: int, *, in_cache: bool = False) -> int:
    """How many records fit a work array of `CHUNK_ENTRIES`, or of one that stays in the cache; at least 1."""
    limit = _CACHE_ENTRIES if in_cache else CHUNK_ENTRIES
    return max(1, min(records, limit // max(entries_per_record, 1)))
