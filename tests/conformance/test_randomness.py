"""Sampling and noise owe nothing to the seeds that users set."""

import subprocess
import sys

SCRIPT = """
import random, numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sordino.training.engine import PrivacyEngine
torch.manual_seed(0); numpy.random.seed(0); random.seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
data = TensorDataset(torch.zeros(200, 3), torch.arange(200))
model, optimizer, loader = PrivacyEngine().make_private(module=model, optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=100), noise_multiplier=1.0, max_grad_norm=1.0)
for features, places in loader:
    (0 * model(features)).sum(1).mean().backward()
    optimizer.step()
    print(places.tolist(), model.weight.grad.flatten().tolist())
"""


def test_two_processes_with_the_same_seeds_draw_other_batches_and_other_noise():
    outputs = [
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    assert len(outputs[0]) == len(outputs[1]) == 2
    masks, noises = zip(*(line.split("] [") for lines in outputs for line in lines), strict=True)
    assert len(set(masks)) == 4
    assert len(set(noises)) == 4
