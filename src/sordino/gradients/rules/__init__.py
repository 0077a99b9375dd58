"""Layer rules, one file per family (floor 1, gradients). Importing this package registers them."""

from sordino.gradients.rules import convolution, embedding, linear, normalization, transposed
from sordino.gradients.rules.rule import LayerRule, Use, layer_rule, rule_for

__all__ = [
    "LayerRule",
    "Use",
    "convolution",
    "embedding",
    "layer_rule",
    "linear",
    "normalization",
    "rule_for",
    "transposed",
]
