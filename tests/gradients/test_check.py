import pytest
import torch
from torch import nn

from sordino.errors import PrivacyError
from sordino.gradients import LayerRule, check_layer_rule, layer_rule


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return x * self.weight


class GoodScale(Scale):
    def forward(self, x):
        return x * self.weight


class SmallScale(Scale):
    def forward(self, x):
        return x * self.weight


class UnevenScale(Scale):
    def forward(self, x):
        return x * self.weight


@layer_rule(GoodScale)
class GoodRule(LayerRule):
    def per_record_gradient(self, use, name):
        return (use.saved[0] * use.grad).flatten(1, -2).sum(1)


@layer_rule(SmallScale)
class HalvedNorms(GoodRule):
    def squared_norms(self, use, names):
        return super().squared_norms(use, names) / 4


@layer_rule(UnevenScale)
class WrongSums(GoodRule):
    def weighted_sums(self, use, names, weights):
        return super().weighted_sums(use, names, torch.ones_like(weights))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (4, 3)),
        (nn.Linear(3, 2), (4, 5, 3)),
        (nn.Conv2d(2, 3, 2), (4, 2, 5, 5)),
        (nn.LayerNorm(3), (4, 2, 3)),
        (nn.GroupNorm(1, 3), (4, 3, 2)),
        (nn.PReLU(), (4, 3)),
        (GoodScale(), (4, 2, 3)),
    ],
)
def test_right_rules_pass(layer, shape):
    check_layer_rule(layer, torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def test_an_embedding_passes():
    check_layer_rule(nn.Embedding(4, 3), torch.tensor([[0, 0, 1], [2, 2, 2]]))


@pytest.mark.parametrize(("layer", "what"), [(SmallScale(), "norms"), (UnevenScale(), "the sum for weight")])
def test_a_wrong_rule_is_caught_and_named(layer, what):
    with pytest.raises(PrivacyError, match=f"{type(layer).__name__}.*{what}"):
        check_layer_rule(layer, torch.randn(4, 2, 3))
