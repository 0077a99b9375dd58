# %% [markdown]
# # Noise that changes: when does a dynamic schedule pay?
#
# Every step of a private descent spends a part of the budget. Equal parts are simple. But the noise of an early step is
# damped by all later ones, so the last steps deserve the least noise. How much is that worth, and when nothing?

# %%
import matplotlib.pyplot as plt
import numpy as np

from sordino.course import check
from sordino.plot_style import METHOD_COLORS, STYLE
from sordino.research import constant_noise_schedule, excess_risk_bound, noise_influence, optimal_noise_schedule

plt.rcParams.update(STYLE)

# %% [markdown]
# ## Exercise: the best schedule
#
# Noise multipliers σ_0 … σ_{T−1} with Σ σ_t⁻² = R (a zCDP budget of R/2) leave Σ γ^(T−1−t) σ_t² of noise at the end,
# γ = 1 − 1/κ. Write a function of T, κ and R that returns the multipliers with the least of it.
#
# <details><summary>Hint</summary>Lagrange: σ_t⁴ ∝ 1/q_t.</details>

# %%
answer = None
check("late noise", answer)

# %% [markdown]
# **Tempting:** equal noise, "since every step costs the same"; and the opposite order, more noise at the end, "since
# the last steps are small". Both leave more.


# %% tags=["answer"]
def best(steps, condition, budget):
    weights = (1 - 1 / condition) ** np.arange(steps - 1, -1, -1.0)
    shape = weights**-0.25
    return shape * np.sqrt(np.sum(shape**-2.0) / budget)


check("late noise", lambda steps, _condition, budget: np.full(steps, np.sqrt(steps / budget)))
check("late noise", lambda steps, condition, budget: best(steps, condition, budget)[::-1])
check("late noise", best)
assert np.allclose(
    best(30, 5.0, 0.3), optimal_noise_schedule(noise_influence(30, condition_number=5.0), budget=0.3).values
)

# %% [markdown]
# ## Experiment: a quadratic that satisfies the condition of the theorem
#
# f(θ) = Σ hᵢ θᵢ²/2 with curvatures from 1/κ to 1, started at distance 1, step 1. Noise is Gaussian, D = 20
# coordinates, κ = 10. The same zCDP budget everywhere. Uniform noise must stop at the right T; the dynamic schedule
# forgives a T that is too large. At the best T of each, the gain is smaller.


# %%
def final_losses(schedule, condition, runs=200, dimensions=20, scale=0.005, seed=0):
    """Loss over that of the start, in each of `runs` noisy descents."""
    curvature = np.geomspace(1 / condition, 1, dimensions)
    theta = np.ones((runs, dimensions)) / np.sqrt(dimensions)
    first = (curvature * theta[:1] ** 2).sum() / 2
    draws = np.random.default_rng(seed)
    for sigma in schedule.values:
        theta = theta - (curvature * theta + scale * sigma * draws.normal(size=theta.shape))
    return (curvature * theta**2).sum(axis=1) / 2 / first


budget, condition = 1.0, 10.0
print("   T    uniform   dynamic")
curves = {"uniform": [], "dynamic": []}
lengths = (10, 20, 40, 80, 160, 320)
for steps in lengths:
    row = {
        "uniform": final_losses(constant_noise_schedule(steps, budget=budget), condition),
        "dynamic": final_losses(
            optimal_noise_schedule(noise_influence(steps, condition_number=condition), budget=budget), condition
        ),
    }
    for name, losses in row.items():
        curves[name].append((losses.mean(), 1.96 * losses.std(ddof=1) / np.sqrt(len(losses))))
    print(f"{steps:4} {row['uniform'].mean():10.4f} {row['dynamic'].mean():9.4f}")

# %%
figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
for place, (name, values) in enumerate(curves.items()):
    means, bars = np.array(values).T
    axes.errorbar(lengths, means, yerr=bars, marker="o", capsize=3, linewidth=2, color=METHOD_COLORS[place], label=name)
axes.set_xscale("log")
axes.set_yscale("log")
axes.set_xticks(lengths, [str(steps) for steps in lengths])
axes.minorticks_off()
axes.set_xlabel("steps T", loc="right")
axes.set_ylabel("loss over the first loss")
axes.legend(frameon=False)
_ = axes.set_title("The same budget: 200 descents a point, 95 % intervals of the mean", loc="left")

# %% [markdown]
# ## Where it pays
#
# The theorem's bound says the same before any data are seen, and for other κ: its gain grows with T/κ, the number of
# times over that the noise of the first step is damped. At the best T of each schedule little is left for large κ.
# The map over T and κ, with the experiment beside the theory, is on the page
# [Optimizers and learned policies](../../optimizers.md).

# %%
alpha = 1e-4
print("     κ   best uniform   best dynamic    gain at the best T   gain at T = 320")
for condition in (2.0, 5.0, 10.0, 20.0, 50.0):
    bounds = {}
    for steps in range(1, 400):
        weights = noise_influence(steps, condition_number=condition, alpha=alpha)
        bounds[steps] = [
            excess_risk_bound(schedule.values, condition_number=condition, alpha=alpha)
            for schedule in (constant_noise_schedule(steps, budget=1.0), optimal_noise_schedule(weights, budget=1.0))
        ]
    uniform, dynamic = np.array(list(bounds.values())).min(axis=0)
    print(
        f"{condition:6g} {uniform:14.5f} {dynamic:14.5f} {1 - dynamic / uniform:20.0%} "
        f"{1 - bounds[320][1] / bounds[320][0]:17.0%}"
    )

# %% [markdown]
# **Tempting:** "so always take the dynamic schedule". It needs κ, which is not known of a network, and where a run is
# short beside κ both schedules are nearly the same. Deep models on digits showed no gain
# ([Optimizers and learned policies](../../optimizers.md)).
