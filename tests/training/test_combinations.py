"""Every clipping method with every noise, sampler and schedule, in `fit` and in a loop of one's own.

A combination trains, adds the noise it declares and is charged what its events compose to; or it is refused by name
before a record is read. What is refused is said here by rules of its own, and no class of the library is left out.
"""

import math
from functools import cache
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sordino import PrivacyEngine, accounting, fit
from sordino.clipping import (
    AdaClip,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.errors import InvalidArgument, UnknownSampler
from sordino.events import Composed, NoOp
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    CyclicPoisson,
    DenseStrategy,
    FixedEpochOrder,
    IndependentNoise,
    MinSeparation,
    Participation,
    SingleParticipation,
    Strategy,
    noise_matrix,
    optimize_banded,
    optimize_buffered,
    optimize_dense,
)
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedClipping
from sordino.sampling import FixedSizeSampling, RandomAllocationSampling, Sampler
from sordino.schedules import CosineSchedule, ExponentialSchedule, LinearSchedule, ListSchedule, Schedule, StepSchedule
from sordino.training import AdaptiveBudget, CorrelatedNoise, Plan, UnitAssignment

STEPS, RECORDS, WIDTH = 4, 16, 40
CLIPPINGS = {
    "adaclip": AdaClip(),
    "automatic": AutomaticClipping(),
    "flat": FlatClipping(),
    "global": GlobalClipping(threshold=2.0),
    "grouped": GroupedClipping(by="parameter"),
    "projected": ProjectedClipping(projections=50),
    "psac": PsacClipping(),
    "quantile": QuantileClipping(count_noise=30.0),
}
STRATEGIES = {
    "banded": optimize_banded(2, steps=STEPS),
    "inverse": BandedInverse.square_root(bands=2, steps=STEPS),
    "buffered": optimize_buffered(1, steps=STEPS),
    "tree": BinaryTree(steps=STEPS),
    "dense": optimize_dense(STEPS),
    "independent": IndependentNoise(steps=STEPS),
}
FIXED = {"poisson_sampling": False, "neighboring_relation": "replace_one"}
BATCHES = {
    "poisson": {"sample_rate": 0.5},
    "whole": {"sample_rate": 1.0},
    "shuffled": {"sample_rate": 0.5, **FIXED},
    "shuffled, add or remove": {"sample_rate": 0.5, "poisson_sampling": False},
    "secure": {"sample_rate": 0.5, "secure_mode": True},
    "users": {"sample_rate": 0.5, "privacy_unit": "user"},
    "noise falls": {"sample_rate": 0.5, "noise_multiplier": ExponentialSchedule(start=3.0, end=1.5, over=4)},
    "noise is listed": {"sample_rate": 0.5, "noise_multiplier": ListSchedule(values=(3.0, 2.0, 2.0, 1.5))},
    "bound falls": {"sample_rate": 0.5, "max_grad_norm": StepSchedule(start=0.5, factor=0.5, every=2)},
    "batch grows": {
        "sample_rate": LinearSchedule(start=0.25, end=0.5),
        "expected_batch_size": LinearSchedule(start=4.0, end=8.0),
    },
    "noise falls, shuffled": {
        "sample_rate": 0.5,
        "noise_multiplier": CosineSchedule(start=3.0, end=1.5, over=4),
        **FIXED,
    },
    **{f"budget, {name}": {"sample_rate": 1.0 if name != "renyi" else 0.5} for name in ("gaussian", "zcdp", "renyi")},
    "budget, shuffled": {"sample_rate": 0.5, **FIXED},
}


def correlated(strategy, participation, **options):
    return {"correlated_noise": CorrelatedNoise(strategy=strategy, participation=participation), **options}


CORRELATED = {
    "cycles": correlated(STRATEGIES["banded"], CyclicPoisson(groups=2, sample_rate=0.25), sample_rate=0.25),
    "cycles, too many bands": correlated(
        STRATEGIES["dense"], CyclicPoisson(groups=2, sample_rate=0.25), sample_rate=0.25
    ),
    "separation": correlated(
        STRATEGIES["banded"], MinSeparation(min_separation=2), sample_rate=0.5, poisson_sampling=False
    ),
    "fixed, wrong epoch": correlated(
        STRATEGIES["banded"], FixedEpochOrder(steps_per_epoch=4), sample_rate=0.5, poisson_sampling=False
    ),
    "epochs, sampled": correlated(STRATEGIES["banded"], FixedEpochOrder(steps_per_epoch=2), sample_rate=0.5),
    "cycles, secure": correlated(
        STRATEGIES["banded"], CyclicPoisson(groups=2, sample_rate=0.25), sample_rate=0.25, secure_mode=True
    ),
    "cycles, noise falls": correlated(
        STRATEGIES["banded"],
        CyclicPoisson(groups=2, sample_rate=0.25),
        sample_rate=0.25,
        noise_multiplier=LinearSchedule(start=2.0, end=1.0, over=4),
    ),
    "cycles, budget": correlated(STRATEGIES["banded"], CyclicPoisson(groups=2, sample_rate=0.25), sample_rate=0.25),
    **{
        f"{name}, epochs": correlated(one, FixedEpochOrder(steps_per_epoch=2), sample_rate=0.5, poisson_sampling=False)
        for name, one in STRATEGIES.items()
    },
    "tree, once": correlated(STRATEGIES["tree"], SingleParticipation(), sample_rate=0.25, poisson_sampling=False),
}
SETTINGS = BATCHES | CORRELATED
ADAPTS = ("adaclip", "quantile")


