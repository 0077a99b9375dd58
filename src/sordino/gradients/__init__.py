"""Per-record gradient norms and weighted sums of any model, in one forward and one backward."""

from sordino.gradients.capture import Contributions, GradientCapture, Recorder, check_layer_rule
from sordino.gradients.module_hooks import per_record
from sordino.gradients.one_by_one import OneByOne
from sordino.gradients.rules import LayerCall, LayerRule, get_rule, layer_rule
from sordino.gradients.rules.base import KernelTimings

__all__ = [
    "Contributions",
    "GradientCapture",
    "KernelTimings",
    "LayerCall",
    "LayerRule",
    "OneByOne",
    "Recorder",
    "check_layer_rule",
    "get_rule",
    "layer_rule",
    "per_record",
]
