"""What clipping asks of a chunk's contributions, whatever they are (floor 1, gradients)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from sordino.gradients.blocks import Blocks
    from sordino.gradients.early import Early
    from sordino.gradients.passes import TwoPasses

__all__ = ["Contributions", "Recorder"]


class Contributions(Protocol):
    """The contributions of a chunk's records, one a record: norms, weighted sums, and the numbers themselves.

    A `Recorder` has them of gradients. Anything else that stands in the place of a record's gradient, such as a
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


class Recorder(ABC):
    """Gradients of a model's records as `Contributions`: forward and backward of a chunk run between `start`, `stop`.

    The model stays the user's object: hooks are registered, nothing is wrapped or replaced.

    Attributes:
        model: whose gradients they are.
        names: the parameters that are recorded, with their names.
    """

    model: nn.Module
    names: dict[nn.Parameter, str]

    @abstractmethod
    def start(self, records: int, *, scale: float = 1.0, taking: "Early | Blocks | TwoPasses | None" = None) -> None:
        """Begin a recording; whatever was recorded before and not read is discarded.

        Args:
            records: number of records in the chunk, ≥ 0.
            scale: factor on every recorded gradient, > 0; the record count, when the loss is a mean over the chunk.
            taking: clips and adds up while backward passes run, where the recorder can.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the recording: later forward and backward passes are not recorded. It can still be read."""

    @contextmanager
    def recording(
        self, records: int, *, scale: float = 1.0, taking: "Early | Blocks | TwoPasses | None" = None
    ) -> Iterator[None]:
        """`start` and `stop` around a block that holds forward and backward of one chunk.

        An exception inside the block discards the recording.
        """
        self.start(records, scale=scale, taking=taking)
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.stop()

    @abstractmethod
    def discard(self) -> None:
        """Forget the recording and free what it holds."""

    @abstractmethod
    def detach(self) -> None:
        """Remove every hook; the model is as before."""

    @abstractmethod
    def set_aside(self) -> object:
        """Stop recording without ending the recording, for a forward pass of no training; give it to `take_back`."""

    @abstractmethod
    def take_back(self, recording: object) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""

    def surrounded_by(self, first: RemovableHandle, last: RemovableHandle) -> None:
        """Accept the model's outermost hooks, a pre-hook and a hook that do nothing in a second run of the forward."""
        del first, last

    @property
    def takes_sums(self) -> bool:
        """Whether the recording is clipped while backward passes run, and must be read by `add_taken_sums`."""
        return False

    def backward(self, run: Callable[[bool], object]) -> object:
        """Run the backward pass of the recording's loss, twice where norms come first.

        Args:
            run: one backward pass; called with whether its graph must be kept for another.
        """
        return run(False)

    def add_taken_sums(self, into: dict[nn.Parameter, Tensor]) -> None:
        """Add the clipped sums of a recording with `takes_sums`."""
        raise NotImplementedError

    def trainable(self) -> list[nn.Parameter]:
        """The recorded parameters that require grad now."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    @abstractmethod
    def squared_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None = None) -> Float[Tensor, "..."]:
        """As of `Contributions`."""

    @abstractmethod
    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """As of `Contributions`."""

    @abstractmethod
    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """As of `Contributions`."""
