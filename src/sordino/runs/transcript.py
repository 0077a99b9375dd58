"""The transcript of a run: lines that only grow, each holding the SHA-256 of the line before it.

There are two kinds of lines. A `RunSegment` says that a process began or resumed the run; a `Line` charges one step. A
step that was lost in a crash and taken again has two lines, distinguished by `attempt`, and both count.

| field | holds |
|---|---|
| `previous` | SHA-256 of the line before, its line end left out; of plan.json and run.json in the first line |
| `step`, `attempt`, `event`, `epsilon` | what was charged |
| `indices` | commitment to the batch's indices under a secret key, or null |
| `charge` | the ledger's name of the charge, or null |
| `segment`, `first_step` | number of the segment, the step where it starts |
| `key`, `seeded` | commitment to its secret key; whether the key came from a chosen seed |
| `most` | the event that one of the segment's steps charges at most |
| `model` | which of several models an engine trains, in lines and segments; absent for the first one |
| `plan` | the segment's plan, when it is not that of plan.json |
| `diagnosed` | whether the segment showed losses on its terminal; absent when it did not |

Nothing in a line depends on a record. Anyone who holds the folder can build another chain that fits: publish the head.
"""

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sordino import checks
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, NonPrivate, NoOp, compose, from_dict, to_dict

# ----------------------------------------------------------------------------------------------------------------------
# How a run folder's files are written and read: whole or not at all, plain JSON, fingerprints.
# ----------------------------------------------------------------------------------------------------------------------


def encode_number(value: float | None) -> float | str | None:
    """JSON has no ∞: it is written as the string "inf". NaN is refused when the text is made."""
    return "inf" if value is not None and math.isinf(value) and value > 0 else value


def decode_number(value: object) -> float | None:
    """The number that `encode` wrote."""
    if value is None or value == "inf":
        return None if value is None else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"value must be a number, 'inf' or null, got {value!r}. The run folder was changed.")
    return float(value)


def parse_json(text: str | bytes, name: str) -> dict[str, object]:
    """The JSON object in `text`, in UTF-8 if it is bytes; `name` says in an error which file it was."""
    try:
        body = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (UnicodeDecodeError, RecursionError) as error:
        kind = "bytes that are no UTF-8" if isinstance(error, UnicodeDecodeError) else "too many brackets"
        raise InvalidArgument(f"{name} must be JSON, got {kind}. Check the file.") from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{name} must be JSON, got text that fails at {error.pos}. Check the file.") from error
    if not isinstance(body, dict):
        raise InvalidArgument(f"{name} must be a JSON object, got {type(body).__name__}. Check the file.")
    return body


