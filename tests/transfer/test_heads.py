"""Fresh heads: found by structure, zero, and only what was asked for is trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino.errors import InvalidArgument, UnsupportedModule
from sordino.training import Plan
from sordino.training.fit import fit
from sordino.transfer import FixedNorm, replace_head


class Net(nn.Module):
    """A network with its activation registered after the head, as some published ones have it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GroupNorm(2, 6))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 100))
        self.activation = nn.ReLU6()

    def forward(self, x):
        return self.classifier(self.pool(self.activation(self.body(x))).flatten(1))


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("head", {"classifier.1.weight", "classifier.1.bias"}),
        ("norms", {"classifier.1.weight", "classifier.1.bias", "body.2.weight", "body.2.bias"}),
        ("biases", {"classifier.1.weight", "classifier.1.bias", "body.0.bias", "body.2.bias"}),
        (
            "all",
            {
                "classifier.1.weight",
                "classifier.1.bias",
                "body.0.weight",
                "body.0.bias",
                "body.2.weight",
                "body.2.bias",
            },
        ),
    ],
)
def test_the_head_and_what_was_asked_for_is_trained(trainable, expected):
    model = Net()
    head = replace_head(model, 10, trainable=trainable)
    assert model.classifier[1] is head
    assert (head.in_features, head.out_features) == (6, 10)
    assert trained(model) == expected
    assert not model(torch.ones(2, 3, 8, 8)).any()


def test_a_fixed_norm_is_batch_norm_in_evaluation_mode_whatever_the_mode():
    generator = torch.Generator().manual_seed(0)
    norm = nn.BatchNorm2d(6)
    for tensor in norm.state_dict().values():
        if tensor.dim():
            tensor.uniform_(0.5, 2.0, generator=generator)
    x = torch.linspace(-3, 3, 4 * 6 * 9).reshape(4, 6, 3, 3)
    torch.testing.assert_close(FixedNorm(norm).train()(x), norm.eval()(x).detach())
    plain = nn.BatchNorm1d(6, affine=False)
    torch.testing.assert_close(FixedNorm(plain)(x[:, :, 0, 0]), plain.eval()(x[:, :, 0, 0]))


def test_a_model_with_batch_norm_trains_privately_once_its_head_is_replaced():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items() if "classifier" not in name}
    replace_head(model, 2)
    plan = Plan(noise_multiplier=2.0, max_grad_norm=1.0, sample_rate=0.5, steps=3, expected_batch_size=8.0, delta=1e-5)
    data = (torch.linspace(0, 1, 16 * 3 * 64).reshape(16, 3, 8, 8), torch.arange(16) % 2)
    result = fit(
        model,
        lambda net, x, y: F.cross_entropy(net(x), y, reduction="none"),
        data,
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        progress=False,
    )
    assert result.steps == 3
    after = result.model.state_dict()
    assert after["classifier.1.weight"].any()
    assert all(torch.equal(after[name], value) for name, value in before.items() if name in after)


def test_a_named_head_is_replaced_and_a_wrong_name_refused():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
    replace_head(model, 3, head="0")
    assert model[0].out_features == 3
    with pytest.raises(InvalidArgument, match="head"):
        replace_head(model, 3, head="1")
    with pytest.raises(InvalidArgument, match="trainable"):
        replace_head(model, 3, trainable="some")


def test_models_without_a_head_of_their_own_are_refused():
    with pytest.raises(UnsupportedModule, match="none"):
        replace_head(nn.Sequential(nn.Conv2d(3, 4, 3)), 2)
    with pytest.raises(UnsupportedModule, match="alone"):
        replace_head(nn.Linear(3, 4), 2)
    tied = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(UnsupportedModule, match="shares with 0"):
        replace_head(tied, 2)
    with pytest.raises(UnsupportedModule, match="stored statistics"):
        replace_head(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 4)), 2)
