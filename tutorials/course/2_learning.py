# %% [markdown]
# # Private learning and whom it serves
#
# Four exercises about the calculus of learning, an experiment on the gap between training and test error, and a
# worksheet for the questions that no ε answers. Put your answers in the place of `None`; `check` says what refutes
# them.

# %%
import matplotlib.pyplot as plt
import numpy as np

from sordino.course import check
from sordino.plot_style import COLORS, METHOD_COLOURS, STYLE

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
        color=METHOD_COLOURS[column],
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
