# %% [markdown]
# # An image classifier in your own training loop
#
# A small convolutional network learns handwritten digits with differential privacy. You keep the loop, the model and
# the optimizer; four lines make the training private. At the end you know what the guarantee says and what it cost.

# %% [markdown]
# ## The records
# 1,797 scanned digits of 8 × 8 pixels, which scikit-learn ships. A fifth of them is kept back as public test records:
# an accuracy measured on *private* records would be a release of its own.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, private = order[:360], order[360:]
print(f"{len(private)} private records, {len(test)} public test records")

# %% [markdown]
# ## A model that treats each record by itself
# Batch normalization would mix the records of a batch, so the network uses group normalization
# ([why](../limitations.md#unsupported-modules)).


# %%
def make_model() -> nn.Module:
    torch.manual_seed(1)  # first weights only; privacy noise never comes from torch's generator
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model.eval()(images[test]).argmax(1) == labels[test]).float().mean())


# %% [markdown]
# ## The loop, with four more lines
# `target_epsilon` asks for the smallest noise with which 30 epochs have ε = 3. The data loader that comes back draws
# Poisson samples: each record joins each batch independently, which is what the accounting assumes.

# %%
from sordino import PrivacyEngine

EPOCHS, DELTA = 30, 1e-4
model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(images[private], labels[private]), batch_size=256)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=1.0,
)

for _ in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

print(engine.guarantee(delta=DELTA).describe())
print(f"accuracy on the test records: {accuracy(model):.1%}")
private_accuracy = accuracy(model)

# %% [markdown]
# ## What privacy cost
# The same model, loop and number of epochs without the four lines. These are public records, so the comparison is
# allowed here; with private records the non-private model would itself be a release without a guarantee.

# %%
plain = make_model()
plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
for _ in range(EPOCHS):
    for x, y in DataLoader(TensorDataset(images[private], labels[private]), batch_size=256, shuffle=True):
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        plain_optimizer.step()
print(f"without privacy: {accuracy(plain):.1%}, with ε = 3: {private_accuracy:.1%}")

# %% [markdown]
# ## Two mistakes that are stopped
# A mean over the batch inside the model makes records depend on each other. The first step raises before any record
# has been released, and names the section that explains it (`sordino explain CoupledRecords` prints it offline).


# %% tags=["raises-exception"]
class CenteredByBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.linear(x - x.mean(0))


coupled = CenteredByBatch()
coupled, optimizer, loader = PrivacyEngine().make_private(
    module=coupled,
    optimizer=torch.optim.SGD(coupled.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(images[private], labels[private]), batch_size=256),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    nn.functional.cross_entropy(coupled(x), y).backward()
    optimizer.step()

# %% [markdown]
# And a step that was never clipped and noised does not happen:

# %% tags=["raises-exception"]
optimizer.step()

# %% [markdown]
# ## Exercises
# 1. Set `target_epsilon` to 1 and to 8. How does the accuracy change, and why is 8 hardly better than 3?
# 2. Train for 10 and for 100 epochs at ε = 3. More epochs need more noise in each step; which wins?
# 3. Replace `nn.GroupNorm(4, 16)` by `nn.BatchNorm2d(16)`. Read the message, and the section that it names.
#
# **Next:** [choosing ε and reading a report](choosing-epsilon.md) · [auditing a model](auditing.md) ·
# [the engine's options](../training-options.md)
