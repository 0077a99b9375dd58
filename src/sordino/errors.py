"""The exceptions of the library.

```
SordinoError
├── InvalidArgument            a value outside its range (also a ValueError)
│   └── NotOffered             a name of another library, with what to write instead (also an AttributeError)
├── MissingDeclaration         something the user must declare was not declared (also a ValueError)
├── PrivacyError               going on would make the stated guarantee false
│   ├── UncapturedParameter    a use of a trainable parameter that no layer rule captured
│   ├── UnsupportedModule      a module that can't be made private, named with the reason
│   ├── CoupledRecords         one record's loss or gradient depends on another record
│   ├── RecordCountMismatch    a captured tensor's leading dimension is not the number of records
│   ├── LossShapeError         the loss is not one value per record
│   ├── NonPrivateStep          an optimizer step without a private gradient
│   └── UnknownSampler         a sampling scheme with no known event
├── BudgetExceeded             the step or the run would spend more than the budget
├── UnsupportedEvent           this accountant has no sound answer for this event
├── AccountingError            the accountant can't bound its own error for this input
├── DataUnavailable            a named dataset is not on this machine
└── LedgerError                the ledger can't be reached, or does not hold together
```

Every message has the form ``<name> must be <constraint>, got <value>. <What to do next>.`` or names the
module, parameter or option concerned. No message holds a record, a norm, a loss, or a realized batch size.
Refusals name a section of ``docs/limitations.md`` through `SordinoError.section`: ``sordino explain NAME`` prints it,
and the site has it below `DOCUMENTATION`.
"""

__all__ = [
    "AccountingError",
    "BudgetExceeded",
    "CoupledRecords",
    "DataUnavailable",
    "InvalidArgument",
    "LedgerError",
    "LossShapeError",
    "MissingDeclaration",
    "NonPrivateStep",
    "NotOffered",
    "PrivacyError",
    "RecordCountMismatch",
    "SordinoError",
    "UncapturedParameter",
    "UnknownSampler",
    "UnsupportedEvent",
    "UnsupportedModule",
]


DOCUMENTATION = "https://sordino-ml.github.io/sordino/latest/"
"""The site of the latest release. ``[project.urls]`` in pyproject.toml and mkdocs.yml have the same, by a test."""


class SordinoError(Exception):
    """Base of every exception that the library raises on purpose.

    `section` is the anchor in ``docs/limitations.md`` that explains the refusal, or an empty string.
    """

    section: str = ""

    def __str__(self) -> str:
        message = super().__str__()
        if not self.section:
            return message
        return f"{message} (`sordino explain {self.section}` or {DOCUMENTATION}limitations/#{self.section})"


class InvalidArgument(SordinoError, ValueError):
    """A value is outside its range."""


class NotOffered(InvalidArgument, AttributeError):
    """A name that another library has; the message says what to write instead. ``hasattr`` is False for it."""


class MissingDeclaration(SordinoError, ValueError):
    """A bound, category list, label set or other public fact was not declared by the user."""

    section = "declare-the-schema"


class PrivacyError(SordinoError):
    """Going on would make the stated guarantee false."""


class UncapturedParameter(PrivacyError):
    """A trainable parameter was used in a way that no layer rule captured."""

    section = "uncaptured-parameters"


class UnsupportedModule(PrivacyError):
    """A module can't be made private; the message names it and the reason."""

    section = "unsupported-modules"


class CoupledRecords(PrivacyError):
    """One record changes another record's loss or gradient."""

    section = "coupled-records"


class RecordCountMismatch(PrivacyError):
    """A captured tensor's leading dimension is not the number of records in the batch."""

    section = "records-first"


class LossShapeError(PrivacyError):
    """The loss is not one value per record."""

    section = "one-loss-per-record"


class NonPrivateStep(PrivacyError):
    """An optimizer was stepped without a private gradient for this batch."""

    section = "one-step-per-batch"


class UnknownSampler(PrivacyError):
    """The sampling scheme has no known event, so no amplification can be claimed."""

    section = "samplers"


class BudgetExceeded(SordinoError):
    """The step or the run would spend more than the budget."""

    section = "budget"


class UnsupportedEvent(SordinoError):
    """This accountant has no sound answer for this event; another accountant may have one."""

    section = "accountants"


class AccountingError(SordinoError):
    """The accountant can't bound its own error for this input."""

    section = "accountants"


class DataUnavailable(SordinoError):
    """A named dataset is not on this machine; the message says which file to place where."""

    section = "datasets"


class LedgerError(SordinoError):
    """The ledger can't be reached, or what it holds does not hold together."""

    section = "budget"
