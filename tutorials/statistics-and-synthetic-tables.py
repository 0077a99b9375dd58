# %% [markdown]
# # Statistics and a synthetic table
#
# Counts, means and a table to try queries on are often enough, without a model. This tutorial releases noisy statistics
# with intervals and a synthetic table, and compares both with the true values.

# %% [markdown]
# ## One charge for all statistics
# `describe` takes a table with a declared schema and releases many statistics from one budget. Each comes with an
# interval that covers the noise, so a reader sees which differences mean something.

# %%
# !sordino describe adult --epsilon 1

# %% [markdown]
# ## A synthetic table
# The synthesizer measures noisy tables of few columns, fits a graphical model and draws records from it. The records
# can be shared: all that is learned from them is covered by the same ε.

# %%
# !sordino synthesize adult --epsilon 1 --method mst --rows 20000 --out synthetic.csv

# %%
import csv

with open("synthetic.csv", newline="") as file:
    synthetic = list(csv.DictReader(file))
print(*synthetic[0].items(), sep="\n")

# %% [markdown]
# ## How close is it?
# The share of records with a high income, by education, in the synthetic and in the true table (which is public here).

# %%
import lzma
from collections import defaultdict
from importlib.resources import files

import matplotlib.pyplot as plt

with lzma.open(files("sordino") / "data/files/adult-train.csv.xz", "rt") as file:
    true = list(csv.DictReader(file))


def share(rows: list[dict[str, str]]) -> dict[str, float]:
    counts = defaultdict(lambda: [0, 0])
    for row in rows:
        counts[row["education"]][0] += 1
        counts[row["education"]][1] += row["income"].startswith(">")
    return {level: high / number for level, (number, high) in counts.items() if number >= 100}


wanted = share(true)
found = share(synthetic)
levels = sorted(wanted, key=wanted.get)
fig, ax = plt.subplots(figsize=(6, 4))
ax.plot([wanted[level] for level in levels], levels, "o", color="#0b6e69", label="true table")
ax.plot([found.get(level, float("nan")) for level in levels], levels, "x", color="#a63a24", label="synthetic, ε = 1")
ax.set(xlabel="share with an income above 50,000 dollars")
_ = ax.legend(frameon=False)

# %% [markdown]
# What a synthetic table is good for: trying queries, developing code, sharing a table's shape. Conclusions belong to the
# noisy statistics, which have intervals; a synthetic record has none.
#
# ## Exercises
# 1. Run it again with `--method independent`. Which dependence is lost?
# 2. `sordino describe` and `sordino synthesize` were run on the same records with ε = 1 each. What may be said about
#    both results together? (`sordino explain ledger`)
#
# **Next:** [describe](../describe.md) · [synthetic tables](../synthetic-tables.md)
