"""Output perturbation, sufficient statistics, candidates, bounded moments: sensitivity, noise and the bill."""

import math

import numpy as np
import pytest

from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators import LinearSVC, LogisticRegression
from sordino.estimators.linear_statistics import AdaptiveStatistics, LeastSquaresStatistics, cross_moment
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, SmoothMargin, Softmax
from sordino.estimators.perturbation import CandidateSelection, OutputPerturbation
from sordino.estimators.preprocessing import BoundedMoments
from sordino.events import BoundedRange, compose
from sordino.mechanisms import GaussianBudget, PureBudget, make_budget

ADD, REPLACE, ZERO = NeighboringRelation
LOSSES = pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (Logistic(), (-1.0, 1.0)),
        (HuberHinge(), (-1.0, 1.0)),
        (HuberResidual(), (-1.0, 0.3, 1.0)),
        (Softmax(outputs=3), (0.0, 1.0, 2.0)),
        (SmoothMargin(outputs=3), (0.0, 1.0, 2.0)),
    ],
    ids=["logistic", "huber-hinge", "huber-residual", "softmax", "smooth-margin"],
)


@LOSSES
@pytest.mark.parametrize("neighboring_relation", [ADD, REPLACE])
def test_no_neighbor_moves_a_minimiser_by_more_than_its_sensitivity(loss, labels, neighboring_relation, unit_neighbors):
    release = OutputPerturbation(
        loss=loss, epsilon=1.0, delta=1e-5, regularization=2.0, dimension=3, neighboring_relation=neighboring_relation
    )
    largest = 0.0
    for rows, targets, row, target in unit_neighbors(3, labels):
        more = release.exact_value(np.vstack([rows, row]), np.append(targets, target))
        if neighboring_relation is ADD:
            less = release.exact_value(rows, targets)
        else:
            other = labels[0] if target != labels[0] else labels[-1]
            less = release.exact_value(np.vstack([rows, row if other != target else -row]), np.append(targets, other))
        largest = max(largest, float(np.linalg.norm(more - less)))
    assert 0.2 * release.l2_sensitivity < largest <= release.l2_sensitivity


def test_an_extreme_pair_comes_close_to_the_sensitivity_of_output_perturbation():
    # Nearly linear losses: strong regularization keeps the weights where the gradient is that at 0.
    release = OutputPerturbation(loss=HuberResidual(), epsilon=1.0, delta=1e-5, regularization=1e4, dimension=2)
    moved = release.exact_value(np.array([[1.0, 0.0]]), np.array([1.0]))
    assert np.linalg.norm(moved) == pytest.approx(release.l2_sensitivity, rel=1e-3)


def test_the_noise_of_output_perturbation_has_the_declared_deviation(seeded, two_armed):
    release = OutputPerturbation(
        loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=2.0, dimension=20_000, rng=seeded(1)
    )
    noise = release.noisy(np.zeros((20_000, 1)))
    two_armed(noise, 3.730632 * release.l2_sensitivity)
    assert release.l2_sensitivity == pytest.approx(0.5, rel=1e-6)
    assert accounting.epsilon(release.event(), 1e-5).upper <= 1.0


def test_the_pure_noise_of_output_perturbation_has_a_gamma_norm(seeded):
    release = OutputPerturbation(
        loss=Softmax(outputs=5), epsilon=0.5, delta=0.0, regularization=2.0, dimension=10, rng=seeded(3)
    )
    norms = [np.linalg.norm(release.noisy(np.zeros((10, 5)))) for _ in range(400)]
    assert np.mean(norms) == pytest.approx(50 * math.sqrt(2) / 2 / 0.5, rel=0.025)


