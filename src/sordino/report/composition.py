"""Other uses of the same records: what a ledger holds beside this run, or what the run states of them."""

from collections.abc import Collection, Mapping
from pathlib import Path

from sordino.errors import InvalidArgument
from sordino.ledger import Account, Entry, Ledger
from sordino.report.parts import Composition
from sordino.report.stated import one_line
from sordino.runs import Line

__all__ = ["composition"]


def composition(
    lines: list[Line], meta: Mapping[str, object], place: str | Path | None, *, paid: Collection[str] = ()
) -> Composition:
    """What is known of other uses of the records.

    Args:
        lines: the transcript, whose lines name the charges that paid for them.
        meta: facts of the run.
        place: the ledger, or None.
        paid: charges of evaluations, which may be all that the ledger holds of this run.

    Raises:
        InvalidArgument: the ledger holds no charge of this run.
    """
    said = one_line(meta.get("composition"))
    charges = {line.charge for line in lines if line.charge is not None}
    if place is None:
        if said is None and charges:
            said = (
                f"The run was charged to a ledger, with {len(charges):,} charges. What else was charged to the same "
                "account is told by the ledger; it was not given for this report."
            )
        return Composition(text=said)
    accounts = _accounts(place)
    # The account that paid for training, wherever evaluations were charged.
    for account, history, wanted in [(*one, set(wanted)) for wanted in (charges, paid) for one in accounts]:
        own = [entry for entry in history if entry.digest in wanted]
        if own:
            return _of(account, history, own, said)
    raise InvalidArgument(
        "ledger must hold charges of this run, got one without any. Give the ledger that the run was charged to."
    )


def _accounts(place: str | Path) -> list[tuple[Account, list[Entry]]]:
    book = Ledger(place)
    accounts = [book.account(name) for name in book.accounts()]
    return [(account, account.history()) for account in accounts]


def _of(account: Account, history: list[Entry], own: list[Entry], said: str | None) -> Composition:
    charged = [entry for entry in history if entry.kind == "charge"]
    before = sum(entry.seq < own[0].seq for entry in charged)
    after = sum(entry.seq > own[-1].seq for entry in charged)
    others = len({entry.run for entry in charged} - {entry.run for entry in own})
    words = (
        f"This run made {_times(len(own), 'charge')} to the account; {_times(before, 'charge')} came before its first, "
        f"{_times(after, 'charge')} after its last, from {_times(others, 'other run or use', 'other runs or uses')}."
    )
    spent = account.spent()
    return Composition(
        account=account.name,
        text=" ".join(filter(None, (words, said, *(f"{caveat}." for caveat in spent.caveats)))),
        spent=spent.epsilon,
        budget=account.budget().epsilon,
    )


def _times(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
