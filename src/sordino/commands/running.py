"""What all commands share: what they say meanwhile, the processes and the account they work for, rounded numbers."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from sordino.definitions import format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import to_dict
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    from sordino.accounting import Interval
    from sordino.ledger import Account, ChargePreview
    from sordino.training.distributed import DistributedContext


class Progress:
    """Says nothing. The command line passes one that prints; derive a class to receive more.

    What is said depends on no private record.
    """

    is_shown = False
    """Whether a training shows its own progress line."""

    def status(self, text: str, *, title: str = "") -> None:
        """Say what is about to happen; `title` is what it is about."""

    def note(self, text: str) -> None:
        """Say something on the side."""

    @contextmanager
    def stage(self, words: str, *, total: int | None = None) -> "Iterator[Callable[..., None]]":
        """Show that a job goes on while the block is carried out.

        Args:
            words: what is being done.
            total: how many parts it has, if that is public.

        Yields:
            Called after each part whose number is public; ``words=`` changes what is being done.
        """
        del words, total

        def advance(*_: object, words: str | None = None) -> None:
            """Say nothing."""
            del words

        yield advance


SILENT = Progress()


# ----------------------------------------------------------------------------------------------------------------------
# Commands under torch's launcher: `train` is one run of all processes, every other command needs a single one.
# ----------------------------------------------------------------------------------------------------------------------


_TOGETHER = ("train",)


def _several() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_rank_zero() -> bool:
    """Whether this process prints the command's last word: the first one, or the only one."""
    return not _several() or os.environ["RANK"] == "0"


def check_single_process_command(command: str | None) -> None:
    """Refuse a command that every process would carry out by itself, each with its own noise and its own charges.

    Raises:
        InvalidArgument: names the command.
    """
    if _several() and command not in _TOGETHER:
        raise InvalidArgument(
            f"command must be train in several processes, got {command}, which each of them would carry out again. "
            "Start it in one process."
        )


def check_single_process_options(**given: object) -> None:
    """Refuse options that work in a single process only.

    Raises:
        InvalidArgument: names those that were given.
    """
    names = [name for name, value in given.items() if value]
    if _several() and names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out in several processes, got a value. Start the command in one process."
        )


@contextmanager
def init_distributed() -> "Iterator[DistributedContext]":
    """The processes that the launcher started, joined into a process group; just this one where it is alone.

    The group is that of gloo: the command trains on processors. After a failure no process waits for the others; the
    launcher ends them.
    """
    from sordino.training.distributed import DistributedContext, get_distributed_context

    if not _several():
        yield DistributedContext()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield get_distributed_context()
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# Accounts: δ where none was given, and what a command would cost (`dry_run=True`).
# ----------------------------------------------------------------------------------------------------------------------


_Found = TypeVar("_Found")


def open_account(place: str | None, name: str | None) -> "Account | None":
    """The account that ``--ledger`` and ``--dataset-name`` name, or None when neither is given."""
    if place is None and name is None:
        return None
    if place is None or name is None:
        raise InvalidArgument("--ledger and --dataset-name must be given together, got one of them. Give both.")
    from sordino.ledger import Ledger

    return Ledger(place).account(name)


def default_delta(population: int) -> float:
    """1e-5, or for large datasets the largest power of ten that stays below 2/3 of 1 / population.

    Example:
        >>> default_delta(30_162), default_delta(2_000_000)
        (1e-05, 1e-07)
    """
    return min(1e-5, float(f"1e-{len(str(3 * population // 2))}"))