@pytest.mark.parametrize("neighboring_relation", [ADD, REPLACE, ZERO])
@pytest.mark.parametrize(
    "spent", [PureBudget(epsilon=1.0), GaussianBudget(noise_multiplier=2.0)], ids=["pure", "gaussian"]
)
def test_no_neighbor_moves_sufficient_statistics_by_more_than_their_sensitivities(
    spent, neighboring_relation, unit_neighbors
):
    statistics = LeastSquaresStatistics(budget=spent, dimension=3, neighboring_relation=neighboring_relation)
    adaptive = AdaptiveStatistics(
        budget=GaussianBudget(noise_multiplier=1.0), dimension=3, neighboring_relation=neighboring_relation
    )
    order = 1 if isinstance(spent, PureBudget) else 2
    crosses, grams, smallest = [], [], []
    for rows, targets, row, target in unit_neighbors(3, (-1.0, 0.5, 1.0)):
        more = np.vstack([rows, row]), np.append(targets, target)
        others = (rows, targets)
        if neighboring_relation is REPLACE:
            others = np.vstack([rows, row[::-1]]), np.append(targets, -target)
        crosses.append(np.linalg.norm(cross_moment(*more) - cross_moment(*others), ord=order))
        change = more[0].T @ more[0] - others[0].T @ others[0]
        grams.append(np.abs(change[np.triu_indices(3)]).sum() if order == 1 else np.linalg.norm(change))
        smallest.append(
            abs(np.linalg.eigvalsh(more[0].T @ more[0])[0] - np.linalg.eigvalsh(others[0].T @ others[0])[0])
        )
    stated = statistics.cross.l1_sensitivity if isinstance(spent, PureBudget) else statistics.cross.l2_sensitivity
    assert 0.5 * stated < max(crosses) <= stated * (1 + 1e-9)
    assert 0.4 * statistics.gram.sensitivity < max(grams) <= statistics.gram.sensitivity * (1 + 1e-9)
    assert max(smallest) <= adaptive.eigenvalue.l2_sensitivity


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.5, 1e-6), (5.0, 1e-6)])
def test_the_parts_of_sufficient_statistics_spend_what_is_declared(epsilon, delta):
    spent = make_budget(epsilon=epsilon, delta=delta)
    parts = [LeastSquaresStatistics(budget=spent, dimension=7)]
    if isinstance(spent, GaussianBudget):
        parts.append(AdaptiveStatistics(budget=spent, dimension=7))
    for statistics in parts:
        upper = accounting.epsilon(compose(statistics.events()), delta).upper
        assert epsilon * 0.999 < upper <= epsilon * (1 + 1e-12)


def test_adassp_calibrated_as_a_whole_needs_the_known_noise():
    # (ε, δ) = (1, 1e-6): 7.31736 on each of three releases, where (ε/3, δ/3) a release takes 11.8518.
    adaptive = AdaptiveStatistics(budget=make_budget(epsilon=1.0, delta=1e-6), dimension=4)
    assert adaptive.stddev == pytest.approx(7.31736, rel=1e-4)
    assert adaptive.statistics.cross.stddev == pytest.approx(7.31736, rel=1e-4)
    assert adaptive.eigenvalue.stddev == pytest.approx(7.31736, rel=1e-4)
    assert math.sqrt(math.log(6e6)) * 3 == pytest.approx(11.8518, rel=1e-5)


def test_the_noise_of_the_cross_moment_has_the_declared_deviation(seeded, two_armed):
    statistics = LeastSquaresStatistics(budget=GaussianBudget(noise_multiplier=2.0), dimension=20_000, rng=seeded(1))
    noise = statistics.cross.release(cross_moment(np.zeros((0, 20_000)), np.zeros(0)))
    two_armed(np.asarray(noise), 2.0 * math.sqrt(2))


def test_every_entry_of_the_noisy_gram_matrix_varies(seeded):
    # No released statistic may be exact, the diagonal for one-sided data included.
    statistics = LeastSquaresStatistics(budget=PureBudget(epsilon=1.0), dimension=3, rng=seeded(2))
    rows = np.abs(np.random.default_rng(0).normal(size=(20, 3))) / 5
    drawn = np.array([statistics.release(rows, np.ones(20))[0] for _ in range(40)])
    assert (drawn.std(axis=0) > 0.3 * statistics.gram.scale).all()


def test_a_cross_moment_is_a_sum_of_products_in_any_order():
    generator = np.random.default_rng(0)
    rows, targets = generator.uniform(-0.5, 0.5, size=(1000, 3)), generator.uniform(-1, 1, size=1000)
    assert cross_moment(rows, targets) == pytest.approx(rows.T @ targets, abs=1e-5)
    order = generator.permutation(1000)
    assert (cross_moment(rows[order], targets[order]) == cross_moment(rows, targets)).all()


