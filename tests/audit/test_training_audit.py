"""One training with canaries: what is shown stays below the claim, much of it is shown, and a lie is found out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino.audit import audit_training
from sordino.clipping import FlatClipping
from sordino.errors import InvalidArgument
from sordino.mechanisms import TensorGaussianMechanism
from sordino.randomness import KeyedRNG
from sordino.sampling import PoissonSampling
from sordino.training.plan import Plan

add_noise, draw = TensorGaussianMechanism.add_noise_, PoissonSampling.draw


def data(records=200):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def plan(**options):
    # μ = √10 / 3.2 ≈ 1: ε ≈ 4.3 at δ = 1e-5.
    given = {
        "noise_multiplier": 3.2,
        "max_grad_norm": 0.5,
        "sample_rate": 1.0,
        "steps": 10,
        "expected_batch_size": 200.0,
        "delta": 1e-5,
    }
    return Plan(**(given | options))


def audited(the_plan=None, *, seed=1, **options):
    torch.manual_seed(0)
    return audit_training(
        nn.Linear(4, 2),
        losses,
        data(),
        the_plan or plan(),
        rng=KeyedRNG(seed=seed, reproducible=True),
        progress=False,
        **options,
    )


def test_a_sound_training_passes_and_shows_a_good_part_of_its_epsilon():
    found = audited()
    assert found.passed
    assert len(found.checks) == 3
    assert 0.3 * found.claimed.epsilon < found.bound.epsilon <= found.claimed.epsilon
    assert found.bound.ceiling > found.claimed.epsilon
    assert found.bound.canaries == 1000
    assert found.bound.guesses == 200
    assert found.report_entry()["alpha"] == 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": 0.3, "expected_batch_size": 60.0},
        {"neighboring_relation": "replace_special"},
        {"neighboring_relation": "replace_one"},
        {"neighboring_relation": "replace_one", "poisson_sampling": False, "sample_rate": 0.5},
    ],
    ids=["Poisson", "zero-out", "replace-one", "shuffled"],
)
def test_every_sampler_and_relation_can_be_audited_and_none_is_shown_more_than_it_claims(options):
    found = audited(plan(**options))
    assert found.passed
    assert found.bound.epsilon <= found.claimed.epsilon


@pytest.mark.parametrize("kind", ["mislabeled", "random"])
def test_records_as_canaries_go_through_the_model(kind):
    found = audited(canaries=kind, count=60)
    assert not found.claim_rejected
    assert found.checks == ()
    assert found.bound.epsilon <= found.claimed.epsilon


def test_records_are_told_apart_where_the_model_is_wide_and_the_noise_small():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 500, generator=generator)
    torch.manual_seed(0)
    found = audit_training(
        nn.Linear(500, 2),
        losses,
        (x, (x[:, 0] > 0).long()),
        plan(noise_multiplier=0.01),
        canaries="mislabeled",
        count=60,
        guesses=20,
        rng=KeyedRNG(seed=1, reproducible=True),
        progress=False,
    )
    assert found.bound.correct >= 18
    assert all(bound.correct >= 18 for _, bound in found.others)


def test_the_final_model_alone_shows_less_than_every_step_would_but_something():
    found = audited(attacker="black-box")
    assert found.attacker == "black-box"
    assert found.bound.correct > 120
    assert found.bound.epsilon <= found.claimed.epsilon


def test_your_own_records_are_canaries():
    generator = torch.Generator().manual_seed(3)
    own = (10 * torch.randn(50, 4, generator=generator), torch.ones(50, dtype=torch.long))
    assert audited(canaries=own).bound.canaries == 50


# ── lies are found out ──────────────────────────────────────────────────────────────────────────────────────


def half_the_noise(self, tensors, *, rng, step, rank=0):
    weaker = TensorGaussianMechanism(noise_multiplier=0.5 * self.noise_multiplier, l2_sensitivity=self.l2_sensitivity)
    add_noise(weaker, tensors, rng=rng, step=step, rank=rank)


def test_half_the_noise_is_rejected_by_the_bound_and_by_a_check(monkeypatch):
    monkeypatch.setattr(TensorGaussianMechanism, "add_noise_", half_the_noise)
    found = audited()
    assert found.claim_rejected
    assert failed(found) == {"noise has the declared variance"}


def failed(found):
    return {check.name for check in found.checks if not check.passed}


def test_noise_that_is_a_twentieth_too_weak_fails_a_check(monkeypatch):
    def weaker(self, tensors, *, rng, step, rank=0):
        other = TensorGaussianMechanism(
            noise_multiplier=0.95 * self.noise_multiplier, l2_sensitivity=self.l2_sensitivity
        )
        add_noise(other, tensors, rng=rng, step=step, rank=rank)

    monkeypatch.setattr(TensorGaussianMechanism, "add_noise_", weaker)
    found = audited(plan(steps=30))
    assert failed(found) == {"noise has the declared variance"}
    assert not found.claim_rejected  # one run shows no such small difference


def test_repeated_noise_fails_a_check(monkeypatch):
    def repeated(self, tensors, *, rng, step, rank=0):
        add_noise(self, tensors, rng=rng, step=0, rank=rank)

    monkeypatch.setattr(TensorGaussianMechanism, "add_noise_", repeated)
    assert "noise is new in every step" in failed(audited())


def test_twice_the_clipping_norm_fails_a_check_and_no_clipping_is_rejected(monkeypatch):
    factors = FlatClipping.clip_factors

    def twice(self, squared_norms, *, max_grad_norm):
        return factors(self, squared_norms, max_grad_norm=2 * max_grad_norm)

    with monkeypatch.context() as patched:
        patched.setattr(FlatClipping, "clip_factors", twice)
        assert "a canary weighs what clipping allows" in failed(audited())
    monkeypatch.setattr(FlatClipping, "clip_factors", lambda self, norms, *, max_grad_norm: torch.ones_like(norms))
    found = audited()
    assert found.claim_rejected
    assert found.bound.epsilon > found.claimed.epsilon


def test_a_larger_share_of_records_than_declared_fails_a_check(monkeypatch):
    def more(self, *, dataset_size, step, rng):
        return draw(PoissonSampling(sample_rate=0.6), dataset_size=dataset_size, step=step, rng=rng)

    monkeypatch.setattr(PoissonSampling, "draw", more)
    found = audited(plan(sample_rate=0.3, expected_batch_size=60.0))
    assert "a canary weighs what clipping allows" in failed(found)


# ── over many trainings ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_of_forty_sound_trainings_hardly_any_is_rejected():
    found = [audited(seed=seed, count=300) for seed in range(40)]
    # Each with probability at most 5 %: more than six of forty has probability 0.3 %.
    assert sum(one.claim_rejected for one in found) <= 6
    assert all(not failed(one) for one in found)
    assert np.median([one.bound.epsilon for one in found]) > 0.8


@pytest.mark.parametrize(
    "options",
    [{"canaries": "none"}, {"attacker": "insider"}, {"count": 5}, {"guesses": 2000}],
)
def test_unusable_arguments_are_refused_before_any_training(options):
    with pytest.raises(InvalidArgument):
        audited(**options)


def test_a_plan_without_noise_claims_nothing_that_could_be_audited():
    with pytest.raises(InvalidArgument, match="noise_multiplier"):
        audited(plan(noise_multiplier=0.0))


def test_absent_records_can_not_be_replaced():
    with pytest.raises(InvalidArgument, match="gradients"):
        audited(plan(neighboring_relation="replace_one"), canaries="random")
