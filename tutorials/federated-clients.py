# %% [markdown]
# # Federated clients
#
# The records stay with their owners, and the guarantee protects *all* records of one client. You simulate a hundred
# clients with a trusted server, then without trust in the server, and see what each arrangement costs.

# %% [markdown]
# ## Clients with records of their own
# 1,437 handwritten digits, divided among 120 clients who have about 12 each. The unit of privacy is the client.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

from sordino import Plan
from sordino.definitions import PrivacyUnit
from sordino.federated import LocalTraining, simulate, split_clients

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
test, own = order[:360], order[360:]
owner = torch.arange(len(own)) % 120
clients = split_clients((x[own], y[own]), owner, num_clients=120)


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(x[test]).argmax(1) == y[test]).float().mean())


# %% [markdown]
# ## A trusted server
# In each round the server samples clients, they train on their own records, and the server clips each update as a whole
# and adds noise to the sum. With 120 clients one client is a large part of the sum, so the noise shows.


# %%
def federated_plan(epsilon: float) -> Plan:
    return Plan.for_epsilon(
        target_epsilon=epsilon,
        delta=1e-3,
        steps=25,  # rounds
        sample_rate=0.5,  # of the clients, each independently
        expected_batch_size=60.0,  # planned cohort size: the divisor, also when clients drop out
        max_grad_norm=0.5,  # bound of one client's update
        privacy_unit=PrivacyUnit.CLIENT,
    )


for epsilon in (0.5, 2.0, 8.0):
    torch.manual_seed(1)
    result = simulate(
        nn.Linear(64, 10), losses, clients, federated_plan(epsilon), local=LocalTraining(learning_rate=0.5, epochs=2)
    )
    print(f"ε = {epsilon:<5} accuracy {accuracy(result.model):.1%}")
print(result.guarantee.describe())

# %% [markdown]
# ## What the clients send
# An update is one vector, clipped as one. However many records a client has, and whatever is in them, its part in the
# sum has norm at most `max_grad_norm`. A client that sends something else than numbers contributes zero:

# %%
from sordino.federated import PrivateServer

server = PrivateServer(nn.Linear(64, 10), federated_plan(8.0), num_clients=120)
names = dict(server.model.named_parameters())


def update(client: int) -> dict[str, torch.Tensor]:
    value = float("nan") if client % 10 == 0 else 0.01
    return {name: torch.full_like(parameter, value) for name, parameter in names.items()}


with server:
    for cohort in server.rounds():
        server.finish_round(cohort, ((int(client), update(int(client))) for client in cohort.clients))
print(all(bool(parameter.isfinite().all()) for parameter in server.model.parameters()))
print(server.guarantee().describe())

# %% [markdown]
# ## Whom must the clients trust?
# The noise in the mean of n clients, when each update has norm at most C and the noise multiplier is z:
#
# | arrangement | noise in the mean | the clients trust |
# |---|---|---|
# | `PrivateServer` | zC / n | the server |
# | `DistributedServer` | a little more | that enough clients are honest, and that only sums are seen |
# | `LocalPrivacy` | 2zC / √n | no other party |

# %%
import matplotlib.pyplot as plt
import numpy as np

n = np.logspace(1, 6, 30)
fig, ax = plt.subplots(figsize=(6, 3.2))
ax.loglog(n, 1 / n, color="#0b6e69", label="trusted server")
ax.loglog(n, np.sqrt(1 / 0.5) / n, color="#c08a2d", label="shares of noise, half of the clients honest")
ax.loglog(n, 2 / np.sqrt(n), color="#a63a24", label="local privacy")
ax.set(xlabel="clients", ylabel="noise in the mean / (z C)")
_ = ax.legend(frameon=False)

# %% [markdown]
# ## Exercises
# 1. Double the number of clients by giving each half as many records. Which ε is now needed for the same accuracy?
# 2. A client holds a thousand records, the others twelve. What does the guarantee say about this client?
#
# **Next:** [federated learning](../federated.md), with your own transport and Flower
