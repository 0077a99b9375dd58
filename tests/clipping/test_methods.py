import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino.clipping import (
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
    clipping_from_dict,
    clipping_to_dict,
    get_clipping,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument

METHODS = [
    FlatClipping(),
    AutomaticClipping(),
    AutomaticClipping(stability=0.0),
    PsacClipping(),
    GlobalClipping(),
    GlobalClipping(threshold=4.0),
    GroupedClipping(inner=AutomaticClipping()),
    QuantileClipping(count_noise=3.0, inner=GroupedClipping(by="block", weights="proportional")),
]
SIZES = {"stem.weight": 60, "stem.bias": 4, "blocks.0.a.weight": 16, "blocks.0.b.weight": 16, "blocks.1.a.weight": 16}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())
@given(norm=st.floats(min_value=0, max_value=1e150), bound=st.floats(min_value=1e-6, max_value=1e6))
def test_no_factor_lets_a_gradient_exceed_the_bound(method, norm, bound):
    factor = float(method.clip_factors(torch.tensor([norm**2], dtype=torch.float64), max_grad_norm=bound)[0])
    assert 0 <= factor < math.inf
    assert factor * norm <= bound


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())
def test_a_gradient_that_is_not_finite_counts_nothing(method):
    squared = torch.tensor([math.inf, math.nan, -math.inf], dtype=torch.float64)
    assert method.clip_factors(squared, max_grad_norm=1.0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())
def test_the_bounds_of_all_groups_together_never_exceed_the_whole(method):
    groups, bounds = method.groups(SIZES), method.clip_norms(SIZES, max_grad_norm=0.3)
    assert sorted(name for group in groups for name in group) == sorted(SIZES)
    assert len(groups) == len(bounds)
    assert 0.3 * (1 - 1e-9) <= math.sqrt(math.fsum(bound**2 for bound in bounds)) <= 0.3


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())
def test_a_method_survives_json_and_doubles_its_sensitivity_when_a_record_is_replaced(method):
    assert clipping_from_dict(clipping_to_dict(method)) == method
    assert method.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE, max_grad_norm=0.7) == 0.7
    assert method.sensitivity(NeighboringRelation.REPLACE_ONE, max_grad_norm=0.7) == 1.4


def test_methods_give_the_factors_of_their_papers():
    squared = torch.tensor([0.25, 4.0, 100.0], dtype=torch.float64)
    norms = squared.sqrt()
    near = {"rtol": 1e-5, "atol": 0.0}
    assert torch.allclose(AutomaticClipping().clip_factors(squared, max_grad_norm=2.0), 2 / (norms + 0.01), **near)
    assert torch.allclose(
        AutomaticClipping(stability=0.0).clip_factors(squared, max_grad_norm=2.0), 2 / norms, rtol=1e-5, atol=0.0
    )
    assert torch.allclose(
        PsacClipping(stability=0.1).clip_factors(squared, max_grad_norm=2.0), 2 / (norms + 0.1 / (norms + 0.1)), **near
    )
    kept = GlobalClipping().clip_factors(squared, max_grad_norm=2.1)
    assert kept.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("parameter", tuple((name,) for name in SIZES)),
        (
            "layer",
            (("stem.weight", "stem.bias"), ("blocks.0.a.weight",), ("blocks.0.b.weight",), ("blocks.1.a.weight",)),
        ),
        ("block", (("stem.weight", "stem.bias"), ("blocks.0.a.weight", "blocks.0.b.weight"), ("blocks.1.a.weight",))),
        ((("blocks.1.",), ("stem.", "blocks.")), (tuple(list(SIZES)[:4]), ("blocks.1.a.weight",))),
    ],
)
def test_groups_follow_the_names(by, groups):
    assert GroupedClipping(by=by).groups(SIZES) == groups


def test_proportional_bounds_follow_the_roots_of_the_sizes():
    bounds = GroupedClipping(by="block", weights="proportional").clip_norms(SIZES, max_grad_norm=1.0)
    assert bounds == pytest.approx([math.sqrt(64 / 112), math.sqrt(32 / 112), math.sqrt(16 / 112)])


@pytest.mark.parametrize("neighboring_relation", NeighboringRelation)
@pytest.mark.parametrize("groups", [1, 4])
def test_counts_and_gradient_together_cost_what_the_noise_multiplier_says(neighboring_relation, groups):
    z, noise = 1.3, 6.0
    moving = QuantileClipping(count_noise=noise).init_state([0.5] * groups)
    scale, sensitivity = moving.joint_scale(neighboring_relation, z)
    factor = neighboring_relation.sensitivity_factor
    gradient, count = factor * math.sqrt(groups) * 0.5, factor * math.sqrt(groups) * 0.5
    stddev = z * sensitivity
    assert stddev / scale == pytest.approx(noise)
    assert sensitivity == pytest.approx(math.hypot(gradient, scale * count))
    # Andrew et al. 2021, theorem 1: z⁻² = z_Δ⁻² + z_b⁻².
    assert (stddev / gradient) ** -2 + (noise / count) ** -2 == pytest.approx(z**-2)


def test_a_count_noise_that_costs_more_than_the_whole_step_is_refused():
    with pytest.raises(InvalidArgument, match="count_noise"):
        QuantileClipping(count_noise=0.6).init_state([1.0]).joint_scale(NeighboringRelation.ADD_OR_REMOVE_ONE, 1.3)


def test_bounds_rise_while_too_many_are_clipped_and_fall_while_too_few():
    moving = QuantileClipping(count_noise=3.0, quantile=0.5, learning_rate=0.2).init_state([1.0])
    squares = torch.tensor([[0.25, 4.0, 9.0, torch.inf]], dtype=torch.float64)
    assert moving.count_below(squares).tolist() == [-1.0]
    moving.update([-1.0], expected_batch_size=4.0)
    assert moving.values[0] == pytest.approx(math.exp(-0.2 * (0.25 - 0.5)))
    moving.update([1e9], expected_batch_size=4.0)
    assert 0 < moving.values[0] < 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: AutomaticClipping(stability=-1.0), "stability"),
        (lambda: PsacClipping(stability=0.0), "stability"),
        (lambda: GlobalClipping(threshold=0.0), "threshold"),
        (lambda: GroupedClipping(by="color"), "by"),
        (lambda: GroupedClipping(weights="random"), "weights"),
        (lambda: GroupedClipping(inner=GroupedClipping()), "inner"),
        (lambda: GroupedClipping(inner=QuantileClipping(count_noise=10.0)), "inner"),
        (lambda: QuantileClipping(count_noise=1.0, inner=QuantileClipping(count_noise=1.0)), "inner"),
        (lambda: QuantileClipping(count_noise=1.0, quantile=1.0), "quantile"),
        (lambda: get_clipping("hard"), "clipping"),
        (lambda: clipping_from_dict({"kind": "hard"}), "clipping"),
        (lambda: clipping_from_dict({"kind": "flat", "extra": 1}), "flat"),
    ],
)
def test_bad_values_are_refused_by_name(make, name):
    with pytest.raises(InvalidArgument, match=name):
        make()
