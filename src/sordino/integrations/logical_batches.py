"""A private loader whose items are whole logical batches, for loops that take one step an item (floor 4)."""

from collections.abc import Iterator

from sordino.errors import UnprivateStep
from sordino.training.records.loader import PrivateLoader

__all__ = ["LogicalBatch", "LogicalBatches"]


class LogicalBatches:
    """Gives one `LogicalBatch` a step; what fetches items ahead has fetched no record yet.

    Args:
        loader: gives their chunks.
    """

    def __init__(self, loader: PrivateLoader) -> None:
        # The parts of a batch are gone through here, whole: nothing outside counts them.
        loader.split_by_size()
        self._loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        chunks = iter(self._loader)
        for _ in range(len(self._loader)):
            yield LogicalBatch(chunks, self._loader)


class LogicalBatch:
    """The chunks of one logical batch; it is drawn and charged when the first is asked for, and can be read once."""

    def __init__(self, chunks: Iterator[object], loader: PrivateLoader) -> None:
        self._chunks, self._loader, self._was_read = chunks, loader, False

    @property
    def is_complete(self) -> bool:
        """Whether the chunk that was given last is the last one."""
        return self._loader.ends_step

    def __iter__(self) -> Iterator[object]:
        if self._was_read:
            raise UnprivateStep(
                "a logical batch must be gone through once, got a second pass: its records would count twice (a "
                "closure that is called twice, an optimizer that evaluates the loss several times). Take one pass a "
                "step."
            )
        self._was_read = True
        yield next(self._chunks)
        while not self.is_complete:
            yield next(self._chunks)
