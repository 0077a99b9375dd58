"""Several views of a record, averaged before clipping (floor 3): augmentation that costs no privacy and no noise."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sordino import checks

__all__ = ["augmented"]


def augmented(
    loss: Callable[..., Tensor],
    transform: Callable[..., tuple[object, ...]],
    *,
    views: int,
) -> Callable[..., Tensor]:
    """A loss whose gradient is the mean over `views` random views of each record, clipped as one.

    When: images or other records with transformations that keep the label. Each record still contributes one clipped
    gradient, so noise and ε are those of a single view, while its direction is steadier. A step costs `views` forward
    and backward passes.

    Guarantee: releases nothing; a record's views are added up before clipping, since they are calls of the same model
    on the same records.

    Args:
        loss: ``loss(model, *batch)``, one value per record.
        transform: ``transform(*batch)``, a random view of the same records in the same order, as a tuple. It must treat
            each record alone, which the check before the first step tries out together with the loss.
        views: K ≥ 1.

    Returns:
        A loss for `fit`.

    Example:
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> def blurred(x, y):
        ...     return nn.functional.dropout(x, 0.1), y
        >>> averaged = augmented(loss, blurred, views=4)
        >>> averaged(nn.Linear(3, 2), torch.ones(5, 3), torch.zeros(5).long()).shape
        torch.Size([5])

    References:
        De, Berrada, Hayes, Smith, Balle 2022, "Unlocking high-accuracy differentially private image classification
        through scale", section 3.2.
    """
    checks.integer(1, views=views)

    def averaged(model: nn.Module, *batch: object) -> Tensor:
        return torch.stack([loss(model, *transform(*batch)) for _ in range(views)]).mean(0)

    return averaged
