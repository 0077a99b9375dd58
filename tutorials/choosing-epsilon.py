# %% [markdown]
# # Choosing ε and reading a report
#
# Before training: what an ε means for one person, and how much noise it takes. After training: how to read the report
# that decides about a release. No formula is needed, and until the last part no record is touched.

# %% [markdown]
# ## What ε means for one person
# Somebody wants to know whether Alice is in the training data. They know everything else: the model, the other records,
# even the code. If they accept being wrong about 1 % of the people who are *not* in the data, how many of those who are
# in it can they find? Without privacy: up to all of them. With a guarantee there is a bound for every attack:

# %%
from sordino import Plan
from sordino.accounting import membership_advantage, true_positive_rate
from sordino.events import Gaussian


def plan(epsilon: float, records: int = 10_000) -> Plan:
    """Full-batch training with 100 steps: the event depends on ε, the noise, and not on the data."""
    return Plan.for_epsilon(
        target_epsilon=epsilon,
        delta=1e-5,
        sample_rate=1.0,
        steps=100,
        max_grad_norm=1.0,
        expected_batch_size=float(records),
        dataset_size_is_public=True,
    )


print("ε      found at 1 % false alarms   right guesses (½ = coin)")
for target in (0.1, 0.5, 1.0, 3.0, 8.0):
    event = plan(target).event()
    found = true_positive_rate(event, 0.01)
    right = (1 + membership_advantage(event).upper) / 2
    print(f"{target:<6} {found:>18.1%} {right:>26.1%}")

# %% [markdown]
# At ε = 1 the best possible guess is right in 55 of 100 cases, where a coin is right in 50; at ε = 8 in 80. Real
# attackers know less; the bound is what can be *promised*. For sensitive records, start at ε = 1 and argue from there.
#
# ## What ε costs
# The noise that reaches an ε, in units of what one record can add, spread over the batch. More records make the same ε
# cheaper; that is the most effective thing you can do.

# %%
import matplotlib.pyplot as plt

epsilons = [0.25, 0.5, 1, 2, 4, 8]
fig, ax = plt.subplots(figsize=(6, 3.4))
for records, color in ((1_000, "#a63a24"), (10_000, "#c08a2d"), (100_000, "#0b6e69")):
    noise = [plan(epsilon, records).noise_multiplier / records for epsilon in epsilons]
    ax.plot(epsilons, noise, "o-", color=color, label=f"{records:,} records")
ax.set(xscale="log", yscale="log", xlabel="ε (δ = 1e-5)", ylabel="noise in the mean gradient / C")
ax.set_xticks(epsilons, [str(epsilon) for epsilon in epsilons])
_ = ax.legend(frameon=False)

# %% [markdown]
# ## δ is not a second ε
# δ bounds the probability that the ε does not hold. It must be far below one over the number of records: with 10,000
# records, 1e-5 or smaller. It costs little, so do not save on it:

# %%
from sordino.accounting import epsilon

for delta in (1e-4, 1e-5, 1e-6, 1e-8):
    print(f"δ = {delta:g}: ε = {epsilon(Gaussian(noise_multiplier=4.0), delta=delta).upper:.2f}")

# %% [markdown]
# ## The accountant matters, the mechanism does not change
# The same training, accounted in three ways. All three are true; the smallest is the one to state.

# %%
from sordino.events import PoissonSampled, SelfComposed

training = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)), count=1000)
for accountant in ("contour", "pld", "rdp"):
    print(f"{accountant:8} ε ≤ {epsilon(training, delta=1e-5, accountant=accountant).upper:.3f}")

# %% [markdown]
# ## Train, and read the report
# The run folder holds plan, transcript and model. Its report is computed from it again, without the records.

# %%
# !sordino train adult --epsilon 1 --out run
# !sordino report run --format md --out report.md --purpose "A tutorial"

# %%
from pathlib import Path

text = Path("report.md").read_text(encoding="utf-8")
print(text[:3500])

# %% [markdown]
# Read it in this order:
#
# 1. **ε and δ, with what they protect**: one record, or all records of a user? Add or remove, or replace?
# 2. **May it be released?** The conditions are what somebody must still do or say.
# 3. **What is not covered**, above all *other access to the records*: settings that were chosen on them, statistics
#    that were looked at. ε counts what was charged.
# 4. **Checks**: a *critical* limitation means that the guarantee can be false.
#
# ## Exercises
# 1. Change one digit of a file in the run folder and run `sordino verify run`.
# 2. At which ε is a perfect attacker right about one person in at most 55 % of cases? Compute it with the code above.
# 3. Two teams train on the same records with ε = 1 each. What may be said about both models together? Ask
#    `sordino.accounting` with `Composed`, and read [ledger](../ledger.md).
#
# **Next:** [the report's parts](../report.md) · [tuning within a budget](tuning-within-a-budget.md)
