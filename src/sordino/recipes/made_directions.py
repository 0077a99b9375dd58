"""Rows whitened by what their features do on pictures made of random numbers, and a linear layer on them (floor 6).

The main directions of the made pictures' rows, each over the root of its share and a ridge, bring out what plain
descent would see last. Real pictures share them roughly; that is enough. As nothing of it reads a record, full-batch
descent spends the whole budget, as one Gaussian.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.recipes.network import Network, quiet_rate
from sordino.training.averaging import TailAverage

__all__ = ["MadeWhitening", "linear_on", "main_directions"]

_CONSTANT = 0.1


def main_directions(rows: Tensor, *, count: int, ridge: float) -> Tensor:
    """[columns, ≤ count]: the main directions of rows [n, columns], each over the root of its share plus a ridge.

    With fewer rows than columns, the axes come from the rows' products: X'X and XX' share their eigenvalues.

    Args:
        rows: of public or made records.
        count: the most directions that are kept.
        ridge: in units of the mean eigenvalue of rows of length 1.
    """
    few = len(rows) < rows.shape[1]
    values, vectors = torch.linalg.eigh((rows @ rows.T if few else rows.T @ rows) / len(rows))
    values, vectors = values.flip(0)[:count].clamp(min=1e-12), vectors.flip(1)[:, :count]
    axes = rows.T @ (vectors / torch.sqrt(values * len(rows))) if few else vectors
    return axes / torch.sqrt(values + ridge / rows.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class MadeWhitening:
    """A fixed map of rows [n, columns] to rows of length 1 [n, directions], each row by itself.

    Args:
        centre: [columns], subtracted first.
        directions: [columns, directions].
    """

    centre: Tensor
    directions: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, made: Tensor, *, count: int, ridge: float) -> "MadeWhitening":
        """The map that made pictures' rows give: their mean, and the main directions around it."""
        centre = made.mean(0)
        rows = nn.functional.normalize(made - centre, dim=1)
        return cls(centre=centre, directions=main_directions(rows, count=count, ridge=ridge))

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Whitened rows; one with an entry that is not finite becomes a row of zeros."""
        centred = nn.functional.normalize(rows - self.centre, dim=1)
        found = nn.functional.normalize(centred @ self.directions, dim=1)
        return torch.where(found.isfinite().all(dim=1, keepdim=True), found, 0.0)


def linear_on(rows: Callable[[Records], Tensor], *, words: str) -> Network:
    """Logistic regression by full-batch descent on rows of length 1.

    Args:
        rows: records ↦ rows [n, columns], each record by itself.
        words: for the report.
    """
    return Network(
        build=_linear,
        batch_size=None,
        steps=80,
        max_grad_norm=0.25,
        learning_rate=quiet_rate(largest=150.0, noise_per_weight=1.2),
        averaging=TailAverage(fraction=0.1),
        microbatch_size=8192,
        # A small constant for the intercept: a constant of 1 would take up half of the squared clipping norm.
        inputs=lambda records: nn.functional.pad(rows(records), (0, 1), value=_CONSTANT),
        words=words,
    )


def _linear(shape: Sequence[int], classes: int) -> nn.Module:
    """Scores without an intercept of their own, zero at the start."""
    linear = nn.Linear(shape[0], classes, bias=False)
    nn.init.zeros_(linear.weight)
    return linear
