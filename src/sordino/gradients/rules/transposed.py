"""Linear layers that keep their matrix as (inputs, outputs), as GPT-2 implementations do (floor 1, gradients).

Hugging Face's ``Conv1D`` flattens its input to rows before it multiplies, so its records can't be followed inside; the
layer as a whole is a linear map like any other. It is recognised by its name, without importing it.
"""

from collections.abc import Iterable
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from sordino.gradients.rules.linear import LinearRule
from sordino.gradients.rules.rounding import Rounding
from sordino.gradients.rules.rule import LayerRule, Use, layer_rule, weigh

__all__ = ["TransposedLinearRule"]

_LINEAR = LinearRule()


@layer_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LayerRule):
    """``x W + b`` with W of shape (inputs, outputs): the linear rule's kernels, the result transposed."""

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """As of the linear layer with the transposed matrix."""
        total = _LINEAR.squared_norms(use, names)
        if "weight" in use.memo:
            use.memo["weight"] = use.memo["weight"].transpose(1, 2)
        return total

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """``A^T G`` for the weight, the sum over positions for the bias."""
        gradient = _LINEAR.per_example(use, name)
        return gradient.transpose(1, 2) if name == "weight" else gradient

    def rounding(self, use: Use, names: Iterable[str]) -> Rounding | None:
        """As of the linear layer."""
        return _LINEAR.rounding(use, names)

    def terms(self, use: Use) -> int:
        """Positions."""
        return _LINEAR.terms(use)

    def term_lengths(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """As of the linear layer."""
        return _LINEAR.term_lengths(use, names)

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """The linear layer's sums, the matrix transposed."""
        sums = {name: weigh(use.memo[name], weights) for name in names if name in use.memo}
        others = [name for name in names if name not in sums]
        for name, value in _LINEAR.weighted_sums(use, others, weights).items():
            sums[name] = value.t().contiguous() if name == "weight" else value
        return sums

    def merge(self, uses: list[Use], names: frozenset[str]) -> Use | None:
        """Several calls are one call on all their positions."""
        merged = _LINEAR.merge(uses, names)
        return None if merged is None else replace(merged, rule=self)
