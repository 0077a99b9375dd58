"""Array types with shapes in signatures: jaxtyping's where it is installed, which the tests use, else the arrays alone.

Example:
    >>> from torch import Tensor
    >>> signature = Float[Tensor, "batch features"]
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int, Int64, Shaped, UInt8
else:
    try:
        from jaxtyping import Bool, Float, Float32, Float64, Int, Int64, Shaped, UInt8
    except ImportError:

        class Shaped:
            """``Shaped[array type, "shape"]`` is the array type."""

            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Float32 = Float64 = Int = Int64 = UInt8 = Shaped

__all__ = ["Bool", "Float", "Float32", "Float64", "Int", "Int64", "Shaped", "UInt8"]
