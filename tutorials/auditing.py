# %% [markdown]
# # Auditing a model
#
# A guarantee is an upper bound on what an attacker can learn; an audit attacks and gives a lower bound. You audit a
# training that keeps its promise, one that does not, and read what each result proves.

# %% [markdown]
# ## A training and its promise

# %%
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from sordino import Plan
from sordino.audit import audit_training

table = load_breast_cancer()  # 569 tumors, 30 measurements; shipped by scikit-learn
x = torch.tensor(table.data, dtype=torch.float32)
x = (x / torch.tensor(table.data.max(0), dtype=torch.float32)).clamp(
    0, 1
)  # public records here; declare bounds otherwise
y = torch.tensor(table.target)
plan = Plan.for_epsilon(
    target_epsilon=4.0,
    delta=1e-5,
    sample_rate=1.0,
    steps=30,
    max_grad_norm=1.0,
    expected_batch_size=float(len(x)),
    dataset_size_is_public=True,
)


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


# %% [markdown]
# ## One training, audited
# Canaries are planted among the records, each in with probability one half, and an attacker who sees every released
# gradient guesses which ones were in. How often the guesses are right bounds ε from below, with 95 % confidence.

# %%
found = audit_training(nn.Linear(30, 2), losses, (x, y), plan, progress=False)
print(
    f"shown: ε ≥ {found.bound.epsilon:.2f}   claimed: ε = {found.claimed.epsilon:.2f}   at most: {found.bound.ceiling:.2f}"
)
print("claim rejected:", found.claim_rejected)
for check in found.checks:
    print(f"{'pass' if check.passed else 'FAIL'}  {check.name}")

# %% [markdown]
# The bound lies below the claim: nothing is refuted, and nothing is proved. "At most" is what the audit would have shown
# had every guess been right; below the claim it could not have refuted anything.
#
# ## A training that lies
# Here most of the noise is forgotten: the training uses a quarter of the noise multiplier that the claim was computed
# for. The audit of this training, held against the false claim:

# %%
import dataclasses

honest = plan.noise_multiplier
lying = dataclasses.replace(plan, noise_multiplier=honest / 4)
exposed = audit_training(nn.Linear(30, 2), losses, (x, y), lying, progress=False)
claimed = plan.guarantee().epsilon
print(f"claimed: ε = {claimed:.2f}, shown: ε ≥ {exposed.bound.epsilon:.2f}")
print("the claim is", "refuted" if exposed.bound.epsilon > claimed else "not refuted by this training")

# %% [markdown]
# ## What an attacker finds in a finished model
# Membership attacks look at the model only. Beside each stands what the guarantee lets through at most.

# %%
from sordino.audit.attacks import membership_bound_of_epsilon

for epsilon in (0.5, 1.0, 4.0):
    bound = membership_bound_of_epsilon(epsilon=epsilon, delta=1e-5)
    print(f"ε = {epsilon}: of the members at most {bound.true_positive_rate(0.01):.1%} are found at 1 % false alarms")

# %% [markdown]
# ## Is the installed engine sound?
# Named checks of the engine that you have installed, here the nine of noise, batches and charges:

# %%
from sordino.audit import check_engine

for name, passed in check_engine().passed.items():
    print(f"{'pass' if passed else 'FAIL'}  {name}")

# %% [markdown]
# ## A pipeline of your own
# A replay runs a function on neighboring datasets with all noisy answers forced to be equal. Whatever still differs is a
# leak past the mechanisms:

# %%
from sordino.audit import replay
from sordino.mechanisms import PrivateCount, make_budget


def pipeline(ages):
    count = PrivateCount(budget=make_budget(epsilon=1.0)).release(ages)
    return count, max(ages)  # the maximum is exact: a leak


report = replay(pipeline, [31, 58, 44], [[31, 58, 44, 90], [31, 58]])
for violation in report.violations:
    print(violation.kind)

# %% [markdown]
# ## Exercises
# 1. Run the first audit again. Why is the bound another one, and which may you state?
# 2. Let `lying` have 0.9 of the noise instead of a quarter. Does the bound notice?
#
# Do not release a model that was audited: it was trained with canaries. **Next:** [bounds and their
# assumptions](../auditing.md) · [attacks](../attacks.md)