def file_digest(path: Path) -> dict[str, object]:
    """SHA-256 and size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def write_json(path: Path, body: Mapping[str, object]) -> None:
    """Write a JSON object, indented, as `write_bytes` does."""
    write_bytes(path, (json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic: a reader sees the old file or the whole new one, also after a power cut."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ----------------------------------------------------------------------------------------------------------------------
# The transcript of a run: lines that only grow, each holding the SHA-256 of the line before it.
# ----------------------------------------------------------------------------------------------------------------------


_LINE = {"previous", "step", "attempt", "event", "epsilon", "indices", "charge"}
_SEGMENT = {"previous", "segment", "key", "seeded", "first_step", "most"}
_OPTIONAL = {"torn", "model"}
_OPTIONAL_OF_SEGMENT = {"model", "plan", "diagnosed"}
_START_OF_SEGMENT = 120


@dataclass(frozen=True, kw_only=True)
class TranscriptLine:
    """One step of the transcript.

    Args:
        step: number of the step, from 0, without gaps within a segment.
        event: what the step did, whatever its batch was.
        epsilon: ε of the run up to and including this line, or None when it was not computed here.
        attempt: how often this step has been charged, from 1; later ones repeat it after a crash.
        indices: commitment to the batch's indices, or None.
        charge: the ledger's name of the charge, or None.
        torn: whether the line was cut off when the machine stopped; it counts as the most that a step can charge.
        model: number of the model that the step trains, from 0.
    """

    step: int
    event: Event
    epsilon: float | None
    attempt: int = 1
    indices: str | None = None
    charge: str | None = None
    torn: bool = False
    model: int = 0

    def to_json(self, previous: str) -> str:
        """The line as it is written after the line with hash `previous`, without its line end."""
        body = {
            "previous": previous,
            "step": self.step,
            "attempt": self.attempt,
            "event": to_dict(self.event),
            "epsilon": encode_number(self.epsilon),
            "indices": self.indices,
            "charge": self.charge,
        }
        more = ({"torn": True} if self.torn else {}) | ({"model": self.model} if self.model else {})
        return json.dumps(body | more, allow_nan=False)

    @classmethod
    def from_body(cls, body: dict[str, object]) -> Self:
        """The line whose JSON object is `body`."""
        return cls(
            step=checks.integer(0, step=body["step"]),
            event=from_dict(body["event"]),
            epsilon=decode_number(body["epsilon"]),
            attempt=checks.integer(1, attempt=body["attempt"]),
            indices=_text(body["indices"]),
            charge=_text(body["charge"]),
            torn=body.get("torn") is True,
            model=checks.integer(0, model=body.get("model", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class RunSegment:
    """The share of one process in a run: from the beginning, or from a checkpoint.

    Args:
        number: from 0; every resume makes a new one.
        key: commitment to the segment's secret key of noise and sampling, or None when it is not known. Never the key.
        first_step: the first step of the segment; less than what was reached before when steps are repeated.
        most: the event that one of its steps charges at most.
        seeded: whether the key came from a chosen seed; the run is then not for release.
        model: number of the model that the segment trains, from 0. Each model has steps of its own.
        plan: what the segment's steps follow, as JSON types; None is plan.json.
        diagnosed: whether losses of private records were shown on the terminal.
    """

    number: int
    key: str | None
    first_step: int
    most: Event
    seeded: bool = False
    model: int = 0
    plan: Mapping[str, object] | None = None
    diagnosed: bool = False

    def to_json(self, previous: str) -> str:
        """The line as it is written after the line with hash `previous`, without its line end."""
        body = {"previous": previous, "segment": self.number, "key": self.key, "seeded": self.seeded}
        body |= {"first_step": self.first_step, "most": to_dict(self.most)}
        body |= ({"model": self.model} if self.model else {}) | ({"diagnosed": True} if self.diagnosed else {})
        return json.dumps(body if self.plan is None else body | {"plan": dict(self.plan)}, allow_nan=False)

    @classmethod
    def from_body(cls, body: dict[str, object]) -> Self:
        """The segment whose JSON object is `body`."""
        return cls(
            number=checks.integer(0, segment=body["segment"]),
            key=_text(body["key"]),
            first_step=checks.integer(0, first_step=body["first_step"]),
            most=from_dict(body["most"]),
            seeded=body["seeded"] is True,
            model=checks.integer(0, model=body.get("model", 0)),
            plan=_object(body.get("plan")),
            diagnosed=body.get("diagnosed") is True,
        )


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"value must be a text or null, got {value!r}. The run folder was changed.")
    return value


def _object(value: object) -> Mapping[str, object] | None:
    if value is not None and not isinstance(value, dict):
        raise InvalidArgument(f"value must be an object or null, got {value!r}. The run folder was changed.")
    return value


def chain_start_hash(plan: bytes, meta: bytes) -> str:
    """What the first line holds in place of a hash: the fingerprint of plan.json and run.json together."""
    parts = "\n".join(hashlib.sha256(part).hexdigest() for part in (plan, meta))
    return hashlib.sha256(f"sordino transcript 1\n{parts}\n".encode()).hexdigest()


@dataclass(kw_only=True)
class _Steps:
    """Where one model stands: its next step, how far it got in any segment, and what a step charges at most."""

    next_step: int = 0
    reached: int = 0
    most: Event | None = None


class TranscriptReader:
    """Follows a transcript line by line, and refuses one that does not continue it.

    Args:
        head: hash that the first line must hold.
    """

    def __init__(self, head: str) -> None:
        self.head = head
        self.lines = self.segments = 0
        self._models: defaultdict[int, _Steps] = defaultdict(_Steps)
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._last = 0

    def next_step(self, model: int = 0) -> int:
        """The number of the step that the next line of `model` must have."""
        return self._models[model].next_step

    def reached(self, model: int = 0) -> int:
        """One more than the last step of `model` that was charged in any segment."""
        return self._models[model].reached

    def attempt(self, step: int, model: int = 0) -> int:
        """The number that the next attempt at `step` has."""
        return self._attempts[model, step] + 1

    def written(self, entry: TranscriptLine | RunSegment) -> bytes:
        """The bytes of the next line; it is then followed."""
        raw = entry.to_json(self.head).encode()
        self._follow(entry, raw)
        return raw + b"\n"

    def read(self, raw: bytes) -> TranscriptLine | RunSegment:
        """What the next line says.

        Raises:
            SordinoError: it is not a line of a transcript, or does not continue this one.
        """
        where = f"line {self.lines + 1} of transcript.jsonl"
        body = parse_json(raw, where)
        needed, optional = (_SEGMENT, _OPTIONAL_OF_SEGMENT) if "segment" in body else (_LINE, _OPTIONAL)
        if not needed <= body.keys() <= needed | optional:
            raise InvalidArgument(
                f"{where} must hold {', '.join(sorted(_LINE))}, got {', '.join(sorted(body))}. "
                "The run folder was changed."
            )
        if body["previous"] != self.head:
            raise SordinoError(f"{where} must hold the hash of what stands before it, got another. {_CHANGED}")
        entry = RunSegment.from_body(body) if "segment" in body else TranscriptLine.from_body(body)
        self._follow(entry, raw)
        return entry

    def torn(self, fragment: bytes) -> TranscriptLine | None:
        """How a last line that was cut off is counted: as a step, unless it began a segment.

        It may have been of any model, so it counts as a step of each.
        """
        if b'"segment"' in fragment[:_START_OF_SEGMENT]:
            return None
        most = [steps.most for steps in self._models.values() if steps.most is not None]
        event = compose(most) if most else NonPrivate(reason="the first line is torn")
        step, model = self._models[self._last].next_step, self._last
        return TranscriptLine(
            step=step, event=event, epsilon=None, attempt=self.attempt(step, model), torn=True, model=model
        )

    def _follow(self, entry: TranscriptLine | RunSegment, raw: bytes) -> None:
        steps = self._models[entry.model]
        if isinstance(entry, RunSegment):
            if entry.number != self.segments or entry.first_step > steps.reached:
                raise SordinoError(
                    f"a segment must be number {self.segments} and start at step {steps.reached} or before, got number "
                    f"{entry.number} at step {entry.first_step}. {_CHANGED}"
                )
            self.segments += 1
            steps.next_step, steps.most = entry.first_step, entry.most
        else:
            if entry.step != steps.next_step or entry.attempt != self.attempt(entry.step, entry.model):
                raise SordinoError(
                    f"steps of a transcript must follow without gaps, got attempt {entry.attempt} at step "
                    f"{entry.step} after step {steps.next_step - 1}. {_CHANGED}"
                )
            self._attempts[entry.model, entry.step] += 1
            steps.next_step += 1
            steps.reached = max(steps.reached, steps.next_step)
            if steps.most is None and not isinstance(entry.event, NoOp):
                steps.most = entry.event
        self._last = entry.model
        self.head = hashlib.sha256(raw).hexdigest()
        self.lines += 1


_CHANGED = "The run folder was changed."


def read_transcript(path: Path, follower: TranscriptReader) -> Iterator[TranscriptLine | RunSegment]:
    """All lines of a transcript, checked; a torn last one comes as the step that it counts as.

    Raises:
        SordinoError: a line does not continue the one before it.
    """
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield follower.read(raw[:-1])
                continue
            line = follower.torn(raw)
            if line is not None:
                yield line
