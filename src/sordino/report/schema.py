"""What a report says, as plain values. The page, the picture and the JSON all come from this one object."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sordino.definitions import Guarantee

__all__ = ["Accuracy", "Attack", "Point", "Remark", "Report"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """ε after `steps` steps."""

    steps: int
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One measured share of right answers, in [0, 1], on public records.

    Args:
        name: what was measured, in a few words.
        value: in [0, 1].
        is_private_model: whether it is the model the report is about.
        is_twin: whether it is the same model, trained without privacy.
    """

    name: str
    value: float
    is_private_model: bool = False
    is_twin: bool = False


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The best any attacker can do against the guarantee, whatever he knows and computes.

    Args:
        found: pairs (false positive rate, greatest true positive rate).
        right_guesses: greatest share of right guesses when membership is a fair coin.
    """

    found: tuple[tuple[float, float], ...]
    right_guesses: float


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One line of what is, or is not, covered."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a report says.

    Args:
        name: the run's name.
        started: when the run began, ISO 8601 without a place.
        guarantee: what the run guarantees.
        claimed_epsilon: ε as the run wrote it when it ended, or None when it did not end.
        recomputed_epsilon: ε computed again from the transcript, when the report was made.
        steps: steps in the transcript.
        curve: ε over the steps.
        target_epsilon: the goal the run was planned for, or None.
        accuracy: public measurements, the private model's first.
        withheld: how many measured values are marked private and so not shown.
        attack: what an attacker can at most do, or None when the run is not private.
        covered: what the guarantee covers.
        not_covered: what it doesn't.
        training: names and values of what was planned.
        data: names and values of what was trained on.
        environment: names and values of versions and platform.
        not_for_release: why the run must not be released, or an empty string.
    """

    name: str
    started: str
    guarantee: Guarantee
    claimed_epsilon: float | None
    recomputed_epsilon: float
    steps: int
    curve: tuple[Point, ...]
    target_epsilon: float | None
    accuracy: tuple[Accuracy, ...]
    withheld: int
    attack: Attack | None
    covered: tuple[Remark, ...]
    not_covered: tuple[Remark, ...]
    training: tuple[tuple[str, str], ...]
    data: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    not_for_release: str

    @property
    def agrees(self) -> bool:
        """Whether the transcript bears out what the run claimed."""
        return self.claimed_epsilon is None or self.recomputed_epsilon <= self.claimed_epsilon * (1 + 1e-9)

    @property
    def has_twin(self) -> bool:
        """Whether a twin trained without privacy was measured."""
        return any(item.is_twin for item in self.accuracy)

    def to_dict(self) -> dict[str, object]:
        """The report as plain JSON types; ∞ is the string "inf"."""
        body = {"schema": 1, **asdict(self)}
        body["guarantee"]["sentence"] = self.guarantee.sentence()
        plain = _plain(body)
        assert isinstance(plain, dict)
        return plain


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return "inf" if value == float("inf") else value
