"""Golden values: every reference case that the room can answer lies inside our interval."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sordino.accounting import calibrate_noise_multiplier, delta, epsilon, renyi_divergence
from sordino.accounting.composition import flatten
from sordino.accounting.contour import contour_epsilon
from sordino.accounting.directions import directions
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Composed, Event, Gaussian, Laplace, PoissonSampled, SelfComposed

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "accounting.json").read_text())["cases"]
}
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


def sampled(q: float, sigma: float, steps: int = 1) -> Event:
    return SelfComposed(event=PoissonSampled(sample_rate=q, event=Gaussian(noise_multiplier=sigma)), count=steps)


def composition(params: dict) -> Event:
    if params.get("formula") == "het1000_sig":
        return Composed(events=tuple(Gaussian(noise_multiplier=float(s)) for s in np.linspace(20, 60, 1000)))
    if params.get("formula") == "het1000_qs":
        rates, noises = np.linspace(0.005, 0.02, 1000), np.linspace(0.8, 1.5, 1000)
        return Composed(events=tuple(sampled(float(q), float(s)) for q, s in zip(rates, noises, strict=True)))
    if "components" not in params:
        return sampled(params["q"], params["sigma"], params["T"])
    parts: list[Event] = []
    for part in params["components"]:
        if part["kind"] == "poisson_subsampled_gaussian":
            parts.append(sampled(part["q"], part["sigma"], part["count"]))
        elif part["kind"] == "laplace":
            parts.append(SelfComposed(event=Laplace(noise_multiplier=part["b"]), count=part["count"]))
        else:
            parts.append(SelfComposed(event=Gaussian(noise_multiplier=part["sigma"]), count=part["count"]))
    return Composed(events=tuple(parts))


def expected(case: dict) -> tuple[float, float]:
    if "truth" in case:
        return case["truth"] - case["abs_tol"], case["truth"] + case["abs_tol"]
    return case["lower"], case["upper"]


def assert_overlaps(lower: float, upper: float, case: dict) -> None:
    low, high = expected(case)
    assert lower <= high, f"our lower end {lower!r} is above the truth"
    assert upper >= low, f"our upper end {upper!r} is below the truth"


COMPOSITIONS = [
    name for name, case in CASES.items() if name.startswith(("comp_", "poisson_q")) and name not in {"comp_lap50"}
]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_is_inside_the_certified_interval_and_the_interval_is_narrow(name):
    case = CASES[name]
    answer = epsilon(composition(case["params"]), case["delta"])
    assert answer.accountant in {"contour", "closed_form"}
    assert_overlaps(answer.lower, answer.upper, case)
    assert answer.width <= 1e-6 * answer.upper


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dir_add_")])
def test_the_adding_direction_alone_is_inside_its_interval(name):
    case = CASES[name]
    _, adding = directions(flatten(composition(case["params"])), NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert_overlaps(*contour_epsilon(adding, case["delta"]), case)


def test_replace_one_on_a_poisson_sample_uses_the_two_sided_pair():
    case = CASES["replace_q.01_s1_T1000"]
    params = case["params"]
    # The case gives std / clipping norm; under replace-one the sensitivity is twice the clipping norm.
    event = sampled(params["q"], params["sigma"] / 2, params["T"])
    answer = epsilon(event, case["delta"], relation=REPLACE_ONE)
    assert_overlaps(answer.lower, answer.upper, case)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("rdp_")])
def test_renyi_divergence_of_a_sampled_gaussian_is_the_published_value(name):
    case = CASES[name]
    params = case["params"]
    value = renyi_divergence(sampled(params["q"], params["sigma"]), params["alpha"])
    assert value == pytest.approx(case["truth"], abs=case["abs_tol"], rel=1e-12)


def test_calibrated_noise_is_the_reference_rounded_up():
    case = CASES["calib_sigma"]
    params = case["params"]
    noise = calibrate_noise_multiplier(
        lambda z: sampled(params["q"], z, params["T"]), target_epsilon=params["target_epsilon"], target_delta=1e-5
    )
    assert case["truth"] <= noise <= case["truth"] + 1e-6


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("agm_sigma")])
def test_calibrated_gaussian_noise_is_the_analytic_one_rounded_up(name):
    case = CASES[name]
    noise = calibrate_noise_multiplier(
        lambda z: Gaussian(noise_multiplier=z),
        target_epsilon=case["params"]["target_epsilon"],
        target_delta=case["delta"],
    )
    assert case["truth"] <= noise <= case["truth"] * (1 + 1e-5)


def test_no_sampling_and_no_steps_cost_nothing_and_no_noise_costs_everything():
    assert epsilon(sampled(0.0, 1.0, 100), 0.01).upper == CASES["edge_q0"]["truth"] == 0
    assert epsilon(sampled(0.1, 1.0, 0), 0.01).upper == CASES["edge_T0"]["truth"] == 0
    assert math.isinf(epsilon(Gaussian(noise_multiplier=0.0), 1e-5).lower)
    assert math.isinf(epsilon(Gaussian(noise_multiplier=1.0), 0.0).lower)
    pure = epsilon(SelfComposed(event=Laplace(noise_multiplier=10.0), count=50), 0.0)
    assert_overlaps(pure.lower, pure.upper, CASES["edge_lap_pure"])


@pytest.mark.parametrize(
    "question",
    [
        lambda: epsilon(sampled(0.01, math.nan, 10), 1e-5),
        lambda: epsilon(sampled(0.01, 1.0, 10), math.nan),
        lambda: epsilon(sampled(1.5, 1.0, 10), 1e-5),
        lambda: epsilon(sampled(-0.1, 1.0, 10), 1e-5),
        lambda: epsilon(sampled(0.01, 1.0, -1), 1e-5),
        lambda: epsilon(sampled(0.01, 1.0, 10), -1e-5),
        lambda: delta(sampled(0.01, 1.0, 10), math.nan),
        lambda: delta(sampled(0.01, 1.0, 10), -1.0),
    ],
)
def test_a_value_outside_its_range_is_refused(question):
    with pytest.raises(InvalidArgument):
        question()
