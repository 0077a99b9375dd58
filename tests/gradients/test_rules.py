"""Every layer rule, over its options and shapes, equals autograd one record at a time."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import oracles
from sordino.clipping import FlatClipping
from sordino.gradients import GradientCapture, get_rule
from sordino.gradients.rules import convolution
from strategies import record_counts, seeds, sizes

TOLERANCE = 1e-5


def check(model, *batch, bound=0.5, expect_rule=True):
    """Norms, clipped sums and the bound on one record's contribution, against the oracle."""
    if expect_rule is not None:
        assert (get_rule(model) is not None) == expect_rule
    torch.manual_seed(1)
    with torch.no_grad():
        cotangent = torch.randn_like(model(*batch)) if batch[0].shape[0] else None

    def loss(module, record, weights):
        return (module(*record[:-1]).double() * weights).sum() if weights is not None else module(*record[:-1]).sum()

    weights = None if cotangent is None else cotangent.double()
    full = (*batch, weights) if weights is not None else (*batch, batch[0])
    expected = oracles.per_record_gradients(
        model, lambda m, record: loss(m, record, record[-1] if weights is not None else None), full
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    capture = GradientCapture(model)
    with capture.capturing(records=batch[0].shape[0]):
        total = loss(model, full, weights)
        assert capture.uncaptured_uses(total) == []
        total.backward()
    squared = capture.squared_norms()
    assert squared.shape == (batch[0].shape[0],)
    true = oracles.squared_norms(expected)
    # Positions of a record may cancel: rounding is relative to the parts, of the size of the largest record's.
    rounding = 1e-6 * float(true.max()) if len(true) else 0.0
    assert torch.allclose(squared, true, rtol=2e-5, atol=rounding)
    assert (squared >= true * (1 - 1e-5) - rounding).all()
    factors = FlatClipping().clip_factors(squared, max_grad_norm=bound)
    sums = {}
    capture.add_weighted_sums(factors, sums)
    reference = oracles.weighted_sums(expected, factors)
    # Clipped records may cancel: errors are relative to what one record contributes.
    scale = float((factors * true.sqrt()).max()) if len(true) else 0.0
    for parameter, wanted in zip(parameters, reference, strict=True):
        got = sums.get(parameter, torch.zeros_like(parameter))
        assert oracles.relative_error(got, wanted, floor=scale) < TOLERANCE
    capture.detach()
    assert all(p.grad is None and p.requires_grad for p in parameters)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40)
@given(records=record_counts, middle=st.lists(sizes, max_size=2), d=sizes, p=sizes, bias=st.booleans(), seed=seeds)
def test_linear_layers_on_any_rank_are_exact(records, middle, d, p, bias, seed):
    torch.manual_seed(seed)
    check(nn.Linear(d, p, bias=bias), normal(seed, records, *middle, d))


