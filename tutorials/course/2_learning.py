# %% [markdown]
# # Private learning and whom it serves
#
# Four exercises about the calculus of learning, two experiments, on what privacy costs in records and on the gap
# between training and test error, and a worksheet for the questions that no ε answers. Put your answers in the place
# of `None`; `check` says what refutes them.

# %%
import matplotlib.pyplot as plt
import numpy as np

from sordino.course import check
from sordino.plot_style import COLORS, METHOD_COLORS, STYLE

plt.rcParams.update(STYLE)

# %% [markdown]
# ## Exercise 3.1: the regularizer of least squares
#
# Which θ minimizes ‖y − Xθ‖²/n + λ‖θ‖²? Write a function of X, y and λ. Is it ridge regression, or the LASSO?
#
# <details><summary>Hint</summary>Set the gradient to zero; the loss is a mean over n rows.</details>

# %%
answer = None
check("ridge", answer)

# %% [markdown]
# **Tempting:** (XᵀX + λI)⁻¹Xᵀy, which forgets the n; and the name LASSO. The penalty ‖θ‖² is ridge; the LASSO's is
# ‖θ‖₁, and sets coefficients to exactly zero. Ridge never does:


# %% tags=["answer"]
def ridge(X, y, penalty):
    return np.linalg.solve(X.T @ X + len(X) * penalty * np.eye(X.shape[1]), X.T @ y)


def lasso(X, y, penalty, steps=2000):
    """Proximal descent: a gradient step, then every coefficient moves towards zero by a threshold."""
    size = len(X) / (2 * np.linalg.eigvalsh(X.T @ X)[-1])
    theta = np.zeros(X.shape[1])
    for _ in range(steps):
        theta = theta + size * 2 / len(X) * X.T @ (y - X @ theta)
        theta = np.sign(theta) * np.maximum(np.abs(theta) - size * penalty, 0)
    return theta


check("ridge", lambda X, y, penalty: np.linalg.solve(X.T @ X + penalty * np.eye(X.shape[1]), X.T @ y))
check("ridge", ridge)
rng = np.random.default_rng(0)
X = rng.normal(size=(100, 5))
y = X @ np.array([2.0, -1.0, 0.0, 0.0, 0.1]) + rng.normal(size=100)
for penalty in (0.01, 0.3, 1.0):
    print(f"λ = {penalty:4g}   ridge {np.round(ridge(X, y, penalty), 3)}   lasso {np.round(lasso(X, y, penalty), 3)}")
assert np.all(ridge(X, y, 1.0) != 0)
assert np.any(lasso(X, y, 1.0) == 0)

# %% [markdown]
# ## Exercise 3.2: two gradients
#
# Write a pair of functions: the derivative of θ² as a function of θ, and the gradient of ‖y − Xθ‖² as a function of X,
# y and θ.
#
# <details><summary>Hint</summary>The chain rule; ‖r‖² = Σ rᵢ² with r = y − Xθ.</details>

# %%
answer = None
check("gradients", answer)

# %% [markdown]
# **Tempting:** 2Xᵀ(y − Xθ), with the sign of the residual lost: descent along it climbs.

# %% tags=["answer"]
check("gradients", (lambda theta: 2 * theta, lambda X, y, theta: 2 * X.T @ (y - X @ theta)))
check("gradients", (lambda theta: 2 * theta, lambda X, y, theta: -2 * X.T @ (y - X @ theta)))

# %% [markdown]
# ## Exercise 5.2: which of x², x³, √x and log x are convex?
#
# Give a set of names out of "x^2", "x^3", "sqrt x" and "log x", each on the whole of its domain.
#
# <details><summary>Hint</summary>The second derivative, on the whole domain.</details>

# %%
answer = None
check("convex", answer)

# %% [markdown]
# **Tempting:** x³, whose plot bends upwards where one looks first, at x > 0. A chord from −3 to 1 lies below the curve.

# %% tags=["answer"]
check("convex", {"x^2", "x^3"})
check("convex", {"x^2"})
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
for place, (name, curve, low, high) in enumerate(
    [("x²", np.square, -3, 3), ("x³", lambda x: x**3, -3, 3), ("√x", np.sqrt, 0, 3), ("log x", np.log, 0.05, 3)]
):
    grid = np.linspace(low, high, 200)
    left, right = (low, low + 0.67 * (high - low))
    axes[place].plot(grid, curve(grid), color=COLORS["accent"], linewidth=2)
    axes[place].plot([left, right], [curve(left), curve(right)], "o--", color=COLORS["alarm"])
    axes[place].set_title(name, loc="left")