def refusal(clipping, setting, *, loop):
    """What must be refused, said once more: by what the proofs need, not by what the code checks."""
    options = SETTINGS[setting]
    scheduled = any(isinstance(value, Schedule) for value in options.values())
    if setting == "shuffled, add or remove" or (scheduled and setting.endswith("shuffled")):
        return UnknownSampler
    if loop and clipping == "projected":
        return InvalidArgument
    if setting in CORRELATED and clipping in (*ADAPTS, "projected"):
        # What moves from step to step can't be taken back later.
        return InvalidArgument
    if setting in ("fixed, wrong epoch", "epochs, sampled"):
        return UnknownSampler
    if setting in ("cycles, too many bands", "cycles, secure", "cycles, noise falls", "cycles, budget"):
        return InvalidArgument
    if setting == "budget, shuffled":
        return InvalidArgument
    if clipping == "projected":
        # Norms that are estimates have no bound: no noise but independent Gaussians was analyzed with them, no
        # relation but one record more or less; their Rényi divergence is infinite, so there is nothing for a filter to
        # add up; a loop of one's own has no losses to project.
        return InvalidArgument if setting in ("secure", "shuffled") or setting.startswith("budget") else None
    if clipping in ADAPTS and setting == "secure":
        return InvalidArgument
    if loop and setting == "users" and clipping == "adaclip":
        return InvalidArgument
    return None


