"""The loss threshold (floor 4): whoever fits suspiciously well was trained on."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["loss_scores"]


def loss_scores(losses: ArrayLike) -> NDArray[np.float64]:
    """Scores of the simplest attack: member if the loss is at most a threshold.

    The attacker knows the model's confidence in each record's own label, and nothing else.

    Args:
        losses: of the attacked model, one a record.

    Returns:
        −loss: higher is more suspicious.

    Example:
        >>> loss_scores([0.25, 2.0]).tolist()
        [-0.25, -2.0]

    References:
        Yeom, Giacomelli, Fredrikson, Jha 2018, "Privacy risk in machine learning", adversary 1.
    """
    return -np.asarray(losses, dtype=np.float64)
