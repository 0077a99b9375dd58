"""A conformance case, and what a library does in one (audit, floor 4)."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sordino.audit.library import Library, NotOffered

__all__ = ["Case", "Finding", "Wrong", "case"]

Expects = Literal["right", "refusal", "either"]
Check = Callable[[Library], None]


class Wrong(Exception):
    """What a library did that no private training may do."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one case.

    Args:
        case: its name.
        verdict: "right", "refused", "wrong", or "not offered" where the library has no such thing.
        passed: whether that is as it should be; what isn't offered passes.
        words: what was wrong, or the kind of the refusal.
    """

    case: str
    verdict: Literal["right", "refused", "wrong", "not offered"]
    passed: bool
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a private library must get right.

    Args:
        name: a sentence that is true of a private library.
        expects: "right" when it must work; "refusal" when no number would be private, so that only a refusal, or a sum
            that stays within the bound all the same, passes; "either" when it may be refused or must be exact.
        check: raises `Wrong` where the library is wrong.
    """

    name: str
    expects: Expects
    check: Check

    def run(self, library: Library) -> Finding:
        """Try the case on `library`; no exception comes out."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check(library)
        except NotOffered:
            return Finding(case=self.name, verdict="not offered", passed=True)
        except Wrong as wrong:
            return Finding(case=self.name, verdict="wrong", passed=False, words=str(wrong))
        except library.refusals as refusal:
            may = self.expects != "right"
            return Finding(case=self.name, verdict="refused", passed=may, words=type(refusal).__name__)
        except Exception as crash:
            words = f"crash: {type(crash).__name__}"
            return Finding(case=self.name, verdict="wrong", passed=False, words=words)
        return Finding(case=self.name, verdict="right", passed=True)


def case(into: dict[str, Case], name: str, *, expects: Expects = "right") -> Callable[[Check], Check]:
    """Decorator: put a check among the cases `into`, under the sentence `name`."""

    def register(check: Check) -> Check:
        into[name] = Case(name=name, expects=expects, check=check)
        return check

    return register
