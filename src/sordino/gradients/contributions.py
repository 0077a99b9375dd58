"""What clipping asks of a chunk's contributions, whatever they are (floor 1, gradients)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Contributions"]


class Contributions(Protocol):
    """The contributions of a chunk's records, one a record: norms, weighted sums, and the numbers themselves.

    `GradientCapture` has them of gradients. Anything else that stands in the place of a record's gradient, such as a
    client's update, is clipped, summed and noised alike if it has these.
    """

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The names of the parameters that contributions are made to."""
        ...

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are trained now, in an order that stays."""
        ...

    def squared_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None) -> Float[Tensor, "..."]:
        """Square of a bound on the norm of each contribution, over all parameters or a row for each group of them.

        Not finite for a contribution that is not finite.
        """
        ...

    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add Σ_b weights[b] · contribution[b] to `into`; what has weight 0 adds nothing, even when it isn't finite.

        `weights` has one factor for each record, or a row of them for each group of the last `squared_bounds`. After
        `last` the chunk is not read again.
        """
        ...

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The contributions of some records at a time, records first, and a factor that they still lack."""
        ...

    def discard(self) -> None:
        """Forget the chunk."""
        ...
