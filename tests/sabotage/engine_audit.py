"""An audit of any engine through its public surface: it returns what is broken, an empty set for a private engine."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.training.engine import PrivacyEngine

C, Z = 0.7, 1.5


def audit() -> set[str]:
    broken = {check.__name__ for check in CHECKS if not check()}
    return {name.replace("_", " ") for name in broken}


def gradients(model, tensors, loss, *, steps, batch_size, noise_multiplier, max_grad_norm=C, seed=None):
    """The gradient that the optimizer sees in each of `steps` steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine(seed=seed, reproducible=seed is not None)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(*tensors), batch_size=batch_size),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
    )
    seen = []
    while len(seen) < steps:
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone())
    engine.detach()
    return seen[:steps]


def silent(model, batch):
    return (0 * model(batch[0])).sum(1).mean()


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1).mean()


def noise_has_the_declared_scale() -> bool:
    (noise,) = gradients(
        nn.Linear(400, 500), (torch.zeros(32, 400),), silent, steps=1, batch_size=8, noise_multiplier=Z
    )
    ratio = float(noise.double().square().mean().sqrt()) / (Z * C / 8)
    return abs(ratio - 1) < 0.01


def noise_is_fresh() -> bool:
    rows = gradients(nn.Linear(100, 100), (torch.zeros(32, 100),), silent, steps=3, batch_size=8, noise_multiplier=Z)
    centred = torch.stack(rows).numpy()
    if not centred.any():
        return True  # no noise at all is what the other check finds
    if not (np.ptp(centred, axis=1) > 0).all():
        return False
    correlation = np.corrcoef(centred) - np.eye(3)
    return bool(np.abs(correlation).max() < 6 / 100)


def one_record_moves_the_sum_by_at_most_twice_the_norm() -> bool:
    sums = []
    for factor in (1.0, 1000.0, 0.0):
        torch.manual_seed(0)
        x, y = torch.randn(12, 4), torch.randn(12, 1)
        x[0] *= factor
        y[0] *= factor
        (gradient,) = gradients(nn.Linear(4, 1), (x, y), squares, steps=1, batch_size=12, noise_multiplier=0.0)
        sums.append(12 * gradient)
    return all(float((one - other).norm()) <= 2 * C * (1 + 1e-5) for one in sums for other in sums)


def the_divisor_is_public() -> bool:
    # Every record's gradient is −1: the sum counts the records, which are random in number.
    model = nn.Linear(1, 1, bias=False)
    seen = gradients(
        model,
        (torch.ones(40, 1),),
        lambda m, b: -m(b[0]).sum(1).mean(),
        steps=8,
        batch_size=10,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    counts = [float(-10 * gradient[0]) for gradient in seen]
    whole = all(abs(count - round(count)) < 1e-3 for count in counts)
    return whole and len({round(count) for count in counts}) > 1


CHECKS = (
    noise_has_the_declared_scale,
    noise_is_fresh,
    one_record_moves_the_sum_by_at_most_twice_the_norm,
    the_divisor_is_public,
)
