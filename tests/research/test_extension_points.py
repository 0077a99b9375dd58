"""Studies plug into the core as a user's own methods would: a clipping method with its own event and sums, a filter."""

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import sordino
from sordino.clipping import Clipping, FlatClipping, clipping_from_dict
from sordino.errors import InvalidArgument
from sordino.events import ProjectedGaussian
from sordino.optimizers import GradientFilter
from sordino.training import Plan
from sordino.training.accumulators import LossAccumulator


@dataclass(frozen=True, kw_only=True)
class HalvedClipping(Clipping):
    """Half of what flat clipping leaves: a method of a user, which no file of sordino knows."""

    kind: ClassVar[str] = "test_halved"

    def describe(self):
        return "half of flat clipping"

    def clip_factors(self, squared_norms, *, max_grad_norm):
        return FlatClipping().clip_factors(squared_norms, max_grad_norm=max_grad_norm) / 2


class ZeroSums(LossAccumulator):
    def sums(self, loss, batch, *, records):
        return {}


@dataclass(frozen=True, kw_only=True)
class BlindClipping(HalvedClipping):
    """A method that states its own event and takes its own sums."""

    kind: ClassVar[str] = "test_blind"
    exact_norms: ClassVar[bool] = False
    plain_sums: ClassVar[bool] = False

    def step_event(self, noise_multiplier):
        return ProjectedGaussian(noise_multiplier=noise_multiplier, projections=7)

    def make_accumulator(self, capture, rng):
        return ZeroSums()


def plan(clipping, **changes):
    return Plan(
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        steps=2,
        expected_batch_size=8.0,
        delta=1e-5,
        clipping=clipping,
        **changes,
    )


def engine(clipping):
    model = nn.Linear(2, 1)
    sordino.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader([torch.zeros(2)] * 4, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
    )


def fitted(clipping):
    model = nn.Linear(3, 2)
    records = (torch.randn(16, 3), torch.randint(2, (16,)))

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    return sordino.fit(model, loss, records, plan(clipping), progress=False)


@pytest.mark.parametrize("clipping", [HalvedClipping(), BlindClipping()])
def test_a_users_method_trains_and_comes_back_from_a_plan_file(clipping):
    assert Plan.from_json(plan(clipping).to_json()) == plan(clipping)
    assert fitted(clipping).guarantee.epsilon == plan(clipping).guarantee().epsilon


def test_a_method_with_its_own_event_is_charged_by_it():
    event = plan(BlindClipping()).step_plan(0).event
    assert event == ProjectedGaussian(noise_multiplier=2.0, projections=7)
    assert plan(BlindClipping()).guarantee().epsilon > plan(HalvedClipping()).guarantee().epsilon


@pytest.mark.parametrize(
    "use",
    [
        lambda clipping: plan(clipping, neighboring_relation="replace_one"),
        lambda clipping: plan(clipping, loss_release=sordino.training.LossRelease(max_loss=2.0)),
        engine,
    ],
)
def test_what_needs_exact_norms_refuses_a_users_method_without_them_by_name(use):
    with pytest.raises(InvalidArgument, match="BlindClipping"):
        use(BlindClipping())


def test_a_kind_names_one_method_and_an_unknown_one_says_what_to_import():
    with pytest.raises(InvalidArgument, match="'flat' of FlatClipping"):
        type("FalseFlat", (Clipping,), {"kind": "flat"})
    assert clipping_from_dict({"kind": "flat"}) == FlatClipping()
    with pytest.raises(InvalidArgument, match="import the module that defines the method"):
        clipping_from_dict({"kind": "of another package"})


def test_an_accumulator_of_another_type_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(BlindClipping):
        kind: ClassVar[str] = "test_wrong"

        def make_accumulator(self, capture, rng):
            return object()

    with pytest.raises(InvalidArgument, match="LossAccumulator"):
        fitted(Wrong())


def test_a_users_filter_may_move_the_parameters_around_the_step():
    class Overshoot(GradientFilter):
        name = "overshoot"

        def filter_gradient(self, gradient, memory):
            return 2 * gradient

        def before_step(self, parameter, memory):
            memory["start"] = parameter.clone()

        def after_step(self, parameter, memory):
            parameter.add_(parameter - memory.pop("start"))

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    Overshoot().attach(optimizer)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -4.0
    assert optimizer.state[weight]["overshoot"] == {}


def test_nothing_but_commands_loads_a_study():
    code = (
        "import sys, sordino.training.fit, sordino.training.engine, sordino.estimators, sordino.audit.attacks, "
        "sordino.federated, sordino.tuning, sordino.recipes, sordino.verification, sordino.report, sordino.cli.app\n"
        "assert not [name for name in sys.modules if name.startswith('sordino.research')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
