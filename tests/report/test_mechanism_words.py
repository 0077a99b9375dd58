"""The report names what the plan holds: every clipping method, schedule, strategy and participation."""

import json

import pytest

from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
    clipping_to_dict,
)
from sordino.events import Gaussian
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    CyclicPoisson,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    SingleParticipation,
    optimize_buffered,
    optimize_dense,
)
from sordino.report import build_report, render_markdown
from sordino.report.formatting import describe_clipping, describe_noise, describe_schedule
from sordino.research import ProjectedClipping
from sordino.runs import RunFolder
from sordino.schedules import CosineSchedule, ExponentialSchedule, ListSchedule, StepSchedule, schedule_to_dict
from sordino.training import CorrelatedNoise, Plan

CLIPPINGS = [
    AdaClip(),
    AutomaticClipping(),
    AutomaticClipping(stability=0.0),
    FlatClipping(),
    GlobalClipping(threshold=2.0),
    GroupedClipping(by="layer"),
    GroupedClipping(by=(("a",), ("b", "c")), weights="proportional", inner=PsacClipping()),
    GroupedClipping(by="parameter", weights=(0.5, 0.25)),
    ProjectedClipping(projections=50),
    PsacClipping(),
    QuantileClipping(count_noise=30.0, inner=GroupedClipping(by="parameter")),
]


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
def test_a_clipping_method_has_the_words_that_it_gives_itself(clipping):
    body = json.loads(json.dumps(clipping_to_dict(clipping)))
    assert describe_clipping(body) == clipping.describe()


def test_no_clipping_method_is_forgotten():
    assert {type(one) for one in CLIPPINGS} == {
        kind for kind in Clipping.__subclasses__() if kind.__module__.startswith("sordino.")
    }


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (ExponentialSchedule(start=6.0, end=3.0), "schedule exponential: start 6, end 3"),
        (StepSchedule(start=1.0, factor=0.5, every=2), "schedule stepped: start 1, factor 0.5, every 2"),
        (CosineSchedule(start=1.0, end=0.5, over=10), "schedule cosine: start 1, end 0.5, over 10"),
        (ListSchedule(values=(1.0, 2.0)), "schedule listed: values 1, 2"),
        (
            ListSchedule(values=tuple(float(value) for value in range(1, 1001))),
            "schedule listed: 1,000 values, from 1 to",
        ),
    ],
)
def test_a_schedule_is_named_with_its_numbers_and_a_long_one_by_its_ends(schedule, words):
    found = describe_schedule(json.loads(json.dumps(schedule_to_dict(schedule))))
    assert found.startswith(words)
    assert len(found) < 80


@pytest.mark.parametrize(
    ("strategy", "participation", "words"),
    [
        (
            BandedToeplitz(coefficients=(1.0, 0.5), steps=8),
            CyclicPoisson(groups=4, sample_rate=0.1),
            "correlated, banded Toeplitz, 2 bands; a record is in at most one step of each cycle of 4",
        ),
        (
            BandedInverse.square_root(bands=3, steps=8),
            MinSeparation(min_separation=4, participations=2),
            "correlated, banded inverse, 3 bands; a record is in at most 2 steps, at least 4 apart",
        ),
        (
            optimize_buffered(1, steps=8),
            MinSeparation(min_separation=4),
            "correlated, buffered Toeplitz, 1 buffer; a record's steps are at least 4 apart",
        ),
        (
            BinaryTree(steps=8),
            SingleParticipation(),
            "correlated, binary tree, refined from below; a record is in at most one step",
        ),
        (
            optimize_dense(8),
            FixedEpochOrder(steps_per_epoch=8),
            "correlated, dense matrix; a record is in one step of each epoch of 8, always the same",
        ),
        (
            IndependentNoise(steps=8),
            SingleParticipation(),
            "correlated, by the identity; a record is in at most one step",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_correlated_noise_is_named_with_its_strategy_and_participation(strategy, participation, words):
    noise = json.loads(json.dumps(CorrelatedNoise(strategy=strategy, participation=participation).to_dict()))
    assert describe_noise({"correlated_noise": noise}, {}) == words


def test_the_report_of_a_run_names_strategy_method_and_schedule(tmp_path):
    common = {"max_grad_norm": 1.0, "steps": 8, "expected_batch_size": 8.0, "delta": 1e-5}
    noise = CorrelatedNoise(
        strategy=BandedToeplitz(coefficients=(1.0, 0.5), steps=8),
        participation=CyclicPoisson(groups=4, sample_rate=0.1),
    )
    plans = {
        "correlated": Plan(noise_multiplier=2.0, sample_rate=0.1, correlated_noise=noise, **common),
        "scheduled": Plan(
            noise_multiplier=ExponentialSchedule(start=6.0, end=3.0),
            sample_rate=1.0,
            clipping=GroupedClipping(by="layer"),
            **common,
        ),
    }
    for name, plan in plans.items():
        with RunFolder.create(tmp_path / name, plan=plan.to_json()) as run:
            run.append(step=0, event=Gaussian(noise_multiplier=2.0), epsilon=None)
    told = {name: render_markdown(build_report(RunFolder.open(tmp_path / name))) for name in plans}
    assert "banded Toeplitz, 2 bands; a record is in at most one step of each cycle of 4" in told["correlated"]
    assert "flat clipping of each layer, equal bounds" in told["scheduled"]
    assert "schedule exponential: start 6, end 3" in told["scheduled"]
    assert "independent from step to step" in told["scheduled"]