class Records(Dataset):
    """Records without a gradient, so that what is released is noise; says how often it was read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return RECORDS

    def __getitem__(self, place):
        self.read += 1
        return torch.zeros(WIDTH), torch.zeros(30)


def losses(model, x, y):
    return (model(x) - y).square().sum(1)


def plan(clipping, setting):
    """`Plan(…)`, which refuses by itself what it can."""
    values = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.5,
        "steps": STEPS,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
        "clipping": CLIPPINGS[clipping],
    }
    return Plan(**{**values, **SETTINGS[setting]})


def budget_of(setting):
    kind = setting.removeprefix("budget, ")
    if kind == setting and not setting.endswith("budget"):
        return None
    kind = kind if kind in ("gaussian", "zcdp", "renyi") else "auto"
    return AdaptiveBudget(epsilon=50.0, delta=1e-5, choose=lambda step, released: 2.0, filter=kind)


def units_of(setting):
    return UnitAssignment(unit_ids=list(range(RECORDS)), num_units=RECORDS) if setting == "users" else None


class Lines:
    def __init__(self):
        self.events = []

    def append(self, *, step, event, epsilon):
        self.events.append(event)


def noise_of_first_step(the_plan):
    """Standard deviation of an entry of the first private gradient, by hand; None where the method scales its own."""
    now = the_plan.step_plan(0)
    scale = now.noise_multiplier * now.max_grad_norm * now.neighboring_relation.sensitivity_factor
    if isinstance(the_plan.clipping, AdaClip):
        return None
    if isinstance(the_plan.clipping, QuantileClipping):
        share = (now.noise_multiplier * now.neighboring_relation.sensitivity_factor / 2 / 30.0) ** 2
        scale /= math.sqrt(1 - share)
    if the_plan.mechanism is not None:
        first = abs(noise_matrix(the_plan.correlated_noise.strategy)[0, 0])
        scale *= first * the_plan.mechanism.sensitivity
    return scale / now.expected_batch_size


def check_noise(moved, the_plan):
    expected = noise_of_first_step(the_plan)
    if expected is not None:
        # 1200 draws: 12 % is six standard errors.
        assert float(moved.std()) == pytest.approx(expected, rel=0.12)


def in_fit(clipping, setting, data):
    the_plan = plan(clipping, setting)
    model, lines, moves = nn.Linear(WIDTH, 30, bias=False), Lines(), []
    before = model.weight.detach().clone()
    result = fit(
        model,
        losses,
        data,
        the_plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        transcript=lines,
        on_step=lambda done: moves.append((model.weight.detach() - before).double()),
        progress=False,
        rng=KeyedRNG(seed=7, reproducible=True),
        budget=budget_of(setting),
        units=units_of(setting),
    )
    check_noise(moves[0], the_plan)
    assert result.steps == STEPS
    return result.guarantee.epsilon, lines.events, the_plan


def in_a_loop(clipping, setting, data):
    options = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, **SETTINGS[setting]}
    secure = options.pop("secure_mode", False)
    options.pop("privacy_unit", None)
    options.setdefault("expected_batch_size", 8.0)
    model = nn.Linear(WIDTH, 30, bias=False)
    engine = PrivacyEngine(secure_mode=secure, seed=7, reproducible=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=max(1, round(RECORDS * options["sample_rate"]))),
        clipping=CLIPPINGS[clipping],
        budget=budget_of(setting),
        units=units_of(setting),
        **options,
    )
    the_plan = engine.private_model(model).plan
    taken = 0
    while taken < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            losses(model, x, y).mean().backward()
            optimizer.step()
            if not taken:
                check_noise((model.weight.detach() - before).double(), the_plan)
            taken += 1
            if taken == STEPS:
                break
    return engine.get_epsilon(1e-5), [engine.event()], the_plan


@cache
def composed(event, neighboring_relation):
    return accounting.epsilon(event, 1e-5, neighboring_relation=neighboring_relation).upper


# An engine has one rate, from its loader.
WAYS = [
    pytest.param(setting, loop, id=f"{setting}, {'loop' if loop else 'fit'}")
    for loop in (False, True)
    for setting in SETTINGS
    if not (loop and setting == "batch grows")
]


def check_training(clipping, setting, *, loop):
    claimed, events, the_plan = (in_a_loop if loop else in_fit)(clipping, setting, Records())
    charged = Composed(events=tuple(event for event in events if not isinstance(event, NoOp)))
    realized = composed(charged, the_plan.neighboring_relation)
    if budget_of(setting) is not None:
        assert realized <= claimed == 50.0
    else:
        assert claimed == pytest.approx(realized, rel=1e-6)
        if not loop:
            assert claimed == pytest.approx(the_plan.guarantee().epsilon, rel=1e-6)
    assert 0 < realized < math.inf


def allowed(setting, *, loop):
    return [clipping for clipping in CLIPPINGS if refusal(clipping, setting, loop=loop) is None]


@pytest.mark.parametrize(("setting", "loop"), WAYS)
def test_a_combination_without_a_proof_is_refused_by_name_before_a_record_is_read(setting, loop):
    for clipping in set(CLIPPINGS) - set(allowed(setting, loop=loop)):
        data = Records()
        with pytest.raises(refusal(clipping, setting, loop=loop), match="must"):
            (in_a_loop if loop else in_fit)(clipping, setting, data)
        assert data.read == 0, clipping


@pytest.mark.parametrize(("setting", "loop"), WAYS)
def test_a_combination_with_a_proof_adds_its_noise_and_is_charged_for_it(setting, loop):
    # One method for each setting, another for the next; all of them in the slow test.
    cheap = [clipping for clipping in allowed(setting, loop=loop) if clipping != "projected"]
    if cheap:
        check_training(cheap[list(SETTINGS).index(setting) % len(cheap)], setting, loop=loop)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "loop"), WAYS)
def test_every_combination_with_a_proof_adds_its_noise_and_is_charged_for_it(setting, loop):
    for clipping in allowed(setting, loop=loop):
        check_training(clipping, setting, loop=loop)


def test_no_class_is_left_out():
    assert {type(one) for one in CLIPPINGS.values()} == {
        kind for kind in Clipping.__subclasses__() if kind.__module__.startswith("sordino.")
    }
    noises = [options["correlated_noise"] for options in CORRELATED.values()]
    assert {type(noise.strategy) for noise in noises} == {
        BandedInverse, BandedToeplitz, BinaryTree, BufferedToeplitz, DenseStrategy, IndependentNoise
    }  # fmt: skip
    assert all(isinstance(noise.strategy, Strategy) for noise in noises)
    assert {type(noise.participation) for noise in noises} == set(get_args(Participation))
    used = {type(value) for options in SETTINGS.values() for value in options.values()}
    assert used >= {
        kind for kind in Schedule.__subclasses__() if not kind.__subclasses__() and kind.__module__[:8] == "sordino."
    }
    assert used >= {LinearSchedule, ExponentialSchedule, CosineSchedule}
    trained = [name for name in SETTINGS if refusal("flat", name, loop=False) is None]
    # Batches of fixed size and balls in bins: test_sampling_plans.py.
    elsewhere = {FixedSizeSampling, RandomAllocationSampling}
    assert {type(plan("flat", name).sampler) for name in trained} == set(get_args(Sampler)) - elsewhere
