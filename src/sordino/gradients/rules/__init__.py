"""Layer rules, one file per family. Importing this package registers them."""

from sordino.gradients.rules import convolution, embedding, linear, normalization
from sordino.gradients.rules.base import LayerCall, LayerRule, get_rule, layer_rule

__all__ = ["LayerCall", "LayerRule", "convolution", "embedding", "get_rule", "layer_rule", "linear", "normalization"]
