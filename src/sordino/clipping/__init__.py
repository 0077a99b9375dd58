"""Per-record clipping: methods that turn squared norms into factors and know their sensitivity (floor 1).

Every method is scale-free: the bound `max_grad_norm` belongs to the plan and comes with each call.
"""

from sordino.clipping.adaclip import AdaClip, AdaClipState
from sordino.clipping.automatic import AutomaticClipping, PsacClipping
from sordino.clipping.choice import clipping_called, clipping_from_dict, clipping_to_dict
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping
from sordino.clipping.grouped import GroupedClipping
from sordino.clipping.keep_or_drop import GlobalClipping
from sordino.clipping.projected import ProjectedClipping
from sordino.clipping.quantile import QuantileClipping, QuantileThresholds

__all__ = [
    "AdaClip",
    "AdaClipState",
    "AutomaticClipping",
    "Clipping",
    "FlatClipping",
    "GlobalClipping",
    "GroupedClipping",
    "ProjectedClipping",
    "PsacClipping",
    "QuantileClipping",
    "QuantileThresholds",
    "clipping_called",
    "clipping_from_dict",
    "clipping_to_dict",
]