@pytest.mark.parametrize(("positions", "d", "p"), [(3, 40, 50), (40, 3, 50), (70, 6, 5), (300, 12, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_each_linear_kernel_is_exact(positions, d, p, bias):
    torch.manual_seed(0)
    check(nn.Linear(d, p, bias=bias), normal(2, 5, positions, d))


@pytest.fixture(params=["patches", "grouped"])
def per_record_kernel(request, monkeypatch):
    """Small convolutions by copied patches, as their positions are few, and as those of large images."""
    if request.param == "grouped":
        monkeypatch.setattr(convolution, "_FEW_POSITIONS", 0)


CONVOLUTIONS = [
    (kind, padding_mode, groups, dilation, stride)
    for kind, padding_mode, groups, dilation, stride in itertools.product(
        [1, 2, 3], ["zeros", "circular", "reflect", "replicate"], [1, 2], [1, 2], [1, 2]
    )
]


@pytest.mark.usefixtures("per_record_kernel")
@pytest.mark.parametrize(("dims", "mode", "groups", "dilation", "stride"), CONVOLUTIONS)
def test_convolutions_with_every_option_are_exact(dims, mode, groups, dilation, stride):
    torch.manual_seed(0)
    cls = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    layer = cls(2, 4, 2, padding=1, padding_mode=mode, groups=groups, dilation=dilation, stride=stride)
    check(layer, normal(3, 3, 2, *range(4, 4 + dims)))


@pytest.mark.usefixtures("per_record_kernel")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_with_even_and_odd_kernels_is_exact(dims, mode, kernel, bias):
    torch.manual_seed(0)
    cls = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    layer = cls(2, 3, kernel, padding="same", padding_mode=mode, bias=bias)
    check(layer, normal(3, 2, 2, *range(4, 4 + dims)))


@settings(deadline=None, max_examples=25)
@given(
    records=record_counts,
    channels=sizes,
    outputs=st.sampled_from([1, 3, 24]),
    size=st.integers(3, 6),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    few=st.sampled_from([0, 100]),
    seed=seeds,
)
def test_two_dimensional_convolutions_are_exact_over_shapes(
    records, channels, outputs, size, kernel, stride, padding, few, seed
):
    torch.manual_seed(seed)
    layer = nn.Conv2d(channels, outputs, kernel, stride=stride, padding=padding)
    with patch.object(convolution, "_FEW_POSITIONS", few):
        check(layer, normal(seed, records, channels, size, size + 1))


@pytest.mark.usefixtures("per_record_kernel")
@pytest.mark.parametrize(("channels", "outputs", "size", "kernel"), [(24, 32, 4, 3), (32, 64, 3, 2), (2, 3, 20, 5)])
@pytest.mark.parametrize("stride", [1, 2])
def test_late_and_early_convolutions_are_exact_by_their_own_kernels(channels, outputs, size, kernel, stride):
    torch.manual_seed(0)
    check(nn.Conv2d(channels, outputs, kernel, padding=1, stride=stride), normal(5, 4, channels, size, size))
    check(nn.Conv1d(channels, outputs, kernel, padding=1, stride=stride), normal(5, 4, channels, size))


@settings(deadline=None, max_examples=25)
@given(records=record_counts, middle=st.lists(sizes, max_size=2), padding=st.sampled_from([None, 0, 2]), seed=seeds)
def test_embeddings_with_duplicate_ids_and_padding_are_exact(records, middle, padding, seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 4, (records, *middle), generator=torch.Generator().manual_seed(seed))
    check(nn.Embedding(4, 3, padding_idx=padding), ids)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bags_with_duplicate_ids_are_exact(mode, padding):
    torch.manual_seed(0)
    ids = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3], [1, 2, 1, 0]])
    check(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding), ids, expect_rule=mode != "max")


def test_embedding_bags_with_sample_weights_are_exact():
    torch.manual_seed(0)
    ids = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3], [1, 2, 1, 0]])
    bag = nn.EmbeddingBag(5, 3, mode="sum")

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = bag

        def forward(self, ids, weights):
            return self.bag(ids, per_sample_weights=weights)

    check(Weighted(), ids, torch.rand(3, 4), expect_rule=None)


@settings(deadline=None, max_examples=25)
@given(records=record_counts, middle=st.lists(sizes, max_size=2), affine=st.sampled_from([1, 2]), seed=seeds)
def test_layer_and_rms_norms_are_exact_over_shapes(records, middle, affine, seed):
    torch.manual_seed(seed)
    shape = (4, 3)[-affine:]
    x = normal(seed, records, *middle, *shape)
    for layer in [nn.LayerNorm(shape), nn.LayerNorm(shape, bias=False), nn.RMSNorm(shape, eps=1e-6)]:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(normal(seed, *parameter.shape))
        check(layer, x)


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(6),
        lambda: nn.LayerNorm(6, bias=False),
        lambda: nn.RMSNorm(6),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.GroupNorm(1, 4),
        lambda: nn.GroupNorm(4, 4),
        lambda: nn.InstanceNorm1d(4, affine=True),
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(),
        lambda: nn.BatchNorm1d(4).eval(),
    ],
)
def test_normalisations_are_exact_first_and_after_another_layer(make, leading):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), make()) if leading else make()
    model[-1].eval() if leading and not make().training else None
    check(model, normal(7, 5, 4, 6), expect_rule=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        lambda: nn.RMSNorm(6, elementwise_affine=False),
        lambda: nn.GroupNorm(2, 4, affine=False),
    ],
)
def test_normalisations_without_parameters_pass_through(make):
    torch.manual_seed(0)
    check(nn.Sequential(nn.Conv1d(4, 4, 1), make()), normal(7, 5, 4, 6), expect_rule=None)


@pytest.mark.parametrize("records", [0, 1, 2, 5])
def test_a_whole_network_is_exact(records):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 2),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    )
    check(model, normal(9, records, 1, 6, 6), expect_rule=None)
