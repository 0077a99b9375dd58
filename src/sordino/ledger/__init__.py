"""The ledger: what was spent on which dataset, by whom, and what is left. SQLAlchemy; no torch.

    Ledger("privacy.db")              a file (SQLite) or postgresql://…
    ledger.declare("adult", …)        a dataset's account, with its budget
    account.charge(event)             before the data are read; refused when it does not fit
    account.reserve(event)            a whole plan set aside, drawn in pieces, the rest given back
    preview_charge(work, account)     what a piece of work would charge, and whether the account has it

Accounts and reservations are what ``ledger=`` takes in `fit`, `PrivacyEngine` and the estimators.
"""

from sordino.ledger.account import (
    Account,
    AccountBudget,
    Charge,
    ChargePreview,
    Remaining,
    Reservation,
    preview_charge,
)
from sordino.ledger.ledger import Ledger
from sordino.ledger.store import LedgerEntry

__all__ = [
    "Account",
    "AccountBudget",
    "Charge",
    "ChargePreview",
    "Ledger",
    "LedgerEntry",
    "Remaining",
    "Reservation",
    "preview_charge",
]