def with_affordable_delta(
    work: Callable[[float], _Found], default: float, account: "Account | None", progress: Progress
) -> _Found:
    """What `work` gives for the default δ, or for the largest that the account still has for events with their own.

    An account keeps a part of its δ for events that have one of their own. Where no δ was given, what is too much
    for that part would be refused though its ε fits. `work` must charge before it reads a record, as all of sordino.
    """
    try:
        return work(default)
    except BudgetExceeded:
        left = 0.0 if account is None else account.remaining_delta()
        if not 0 < left < default:
            raise
        progress.note(f"  δ = {left:g}: what the account has left for events with a δ of their own")
        return work(left)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a command would charge; nothing was charged and no record was read.

    Args:
        charge: what would be charged, and whether the account has it; None where nothing would be.
        cost: its ε at `delta`; None where nothing would be charged.
        delta: at which `cost` is stated.
        account: that would be charged, or None.
        why: why nothing would be charged.
    """

    charge: "ChargePreview | None" = None
    cost: "Interval | None" = None
    delta: float = 0.0
    account: "Account | None" = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """False where the account does not have it."""
        return self.charge is None or self.charge.fits is not False

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        if self.charge is None or self.cost is None:
            return {"dry_run": True, "cost": None, "ledger": None, "why": self.why}
        ledger = None
        if self.account is not None:
            budget = self.account.budget()
            ledger = {
                "account": self.account.name,
                "fits": self.charge.fits,
                "left_epsilon": self.account.remaining_epsilon(),
                "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
                "refusal": self.charge.refusal or None,
            }
        return {
            "dry_run": True,
            "cost": {
                "epsilon": encode_number(self.cost.upper),
                "delta": self.delta,
                "neighboring_relation": self.charge.neighboring_relation.value,
                "privacy_unit": self.charge.privacy_unit.value,
                "accountant": self.cost.accountant,
                "event": to_dict(self.charge.event),
            },
            "ledger": ledger,
        }


def perform(
    work: "Callable[[Account | None, Path], _Found]",
    folder: Path,
    account: "Account | None",
    *,
    dry_run: bool,
    delta: float | None,
    progress: Progress,
) -> _Found | DryRun:
    """What `work` gives for the account and the run folder, or, in a dry run, what it would charge, see `preview`."""
    if dry_run:
        return preview(work, account, delta=delta, progress=progress)
    return work(account, folder)


def preview(
    work: "Callable[[Account, Path], object]", account: "Account | None", *, delta: float | None, progress: Progress
) -> DryRun:
    """What `work` would charge, and whether the account has it.

    Args:
        work: (account, run folder) ↦ anything; carried out up to its first charge, in a folder that is removed.
        account: that would be charged, or None.
        delta: at which ε is stated; None takes the account's, or 1e-5.
        progress: where it is said that this goes on.
    """
    from sordino import accounting
    from sordino.ledger import preview_charge

    with TemporaryDirectory() as place, progress.stage("computing the charge"):
        found = preview_charge(lambda ledger: work(ledger, Path(place) / "run"), account)
    if found is None:
        return DryRun(why="it reads no private record")
    level = delta if delta is not None else 1e-5 if account is None else account.budget().delta
    cost = accounting.epsilon(found.event, level, neighboring_relation=found.neighboring_relation)
    return DryRun(charge=found, cost=cost, delta=level, account=account)


# ----------------------------------------------------------------------------------------------------------------------
# Files and numbers: no file is replaced, and ε is rounded upwards.
# ----------------------------------------------------------------------------------------------------------------------


def write_new_file(path: Path, text: str) -> None:
    """Write `text` into a file that is not there yet.

    Raises:
        InvalidArgument: it is there, or can't be written.
    """
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InvalidArgument(f"out must be a new file, got {str(path)!r}. Give --out another name.") from error
    except OSError as error:
        raise InvalidArgument(f"out must be a file that can be written, got {str(path)!r}. Check the path.") from error


_SMALL, _LONGEST = 0.01, 300


def rounded(epsilon: float, digits: int = 5, *, most: float = math.inf) -> float | str:
    """ε with few digits, never below itself: five decimals, or as many more as it takes for five that are not 0.

    Args:
        epsilon: ≥ 0.
        digits: decimals of a number that is not small.
        most: what it is known to be at most; rounding does not take it above.
    """
    if math.isinf(epsilon):
        return "inf"
    if 0 < epsilon < _SMALL:
        digits += -2 - math.floor(math.log10(epsilon))
    found = float(format_upper_bound(epsilon, digits))
    while found > most >= epsilon and digits < _LONGEST:
        digits += 1
        found = float(format_upper_bound(epsilon, digits))
    return min(found, most) if epsilon <= most else found
