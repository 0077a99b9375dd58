"""Membership attacks end to end: they bite on an overfitted model, and stay under the ceiling of a private one."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino import data
from sordino.audit.attacks import (
    confidence,
    membership_bound,
    membership_report,
    plot_roc,
    standard_training,
    train_references,
)
from sordino.errors import DataUnavailable, InvalidArgument
from sordino.events import Gaussian, NonPrivate
from sordino.randomness import KeyedRNG
from sordino.training.fit import fit
from sordino.training.plan import Plan

UNPROTECTED = NonPrivate(reason="trained without noise")


def fixed(seed=1):
    return KeyedRNG(seed=seed, reproducible=True)


def noisy_records(count, seed):
    """Records in 40 dimensions whose labels are partly chance: what a model knows of chance, it remembers."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 40, generator=generator)
    chance = torch.randint(0, 2, (count,), generator=generator)
    return features, torch.where(torch.rand(count, generator=generator) < 0.5, (features[:, 0] > 0).long(), chance)


def network():
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 2))


@pytest.fixture(scope="module")
def overfitted():
    torch.manual_seed(0)
    train = standard_training(network, steps=120, batch_size=64, learning_rate=0.01, rng=fixed())
    members, others, population = (noisy_records(count, seed) for count, seed in ((600, 1), (600, 2), (300, 3)))
    return membership_report(
        train(*members),
        members,
        others,
        population=population,
        event=UNPROTECTED,
        train_reference=train,
        references=8,
        rng=fixed(2),
    )


def test_the_overfitted_model_gives_its_members_away(overfitted):
    assert {"LiRA, online", "RMIA, offline", "loss threshold", "shadow models"} <= {a.name for a in overfitted.attacks}
    assert overfitted.strongest.roc.true_positive_rate(0.01).value >= 0.05
    assert overfitted.strongest.roc.true_positive_rate(0.01).lower > 0.01
    assert min(attack.roc.auc for attack in overfitted.attacks) > 0.55
    assert overfitted.above_ceiling == ()
    assert overfitted.ceiling.auc == 1.0


def test_a_false_claim_is_refuted_by_the_same_scores(overfitted):
    lying = replace(overfitted, ceiling=membership_bound(Gaussian(noise_multiplier=10.0)))
    assert overfitted.strongest.name in lying.above_ceiling


def test_the_report_is_json_and_a_picture_and_names_the_most_exposed(overfitted, tmp_path):
    body = json.loads(json.dumps(overfitted.to_dict(), allow_nan=False))
    assert body["members"] == body["non_members"] == 600
    assert "no proof" in body["note"]
    assert len(overfitted.most_exposed(5)) == 5
    assert max(overfitted.most_exposed(5)) < 600
    plot_roc(overfitted, tmp_path / "roc.png")
    assert (tmp_path / "roc.png").stat().st_size > 10_000
    assert overfitted.slices == tuple(sorted(overfitted.slices, key=lambda part: -part.lower))


def test_a_model_that_saw_neither_side_refutes_nothing():
    torch.manual_seed(0)
    train = standard_training(network, steps=60, batch_size=64, learning_rate=0.01, rng=fixed())
    refuted = 0
    for seed in range(6):
        mine, others, population, elsewhere = (noisy_records(500, 10 * seed + k) for k in range(4))
        report = membership_report(
            train(*elsewhere),
            mine,
            others,
            population=population,
            # Next to blind guessing: any attack that seems to work would refute it.
            event=Gaussian(noise_multiplier=1000.0),
            train_reference=train,
            references=4,
            rng=fixed(seed),
        )
        refuted += bool(report.above_ceiling)
        assert all(abs(attack.roc.auc - 0.5) < 0.1 for attack in report.attacks)
    assert refuted <= 1


def test_a_private_model_stays_under_its_ceiling():
    torch.manual_seed(0)
    members, others, population = (noisy_records(count, seed) for count, seed in ((600, 1), (600, 2), (300, 3)))
    plan = Plan.for_epsilon(
        target_epsilon=1.0, delta=1e-4, sample_rate=0.1, steps=60, max_grad_norm=1.0, expected_batch_size=60.0
    )
    result = fit(
        network(),
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
        members,
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        rng=fixed(),
        progress=False,
    )
    train = standard_training(network, steps=120, batch_size=64, learning_rate=0.01, rng=fixed())
    report = membership_report(
        result.model,
        members,
        others,
        population=population,
        event=plan.event(),
        claim=result.guarantee,
        train_reference=train,
        references=4,
        rng=fixed(2),
    )
    assert report.above_ceiling == ()
    assert report.ceiling.true_positive_rate(0.01) < 0.05
    assert all(attack.roc.auc_interval[0] < report.ceiling.auc for attack in report.attacks)


@pytest.mark.slow
def test_the_strong_attacks_find_members_of_a_digit_model_and_none_of_a_private_one():
    try:
        features, labels = data.load_dataset("mnist").train.tensors()
    except DataUnavailable:
        pytest.skip("mnist is not on this machine")
    generator = torch.Generator().manual_seed(0)
    chance = torch.randint(0, 10, (3000,), generator=generator)
    labels = torch.where(torch.rand(3000, generator=generator) < 0.2, chance, labels[:3000])
    parts = [(features[k : k + 1000], labels[k : k + 1000]) for k in (0, 1000, 2000)]
    torch.manual_seed(0)

    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    train = standard_training(build, steps=400, batch_size=64, rng=fixed())
    plan = Plan.for_epsilon(
        target_epsilon=2.0, delta=1e-4, sample_rate=0.1, steps=100, max_grad_norm=1.0, expected_batch_size=100.0
    )
    private = fit(
        build(),
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
        parts[0],
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        rng=fixed(),
        progress=False,
    )
    settings = {"population": parts[2], "train_reference": train, "references": 16, "rng": fixed(2)}
    bare = membership_report(train(*parts[0]), *parts[:2], event=UNPROTECTED, **settings)
    kept = membership_report(private.model, *parts[:2], event=plan.event(), claim=private.guarantee, **settings)
    found = {attack.name: attack.roc.true_positive_rate(0.01) for attack in bare.attacks}
    assert max(found["LiRA, online"].value, found["RMIA, online"].value) >= 0.05
    assert kept.above_ceiling == ()
    for attack in kept.attacks:
        assert attack.roc.true_positive_rate(0.01).lower <= kept.ceiling.true_positive_rate(0.01)


def test_every_record_is_in_half_of_the_reference_models():
    records = noisy_records(30, 4)
    train = standard_training(network, steps=1, rng=fixed())
    found = train_references(train, records, count=6, population=noisy_records(10, 5), rng=fixed())
    assert (found.included.sum(axis=0) == 3).all()
    assert len({tuple(column) for column in found.included.T.tolist()}) > 10
    assert found.population[0].own.shape == (10,)
    with pytest.raises(InvalidArgument, match="even"):
        train_references(train, records, count=5, population=records, rng=fixed())


def test_confidence_is_the_log_odds_of_the_label_without_cancellation():
    logits = torch.tensor([[60.0, 0.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([0, 2])
    found = confidence(nn.Identity(), (logits, labels))
    assert found.phi[0] == pytest.approx(60 - 0.6931471805599453)
    p = logits[1].softmax(0)[2]
    assert found.phi[1] == pytest.approx(float(torch.log(p / (1 - p))))
    assert found.own[1] == pytest.approx(float(torch.log(p)))


def test_too_few_others_are_refused():
    records = noisy_records(12, 1)
    with pytest.raises(InvalidArgument, match="population"):
        membership_report(network(), records, records, event=UNPROTECTED)
