"""What a report says, as one versioned model. Page, Markdown, JSON, registry entry and picture all come from it."""

from typing import Literal, Self

from pydantic import ValidationError

from sordino.errors import InvalidArgument
from sordino.report.bought import NoisyLosses, PaidEvaluation
from sordino.report.parts import (
    Accounting,
    Audit,
    Composition,
    Curves,
    Measurements,
    Mechanism,
    Part,
    Pitfall,
    Process,
    Real,
    Remark,
    Risk,
    Statement,
    Touch,
    UserLevel,
)

__all__ = ["Report"]


class Report(Part):
    """Everything a report says. Whatever a run does not say is None, and listed in `missing`.

    Args:
        schema_version: 3.
        name: the run's name.
        started: when the run began, ISO 8601 without a place.
        released: what is released, or None.
        trust: who has to be trusted with the records, in words.
        not_for_release: why the run must not be released, or an empty string.
        losses: the noisy losses that the plan bought, or None.
        evaluations: those on private records that were paid for.
        epsilon_together: ε of training and all evaluations at the run's δ; None without any, or where none composes.
        training, data, environment: names and values in words.
        registry: what the user says for the public registry of deployments.
        missing: names of required things that the run does not state.
    """

    schema_version: Literal[3] = 3
    name: str
    started: str
    released: str | None
    trust: str
    guarantee: Statement
    target_epsilon: Real | None
    accounting: Accounting
    user_level: tuple[UserLevel, ...]
    mechanism: Mechanism
    process: Process
    curves: Curves
    risk: Risk | None
    touches: tuple[Touch, ...]
    composition: Composition
    audits: tuple[Audit, ...]
    utility: Measurements
    losses: NoisyLosses | None
    evaluations: tuple[PaidEvaluation, ...]
    epsilon_together: Real | None
    pitfalls: tuple[Pitfall, ...]
    covered: tuple[Remark, ...]
    not_covered: tuple[Remark, ...]
    training: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    registry: dict[str, str]
    not_for_release: str
    missing: tuple[str, ...]

    def to_json(self) -> str:
        """The report as JSON; ∞ is the string "inf"."""
        return self.model_dump_json(indent=2)

    def to_dict(self) -> dict[str, object]:
        """The report as plain JSON types."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote.

        Raises:
            InvalidArgument: it is not one, or was written by another version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise InvalidArgument(
                f"report must be JSON of schema version 3, got one that fails at {where}: {first['msg']}. "
                "Make it anew with `sordino report RUN --format json`."
            ) from error
