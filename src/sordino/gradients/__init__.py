"""Per-record gradient norms and weighted sums of any model, in one forward and one backward (floor 1)."""

from sordino.gradients.capture import GradientCapture
from sordino.gradients.check import check_layer_rule
from sordino.gradients.contributions import Contributions, Recorder
from sordino.gradients.one_by_one import OneByOne
from sordino.gradients.rules import LayerRule, Use, layer_rule, rule_for
from sordino.gradients.rules.timings import KernelTimings
from sordino.gradients.sites import per_record

__all__ = [
    "Contributions",
    "GradientCapture",
    "KernelTimings",
    "LayerRule",
    "OneByOne",
    "Recorder",
    "Use",
    "check_layer_rule",
    "layer_rule",
    "per_record",
    "rule_for",
]
