"""The run folder itself: made, opened to read, or taken up again by one process at a time."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from sordino import checks
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, NoOp, compose
from sordino.runs.results import (
    Evaluation,
    Metric,
    ReleasedLosses,
    evaluations_body,
    guarantee_body,
    losses_body,
    metrics_body,
    read_evaluations,
    read_guarantee,
    read_metrics,
    read_released_losses,
)
from sordino.runs.transcript import (
    RunSegment,
    TranscriptLine,
    TranscriptReader,
    chain_start_hash,
    file_digest,
    parse_json,
    read_transcript,
    write_bytes,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor


# ----------------------------------------------------------------------------------------------------------------------
# Versions and platform of a run, without anything that names the machine or the user.
# ----------------------------------------------------------------------------------------------------------------------


_PACKAGES = ("sordino", "torch", "numpy", "scipy", "safetensors", "cryptography")


def environment() -> dict[str, object]:
    """What `environment.json` holds."""
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
        "accelerator": _accelerator(),
        "code": _commit(),
        "packages": versions,
    }


def _accelerator() -> str | None:
    """The model of the first CUDA device, when the process has torch loaded and a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


def _commit() -> str | None:
    """The git commit of the working directory, with a mark when tracked files differ from it; None outside git.

    It says which code a run was made with; names of files, branches and remotes stay out.
    """
    git = shutil.which("git")
    if git is None:
        return None
    try:
        head, changes = (
            subprocess.run([git, *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}, changed since" if changes else head


# ----------------------------------------------------------------------------------------------------------------------
# Opening a run folder for writing: one process at a time, and a torn last line made whole.
# ----------------------------------------------------------------------------------------------------------------------


def umask() -> int:
    """Which rights new files don't get; there is no way to ask without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def lock_transcript(path: Path) -> int:
    """A lock on the folder that ends with this process, however it ends."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise InvalidArgument(
            f"run must not be open elsewhere, got {str(path)!r}, which another process is writing, or "
            "another engine in this one. Wait for its end; an engine lets go of it with detach()."
        ) from error
    return lock


def repair_last_line(transcript: Path, follower: TranscriptReader) -> None:
    """Follow the transcript to its end; put a whole line in place of a torn one, in one atomic step."""
    content = transcript.read_bytes()
    whole, _, fragment = content.rpartition(b"\n")
    for raw in whole.split(b"\n") if whole else ():
        follower.read(raw)
    if fragment:
        line = follower.torn(fragment)
        mended = b"" if line is None else follower.written(line)
        write_bytes(transcript, content[: len(content) - len(fragment)] + mended)


# ----------------------------------------------------------------------------------------------------------------------
# The run folder itself: made, opened to read, or taken up again by one process at a time.
# ----------------------------------------------------------------------------------------------------------------------


MANIFEST_FILES = (
    "checkpoint.safetensors",
    "environment.json",
    "evaluations.json",
    "guarantee.json",
    "loss_curve.json",
    "metrics.json",
    "model.json",
    "model.safetensors",
    "plan.json",
    "run.json",
    "transcript.jsonl",
)
"""The files of a run. A manifest vouches for them and for whatever else lies in the folder when it is closed."""

_SCHEMA = 1
_SECONDS_BETWEEN_SYNCS = 1.0


class RunFolder:
    """A run on disk. Make one with `create`, `open` or `resume`; use it in a `with` block, or `close` it.

    Guarantee: releases nothing of its own. What it stores is the plan, the events, the model and metrics that
    say whether they are public.
    """

    def __init__(
        self, path: Path, *, transcript: BinaryIO | None, follower: TranscriptReader | None, lock: int | None
    ) -> None:
        self.path = path
        self._transcript = transcript
        self._follower = follower
        self._lock = lock
        self._synced = time.monotonic()

    @classmethod
    def create(cls, path: str | Path, *, plan: str, meta: Mapping[str, object] | None = None) -> Self:
        """A new folder for a run that has not begun.

        Args:
            path: the folder; made with its parents. It must not hold anything yet.
            plan: the plan as JSON (`Plan.to_json()`).
            meta: JSON-ready facts about the run that are public: dataset, model, recipe.

        Raises:
            InvalidArgument: the folder holds something already, or `plan` is not a JSON object.
        """
        path = Path(path)
        parse_json(plan, "plan")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidArgument(
                f"path must be a new or empty folder, got {str(path)!r}. Runs are never overwritten: choose another."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A process that dies in here leaves no half of a run behind: the folder gets its name when it is whole.
            draft = Path(mkdtemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent))
        except OSError as error:
            raise InvalidArgument(
                f"path must be a folder that can be made, got {str(path)!r} ({error.strerror}). Choose another."
            ) from error
        lock = lock_transcript(draft)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        write_bytes(draft / "plan.json", (plan.rstrip("\n") + "\n").encode())
        write_json(draft / "run.json", {"schema": _SCHEMA, "started": started, **dict(meta or {})})
        write_json(draft / "environment.json", environment())
        transcript = (draft / "transcript.jsonl").open("xb", buffering=0)
        draft.chmod(0o777 & ~umask())
        draft.replace(path)
        return cls(path, transcript=transcript, follower=_follower(path), lock=lock)

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
        return cls(path, transcript=None, follower=None, lock=None)

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """An existing run, to go on writing: a torn last line is made whole.

        Raises:
            InvalidArgument: no run lies there, or another process is writing it.
            SordinoError: the transcript was changed.
        """
        path = cls.open(path).path
        lock = lock_transcript(path)
        try:
            follower = _follower(path)
            repair_last_line(path / "transcript.jsonl", follower)
            transcript = (path / "transcript.jsonl").open("ab", buffering=0)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, transcript=transcript, follower=follower, lock=lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the transcript ------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[TranscriptLine | RunSegment]:
        """All lines of the transcript in order, checked against the chain of hashes.

        Raises:
            SordinoError: a line does not continue the one before it.
        """
        return read_transcript(self.path / "transcript.jsonl", _follower(self.path))

    def __iter__(self) -> Iterator[TranscriptLine]:
        """The steps of the transcript in the order in which they were charged; repeated ones come again."""
        return (entry for entry in self.entries() if isinstance(entry, TranscriptLine))

    def segments(self) -> tuple[RunSegment, ...]:
        """The processes that worked on the run; more than one when it was resumed."""
        return tuple(entry for entry in self.entries() if isinstance(entry, RunSegment))

    @property
    def head(self) -> str:
        """The hash that stands for the run. Publish it to anchor the run.

        Of a closed run it is the SHA-256 of the manifest, and stands for every file: plan, facts, transcript, model,
        guarantee, metrics and reports. Until then it is `chain_head`.
        """
        file = self.path / "manifest.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else self.chain_head

    @property
    def chain_head(self) -> str:
        """The hash at the end of the chain: it stands for plan, facts and every line of the transcript."""
        follower = self._follower
        if follower is None:
            follower = _follower(self.path)
            for _ in read_transcript(self.path / "transcript.jsonl", follower):
                pass
        return follower.head

    def next_step(self, model: int = 0) -> int | None:
        """The number that the next line of `model` must have; None when the folder is not open for writing."""
        return None if self._follower is None or self._transcript is None else self._follower.next_step(model)

    def reached(self, model: int = 0) -> int:
        """One more than the last step of `model` that was charged."""
        if self._follower is not None:
            return self._follower.reached(model)
        return max((line.step + 1 for line in self if line.model == model), default=0)

    @property
    def lines(self) -> int:
        """Number of lines in the transcript, those of segments among them."""
        return sum(1 for _ in self.entries()) if self._follower is None else self._follower.lines

    def begin(
        self,
        *,
        key: str | None,
        first_step: int,
        most: Event,
        seeded: bool = False,
        model: int = 0,
        plan: Mapping[str, object] | None = None,
        diagnosed: bool = False,
    ) -> RunSegment:
        """Write that a process begins or takes up the run.

        Args:
            key: commitment to its secret key of noise and sampling (`KeyedRNG.commitment`), never the key.
            first_step: its first step, at most one more than the last that was charged.
            most: the event that one of its steps charges at most; a torn line counts as this.
            seeded: whether the key came from a chosen seed.
            model: which of several models the segment trains, from 0.
            plan: what its steps follow, as JSON types, when it is not plan.json.
            diagnosed: whether it shows losses on its terminal.
        """
        follower = self._writing()
        # What the folder claims about its end would be too little from here on.
        for name in ("manifest.json", "guarantee.json"):
            (self.path / name).unlink(missing_ok=True)
        segment = RunSegment(
            number=follower.segments,
            key=key,
            first_step=first_step,
            most=most,
            seeded=seeded,
            model=model,
            plan=plan,
            diagnosed=diagnosed,
        )
        self._write(segment)
        self.sync()
        return segment

    def append(
        self,
        *,
        step: int,
        event: Event,
        epsilon: float | None,
        indices: str | None = None,
        charge: str | None = None,
        model: int = 0,
    ) -> None:
        """Write one step. Call it before the step touches data, so that the transcript is never short.

        The line reaches the operating system at once (a killed process loses nothing) and the disk at least
        once a second, and always before a model or a checkpoint is saved.

        Args:
            step: the next number, from 0, or from where `begin` said.
            event: the step's event.
            epsilon: ε so far, this step included; None when it was not computed.
            indices: commitment to the batch under a secret key; never a plain hash of the batch.
            charge: the ledger's name of the charge.
            model: which of several models the step trains.
        """
        follower = self._writing()
        if checks.integer(0, step=step) != (following := follower.next_step(model)):
            raise InvalidArgument(f"step must be {following}, got {step}. Write every step once, in order.")
        self._write(
            TranscriptLine(
                step=step,
                event=event,
                epsilon=epsilon,
                attempt=follower.attempt(step, model),
                indices=indices,
                charge=charge,
                model=model,
            )
        )
        if time.monotonic() - self._synced >= _SECONDS_BETWEEN_SYNCS:
            self.sync()

    def _writing(self) -> TranscriptReader:
        if self._transcript is None or self._follower is None:
            raise InvalidArgument(
                "run must be open for writing, got one that was closed or opened to read. Create or resume one."
            )
        return self._follower

    def _write(self, entry: TranscriptLine | RunSegment) -> None:
        follower, transcript = self._writing(), self._transcript
        raw = follower.written(entry)
        if transcript is None or transcript.write(raw) != len(raw):
            # What follows a line that was written in part would not be a chain any more.
            self._transcript = None
            raise SordinoError("transcript must take whole lines, got a short write. Free space on the disk, resume.")

    def sync(self) -> None:
        """Force the transcript to the disk."""
        if self._transcript is not None:
            os.fsync(self._transcript.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Force the transcript to the disk, end it, and write the manifest. Other files may still be written.

        A folder that was deleted meanwhile gets no manifest.
        """
        if self._transcript is not None and self._follower is not None:
            self.sync()
            self._transcript.close()
            self._transcript = None
            if self.path.is_dir():
                files = {name: file_digest(self.path / name) for name in self.files()}
                manifest = {"schema": 1, "head": self._follower.head, "lines": self._follower.lines, "files": files}
                write_json(self.path / "manifest.json", manifest)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- the other files -----------------------------------------------------------------------------------------

    def event(self) -> Event:
        """The composition of all that was charged so far: what an accountant is to be asked about."""
        return compose([line.event for line in self if not isinstance(line.event, NoOp)])

    @property
    def plan(self) -> dict[str, object]:
        """The plan, as it was written."""
        return parse_json((self.path / "plan.json").read_bytes(), "plan.json")

    @property
    def meta(self) -> dict[str, object]:
        """What was said about the run when it began."""
        return parse_json((self.path / "run.json").read_bytes(), "run.json")

    @property
    def environment(self) -> dict[str, object]:
        """Versions and platform of the process that began the run."""
        return self._optional("environment.json")

    def write_guarantee(self, guarantee: Guarantee) -> None:
        """Write what the finished run guarantees, as numbers and as a sentence."""
        self._put_json("guarantee.json", guarantee_body(guarantee))

    @property
    def guarantee(self) -> Guarantee | None:
        """The guarantee of the finished run, or None when it has not been written."""
        body = self._optional("guarantee.json")
        return read_guarantee(body) if body else None

    @property
    def guarantee_description(self) -> str:
        """The guarantee in one sentence, as it was written, or an empty string."""
        return str(self._optional("guarantee.json").get("description", ""))

    def write_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Write all measured values; every one says whether it is public."""
        self._put_json("metrics.json", metrics_body(metrics))

    @property
    def metrics(self) -> dict[str, Metric]:
        """The measured values, or an empty dictionary. Anything not marked public is private."""
        return read_metrics(self._optional("metrics.json"))

    def write_loss_curve(self, losses: ReleasedLosses) -> None:
        """Write the noisy losses that the plan releases: they were released, so they are public."""
        self._put_json("loss_curve.json", losses_body(losses))

    @property
    def released_losses(self) -> ReleasedLosses | None:
        """The noisy losses, or None when the plan releases none or the run did not get to write them."""
        body = self._optional("loss_curve.json")
        return read_released_losses(body) if body else None

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Write all evaluations on private records that were paid for, those without an answer among them."""
        self._put_json("evaluations.json", evaluations_body(evaluations))

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations on private records, in the order in which they were paid for."""
        body = self._optional("evaluations.json")
        return read_evaluations(body) if body else ()

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
        return self._put("model.safetensors", save(tensors, metadata={"format": "pt"}))

    def write_model_description(self, description: Mapping[str, object]) -> None:
        """Write what `model.safetensors` is: kind, schema, features and classes, all of them public facts.

        Nothing in it depends on a record, except settings that a private search chose. The manifest vouches for it.
        """
        self._put_json("model.json", description)

    @property
    def model_description(self) -> dict[str, object]:
        """What the model is, or an empty dictionary for a run that does not say it."""
        return self._optional("model.json")

    def load_model(self) -> "dict[str, Tensor]":
        """The parameters of `model.safetensors`, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / "model.safetensors"
        if not file.is_file():
            raise InvalidArgument(f"run must hold a model, got {str(self.path)!r} without one. Was it cut off?")
        try:
            return load_file(file)
        except SafetensorError as error:
            raise InvalidArgument(
                "model.safetensors must be a safetensors file, got another. The run folder was changed."
            ) from error

    def save_checkpoint(self, content: bytes) -> Path:
        """Write `checkpoint.safetensors`, whole or not at all, after the transcript is on the disk.

        Args:
            content: what `sordino.training.checkpoint` made.
        """
        self.sync()
        return self._put("checkpoint.safetensors", content)

    @property
    def manifest(self) -> dict[str, object]:
        """What `close` vouched for, or an empty dictionary for a run that is being written or was cut off."""
        return self._optional("manifest.json")

    def files(self) -> tuple[str, ...]:
        """Names of all that lies in the folder, except the manifest, below it too; sorted."""
        found = (path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir())
        return tuple(sorted(name for path in found if (name := str(path.relative_to(self.path))) != "manifest.json"))

    def vouch(self, *paths: Path) -> None:
        """Take files that were written into a closed run, such as a report, into its manifest; `head` changes.

        Files elsewhere are left out.
        """
        manifest = self.manifest
        files = manifest.get("files")
        if not isinstance(files, dict):
            return
        inside = [path.resolve() for path in paths if path.resolve().is_relative_to(self.path.resolve())]
        names = {str(path.relative_to(self.path.resolve())): path for path in inside if path.is_file()}
        taken = files | {name: file_digest(path) for name, path in names.items()}
        write_json(self.path / "manifest.json", manifest | {"files": dict(sorted(taken.items()))})

    def _put_json(self, name: str, body: Mapping[str, object]) -> Path:
        return self._put(name, (json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def _put(self, name: str, content: bytes) -> Path:
        target = self.path / name
        write_bytes(target, content)
        self.vouch(target)
        return target

    def _optional(self, name: str) -> dict[str, object]:
        file = self.path / name
        return parse_json(file.read_bytes(), name) if file.is_file() else {}


def _follower(path: Path) -> TranscriptReader:
    return TranscriptReader(chain_start_hash((path / "plan.json").read_bytes(), (path / "run.json").read_bytes()))