# %% [markdown]
# ## Exercise 5.3: gradient descent for least squares
#
# Write gradient descent on ‖y − Xθ‖²/n from θ = 0: a function of X, y and a tolerance that returns θ and the number of
# iterations, so that at most that fraction of the first gap to the least loss is left. How many iterations does it take
# to the optimum itself?
#
# <details><summary>Hint</summary>A step of 1/L, with L the largest eigenvalue of 2XᵀX/n, multiplies the gap by
# (1 − 1/κ)² or less.</details>

# %%
answer = None
check("descent", answer)

# %% [markdown]
# **Tempting:** "as many as there are columns". That is true of conjugate gradients. **Tempting too:** a large step, to
# be there sooner. Both are refuted by running them. No finite number reaches the optimum: each iteration leaves a
# fraction.


# %% tags=["answer"]
def descent(X, y, tolerance, iterations=None, size=1.0):
    curvature = np.linalg.eigvalsh(2 * X.T @ X / len(X))
    count = int(np.ceil(curvature[-1] / curvature[0] * np.log(1 / tolerance) / 2)) if iterations is None else iterations
    theta = np.zeros(X.shape[1])
    for _ in range(count):
        theta = theta + size / curvature[-1] * 2 / len(X) * X.T @ (y - X @ theta)
    return theta, count


check("descent", lambda X, y, tolerance: descent(X, y, tolerance, iterations=X.shape[1]))
check("descent", lambda X, y, tolerance: descent(X, y, tolerance, size=2.2))
check("descent", descent)

# %% [markdown]
# ## How many more records does a private learner need?
#
# Kasiviswanathan, Lee, Nissim, Raskhodnikova and Smith 2008: whatever can be learned from a finite class H can be
# learned with ε-differential privacy. The exponential mechanism chooses a hypothesis by its number of wrong records;
# with n ≥ 2(ln |H| + ln 1/β)/(εα) records its excess training error is below α with probability 1 − β. Thresholds on a
# universe of |X| points are |X| + 1 hypotheses, so n grows with log |X|.
#
# Below, records lie in one of two ways. *At the border*: half of them at each of two adjacent points with different
# labels, so one threshold is right and all others are wrong for half of the records (α = ½). *Spread out*: uniform on
# the universe, where an error of 0.1 is good enough. For each universe the cell finds the smallest n with which the
# mechanism chooses well in 9 of 10 cases, at ε = 1.
#
# **Tempting:** "a universe twice as large needs twice the records". It needs ln 2 · 4/ε more, 2.8 records. **Tempting
# too:** "a private learner always pays for the size of the universe". Spread-out records have many good thresholds, and
# n doesn't grow. Without privacy two records at the border are enough in every universe. With δ > 0 other mechanisms
# need only log* |X| records (Bun, Nissim, Stemmer, Vadhan 2015).

# %%
from sordino.mechanisms import ExponentialMechanism

exponential = ExponentialMechanism(epsilon=1.0, sensitivity=1.0)
bits = np.array([4, 8, 16, 24, 32, 40])


def pieces(points, labels, size):
    """Thresholds t = 0 … size predict 1 from t on. Between two records they do the same: first t, number, wrong."""
    order = np.argsort(points, kind="stable")
    ends, first = np.unique(points[order], return_index=True)
    below = np.concatenate([[0], np.cumsum(labels[order])])[np.append(first, len(points))]
    starts = np.concatenate([[0], ends + 1])
    wrong = below + (len(points) - labels.sum()) - (np.append(first, len(points)) - below)
    return starts, np.diff(np.append(starts, size + 1)), wrong


