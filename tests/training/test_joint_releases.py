"""Whatever a step releases besides its gradient is one Gaussian of the plan's event, under every relation and sampler.

What hostile records add is measured at the door of the mechanisms; what that costs is integrated on a lattice of the
plane that absence and two records span. Nothing of `sordino.accounting` has a part in the integration.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from sordino import accounting
from sordino.clipping import AdaClip, AutomaticClipping, GlobalClipping, GroupedClipping, PsacClipping, QuantileClipping
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.federated import PrivateServer
from sordino.gradients import GradientCapture
from sordino.mechanisms.base import observe_releases
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.training import LossRelease, Plan, PrivateStep
from sordino.training.noisy_releases import NormRelease
from sordino.training.record_source import UnitMicrobatch

RELATIONS = list(NeighboringRelation)
Z = 0.8
# Each kind of release: what the plan says, and the share of the norm.
KINDS = {
    "flat": ({}, None),
    "automatic": ({"clipping": AutomaticClipping()}, None),
    "keep or drop": ({"clipping": GlobalClipping()}, None),
    "groups": ({"clipping": GroupedClipping(by="layer")}, None),
    "losses": ({"loss_release": LossRelease(max_loss=2.0, budget_fraction=0.02)}, None),
    "mostly losses": ({"loss_release": LossRelease(max_loss=2.0, budget_fraction=0.7)}, None),
    "losses, other clipping": (
        {"clipping": PsacClipping(), "loss_release": LossRelease(max_loss=0.3, budget_fraction=0.3)},
        None,
    ),
    "counts": ({"clipping": QuantileClipping(count_noise=2.0)}, None),
    "counts of groups": ({"clipping": QuantileClipping(count_noise=2.0, inner=GroupedClipping(by="layer"))}, None),
    "counts and losses": (
        {"clipping": QuantileClipping(count_noise=2.0), "loss_release": LossRelease(max_loss=2.0, budget_fraction=0.1)},
        None,
    ),
    "norm": ({}, 0.3),
    "norm and losses": ({"loss_release": LossRelease(max_loss=2.0, budget_fraction=0.4)}, 0.3),
    "norm, counts and losses": (
        {"clipping": QuantileClipping(count_noise=2.0), "loss_release": LossRelease(max_loss=2.0, budget_fraction=0.1)},
        0.2,
    ),
    "AdaClip": ({"clipping": AdaClip()}, None),
    "whole numbers": ({"secure_mode": True}, None),
    "whole numbers in groups": ({"secure_mode": True, "clipping": GroupedClipping(by="parameter")}, None),
}
# A record is a factor of its gradient, and its loss.
HOSTILE = [(gradient, loss) for gradient in (1e6, -1e6, 0.3, 1e-4, math.nan) for loss in (0.0, 1e9, 0.2, math.nan)]


def plan(neighboring_relation, **changes):
    values = {
        "noise_multiplier": Z,
        "max_grad_norm": 0.5,
        "sample_rate": 0.1,
        "steps": 3,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
        "neighboring_relation": neighboring_relation,
    }
    return Plan(**{**values, **changes})


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))


class Listener:
    """Keeps what a mechanism was given in units of its noise, and lets nothing be drawn."""

    def released(self, release, draw):
        parts = release.value if isinstance(release.value, list) else [release.value]
        stddev = getattr(release.mechanism, "grid_stddev", None) or release.mechanism.stddev
        self.vector = torch.cat([torch.as_tensor(part).detach().double().flatten() for part in parts]) / stddev
        return np.zeros_like(release.value) if isinstance(release.value, np.ndarray) else None


def released(the_plan, rows, *, norm=None):
    """The vector that a batch of (gradient, loss) rows adds noise to, in units of the noise."""
    model, listener = network(), Listener()
    capture = GradientCapture(model)
    bought = None if norm is None else NormRelease(budget_fraction=norm)
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=1, reproducible=True), norm=bought)
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2)
    with observe_releases(listener):
        for chunk in split_into_microbatches(np.arange(len(table)), step=0, microbatch_size=2):
            with private.capturing(chunk):
                if chunk.num_records:
                    part = table[torch.from_numpy(chunk.indices)]
                    (model(torch.ones(len(part), 1))[:, 0] * part[:, 0]).sum().backward()
                    private.add_losses(part[:, 1])
            private.add(chunk)
        private.finish()
    capture.detach()
    return listener.vector


def displacements(the_plan, rest, *, norm=None):
    """What each hostile record adds to the batch `rest`, in units of the noise."""
    without = released(the_plan, rest, norm=norm)
    return [released(the_plan, [*rest, row], norm=norm) - without for row in HOSTILE]


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [[], [(5.0, 1.0), (-0.1, 0.0)]], ids=["alone", "among others"])
def test_a_record_is_no_farther_from_absence_than_sampling_is_accounted_for(kind, neighboring_relation, rest):
    changes, norm = KINDS[kind]
    the_plan = plan(neighboring_relation, **changes)
    farthest = max(float(vector.norm()) for vector in displacements(the_plan, rest, norm=norm))
    # z is noise over the distance between two records' values when one is replaced, over one value otherwise.
    allowed = 1 / (Z * neighboring_relation.sensitivity_factor)
    assert farthest <= allowed * (1 + 1e-6)
    assert farthest >= 0.4 * allowed  # the records are hostile


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
def test_a_unit_in_a_loop_of_rows_is_no_farther_from_absence_than_it_is_accounted_for(neighboring_relation):
    the_plan = plan(neighboring_relation, privacy_unit=PrivacyUnit.USER, clipping=QuantileClipping(count_noise=2.0))

    def vector(rows, units):
        model, listener = network(), Listener()
        capture = GradientCapture(model)
        private = PrivateStep(capture, the_plan, KeyedRNG(seed=1, reproducible=True), by_unit=True)
        chunk = UnitMicrobatch(
            step=0,
            index=0,
            is_last=True,
            indices=np.arange(len(rows)),
            units=np.array(units),
            weights=np.ones(len(rows)),
        )
        with observe_releases(listener):
            private.start(chunk, rows=len(rows))
            (model(torch.ones(len(rows), 1))[:, 0] * torch.tensor(rows)).sum().backward()
            private.add_sums(chunk, private.bounds.sums(chunk))
            private.finish()
        capture.detach()
        return listener.vector

    without = vector([1.0, 2.0], [0, 0])
    farthest = max(
        float((vector([1.0, 2.0, *more], [0, 0, *([1] * len(more))]) - without).norm())
        for more in ([1e4], [-1e4, 1.0], [1e-3], [0.0], [1e4, 1e4, 1e4], [math.inf])
    )
    assert farthest <= (1 + 1e-6) / (Z * neighboring_relation.sensitivity_factor)
    assert farthest >= 0.9 / (Z * neighboring_relation.sensitivity_factor)


@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
def test_a_client_is_no_farther_from_absence_than_it_is_accounted_for(neighboring_relation):
    the_plan = plan(
        neighboring_relation,
        privacy_unit=PrivacyUnit.CLIENT,
        clipping=QuantileClipping(count_noise=2.0),
        sample_rate=1.0,
    )

    def vector(sizes):
        listener = Listener()
        server = PrivateServer(network(), the_plan, num_clients=3, rng=KeyedRNG(seed=1, reproducible=True))
        with server, observe_releases(listener):
            cohort = next(server.rounds())
            updates = [{name: torch.full_like(part, size) for name, part in server.shared().items()} for size in sizes]
            server.finish_round(cohort, list(enumerate(updates)))
        return listener.vector

    without = vector([0.1, -3.0])
    farthest = max(
        float((vector([0.1, -3.0, size]) - without).norm()) for size in (1e5, -1e5, 1e-3, 0.0, math.nan, math.inf)
    )
    assert farthest <= (1 + 1e-6) / (Z * neighboring_relation.sensitivity_factor)
    assert farthest >= 0.9 / (Z * neighboring_relation.sensitivity_factor)


# ── what the measured vectors cost ──────────────────────────────────────────────────────────────────────────


def plane(present, replaced):
    """Coordinates of two vectors in the plane that they span with 0."""
    first = float(np.linalg.norm(present))
    along = present / first if first > 0 else present
    x = float(replaced @ along)
    return (first, 0.0), (x, math.sqrt(max(0.0, float(replaced @ replaced) - x * x)))


def least_delta(present, replaced, rate, steps, epsilons, *, cell=1e-3, nodes=400):
    """δ(ε) of (1 − q) N(0) + q N(v) from (1 − q) N(0) + q N(v′), `steps` times: losses are rounded down."""
    one, other = plane(np.asarray(present), np.asarray(replaced))
    axes = []
    for place in (0, 1):
        far = [0.0, one[place], other[place]]
        axes.append(np.linspace(min(far) - 8.0, max(far) + 8.0, nodes))
    x, y = axes[0][:, None], axes[1][None, :]
    area = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0]) / (2 * math.pi)

    def bell(at):
        return np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / 2)

    p, q = ((1 - rate) * bell((0.0, 0.0)) + rate * bell(at) for at in (one, other))
    lattice = np.floor(np.log(p / q) / cell).astype(int).ravel()
    low = int(lattice.min())
    mass = np.bincount(lattice - low, (p * area).ravel())
    size = 1 << math.ceil(math.log2(len(mass) * steps + 1))
    many = np.maximum(np.fft.irfft(np.fft.rfft(mass, size) ** steps, size), 0.0)
    loss = (np.arange(size) + low * steps) * cell
    return [float((many * np.maximum(-np.expm1(np.minimum(at - loss, 0.0)), 0.0)).sum()) for at in epsilons]


def test_the_lattice_agrees_with_closed_forms():
    # One step on everybody: the Gaussian mechanism at the distance of the two vectors.
    (found,) = least_delta([0.4, 0.0], [0.0, 0.3], 1.0, 1, [0.3], cell=1e-4)
    assert found == pytest.approx(accounting.delta(Gaussian(noise_multiplier=2.0), 0.3).upper, rel=5e-3)
    # A record that is there or not, sampled, many times.
    (found,) = least_delta([1.0, 0.0], [0.0, 0.0], 0.1, 10, [0.5], cell=2e-4)
    many = SelfComposed(event=PoissonSampled(sample_rate=0.1, event=Gaussian(noise_multiplier=1.0)), count=10)
    assert found == pytest.approx(accounting.delta(many, 0.5).upper, rel=1e-2)


CASES = [
    (kind, rate, noise, steps)
    for kind, (rate, noise, steps) in itertools.product(
        ("flat", "losses", "mostly losses", "losses, other clipping", "counts", "counts and losses", "norm"),
        ((0.01, 0.5, 1), (0.1, 0.6, 10), (0.05, 0.7, 50)),
    )
]


@pytest.mark.parametrize(("kind", "rate", "noise", "steps"), CASES)
@pytest.mark.parametrize("neighboring_relation", ["replace_one", "add_or_remove_one"])
def test_the_claim_of_a_plan_covers_what_hostile_records_were_measured_to_cost(
    kind, rate, noise, steps, neighboring_relation
):
    changes, norm = KINDS[kind]
    the_plan = plan(
        NeighboringRelation(neighboring_relation), noise_multiplier=noise, sample_rate=rate, steps=steps, **changes
    )
    vectors = displacements(the_plan, [], norm=norm)
    absent = torch.zeros_like(vectors[0])
    chosen = [(a, b) for a in vectors for b in (vectors if neighboring_relation == "replace_one" else [absent])]
    # δ grows with each of ‖v‖², ‖v − v′‖² and ⟨v, v − v′⟩ (docs/proofs/noisy-losses.md): the pairs where their sum is
    # largest, and those where single ones are.
    marks = [lambda a, b: (a - b).square().sum() + a @ (a - b), lambda a, b: (a - b).square().sum()]
    pairs = {tuple(map(id, max(chosen, key=lambda pair: float(mark(*pair))))) for mark in marks}
    claim = the_plan.guarantee().epsilon
    for a, b in chosen:
        if (id(a), id(b)) in pairs:
            for one, other in ((a, b), (b, a)):
                (found,) = least_delta(one.numpy(), other.numpy(), rate, steps, [claim])
                assert found <= 1.01 * the_plan.delta


@pytest.mark.parametrize(("share", "rate", "noise", "steps"), [(0.02, 0.01, 0.5, 1), (0.1, 0.05, 0.6, 50)])
def test_losses_that_are_not_centered_would_have_been_seen(share, rate, noise, steps):
    the_plan = plan(
        NeighboringRelation.REPLACE_ONE,
        noise_multiplier=noise,
        sample_rate=rate,
        steps=steps,
        loss_release=LossRelease(max_loss=1.0, budget_fraction=share),
    )
    gradient, loss = math.sqrt(1 - share) / (2 * noise), math.sqrt(share) / noise
    (found,) = least_delta([gradient, loss], [-gradient, loss], rate, steps, [the_plan.guarantee().epsilon])
    assert found > 1.2 * the_plan.delta


@pytest.mark.parametrize("seed", range(6))
def test_no_two_vectors_in_the_ball_cost_more_than_opposite_ones_on_its_surface(seed):
    generator = np.random.default_rng(seed)
    rate, noise = generator.uniform(0.02, 0.9), generator.uniform(0.4, 2.0)
    epsilons = [0.0, 0.2, 1.0, 2.0]
    bounds = [
        accounting.delta(
            PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=noise)),
            at,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
        ).upper
        for at in epsilons
    ]
    for _ in range(4):
        vectors = generator.normal(size=(2, 3))
        vectors *= generator.uniform(0.6, 1.0, size=(2, 1)) / np.linalg.norm(vectors, axis=1, keepdims=True)
        found = least_delta(*(vectors / (2 * noise)), rate, 1, epsilons, cell=1e-4)
        assert all(least <= bound * (1 + 1e-3) + 1e-9 for least, bound in zip(found, bounds, strict=True))
    opposite = np.array([1.0, 0.0]) / (2 * noise)
    found = least_delta(opposite, -opposite, rate, 1, epsilons, cell=1e-4)
    assert found == pytest.approx(bounds, rel=1e-2, abs=1e-7)
