"""Counts, sums, means, histograms, quantiles, covariances: the largest change over neighbors, the noise, the bill."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import BoundedRange, Composed, DiscreteLaplace, Gaussian, PureDP, SelfComposed
from sordino.mechanisms import (
    GaussianBudget,
    PrivateCount,
    PrivateCovariance,
    PrivateHistogram,
    PrivateMean,
    PrivateQuantile,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
)
from sordino.mechanisms.integer_noise import IntegerNoise

PURE = PureBudget(epsilon=1.0)
GAUSSIAN = GaussianBudget(noise_multiplier=1.5)
BUDGETS = pytest.mark.parametrize("budget", [PURE, GAUSSIAN], ids=["pure", "gaussian"])
RELATIONS = pytest.mark.parametrize("neighboring_relation", list(NeighboringRelation))
ADD, REPLACE, ZERO = NeighboringRelation

# What a hostile record may look like: at, beside and beyond every bound, and not a number.
EXTREMES = (0.0, 1.0, -1.0, 7.5, -7.5, 1e-12, 1e300, -1e300, math.inf, -math.inf, math.nan)


def neighbors(columns, neighboring_relation, trials=120):
    """Pairs of datasets that differ in one record, random and extreme."""
    generator = np.random.default_rng(7)

    def record():
        if generator.random() < 0.6:
            return generator.choice(EXTREMES, size=columns)
        return generator.normal(size=columns) * 10.0 ** generator.integers(-3, 4)

    for _ in range(trials):
        base = np.array([record() for _ in range(generator.integers(0, 6))]).reshape(-1, columns)
        other = record() if neighboring_relation is REPLACE else np.full(columns, math.nan)
        first = np.vstack([base, record()])
        yield first, base if neighboring_relation is ADD else np.vstack([base, other])


def pure_cost(event):
    """ε of a composition of pure events: the largest losses add up."""
    match event:
        case Composed():
            return math.fsum(pure_cost(part) for part in event.events)
        case SelfComposed():
            return event.count * pure_cost(event.event)
        case DiscreteLaplace():
            return event.sensitivity / event.scale
        case _:
            return event.epsilon


def two_armed(noise, scale, *, laplace):
    """The estimated scale is the declared one; 5 % more and 5 % less are not."""
    estimate = float(np.abs(noise).mean() if laplace else noise.std())
    assert estimate == pytest.approx(scale, rel=0.025)
    assert estimate != pytest.approx(scale * 1.05, rel=0.025)
    assert estimate != pytest.approx(scale / 1.05, rel=0.025)


# ── sums ──


@RELATIONS
@BUDGETS
@pytest.mark.parametrize("bounds", [(-7.5, 7.5), (0.0, 1.0), (100.0, 101.0), (-3.0, -1.0), (0.0, 1e-9)])
def test_no_neighbor_moves_a_sum_by_more_than_its_sensitivity(bounds, budget, neighboring_relation):
    mechanism = PrivateSum(budget=budget, bounds=bounds, neighboring_relation=neighboring_relation)
    (sensitivity,) = mechanism.noise.sensitivities
    largest = max(
        abs(int(mechanism.exact_value(first)[0] - mechanism.exact_value(second)[0]))
        for first, second in neighbors(1, neighboring_relation)
    )
    assert largest == sensitivity  # reached by an extreme record, and never passed


@RELATIONS
def test_sensitivities_of_sums_are_those_of_the_bounds(neighboring_relation):
    mechanism = PrivateSum(
        budget=PURE, bounds=((-1.0, 3.0), (100.0, 101.0), (-5.0, -2.0)), neighboring_relation=neighboring_relation
    )
    expected = [4.0, 101.0, 5.0] if neighboring_relation is REPLACE else [3.0, 101.0, 5.0]
    assert mechanism.sensitivities == pytest.approx(expected, rel=1e-8)


@BUDGETS
def test_the_noise_of_a_sum_has_the_declared_scale_in_every_column(budget, seeded):
    each = 10_000
    bounds = ((0.0, 1.0),) * each + ((0.0, 1000.0),) * each + ((-3.0, 0.0),) * each
    mechanism = PrivateSum(budget=budget, bounds=bounds, rng=seeded(1))
    noise = mechanism.release(np.zeros((0, 3 * each))).reshape(3, each)
    unit = 3.0 * each if budget is PURE else 1.5 * math.sqrt(3 * each)
    for column, bound in enumerate([1.0, 1000.0, 3.0]):
        assert mechanism.scales[column * each] == pytest.approx(unit * bound, rel=1e-6)
        two_armed(noise[column], unit * bound, laplace=budget is PURE)


def test_a_sum_is_the_sum_of_clipped_records(seeded):
    mechanism = PrivateSum(budget=PureBudget(epsilon=1e6), bounds=(0.0, 10.0), rng=seeded(2))
    assert float(mechanism.release([1.0, 2.5, 99.0, -4.0, math.nan, math.inf])) == pytest.approx(13.5, abs=1e-3)


def test_a_sum_does_not_depend_on_the_order_of_records():
    mechanism = PrivateSum(budget=PURE, bounds=(-1.0, 1.0))
    records = np.random.default_rng(0).normal(size=1000)
    assert (
        mechanism.exact_value(records)
        == mechanism.exact_value(records[::-1])
        == mechanism.exact_value(np.sort(records))
    )


def test_entries_of_different_sensitivities_all_move():
    with pytest.raises(InvalidArgument, match="moved must be 2"):
        IntegerNoise(sensitivities=(1, 2), moved=1, budget=PURE)
    mixed = IntegerNoise(sensitivities=(1, 3, 1), moved=3, budget=PureBudget(epsilon=3.0)).event()
    assert mixed == Composed(
        events=(
            SelfComposed(event=DiscreteLaplace(scale=1.0, sensitivity=1), count=2),
            DiscreteLaplace(scale=3.0, sensitivity=3),
        )
    )


@BUDGETS
@pytest.mark.parametrize("columns", [1, 3, 40])
def test_the_event_of_a_sum_costs_its_budget(budget, columns):
    mechanism = PrivateSum(budget=budget, bounds=tuple((0.0, 1.0 + j) for j in range(columns)))
    event = mechanism.event()
    if budget is GAUSSIAN:
        assert event == Gaussian(noise_multiplier=1.5)
    else:
        assert event.count == columns if columns > 1 else isinstance(event, DiscreteLaplace)
        assert 1 - 1e-8 < pure_cost(event) <= 1 + 1e-14


# ── counts and histograms ──


@BUDGETS
def test_a_count_is_whole_and_has_the_noise_of_one_bin(budget, seeded):
    released = PrivateCount(budget=budget, rng=seeded(3)).release([None] * 5)
    assert isinstance(released, int)
    assert abs(released - 5) < 30
    assert PrivateCount(budget=budget).event() == PrivateHistogram(budget=budget, categories=("a", "b")).event()


def test_a_count_counts_where_it_is_told(seeded):
    mechanism = PrivateCount(budget=PureBudget(epsilon=200.0), rng=seeded(4))
    ages = np.array([20, 40, 60])
    assert mechanism.release(ages) == 3
    assert mechanism.release(ages, where=ages > 30) == 2
    with pytest.raises(InvalidArgument, match="where must be a boolean vector"):
        mechanism.release(ages, where=np.array([1.0, 0.0, 0.0]))


@RELATIONS
def test_no_neighbor_moves_a_histogram_further_than_declared(neighboring_relation):
    mechanism = PrivateHistogram(
        budget=PURE, edges=(-1.0, 0.0, 1.0, 7.5), outside="clip", neighboring_relation=neighboring_relation
    )
    for first, second in neighbors(1, neighboring_relation):
        moved = mechanism.exact_value(first[:, 0]) - mechanism.exact_value(second[:, 0])
        assert np.abs(moved).max(initial=0) <= 1
        assert (moved != 0).sum() <= mechanism.noise.moved
    assert mechanism.noise.moved == (2 if neighboring_relation is REPLACE else 1)


def test_bins_are_closed_below_and_the_last_one_above():
    drop = PrivateHistogram(budget=PURE, edges=(0.0, 1.0, 2.0))
    values = [-0.1, 0.0, 0.999, 1.0, 2.0, 2.1, math.nan, math.inf, -math.inf]
    assert drop.exact_value(values).tolist() == [2, 2]
    clip = PrivateHistogram(budget=PURE, edges=(0.0, 1.0, 2.0), outside="clip")
    assert clip.exact_value(values).tolist() == [4, 4]
    numpy_counts, _ = np.histogram([0.0, 0.5, 1.0, 1.5, 2.0], bins=[0.0, 1.0, 2.0])
    assert drop.exact_value([0.0, 0.5, 1.0, 1.5, 2.0]).tolist() == numpy_counts.tolist()


def test_a_histogram_by_category_drops_what_was_not_declared():
    mechanism = PrivateHistogram(budget=PURE, categories=("x", None, 3))
    assert mechanism.exact_value(["x", 3, 3, None, "other", 4.0]).tolist() == [1, 1, 2]
    assert mechanism.exact_value(np.array(["x", "y"])).tolist() == [1, 0, 0]


@BUDGETS
@RELATIONS
def test_the_noise_of_a_histogram_has_the_declared_scale(budget, neighboring_relation, seeded):
    bins = 20_000
    mechanism = PrivateHistogram(
        budget=budget, categories=tuple(range(bins)), neighboring_relation=neighboring_relation, rng=seeded(5)
    )
    noise = mechanism.release([])
    share = 2.0 if neighboring_relation is REPLACE else 1.0
    q = math.exp(-1.0 / share)
    spread = math.sqrt(2 * q) / (1 - q) if budget is PURE else math.sqrt(1.5**2 * share + 1 / 12)
    two_armed(noise, spread, laplace=False)
    assert mechanism.event() == GAUSSIAN.event() if budget is GAUSSIAN else pure_cost(mechanism.event()) == 1.0


# ── means ──


@RELATIONS
@BUDGETS
def test_the_parts_of_a_mean_spend_the_budget_and_no_more(budget, neighboring_relation):
    records = None if neighboring_relation is ADD else 10
    mechanism = PrivateMean(
        budget=budget, bounds=((0.0, 1.0), (5.0, 9.0)), neighboring_relation=neighboring_relation, records=records
    )
    event = mechanism.event()
    if budget is PURE:
        assert 1 - 1e-8 < pure_cost(event) <= 1 + 1e-14
    else:
        parts = event.events if isinstance(event, Composed) else (event,)
        counted = [(part.event, part.count) if isinstance(part, SelfComposed) else (part, 1) for part in parts]
        assert sum(count * part.noise_multiplier**-2 for part, count in counted) == pytest.approx(1.5**-2, rel=1e-12)


@RELATIONS
def test_a_mean_moves_its_sum_by_half_the_range(neighboring_relation):
    mechanism = PrivateMean(
        budget=PURE,
        bounds=(100.0, 110.0),
        neighboring_relation=neighboring_relation,
        records=None if neighboring_relation is ADD else 5,
    )
    expected = 10.0 if neighboring_relation is REPLACE else 5.0
    assert mechanism.parts[0].sensitivities == pytest.approx([expected], rel=1e-8)
    assert (mechanism.parts[1] is None) == (neighboring_relation is not ADD)


def test_a_mean_is_near_the_mean_and_inside_the_bounds(seeded):
    generator = np.random.default_rng(1)
    values = generator.normal([3.0, -2.0], 1.0, size=(20_000, 2))
    mechanism = PrivateMean(budget=PURE, bounds=((-10.0, 10.0), (-5.0, 5.0)), rng=seeded(6))
    assert mechanism.release(values) == pytest.approx(values.mean(axis=0), abs=0.02)
    tiny = PrivateMean(budget=PureBudget(epsilon=1e-3), bounds=(0.0, 1.0), rng=seeded(7))
    assert all(0.0 <= float(tiny.release([])) <= 1.0 for _ in range(30))


def test_a_record_without_a_number_is_left_out_of_a_mean(seeded):
    mechanism = PrivateMean(budget=PureBudget(epsilon=1e5), bounds=(0.0, 10.0), rng=seeded(8))
    assert float(mechanism.release([2.0, 4.0, math.nan, math.inf])) == pytest.approx(3.0, abs=1e-2)


def test_the_number_of_records_is_private_or_declared():
    with pytest.raises(MissingDeclaration, match="public number of records under replace one"):
        PrivateMean(budget=PURE, bounds=(0.0, 1.0), neighboring_relation=REPLACE)
    with pytest.raises(InvalidArgument, match="private there"):
        PrivateMean(budget=PURE, bounds=(0.0, 1.0), records=10)
    declared = PrivateMean(budget=PURE, bounds=(0.0, 1.0), neighboring_relation=REPLACE, records=3)
    with pytest.raises(InvalidArgument, match="3 records as declared"):
        declared.release([0.5, 0.5])


# ── quantiles ──


def quantile_scores(mechanism, records):
    """The score of every grid point, by the definition: ranks away from quantile·n."""
    first, sizes, scores = mechanism.pieces(records)
    assert sizes.sum() == mechanism.resolution
    assert (sizes >= 0).all()
    return np.repeat(scores, sizes), first


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_quantile_scores_are_those_of_the_definition(quantile):
    mechanism = PrivateQuantile(epsilon=1.0, quantile=quantile, bounds=(0.0, 10.0), resolution=11)
    records = np.array([0.0, 3.0, 3.0, 3.2, 9.6, 10.0, 14.0])
    points = np.rint(np.clip(records, 0, 10))
    scores, _ = quantile_scores(mechanism, records)
    for point in range(11):
        strictly, weakly, target = (points < point).sum(), (points <= point).sum(), quantile * len(records)
        assert scores[point] == pytest.approx(-max(strictly - target, target - weakly, 0.0))


@RELATIONS
@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 1.0])
def test_no_neighbor_moves_a_quantile_score_by_more_than_its_sensitivity(quantile, neighboring_relation):
    mechanism = PrivateQuantile(
        epsilon=1.0, quantile=quantile, bounds=(-7.5, 7.5), resolution=31, neighboring_relation=neighboring_relation
    )
    largest = 0.0
    for first, second in neighbors(1, neighboring_relation):
        moved = quantile_scores(mechanism, first)[0] - quantile_scores(mechanism, second)[0]
        largest = max(largest, float(np.abs(moved).max()))
    assert largest <= mechanism.sensitivity + 1e-9
    assert largest > 0.9 * mechanism.sensitivity


def test_the_law_of_a_quantile_is_that_of_the_exponential_mechanism_on_all_points(seeded):
    mechanism = PrivateQuantile(epsilon=2.0, quantile=0.5, bounds=(0.0, 5.0), resolution=6, rng=seeded(9))
    records = [1.0, 1.0, 4.0]
    weights = np.exp(2.0 * quantile_scores(mechanism, records)[0] / (2 * 0.5))
    counts = np.bincount([round(mechanism.release(records)) for _ in range(1500)], minlength=6)
    assert stats.chisquare(counts, weights / weights.sum() * 1500).pvalue > 1e-3
    wrong = weights**0.7
    assert stats.chisquare(counts, wrong / wrong.sum() * 1500).pvalue < 1e-4
    assert mechanism.event() == BoundedRange(epsilon=2.0)


def test_quantiles_are_near_the_truth(seeded):
    values = np.random.default_rng(2).normal(50, 10, size=5000)
    for quantile in (0.1, 0.5, 0.9):
        mechanism = PrivateQuantile(epsilon=1.0, quantile=quantile, bounds=(0.0, 200.0), rng=seeded(10))
        assert mechanism.release(values) == pytest.approx(np.quantile(values, quantile), abs=1.0)


def test_a_quantile_of_nothing_is_a_point_between_the_bounds(seeded):
    mechanism = PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(-1.0, 3.0), rng=seeded(11))
    assert all(-1.0 <= mechanism.release([]) <= 3.0 for _ in range(20))


# ── second moments ──


@RELATIONS
@BUDGETS
@pytest.mark.parametrize("columns", [1, 3])
def test_no_neighbor_moves_second_moments_by_more_than_their_sensitivity(columns, budget, neighboring_relation):
    mechanism = PrivateSecondMoment(
        budget=budget, data_norm=7.5, columns=columns, neighboring_relation=neighboring_relation
    )
    upper = np.triu_indices(columns)
    largest = 0.0
    for first, second in neighbors(columns, neighboring_relation):
        moved = np.ldexp(
            (mechanism.exact_value(first) - mechanism.exact_value(second)).astype(float), 2 * mechanism._exponent
        )
        size = np.abs(moved[upper]).sum() if budget is PURE else np.linalg.norm(moved)
        largest = max(largest, float(size))
    assert largest <= mechanism.sensitivity
    assert largest > mechanism.sensitivity * (0.4 if neighboring_relation is REPLACE else 0.9)


def test_the_sensitivity_of_second_moments_is_reached():
    for neighboring_relation, factor in ((ADD, 1.0), (REPLACE, math.sqrt(2))):
        mechanism = PrivateSecondMoment(
            budget=GAUSSIAN, data_norm=2.0, columns=2, neighboring_relation=neighboring_relation
        )
        moved = mechanism.exact_value([[2.0, 0.0]]) - mechanism.exact_value(
            [[0.0, 2.0]] if neighboring_relation is REPLACE else [[0.0, 0.0]]
        )
        size = np.linalg.norm(np.ldexp(moved.astype(float), 2 * mechanism._exponent))
        assert size == pytest.approx(4.0 * factor, rel=1e-4)
        assert mechanism.sensitivity == pytest.approx(4.0 * factor)
    # Upper triangle of rows with |x_j| ≤ 1: d(d + 1)/2.
    pure = PrivateSecondMoment(budget=PURE, data_norm=math.sqrt(3), columns=3)
    assert pure.sensitivity == pytest.approx(3 * 4 / 2)


@RELATIONS
def test_gaussian_noise_on_second_moments_has_its_scale_on_and_beside_the_diagonal(neighboring_relation, seeded):
    mechanism = PrivateSecondMoment(
        budget=GAUSSIAN, data_norm=2.0, columns=200, neighboring_relation=neighboring_relation, rng=seeded(12)
    )
    noise = mechanism.release(np.zeros((0, 200)))
    assert np.array_equal(noise, noise.T)
    scale = 1.5 * 4.0 * (math.sqrt(2) if neighboring_relation is REPLACE else 1.0)
    assert mechanism.scale == pytest.approx(scale, rel=1e-6)
    beside = noise[np.triu_indices(200, 1)]
    two_armed(beside, scale / math.sqrt(2), laplace=False)
    assert stats.kstest(beside / beside.std(), "norm").pvalue > 1e-3
    diagonal = [np.diag(mechanism.release(np.zeros((0, 200)))) for _ in range(20)]
    two_armed(np.concatenate(diagonal), scale, laplace=False)


def test_laplace_noise_on_second_moments_has_its_scale(seeded):
    mechanism = PrivateSecondMoment(budget=PURE, data_norm=1.0, columns=160, rng=seeded(13))
    noise = mechanism.release(np.zeros((0, 160)))[np.triu_indices(160)]
    assert mechanism.scale == pytest.approx(80.5, rel=1e-4)
    two_armed(noise, 80.5, laplace=True)
    assert stats.kstest(noise / 80.5, "laplace").pvalue > 1e-3
    assert mechanism.event() == PureDP(epsilon=1.0)


def test_second_moments_are_those_of_the_clipped_rows(seeded):
    mechanism = PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=1e-4), data_norm=2.0, columns=2, rng=seeded(14)
    )
    rows = np.array([[1.0, 1.0], [30.0, 40.0], [math.nan, 1.0], [0.0, -1.0]])
    clipped = np.array([[1.0, 1.0], [1.2, 1.6], [0.0, -1.0]])
    assert mechanism.release(rows) == pytest.approx(clipped.T @ clipped, abs=3e-3)


@pytest.mark.parametrize(
    "budget", [PureBudget(epsilon=1e-9), GaussianBudget(noise_multiplier=1e9), PureBudget(epsilon=1e9)]
)
def test_extreme_budgets_make_the_grid_coarser_and_nothing_else(budget, seeded):
    for mechanism, value in (
        (PrivateSecondMoment(budget=budget, data_norm=1.0, columns=3, rng=seeded(16)), np.eye(3)),
        (PrivateSum(budget=budget, bounds=((0.0, 1.0),) * 3, rng=seeded(16)), np.eye(3)),
        (PrivateMean(budget=budget, bounds=(0.0, 1.0), rng=seeded(16)), np.ones(3)),
    ):
        assert np.isfinite(mechanism.release(value)).all()
    with pytest.raises(InvalidArgument, match="budget must allow"):
        PrivateSecondMoment(budget=PureBudget(epsilon=1e-13), data_norm=1.0, columns=3)


def test_products_of_many_rows_are_added_exactly():
    rows = np.random.default_rng(3).normal(size=(30_000, 3))
    mechanism = PrivateSecondMoment(budget=GAUSSIAN, data_norm=1.0, columns=3)
    steps = mechanism._row_integers(rows).astype(np.int64)
    assert np.array_equal(mechanism.exact_value(rows), steps.T @ steps)


def test_a_covariance_is_near_the_truth_and_positive_semi_definite(seeded):
    generator = np.random.default_rng(4)
    rows = generator.multivariate_normal([0.5, -0.2], [[0.02, 0.01], [0.01, 0.03]], size=50_000)
    mechanism = PrivateCovariance(budget=GAUSSIAN, data_norm=2.0, columns=2, rng=seeded(15))
    assert mechanism.release(rows) == pytest.approx(np.cov(rows.T), abs=2e-3)
    noisy = PrivateCovariance(budget=GaussianBudget(noise_multiplier=50.0), data_norm=2.0, columns=5)
    assert np.linalg.eigvalsh(noisy.release(np.zeros((3, 5)))).min() >= -1e-9
    assert mechanism.event() == Gaussian(noise_multiplier=1.5)


# ── refusals ──


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PrivateSum(budget=PURE, bounds=(1.0, 1.0)), "lower < upper"),
        (lambda: PrivateSum(budget=PURE, bounds=(0.0, math.inf)), "never take them from the data"),
        (lambda: PrivateSum(budget=PURE, bounds=((0.0, 1.0), (2.0, 1.0))), "lower < upper"),
        (lambda: PrivateSum(budget=GaussianBudget(noise_multiplier=1e15), bounds=(0.0, 1.0)), "budget must allow"),
        (lambda: PrivateHistogram(budget=PURE), "edges must be given, or categories"),
        (lambda: PrivateHistogram(budget=PURE, edges=(0.0,)), "at least two rising numbers"),
        (lambda: PrivateHistogram(budget=PURE, edges=(0.0, 0.0)), "at least two rising numbers"),
        (lambda: PrivateHistogram(budget=PURE, categories=("a", "a")), "Declare each once"),
        (lambda: PrivateHistogram(budget=PURE, categories=("a",), outside="keep"), "outside must be one of"),
        (lambda: PrivateQuantile(epsilon=1.0, quantile=1.1, bounds=(0.0, 1.0)), "quantile must be"),
        (lambda: PrivateQuantile(epsilon=1.0, quantile=0.5, bounds=(0.0, 1.0), resolution=1), "resolution must be"),
        (lambda: PrivateSecondMoment(budget=PURE, data_norm=0.0, columns=2), "data_norm must be"),
        (lambda: PrivateMean(budget=PURE, bounds=(0.0, 1.0), count_share=1.0), "count_share must be"),
    ],
)
def test_wrong_declarations_are_refused(build, message):
    with pytest.raises((InvalidArgument, MissingDeclaration)) as caught:
        build()
    assert message in str(caught.value)


def test_shapes_and_kinds_of_records_are_refused_without_quoting_them():
    total = PrivateSum(budget=PURE, bounds=((0.0, 1.0), (0.0, 1.0)))
    for records in ([[1.5, 2.5, 3.5]], [1.5, 2.5], [["1.5", "2.5"]]):
        with pytest.raises(InvalidArgument) as caught:
            total.release(records)
        assert "1.5" not in str(caught.value)
