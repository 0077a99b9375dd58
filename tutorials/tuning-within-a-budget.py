# %% [markdown]
# # Tuning within a budget
#
# Trying twenty settings on private records and keeping the best is twenty uses of them. Here the whole search is part of
# the guarantee: you see the free ways first, then a search that costs little more than one training.

# %% [markdown]
# ## Free: rules of scale
# Batch size, steps and clipping norm that are reasonable for the number of records, without a look at any of them.

# %%
from sordino import data
from sordino.tuning import recommend_settings

adult = data.load_dataset("adult")
X, y = adult.train.features, adult.train.labels
settings = recommend_settings(dataset_size=len(y), num_parameters=105 * 2, target_epsilon=1.0, delta=1e-5)
for name in ("batch_size", "steps", "max_grad_norm", "noise_multiplier"):
    print(f"{name:17} {getattr(settings, name)}")

# %% [markdown]
# ## The wrong way, and its price
# Twenty trainings with ε = 1 each, of which the best one is shown:

# %%
from sordino.accounting import calibrate_noise_multiplier, epsilon
from sordino.events import Gaussian, SelfComposed

one = Gaussian(noise_multiplier=calibrate_noise_multiplier(
    lambda noise: Gaussian(noise_multiplier=noise), target_epsilon=1.0, delta=1e-5
))  # fmt: skip
print(f"one training:    ε = {epsilon(one, delta=1e-5).upper:.2f}")
print(f"twenty of them:  ε = {epsilon(SelfComposed(event=one, count=20), delta=1e-5).upper:.2f}")

# %% [markdown]
# ## Random stopping: the number of trials stays secret
# `PrivateRandomSearch` draws the number of trials from a distribution, keeps the best, and says nothing of the others.
# Then the best trial tells little more than a single one, and the whole search has ε = 1.

# %%
from sordino.estimators import LogisticRegression
from sordino.tuning import LogUniform, PrivateRandomSearch, Uniform

model = LogisticRegression(data_norm=13**0.5, classes=(0, 1), method="dp-gd", dataset_size=30_000)
space = {"learning_rate": LogUniform(1.0, 256.0), "max_grad_norm": Uniform(0.05, 1.0)}
search = PrivateRandomSearch(model, space, mean=8, epsilon=1.0, delta=1e-5).fit(X, y)
print(search.guarantee_.describe())
print("settings of the best trial:", {name: round(value, 3) for name, value in search.best_params_.items()})
print(f"accuracy on public test records: {search.score(adult.test.features, adult.test.labels):.1%}")

# %% [markdown]
# ## What the search costs in noise
# Each trial of a search trains with more noise than a single training at the same ε. That is the price of choosing; it
# pays when the settings matter more than the noise.

# %%
import matplotlib.pyplot as plt

from sordino.events import RepeatAndSelect

fig, ax = plt.subplots(figsize=(6, 3.2))
noises = [2, 3, 4, 6, 8, 12]
single = [epsilon(Gaussian(noise_multiplier=z), delta=1e-5).upper for z in noises]
ax.plot(noises, single, "o-", color="#0b6e69", label="one training")
for mean, color in ((10, "#c08a2d"), (100, "#a63a24")):
    searched = [
        epsilon(
            RepeatAndSelect(event=Gaussian(noise_multiplier=z), distribution="negative_binomial", mean=mean, shape=0.0),
            delta=1e-5,
        ).upper
        for z in noises
    ]
    ax.plot(noises, searched, "o-", color=color, label=f"the best of {mean} on average")
ax.set(xlabel="noise multiplier of each training", ylabel="ε of the whole (δ = 1e-5)", ylim=(0, None))
_ = ax.legend(frameon=False)

# %% [markdown]
# ## One command
# The same on the command line; the run folder holds the best trial, and its report says how the settings were found.

# %%
# !sordino tune adult --model dp-gd --epsilon 1 --runs 5 --out run

# %% [markdown]
# ## Exercises
# 1. Compare the accuracy with the default settings, which cost nothing, at ε = 0.1, 1 and 8. When does searching pay?
# 2. Why would it break the guarantee to print how long the search took?
#
# **Next:** [all search methods](../tuning.md) · [the proof](../proofs/tuning-profiles.md)
