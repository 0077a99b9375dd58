"""One folder a run (floor 2): what was planned, what was done, what came out. Plain JSON and safetensors, no pickle.

| file | holds |
|---|---|
| `run.json` | schema version, when it began, and what the caller said about the run (data, model, recipe) |
| `plan.json` | everything that changes the guarantee |
| `transcript.jsonl` | one line a step: step, event, ε charged so far; append-only |
| `guarantee.json` | what the finished run guarantees |
| `metrics.json` | measured values, each marked public or private |
| `model.safetensors` | the trained parameters, written whole or not at all |
| `environment.json` | versions and platform; no host name, no user name, no path |

Nothing here depends on a record: no realised batch size, no loss, no norm. So the folder may be published
with the model, except for metrics marked private.

Example:
    >>> import tempfile, pathlib
    >>> from sordino.events import Gaussian
    >>> with RunFolder.create(pathlib.Path(tempfile.mkdtemp()) / "run", plan="{}") as run:
    ...     run.append(step=0, event=Gaussian(noise_multiplier=2.0), epsilon=1.5)
    >>> run.event()
    Gaussian(noise_multiplier=2.0)
"""

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from sordino import checks
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, compose, from_dict, to_dict

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Line", "Metric", "RunFolder"]

_SCHEMA = 1
_SECONDS_BETWEEN_SYNCS = 1.0
_PACKAGES = ("sordino", "torch", "numpy", "scipy", "safetensors", "cryptography")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One step of the transcript.

    Args:
        step: number of the step, from 0, without gaps.
        event: what the step did, whatever its batch was.
        epsilon: ε of the run up to and including this step, or None when it was not computed at this step.
    """

    step: int
    event: Event
    epsilon: float | None

    def to_json(self) -> str:
        """The line as it is written, without its line end."""
        body = {"step": self.step, "event": to_dict(self.event), "epsilon": _encode(self.epsilon)}
        return json.dumps(body, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The line that `to_json` wrote."""
        body = _parse(text, "a line of transcript.jsonl")
        if set(body) != {"step", "event", "epsilon"}:
            raise InvalidArgument(
                f"a line of transcript.jsonl must hold step, event and epsilon, got {', '.join(sorted(body))}. "
                "The run folder was changed."
            )
        step = checks.integer(0, step=body["step"])
        return cls(step=step, event=from_dict(body["event"]), epsilon=_decode(body["epsilon"]))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured value.

    Args:
        value: the number.
        public: True only when it was computed from public data, or from the private model on public data.
        what: what was measured, in words.
    """

    value: float
    public: bool
    what: str = ""


class RunFolder:
    """A run on disk. Make one with `create` or `open`; use it in a `with` block, or `close` it.

    Guarantee: releases nothing of its own. What it stores is the plan, the events, the model and metrics that
    say whether they are public.
    """

    def __init__(self, path: Path, *, transcript: BinaryIO | None, last_step: int | None) -> None:
        self.path = path
        self._transcript = transcript
        self._last_step = last_step
        self._synced = time.monotonic()

    @classmethod
    def create(cls, path: str | Path, *, plan: str, meta: Mapping[str, object] | None = None) -> Self:
        """A new folder for a run that has not begun.

        Args:
            path: the folder; made with its parents. It must not hold anything yet.
            plan: the plan as JSON (`Plan.to_json()`).
            meta: JSON-ready facts about the run that are public: data set, model, recipe.

        Raises:
            InvalidArgument: the folder holds something already, or `plan` is not a JSON object.
        """
        path = Path(path)
        _parse(plan, "plan")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidArgument(
                f"path must be a new or empty folder, got {str(path)!r}. Runs are never overwritten: choose another."
            )
        path.mkdir(parents=True, exist_ok=True)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        _write(path / "plan.json", plan.rstrip("\n") + "\n")
        _write_json(path / "run.json", {"schema": _SCHEMA, "started": started, **dict(meta or {})})
        _write_json(path / "environment.json", environment())
        transcript = (path / "transcript.jsonl").open("xb", buffering=0)
        return cls(path, transcript=transcript, last_step=None)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """An existing run, to read.

        Raises:
            InvalidArgument: no run lies there.
        """
        path = Path(path)
        missing = [name for name in ("run.json", "plan.json", "transcript.jsonl") if not (path / name).is_file()]
        if missing:
            raise InvalidArgument(
                f"path must be a run folder, got {str(path)!r}, which lacks {', '.join(missing)}. "
                "Give a folder that `sordino train` or `sordino demo` made."
            )
        return cls(path, transcript=None, last_step=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Line]:
        """The transcript's lines, checked: whole lines, steps from 0 without gaps."""
        with (self.path / "transcript.jsonl").open("rb") as file:
            for number, raw in enumerate(file):
                if not raw.endswith(b"\n"):
                    raise SordinoError(
                        "transcript.jsonl must end with a whole line, got a torn one. "
                        "The run was cut off while it wrote; its last step may have been charged."
                    )
                line = Line.from_json(raw.decode())
                if line.step != number:
                    raise SordinoError(
                        f"steps of a transcript must run from 0 without gaps, got {line.step} at line {number + 1}. "
                        "The run folder was changed."
                    )
                yield line

    def append(self, *, step: int, event: Event, epsilon: float | None) -> None:
        """Write one step. Call it before the step touches data, so that the transcript is never short.

        The line reaches the operating system at once (a killed process loses nothing) and the disk at least
        once a second, and always before a model is saved.

        Args:
            step: the next number, from 0.
            event: the step's event.
            epsilon: ε so far, this step included; None when it was not computed.
        """
        if self._transcript is None:
            raise InvalidArgument(
                "run must be open for writing, got one that was closed or opened to read. Create one."
            )
        expected = 0 if self._last_step is None else self._last_step + 1
        if checks.integer(0, step=step) != expected:
            raise InvalidArgument(f"step must be {expected}, got {step}. Write every step once, in order.")
        self._transcript.write(Line(step=step, event=event, epsilon=epsilon).to_json().encode() + b"\n")
        self._last_step = step
        if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
            self.sync()

    def sync(self) -> None:
        """Force the transcript to the disk."""
        if self._transcript is not None:
            os.fsync(self._transcript.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Force the transcript to the disk and end writing it. Everything else may still be written."""
        if self._transcript is not None:
            self.sync()
            self._transcript.close()
            self._transcript = None

    def event(self) -> Event:
        """The composition of all steps written so far: what an accountant is to be asked about."""
        return compose([line.event for line in self])

    @property
    def plan(self) -> dict[str, object]:
        """The plan, as it was written."""
        return _parse((self.path / "plan.json").read_text(), "plan.json")

    @property
    def meta(self) -> dict[str, object]:
        """What was said about the run when it began."""
        return _parse((self.path / "run.json").read_text(), "run.json")

    @property
    def environment(self) -> dict[str, object]:
        """Versions and platform of the process that began the run."""
        return self._optional("environment.json")

    def write_guarantee(self, guarantee: Guarantee) -> None:
        """Write what the finished run guarantees, as numbers and as a sentence."""
        body = {
            "epsilon": _encode(guarantee.epsilon),
            "delta": guarantee.delta,
            "relation": guarantee.relation.value,
            "unit": guarantee.unit.value,
            "sampler": guarantee.sampler,
            "accountant": guarantee.accountant,
            "caveats": list(guarantee.caveats),
            "sentence": guarantee.sentence(),
        }
        _write_json(self.path / "guarantee.json", body)

    @property
    def guarantee(self) -> Guarantee | None:
        """The guarantee of the finished run, or None when it has not been written."""
        body = self._optional("guarantee.json")
        if not body:
            return None
        try:
            epsilon = _decode(body["epsilon"])
            caveats = body["caveats"]
            return Guarantee(
                epsilon=math.inf if epsilon is None else epsilon,
                delta=float(str(body["delta"])),
                relation=NeighboringRelation(str(body["relation"])),
                unit=PrivacyUnit(str(body["unit"])),
                sampler=str(body["sampler"]),
                accountant=str(body["accountant"]),
                caveats=tuple(map(str, caveats)) if isinstance(caveats, list) else (),
            )
        except KeyError as missing:
            raise InvalidArgument(
                f"guarantee.json must hold {missing}, got none. The run folder was changed."
            ) from missing

    def write_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Write all measured values; every one says whether it is public."""
        body = {
            name: {"value": _encode(metric.value), "visibility": "public" if metric.public else "private"}
            | ({"what": metric.what} if metric.what else {})
            for name, metric in metrics.items()
        }
        _write_json(self.path / "metrics.json", body)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The measured values, or an empty dictionary. Anything not marked public is private."""
        found: dict[str, Metric] = {}
        for name, body in self._optional("metrics.json").items():
            value = _decode(body.get("value")) if isinstance(body, dict) else None
            if isinstance(body, dict) and value is not None:
                public = body.get("visibility") == "public"
                found[name] = Metric(value=value, public=public, what=str(body.get("what", "")))
        return found

    def save_model(self, state_dict: "Mapping[str, Tensor]") -> Path:
        """Write the parameters to `model.safetensors`, whole or not at all, after the transcript is on the disk.

        Tied parameters are written once per name, so that the file loads into any module with these names.

        Args:
            state_dict: names to tensors of any shape and device.

        Returns:
            The file.
        """
        from safetensors.torch import save

        self.sync()
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state_dict.items()}
        target = self.path / "model.safetensors"
        _write_bytes(target, save(tensors, metadata={"format": "pt"}))
        return target

    def load_model(self) -> "dict[str, Tensor]":
        """The parameters of `model.safetensors`, on the CPU."""
        from safetensors.torch import load_file

        file = self.path / "model.safetensors"
        if not file.is_file():
            raise InvalidArgument(f"run must hold a model, got {str(self.path)!r} without one. Was it cut off?")
        return load_file(file)

    def _optional(self, name: str) -> dict[str, object]:
        file = self.path / name
        return _parse(file.read_text(), name) if file.is_file() else {}


def environment() -> dict[str, object]:
    """Versions and platform, without anything that names the machine or the user."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": versions,
    }


def _encode(value: float | None) -> float | str | None:
    """JSON has no ∞: it is written as the string "inf". NaN is refused when the text is made."""
    return "inf" if value is not None and math.isinf(value) and value > 0 else value


def _decode(value: object) -> float | None:
    if value is None or value == "inf":
        return None if value is None else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"value must be a number, 'inf' or null, got {value!r}. The run folder was changed.")
    return float(value)


def _parse(text: str, name: str) -> dict[str, object]:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{name} must be JSON, got text that fails at {error.pos}. Check the file.") from error
    if not isinstance(body, dict):
        raise InvalidArgument(f"{name} must be a JSON object, got {type(body).__name__}. Check the file.")
    return body


def _write_json(path: Path, body: Mapping[str, object]) -> None:
    _write(path, json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    _write_bytes(path, text.encode())


def _write_bytes(path: Path, content: bytes) -> None:
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
