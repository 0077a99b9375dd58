"""Per-record clipping: methods that turn squared norms into factors and know their sensitivity.

Every method is scale-free: the bound `max_grad_norm` belongs to the plan and comes with each call.
"""

from sordino.clipping.grouped import (
    GroupedClipping,
    QuantileClipping,
    QuantileThresholds,
    clipping_from_dict,
    clipping_to_dict,
    get_clipping,
)
from sordino.clipping.methods import (
    AdaClip,
    AdaClipState,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    PsacClipping,
)

__all__ = [
    "AdaClip",
    "AdaClipState",
    "AutomaticClipping",
    "Clipping",
    "FlatClipping",
    "GlobalClipping",
    "GroupedClipping",
    "PsacClipping",
    "QuantileClipping",
    "QuantileThresholds",
    "clipping_from_dict",
    "clipping_to_dict",
    "get_clipping",
]