def at_border(n, size, _rng=None):
    labels = np.arange(n) % 2
    starts, counts, wrong = pieces(size // 3 - 1 + labels, labels, size)
    return -wrong, counts, np.where(starts == size // 3, counts, 0)


def spread_out(n, size, rng):
    points = rng.integers(0, size, n)
    starts, counts, wrong = pieces(points, (points >= size // 3).astype(int), size)
    # The true error of a threshold is its distance from the border.
    low, high = size // 3 - size // 10, size // 3 + size // 10
    good = np.clip(np.minimum(starts + counts - 1, high) - np.maximum(starts, low) + 1, 0, None)
    return -wrong, counts, good


def success(draw, n, size, tries=100):
    """Probability that the chosen threshold is a good one, over records and the mechanism's randomness."""
    rng, found = np.random.default_rng(0), []
    for _ in range(tries):
        scores, counts, good = draw(n, size, rng)
        found.append(float(np.sum(exponential.probabilities(scores, counts) * good / counts)))
    return np.mean(found)


def fewest(draw, size):
    return next(n for n in range(4, 400, 2) if success(draw, n, size) >= 0.9)


needed = {name: [fewest(draw, 2**b) for b in bits] for name, draw in (("border", at_border), ("spread", spread_out))}
bound = 4 * (np.log(2.0**bits + 1) + np.log(10))
print("|X| = 2^b, b =", *(f"{b:6}" for b in bits))
print("at the border ", *(f"{n:6}" for n in needed["border"]), "  records")
print("the theorem   ", *(f"{n:6.0f}" for n in bound))
print("spread out    ", *(f"{n:6}" for n in needed["spread"]))
slope = np.polyfit(bits, needed["border"], 1)[0]
assert abs(slope / (4 * np.log(2)) - 1) < 0.1
assert np.all(np.array(needed["border"]) <= np.ceil(bound / 2) * 2)
assert max(needed["spread"]) - min(needed["spread"]) <= 8

# The same by releases: 400 choices of one threshold among 2^40.
right = 0
scores, counts, good = at_border(needed["border"][-1], 2**40)
for _ in range(400):
    right += int(good[exponential.release(scores, counts)] > 0)
print(f"by 400 releases at |X| = 2^40: right in {right / 400:.0%}")
assert abs(right / 400 - 0.9) < 0.07

# %%
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
axes.plot(bits, bound, "--", color=COLORS["mute"], label="the theorem, at the border")
axes.plot(bits, needed["border"], "o-", color=METHOD_COLORS[0], label="at the border")
axes.plot(bits, needed["spread"], "s-", color=METHOD_COLORS[1], label="spread out")
axes.set_xticks(bits, [f"$2^{{{b}}}$" for b in bits])
axes.set_xlabel("points in the universe")
axes.set_ylabel("records needed")
axes.set_ylim(0)
axes.legend(frameon=False)
_ = axes.set_title("At ε = 1 the worst case grows with log |X|", loc="left")

# %% [markdown]
# ## Does privacy keep a model from over-fitting?
#
# A model that hardly depends on any one record can't tell the records that it saw from others. Exchange a training
# record for the one that is tested: the expected error changes by no more than the two models' total variation
# distance, which is the *advantage* of the best membership attack under replace-one. So for every private training the
# expected gap between test and training error is at most that number. Below, a network with room for every record is
# trained on 500 digits whose labels are wrong in a third of the cases, so that there is much to over-fit: 300 steps
# with momentum, from the same weights, at three ε, with clipping alone, and with neither clipping nor noise.
#
# **Tempting:** "noise keeps the model from over-fitting, so a smaller ε is a better model". Two experiments refute it.
# Clipping alone, which has no ε at all, closes most of the gap here, as it holds each record's pull down. And where
# noise closes the rest, at ε = 1, it does so from both sides: the training error is as large as the test error.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

from sordino import Plan, accounting, data
from sordino.events import Gaussian, SelfComposed
from sordino.training.fit import fit

digits = load_digits()
features, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
x, y = features[order[:500]], labels[order[:500]]
test_x, test_y = features[order[500:]], labels[order[500:]]
generator = torch.Generator().manual_seed(0)


def spoiled(labels):
    wrong = torch.rand(len(labels), generator=generator) < 1 / 3
    return torch.where(wrong, torch.randint(0, 10, labels.shape, generator=generator), labels)


y, test_y = spoiled(y), spoiled(test_y)


def cross_entropy(model, features, labels):
    return nn.functional.cross_entropy(model(features), labels, reduction="none")


def errors(model):
    with torch.no_grad():
        return [float((model(a).argmax(1) != b).float().mean()) for a, b in ((x, y), (test_x, test_y))]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


settings = {"delta": 1e-5, "steps": 300, "sample_rate": 1.0, "expected_batch_size": 500.0, "max_grad_norm": 1.0}
plans = {f"ε = {epsilon:g}": Plan.for_epsilon(target_epsilon=epsilon, **settings) for epsilon in (1.0, 8.0, 64.0)}
plans["clipping alone"] = Plan(noise_multiplier=0.0, **settings)
gaps, bounds = {}, {}
for name, plan in plans.items():
    runs = []
    for _ in range(3 if plan.noise_multiplier else 1):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        fit(model, cross_entropy, (x, y), plan, optimizer=optimizer, progress=False)
        runs.append(errors(model))
    gaps[name] = np.array(runs)
    bounds[name] = 1.0  # nothing is promised without noise
    if plan.noise_multiplier:
        # Replacing a record moves the clipped sum by 2C: the noise counts half.
        replaced = SelfComposed(event=Gaussian(noise_multiplier=plan.noise_multiplier / 2), count=plan.steps)
        bounds[name] = accounting.membership_advantage(replaced).upper
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for _ in range(300):
    optimizer.zero_grad()
    cross_entropy(model, x, y).mean().backward()
    optimizer.step()
gaps["neither"], bounds["neither"] = np.array([errors(model)]), 1.0
print("                training error   test error      gap")
for name, runs in gaps.items():
    train, test = runs.mean(axis=0)
    print(f"{name:15} {train:14.1%} {test:12.1%} {test - train:8.1%}   at most {bounds[name]:.1%}")
    assert test - train <= bounds[name] + 0.02  # two points for chance: 500 and 1297 records
assert np.diff(gaps["neither"].mean(axis=0)) > 3 * np.diff(gaps["clipping alone"].mean(axis=0))

# %%
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
places = np.arange(len(gaps))
for column, name in enumerate(("training error", "test error")):
    means = [100 * runs[:, column].mean() for runs in gaps.values()]
    spreads = [100 * runs[:, column].std(ddof=1) if len(runs) > 1 else 0.0 for runs in gaps.values()]
    axes.errorbar(
        places,
        means,
        yerr=spreads,
        marker="os"[column],
        capsize=3,
        linestyle="none",
        markersize=8,
        color=METHOD_COLORS[column],
        label=name,
    )
for place, runs in zip(places, gaps.values(), strict=True):
    axes.plot([place, place], 100 * runs.mean(axis=0), color=COLORS["mute"], linewidth=3, zorder=0)
axes.set_xticks(places, list(gaps))
axes.set_ylabel("error, %")
axes.legend(frameon=False)
_ = axes.set_title("The gap (gray) is small under clipping, with noise or without", loc="left")

# %% [markdown]
# ## A worksheet: whom does the model serve, and whom does it cost?
#
# ε answers one question. These are others, and the run answers a part of them. `sordino report RUN --format worksheet`
# writes the sheet; what the run can't know stands as a question.

# %%
import tempfile
from pathlib import Path

from sordino import RunFolder
from sordino.report import build_report, compute_utility, render_worksheet

adult = data.load_dataset("adult")
names = [column.name for column in adult.schema.columns]
start = sum(column.width for column in adult.schema.columns[: names.index("race")])
race = adult.schema.columns[names.index("race")]
groups = [race.categories[k] for k in adult.test.features[:, start : start + race.width].argmax(axis=1)]

features, labels = adult.train.tensors()
test_features, test_labels = adult.test.tensors()
model = nn.Linear(features.shape[1], 2)
plan = Plan.for_epsilon(
    target_epsilon=1.0, delta=1e-5, steps=100, sample_rate=0.1, expected_batch_size=3000.0, max_grad_norm=1.0
)
folder = Path(tempfile.mkdtemp()) / "income"
fit(
    model,
    cross_entropy,
    (features, labels),
    plan,
    optimizer=torch.optim.SGD(model.parameters(), lr=4.0),
    run_folder=RunFolder.create(folder, plan=plan.to_json(), meta={"data": {"name": "Adult, census records"}}),
    progress=False,
)
with torch.no_grad():
    chances = torch.softmax(model(test_features), 1).numpy()
run = RunFolder.open(folder)
run.write_metrics(compute_utility(chances, test_labels.numpy(), public=True, groups={"race": groups}))
print(render_worksheet(build_report(run)))