@LOSSES
@pytest.mark.parametrize("neighboring_relation", [ADD, REPLACE])
def test_no_neighbor_moves_a_candidates_score_by_more_than_its_sensitivity(
    loss, labels, neighboring_relation, unit_neighbors
):
    candidates = (
        np.random.default_rng(0).normal(size=(6, 3, loss.outputs)) * np.array([0, 1, 3, 9, 1, 1])[:, None, None]
    )
    choice = CandidateSelection(
        loss=loss, epsilon=1.0, candidates=candidates, neighboring_relation=neighboring_relation
    )
    largest = 0.0
    for rows, targets, row, target in unit_neighbors(3, labels):
        more = choice.scores(np.vstack([rows, row]), np.append(targets, target))
        less = choice.scores(rows, targets)
        if neighboring_relation is REPLACE:
            less = choice.scores(np.vstack([rows, -row]), np.append(targets, target))
        largest = max(largest, float(np.abs(more - less).max()))
    assert 0.05 * choice.sensitivity < largest <= choice.sensitivity
    assert choice.event() == BoundedRange(epsilon=1.0)


def test_candidates_are_chosen_by_the_exponential_law(seeded):
    grid = np.array([[[-1.0]], [[0.0]], [[1.0]]])
    choice = CandidateSelection(loss=Logistic(), epsilon=2.0, candidates=grid, rng=seeded(0))
    rows, targets = np.ones((3, 1)), np.ones(3)
    weights = np.exp(choice.scores(rows, targets))  # ε/(2Δ) = 1
    drawn = [float(choice.release(rows, targets)[0, 0]) for _ in range(3000)]
    shares = [drawn.count(value) / 3000 for value in (-1.0, 0.0, 1.0)]
    assert shares == pytest.approx(list(weights / weights.sum()), abs=0.03)


def test_candidates_must_be_finite():
    with pytest.raises(InvalidArgument, match="candidates must be finite"):
        CandidateSelection(loss=Logistic(), epsilon=1.0, candidates=np.full((2, 1, 1), np.inf))


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("ends", [(100.0, 101.0), (-1e-9, 1e-9), (0.0, 50.0)])
def test_moments_of_far_away_bounds_need_no_more_noise_than_those_around_zero(delta, ends, seeded):
    lower, upper = np.full(2, ends[0]), np.full(2, ends[1])
    moments = BoundedMoments(budget=make_budget(epsilon=1.0, delta=delta), lower=lower, upper=upper, rng=seeded(0))
    assert moments.sums.sensitivities == pytest.approx([1.0, 1.0, 0.5, 0.5])
    upper_end = accounting.epsilon(compose(moments.events()), delta).upper
    assert 0.999 < upper_end <= 1 + 1e-12
    records = ends[0] + (ends[1] - ends[0]) * np.random.default_rng(0).random((5000, 2))
    found = moments.release(records)
    width = ends[1] - ends[0]
    assert (found.means - records.mean(axis=0)) / width == pytest.approx([0, 0], abs=0.02)
    assert found.variances / width**2 == pytest.approx([1 / 12] * 2, rel=0.2)


def test_the_functional_mechanism_minimizes_the_quadratic_and_says_where_it_has_none():
    generator = np.random.default_rng(0)
    X = generator.uniform(-1, 1, size=(4000, 2))
    y = (generator.random(4000) < 1 / (1 + np.exp(-2 * X[:, 0] + X[:, 1]))).astype(int)
    given = {"epsilon": 1e4, "delta": 1e-3, "data_norm": 2.0, "classes": (0, 1), "method": "functional"}
    model = LogisticRegression(**given, regularization=0.0).fit(X, y)
    rows, signs = np.column_stack([X, np.ones(4000)]), 2.0 * y - 1
    by_hand = 2 * np.linalg.solve(rows.T @ rows, rows.T @ signs)
    assert np.append(model.coef_, model.intercept_) == pytest.approx(by_hand, abs=0.02)
    weighted = LogisticRegression(**given, regularization=0.0, class_weight={1: 3.0}).fit(X, y)
    heavier = np.where(y == 1, 1.0, 1 / 3)[:, None] * rows
    expected = 2 * np.linalg.solve(rows.T @ heavier, heavier.T @ signs)
    assert np.append(weighted.coef_, weighted.intercept_) == pytest.approx(expected, abs=0.02)
    with pytest.raises(InvalidArgument, match="logistic loss for two classes"):
        LogisticRegression(**(given | {"classes": (0, 1, 2)})).fit(X, y)
    with pytest.raises(InvalidArgument, match="logistic loss for two classes"):
        LinearSVC(**given).fit(X, y)


def test_the_quadratic_of_the_functional_mechanism_is_the_loss_up_to_fourth_order():
    s = np.linspace(-2, 2, 401)
    apart = np.abs(np.logaddexp(0, -s) - (np.log(2) - s / 2 + s**2 / 8))
    assert (apart <= s**4 / 192 + 1e-15).all()
    assert apart.max() > 0.05
