"""Each attack's score: golden values, and slow loops that follow the papers' formulas."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.audit.attacks import (
    gaussian_log_ratio,
    lira_offline,
    lira_online,
    loss_scores,
    quantile_scores,
    rmia_average,
    rmia_offset,
    rmia_scores,
    roc_curve,
    shadow_scores,
)
from sordino.errors import InvalidArgument


def test_the_loss_threshold_reaches_the_advantage_of_theory():
    generator = np.random.default_rng(0)
    # Under μ-GDP no threshold has more than 2Φ(μ/2) − 1; normal losses one μ apart reach it.
    found = roc_curve(loss_scores(generator.normal(0, 1, 50_000)), loss_scores(generator.normal(1, 1, 50_000)))
    assert found.advantage == pytest.approx(2 * stats.norm.cdf(0.5) - 1, abs=0.01)


def test_likelihood_ratios_have_their_golden_values():
    # in N(2, 1), out N(0, 1): φ = 1 → 1, φ = 2 → e²
    ratios = np.exp(gaussian_log_ratio([1.0, 2.0], in_mean=2.0, in_std=1.0, out_mean=0.0, out_std=1.0))
    assert ratios == pytest.approx([1.0, 7.389], abs=1e-3)


def models(seed, count, records):
    generator = np.random.default_rng(seed)
    included = generator.uniform(size=(count, records)).argsort(axis=0) < count // 2
    shift = generator.normal(0, 1, records)
    return generator.normal(shift + 2.0 * included), included, generator.normal(shift)


@pytest.mark.parametrize("count", [6, 80])
def test_lira_is_what_the_paper_writes(count):
    phi, included, target = models(1, count, 50)
    online, offline = lira_online(target, phi, included), lira_offline(target, phi, included)
    pooled = []
    for seen in (included, ~included):
        squares = sum(((phi[seen[:, i], i] - phi[seen[:, i], i].mean()) ** 2).sum() for i in range(50))
        pooled.append(math.sqrt(squares / (50 * (count // 2 - 1))))
    for i in range(50):
        inside, outside = phi[included[:, i], i], phi[~included[:, i], i]
        spread = pooled if count == 6 else [inside.std(ddof=1), outside.std(ddof=1)]
        ratio = stats.norm.pdf(target[i], inside.mean(), spread[0]) / stats.norm.pdf(
            target[i], outside.mean(), spread[1]
        )
        assert online[i] == pytest.approx(math.log(ratio))
        assert offline[i] == pytest.approx(-math.log(1 - stats.norm.cdf(target[i], outside.mean(), spread[1])))


def test_lira_tells_members_where_one_threshold_for_all_cannot():
    generator = np.random.default_rng(2)
    hardness = generator.normal(0, 4, 2000)
    included = generator.uniform(size=(16, 2000)).argsort(axis=0) < 8
    phi = generator.normal(hardness + 2.0 * included)
    target = generator.normal(hardness + 2.0 * (np.arange(2000) < 1000))
    online = roc_curve(*np.split(lira_online(target, phi, included), 2))
    offline = roc_curve(*np.split(lira_offline(target, phi, included), 2))
    plain = roc_curve(*np.split(target, 2))
    assert online.auc > 0.85
    assert offline.auc > 0.85
    assert plain.auc < 0.7


def test_lira_refuses_too_few_models():
    with pytest.raises(InvalidArgument, match="left out of two reference models"):
        lira_offline([0.0], [[1.0], [2.0]], [[True], [False]])


def test_rmia_average_has_its_golden_value():
    average = float(rmia_average(0.5, offset=0.3))
    assert average == pytest.approx(0.675)
    assert 0.9 / average == pytest.approx(1.3333, abs=1e-4)


@pytest.mark.parametrize("online", [False, True])
def test_rmia_counts_the_population_records_that_are_dominated(online):
    generator = np.random.default_rng(3)
    included = generator.uniform(size=(4, 20)).argsort(axis=0) < 2
    p, models_x = generator.uniform(0.01, 1, 20), generator.uniform(0.01, 1, (4, 20))
    p_z, models_z = generator.uniform(0.01, 1, 30), generator.uniform(0.01, 1, (4, 30))
    found = rmia_scores(
        p,
        models_x,
        included,
        population_target=p_z,
        population_references=models_z,
        gamma=1.2,
        offset=0.4,
        online=online,
    )
    for i in range(20):
        out, seen = models_x[~included[:, i], i].mean(), models_x[included[:, i], i].mean()
        average = (out + seen) / 2 if online else 0.5 * (1.4 * out + 0.6)
        dominated = 0
        for j in range(30):
            plain = models_z[:, j].mean()
            average_z = plain if online else 0.5 * (1.4 * plain + 0.6)
            dominated += (p[i] / average) / (p_z[j] / average_z) >= 1.2
        assert found[i] == pytest.approx(dominated / 30)


def test_rmia_works_with_one_reference_model():
    generator = np.random.default_rng(4)
    hard = generator.uniform(0.2, 0.8, 1500)
    p = np.clip(hard + np.where(np.arange(1500) < 500, 0.15, 0.0) + generator.normal(0, 0.05, 1500), 0.01, 0.99)
    models_x = hard[None] + generator.normal(0, 0.05, (1, 1500))
    scores = rmia_scores(
        p[:1000],
        models_x[:, :1000],
        np.zeros((1, 1000), dtype=bool),
        population_target=p[1000:],
        population_references=models_x[:, 1000:],
    )
    assert roc_curve(scores[:500], scores[500:]).auc > 0.8


def test_the_offset_is_the_best_against_a_model_of_ones_own():
    generator = np.random.default_rng(7)
    included = generator.uniform(size=(8, 800)).argsort(axis=0) < 4
    hard = generator.uniform(0.05, 0.9, 800)
    # Training on a record lifts hard ones far more: the guess (P + 1)/2 at a = 0 suits it, no lift at all doesn't.
    models = np.clip(np.where(included, (hard + 1) / 2, hard) + generator.normal(0, 0.02, (8, 800)), 0.01, 0.99)
    population = np.clip(generator.uniform(0.05, 0.9, 400) + generator.normal(0, 0.02, (8, 400)), 0.01, 0.99)
    found = rmia_offset(models, included, population_references=population)
    areas = {}
    for a in np.linspace(0, 1, 11).round(1).tolist():
        settings = {"population_target": population[0], "population_references": population[1:], "offset": a}
        scores = rmia_scores(models[0], models[1:], included[1:], **settings)
        areas[a] = roc_curve(scores[included[0]], scores[~included[0]], false_positive_rates=()).auc
    assert areas[found] == max(areas.values()) > min(areas.values())
    assert rmia_offset(models[:1], included[:1], population_references=population[:1]) == 0.3


def test_quantile_regression_flags_the_wanted_share_of_others_and_more_members():
    generator = np.random.default_rng(5)
    x = generator.uniform(-1, 1, (3000, 3))
    confidence = 4 * x[:, 0] + generator.normal(0, 1, 3000)
    confidence[2000:] += 2
    scores = quantile_scores(
        x[1000:], confidence[1000:], population_features=x[:1000], population_confidences=confidence[:1000]
    )
    others, members = scores[:1000], scores[1000:]
    assert 0.01 < (others > 0).mean() < 0.15
    assert (members > 0).mean() > 3 * (others > 0).mean()
    assert roc_curve(members, others).auc > roc_curve(confidence[2000:], confidence[1000:2000]).auc


def test_shadow_models_teach_what_members_look_like():
    generator = np.random.default_rng(6)
    labels = generator.integers(0, 3, 600)
    included = generator.uniform(size=(6, 600)).argsort(axis=0) < 3
    member = np.arange(600) < 300

    def probabilities(seen):
        logits = generator.normal(0, 1, (600, 3))
        # Class 1 is remembered by less confidence: one rule for all classes would fail.
        logits[np.arange(600), labels] += np.where(labels == 1, 3 - 2 * seen, 1 + 2 * seen)
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    shadows = np.stack([probabilities(row) for row in included])
    scores = shadow_scores(probabilities(member), labels, shadows, included)
    assert roc_curve(scores[member], scores[~member]).auc > 0.75


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgument, match="models first"):
        lira_online([0.0, 1.0], [[0.0]], [[True]])
    with pytest.raises(InvalidArgument, match="models first"):
        rmia_scores([0.5], [[0.5, 0.5]], [[False]], population_target=[0.5], population_references=[[0.5]])
    with pytest.raises(InvalidArgument, match="models first"):
        shadow_scores([[0.5, 0.5]], [0], [[0.5, 0.5]], [[True]])
    with pytest.raises(InvalidArgument, match="one row a record"):
        quantile_scores([[1.0]], [1.0, 2.0], population_features=[[1.0]], population_confidences=[1.0])
