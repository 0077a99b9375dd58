"""Clients' updates in the place of per-record gradients (floor 4, federated): one update is one record's gradient.

`training.PrivateStep` clips, sums and noises whatever has norms and weighted sums. A stack of updates has both, so
every clipping method, schedule and correlated noise of a plan holds for clients as it does for records.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.federated.updates import GivenUpdate, Update, as_tensors, shared_parameters
from sordino.gradients.numerics import full_precision

__all__ = ["UpdateStack"]


class UpdateStack:
    """The updates of some clients, stacked.

    Guarantee: none of its own. An update that is not what was asked for (a name is missing or unknown, a shape differs,
    an entry is not finite) counts as not finite: it is clipped to exactly zero.

    Args:
        model: names the shared parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shared = shared_parameters(model)
        self.names = {parameter: name for name, parameter in self._shared.items()}
        self._rows: dict[nn.Parameter, Tensor] = {}
        self._groups: dict[nn.Parameter, int] = {}

    def trainable(self) -> list[nn.Parameter]:
        """The shared parameters, in the model's order."""
        return list(self._shared.values())

    def put(self, updates: Iterable[GivenUpdate]) -> int:
        """Stack `updates` in the place of what was there; the number of them is returned.

        Raises:
            InvalidArgument: an update is of a type that holds no numbers.
        """
        usable = [self._usable(update) for update in updates]
        self._rows = {
            parameter: torch.stack(
                [update[name].detach().to(parameter.device, _working(parameter)) for update in usable]
            )
            for name, parameter in self._shared.items()
            if usable
        }
        return len(usable)

    def _usable(self, given: GivenUpdate) -> Update:
        """`given`, or one that is nowhere finite in its place."""
        update = as_tensors(given, self.names.values())
        fits = set(update) == set(self._shared)
        fits = fits and all(_fits(update[name], parameter) for name, parameter in self._shared.items())
        return update if fits else {name: torch.full_like(p, torch.nan) for name, p in self._shared.items()}

    def squared_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None) -> Float[Tensor, "*G B"]:
        """The squared norm of each update, over all parameters or for each group of them.

        Sums of squares of single-precision entries are taken in double precision; an update whose square overflows even
        that counts as not finite.
        """
        if groups is None:
            self._groups = {}
            return self._squares(self.trainable())
        self._groups = {parameter: number for number, group in enumerate(groups) for parameter in group}
        return torch.stack([self._squares(group) for group in groups])

    def _squares(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, " B"]:
        total = torch.zeros(0, dtype=torch.float64)
        for parameter in parameters:
            if parameter in self._rows:
                rows = self._rows[parameter].double().flatten(1).square().sum(1)
                total = rows if not len(total) else total + rows.to(total.device)
        return total

    def add_weighted_sums(
        self, weights: Float[Tensor, "*G B"], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add Σ_b weights[b] · update_b to `into`; with groups, row g of `weights` is for the g-th group."""
        del last
        for parameter, rows in self._rows.items():
            with full_precision(rows.device):
                self._add(weights, parameter, rows, into)

    def _add(
        self, weights: Float[Tensor, "*G B"], parameter: nn.Parameter, rows: Tensor, into: dict[nn.Parameter, Tensor]
    ) -> None:
        """Norms were taken of these very numbers, so no product may be rounded more coarsely."""
        factor = (weights if weights.dim() == 1 else weights[self._groups[parameter]]).to(rows)
        # A factor of zero must also remove what is not finite.
        kept = torch.where(factor.view(-1, *[1] * (rows.dim() - 1)) == 0, torch.zeros_like(rows), rows)
        total = torch.tensordot(factor, kept, dims=1)
        present = into.get(parameter)
        into[parameter] = total if present is None else present.add_(total)

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The stacked updates themselves, and the factor 1: for methods that must look at every entry."""
        if self._rows:
            yield dict(self._rows), 1.0

    def discard(self) -> None:
        """Forget the stacked updates."""
        self._rows = {}


def _fits(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether `value` lies in memory and has the parameter's shape."""
    return value.shape == parameter.shape and value.device.type != "meta"


def _working(parameter: nn.Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
