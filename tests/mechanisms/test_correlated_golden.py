"""Every row of the published values, read from one file, is asked of the library; no row may be left out."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sordino import accounting
from sordino.mechanisms.correlated import (
    BandedToeplitz,
    BinaryTree,
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    FixedEpochOrder,
    MinSeparation,
    SingleParticipation,
    max_error,
    mean_error,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
    prefix_variances,
    sensitivity,
    square_root_coefficients,
    tree_sensitivity,
)

FILE = Path(__file__).parents[1] / "golden" / "correlated_noise.json"
TRUTH = {name: value for name, value in json.loads(FILE.read_text()).items() if name != "comment"}
ONCE = SingleParticipation()
# Values are given to six digits after the point.
ROUNDING = 6e-7


def square_root(steps):
    return BandedToeplitz(coefficients=square_root_coefficients(steps), steps=steps)


def errors(strategy, participation=ONCE):
    return {
        "rmse": partial(mean_error, strategy, participation),
        "max": partial(max_error, strategy, participation),
        "sensitivity": partial(sensitivity, strategy, participation),
    }


def check(row, found, *, known, rounding=ROUNDING):
    """Every number of `row` besides those in `known`, which say what it is of."""
    asked = set(row) - set(known)
    assert asked <= set(found)
    assert asked
    for name in asked:
        assert found[name]() == pytest.approx(row[name], abs=rounding), name


def check_square_root(row):
    check(row, errors(square_root(row["n"])), known=("n",))


def check_noising(value, place):
    assert square_root(8).noise_column()[place] == pytest.approx(value, abs=1e-12)


def check_banded(row):
    check(row, errors(optimize_banded(row["bands"], steps=row["n"])), known=("n", "bands"))


def check_dense(row):
    epochs = row.get("epochs", 1)
    strategy, participation = (
        optimize_dense(row["n"], epochs=epochs),
        FixedEpochOrder(steps_per_epoch=row["n"] // epochs),
    )
    # The published ones come from an iteration that was ended a little before the optimum.
    assert row["rmse"] * (1 - 1e-5) < mean_error(strategy, participation) < row["rmse"] + ROUNDING


def check_separation(row):
    kinds = {"sqrt_toeplitz": square_root, "optimal_banded": partial(optimize_banded, row.get("bands", 0))}
    kind = kinds[row["kind"]]
    strategy = kind(row["n"]) if row["kind"] == "sqrt_toeplitz" else kind(steps=row["n"])
    separation = row.get("separation", row.get("bands"))
    participation = MinSeparation(min_separation=separation, participations=row["participations"])
    check(row, errors(strategy, participation), known=("kind", "n", "bands", "separation", "participations"))


def check_buffers(row):
    check(row, errors(optimize_buffered(row["buffers"], steps=row["n"])), known=("n", "buffers"), rounding=1.1e-6)


def check_tree(row):
    tree = BinaryTree(steps=row["n"])
    of_nodes, plain, refined = tree_sensitivity(row["n"]), tree.unrefined_variances(), prefix_variances(tree)
    found = {
        "naive_rmse": lambda: of_nodes * math.sqrt(plain.mean()),
        "naive_max": lambda: of_nodes * math.sqrt(plain.max()),
        "honaker_rmse": lambda: of_nodes * math.sqrt(refined.mean()),
        "honaker_max": lambda: of_nodes * math.sqrt(refined.max()),
    }
    check(row, found, known=("n",))
    # What is really added has less sensitivity than its nodes one by one.
    assert mean_error(tree) <= found["honaker_rmse"]() * (1 + 1e-12) < found["naive_rmse"]()


def check_tree_sensitivity(row):
    # Their separation is the number of steps between two participations.
    found = tree_sensitivity(row["steps"], separation=row["separation"] + 1, participations=row["participations"])
    assert found**2 == pytest.approx(row["value"], abs=1e-9)


def check_tradeoff(setting, bands):
    rate = setting["batch"] / setting["n"]
    mechanism = partial(
        CorrelatedGaussianMechanism,
        strategy=optimize_banded(bands, steps=setting["steps"]),
        participation=CyclicPoisson(groups=bands, sample_rate=rate),
        l2_sensitivity=1.0,
    )
    z = accounting.calibrate_noise_multiplier(
        lambda noise: mechanism(noise_multiplier=noise).event(),
        target_epsilon=setting["epsilon"],
        delta=setting["delta"],
    )
    # Their accountant is one on a lattice, which needs a little more noise than the exact one.
    assert setting["noise_multiplier_by_bands"][str(bands)] * (1 - 2e-3) < z
    assert z < setting["noise_multiplier_by_bands"][str(bands)] * (1 + 1e-5)
    error = z * mean_error(optimize_banded(bands, steps=setting["steps"]))
    assert error == pytest.approx(setting["prefix_rmse_by_bands"][str(bands)], abs=0.025)


ROWS = {
    "sqrt_toeplitz": (check_square_root, None),
    "sqrt_toeplitz_noising_coefficients": (check_noising, "place"),
    "optimal_banded_toeplitz": (check_banded, None),
    "dense_optimum_sensitivity_1": (check_dense, None),
    "min_separation": (check_separation, None),
    "blt_max": (check_buffers, None),
    "binary_tree": (check_tree, None),
    "tree_sensitivity_squared": (check_tree_sensitivity, None),
}
CASES = [
    pytest.param(check, (row, place) if how == "place" else (row,), id=f"{name}-{place}")
    for name, (check, how) in ROWS.items()
    for place, row in enumerate(TRUTH[name])
]


@pytest.mark.parametrize(("check", "given"), CASES)
def test_the_library_has_the_published_value(check, given):
    check(*given)


@pytest.mark.parametrize("bands", sorted(map(int, TRUTH["banded_dpsgd_tradeoff"]["noise_multiplier_by_bands"])))
def test_bands_trade_noise_for_amplification_as_published(bands):
    check_tradeoff(TRUTH["banded_dpsgd_tradeoff"], bands)


def test_no_row_is_left_out():
    assert set(TRUTH) == {*ROWS, "banded_dpsgd_tradeoff"}
    tradeoff = TRUTH["banded_dpsgd_tradeoff"]
    assert set(tradeoff["prefix_rmse_by_bands"]) == set(tradeoff["noise_multiplier_by_bands"])


@pytest.mark.parametrize("steps", [1, 7, 64])
def test_an_unrefined_prefix_is_the_sum_of_its_nodes(steps):
    # The slow way: cut the prefix into the largest complete nodes, one after the other.
    for end, variance in zip(range(1, steps + 1), BinaryTree(steps=steps).unrefined_variances(), strict=True):
        nodes, low = 0, 0
        while low < end:
            width = 2 ** int(math.log2(end - low))
            assert low % width == 0
            nodes, low = nodes + 1, low + width
        assert variance == nodes
    assert np.all(prefix_variances(BinaryTree(steps=steps)) <= BinaryTree(steps=steps).unrefined_variances() + 1e-12)
