"""What server and clients share: the model, and each client's records."""

import torch
from sklearn.datasets import load_digits


def model() -> torch.nn.Module:
    """Logistic regression from 8 × 8 pixels to ten digits."""
    linear = torch.nn.Linear(64, 10)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    return linear


def records(part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The records of client number `part`; the last fifth of the data is kept for the server, as public test data."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = len(x) * 4 // 5
    return x[part:train:parts], y[part:train:parts]


def public_test() -> tuple[torch.Tensor, torch.Tensor]:
    """Records that nobody's privacy depends on."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return x[len(x) * 4 // 5 :], y[len(x) * 4 // 5 :]
