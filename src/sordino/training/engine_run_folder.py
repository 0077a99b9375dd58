"""The run folder of an engine: every step is in its transcript before the step's records are read.

Whatever a crash leaves behind, all that can be seen of the records is in the transcript; who goes on, from the last
checkpoint or an older one, is charged all of it. Without a folder steps are noted in memory, so that a folder that is
begun later holds them too.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary, finalize

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import Event, NoOp
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.charging import ChargeLog
from sordino.training.distributed import get_distributed_context
from sordino.training.plan import Plan
from sordino.training.private_run import ChargedBatch

RUN_FOLDERS = "sordino-runs"
"""Folder of the run folders next to another library's checkpoints."""


_LOG = logging.getLogger(__name__)

# Which journal of this process has a folder open: another one that needs it takes it over.
_OPEN: "WeakValueDictionary[Path, Journal]" = WeakValueDictionary()


@dataclass
class _OpenFolder:
    """The folder that a journal has open, if any, and the process that opened it."""

    folder: RunFolder | None = None
    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether it is open, in the process that opened it."""
        return self.folder is not None and self.process == os.getpid()

    def close(self) -> None:
        """Close it: a worker that was forked leaves it alone."""
        if self.folder is not None and self.is_here:
            folder, self.folder = self.folder, None
            folder.close()


@dataclass
class _Steps:
    """Consecutive steps that charge the same."""

    first: int
    event: Event
    receipt: str | None
    count: int = 1


@dataclass(kw_only=True)
class JournaledModel:
    """One `make_private`: its plan and key, and the steps of it that no folder holds yet.

    Args:
        number: which of the engine's models, from 0.
        plan: what its steps follow.
        key: commitment to its secret key.
        seeded: whether the key came from a chosen seed.
        most: the event that one step charges at most.
        budget: facts of the budget that chooses its noise, or None.
    """

    number: int
    plan: Plan
    key: str
    seeded: bool
    most: Event
    budget: Mapping[str, object] | None = None
    _begun_in: object = None
    _pending: list[_Steps] = field(default_factory=list)

    @property
    def has_pending(self) -> bool:
        """Whether it has steps that no folder holds."""
        return bool(self._pending)

    def note(self, step: int, event: Event, receipt: str | None) -> None:
        """Remember a step that no folder holds."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.first + last.count == step and (last.event, last.receipt) == (event, receipt):
            last.count += 1
        else:
            self._pending.append(_Steps(step, event, receipt))

    def write(self, folder: RunFolder, step: int, event: Event, receipt: str | None, *, diagnosed: bool) -> None:
        """Write a step, and before its first one in this opening of the folder that a segment begins."""
        if self._begun_in is not folder or folder.next_step(self.number) != step:
            own = json.loads(self.plan.to_json())
            folder.begin(
                # A key stands once: what follows in another segment has other numbers of the same streams.
                key=self.key if self._begun_in is None else None,
                first_step=step,
                most=self.most,
                seeded=self.seeded,
                model=self.number,
                plan=None if folder.plan == own else own,
                diagnosed=diagnosed,
            )
            self._begun_in = folder
        folder.append(step=step, event=event, epsilon=None, charge=receipt, model=self.number)

    def flush(self, folder: RunFolder, *, diagnosed: bool) -> int:
        """Write what was noted; returns how many lines that are."""
        written = 0
        for steps in self._pending:
            for step in range(steps.first, steps.first + steps.count):
                self.write(folder, step, steps.event, steps.receipt, diagnosed=diagnosed)
                written += 1
        self._pending.clear()
        return written


class Journal:
    """What an engine charged, on disk once it has a folder. Of several processes the first one writes.

    Guarantee: when `charge` returns, the step's line is with the operating system, and a killed process loses none;
    the disk has it within a second, and before `note` or `finish` returns.

    Args:
        charges: the engine's own record; what a folder held before is added to it.

    Attributes:
        segment: name of the engine's own charges, which no other engine has.
        earlier_segments: what it took over from others: events as JSON, with their counts, by the segment's name.
    """

    def __init__(self, charges: ChargeLog) -> None:
        self.segment = KeyedRNG().commitment
        self.earlier_segments: dict[str, Counter[str]] = {}
        self._charges = charges
        self._models: list[JournaledModel] = []
        self._open = _OpenFolder()
        self._choose: Callable[[], Path] | None = None
        self._cut_off: Callable[[], Path | None] | None = None
        self._path: Path | None = None
        self._facts: dict[str, object] = {}
        self._known = 0
        self.plans: list[Plan] = []
        self.seeded = self.diagnosed = self.has_foreign_charges = False
        self._budget: object = None
        finalize(self, _close, self._open)

    # --- opening -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The run folder; None before there is one."""
        return self._path

    @property
    def is_writing(self) -> bool:
        """Whether the folder is open, in the process that opened it."""
        return self._open.is_here

    @property
    def is_set(self) -> bool:
        """Whether there is a folder, or one will be made before the first step."""
        return self._path is not None or self._choose is not None

    def will_create(
        self, choose: Callable[[], Path], cut_off: Callable[[], Path | None] | None = None, **facts: object
    ) -> None:
        """Make a new folder where `choose` says, before the first step is charged, unless there is one already.

        Args:
            choose: called when the folder is made; again when another process was faster.
            cut_off: called before; the folder of a run that never ended, to go on in instead, or None.
            **facts: public, for run.json.
        """
        self._facts |= {name: value for name, value in facts.items() if value is not None}
        if self._path is None:
            self._choose, self._cut_off = choose, cut_off

    def open(self, path: str | Path, **facts: object) -> None:
        """Go on in an existing run folder, or make it before the first step; what it holds is charged here too.

        Raises:
            InvalidArgument: another process writes it, it is not empty and no run of an engine, or this engine has
                charged something that is not in it.
        """
        path = Path(path)
        ranks = get_distributed_context()
        known = ranks.broadcast_from_rank_zero(lambda: self._opened(path, facts))
        if not ranks.is_rank_zero and self._path is None and self._choose is None:
            self._mirror(cast("Mapping[str, object]", known))

    def _opened(self, path: Path, facts: Mapping[str, object]) -> dict[str, object]:
        if self._path is not None and self._path.resolve() == path.resolve():
            self._folder()
            return {}
        if self._path is not None or (self._has_steps() and (path / "run.json").is_file()):
            raise InvalidArgument(
                f"run folder must be the one that this engine writes, got {str(path)!r} after steps that are not in "
                "it. Load a checkpoint before the first step, or make a new engine."
            )
        if self.has_foreign_charges:
            raise InvalidArgument(
                "run folder must hold all that its engine charged, got an engine with charges from load_state_dict. "
                "Make a new engine with the run folder."
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            self._resume_in(path)
        else:
            self.will_create(lambda: path, None, **facts)
        return {
            "charged": self._charges.state_dict(),
            "plans": [plan.to_json() for plan in self.plans],
            "seeded": self.seeded,
            "diagnosed": self.diagnosed,
            "budget": self._budget,
        }

    def _mirror(self, known: Mapping[str, object]) -> None:
        """What the first process read, in another one, which writes nothing."""
        if not known:
            return
        self._charges.load_state_dict(cast("dict[str, object]", known["charged"]))
        self.plans = [Plan.from_json(text) for text in cast("list[str]", known["plans"])]
        self.seeded, self.diagnosed = bool(known["seeded"]), bool(known["diagnosed"])
        self._budget = known["budget"]

    def look_into(self, path: Path) -> None:
        """Take over what a run folder has charged, without writing to it yet: for an evaluation of its model."""
        if self._has_steps() or self._path is not None:
            return
        self._take_over(RunFolder.open(path))
        self._path = path

    def _has_steps(self) -> bool:
        return any(model.has_pending for model in self._models) or self._known > 0

    def _folder(self) -> RunFolder:
        """The folder, open for writing."""
        if self._open.folder is not None:
            return self._open.folder
        return self._create() if self._path is None else self._resume(self._path)

    def _create(self) -> RunFolder:
        assert self._choose is not None
        cut_off = None if self._cut_off is None else self._cut_off()
        if cut_off is not None:
            folder = self._resume_in(cut_off)
            _LOG.warning(
                "going on in %s, whose run never ended: all that it charged is charged to this one too. For an account "
                "of its own end each run, or name another folder.",
                cut_off,
            )
            self._flush(folder)
            return folder
        first = self._models[0]
        facts = {
            "id": KeyedRNG().commitment,
            "open_ended": True,
            "budget": first.budget,
            "diagnostics": "private" if self.diagnosed else None,
            "reproducible": first.seeded,
        }
        facts = {name: value for name, value in (self._facts | facts).items() if value is not None}
        while True:
            path = self._choose()
            try:
                folder = RunFolder.create(path, plan=first.plan.to_json(), meta=facts)
                break
            except (OSError, InvalidArgument):
                # Another process may have taken the name in between.
                if not path.exists() or self._choose() == path:
                    raise
        self._path = path
        self._hold(folder)
        self._budget = first.budget
        self._flush(folder)
        return folder

    def _flush(self, folder: RunFolder) -> None:
        for model in self._models:
            self._known += model.flush(folder, diagnosed=self.diagnosed)

    def _resume_in(self, path: Path) -> RunFolder:
        """Go on in a folder from now on: what it has charged is charged here too."""
        self._path = path
        try:
            return self._resume(path)
        except BaseException:
            self._path = None
            raise

    def _resume(self, path: Path) -> RunFolder:
        other = _OPEN.get(path.resolve())
        if other is not None and other is not self:
            # Two engines of one process take turns: each is charged what the other wrote.
            other.let_go()
        folder = RunFolder.resume(path)
        try:
            self._take_over(folder)
        except BaseException:
            folder.close()
            raise
        self._hold(folder)
        return folder

    def _hold(self, folder: RunFolder) -> None:
        self._open.folder, self._open.process = folder, os.getpid()
        _OPEN[folder.path.resolve()] = self

    def let_go(self) -> None:
        """Close the folder; it is opened again when a step comes."""
        self._open.close()

    def _take_over(self, folder: RunFolder) -> None:
        """Charge the lines that are not known here."""
        if folder.meta.get("open_ended") is not True:
            raise InvalidArgument(
                f"run_folder must be one that an engine wrote, got {str(folder.path)!r}, which fit or a recipe wrote. "
                "Choose another path."
            )
        segments = folder.segments()
        texts = [folder.plan, *(segment.plan for segment in segments if segment.plan is not None)]
        plans = [Plan.from_json(json.dumps(body)) for body in texts]
        self._check_same(folder, plans)
        for line in list(folder)[self._known :]:
            self._known += 1
            if not isinstance(line.event, NoOp):
                self._charges.add(line.event)
        self.plans = plans
        self.seeded = self.seeded or any(segment.seeded for segment in segments)
        shown = folder.meta.get("diagnostics") is not None or any(segment.diagnosed for segment in segments)
        self.diagnosed = self.diagnosed or shown
        self._budget = folder.meta.get("budget")

    def _check_same(self, folder: RunFolder, plans: Sequence[Plan]) -> None:
        """Refuse a folder whose charges can't be stated together with those of the models that are here already."""
        for model in self._models:
            for name in ("neighboring_relation", "privacy_unit"):
                if any(getattr(plan, name) is not getattr(model.plan, name) for plan in plans):
                    raise InvalidArgument(
                        f"{name} must be that of the run folder {str(folder.path)!r}, got another. Choose the same, or "
                        "another folder."
                    )
            if folder.meta.get("budget") != model.budget:
                raise InvalidArgument(
                    f"budget must be that of the run folder, {folder.meta.get('budget')}, got {model.budget}. Give the "
                    "same AdaptiveBudget, or another run_folder."
                )

    @property
    def run_id(self) -> object:
        """Random name of the run; None without a folder."""
        return None if self._path is None else RunFolder.open(self._path).meta.get("id")

    def reached(self, model: int) -> int:
        """One more than the last step of a model that any process charged to the folder."""
        return 0 if self._path is None else self._folder().reached(model)

    # --- steps ---------------------------------------------------------------------------------------------------

    def model(self, number: int, plan: Plan, rng: KeyedRNG, adaptive: AdaptiveBudgetRun | None) -> "JournaledModel":
        """A model whose steps will be charged here.

        Raises:
            InvalidArgument: the folder is of a run under another budget.
        """
        facts = None if adaptive is None else adaptive.facts()
        if self._path is not None and self._budget != facts:
            raise InvalidArgument(
                f"budget must be that of the run folder, {self._budget}, got {facts}. Give the same AdaptiveBudget, "
                "or another run_folder."
            )
        made = JournaledModel(
            number=number,
            plan=plan,
            key=rng.commitment,
            seeded=rng.reproducible,
            most=plan.max_step_event() if adaptive is None else adaptive.event(),
            budget=facts,
        )
        self.seeded = self.seeded or made.seeded
        self._models.append(made)
        return made

    def catch_up(self) -> None:
        """Charge what another engine of this process has written to the run folder since."""
        if self._path is not None:
            self._folder()

    def charge(self, model: JournaledModel, batch: ChargedBatch) -> None:
        """Write a step; call it before its records are read."""
        step, event, receipt = batch.step, batch.event, batch.receipt
        if not self.is_set:
            model.note(step, event, receipt)
            return
        self._check_there()
        folder = self._folder()
        reached = folder.reached(model.number)
        if step > reached:
            raise InvalidArgument(
                f"step must be at most {reached}, where the run folder is, got {step}. Load a checkpoint of this run."
            )
        model.write(folder, step, event, receipt, diagnosed=self.diagnosed)
        self._known += 1

    def _check_there(self) -> None:
        """Refuse to go on when the folder was deleted or moved: what was charged could not be read."""
        if self._path is not None and not (self._path / "transcript.jsonl").is_file():
            raise InvalidArgument(
                f"run folder must stay where it is until its run has ended, got none at {str(self._path)!r} any more. "
                "Put it back; guarantee() still says what this engine has charged."
            )

    def sync(self) -> None:
        """Have the disk hold all that was charged; call it before anything is shown or saved."""
        if self._open.folder is not None:
            self._open.folder.sync()

    def note(self) -> dict[str, object]:
        """What a checkpoint says of the run that it belongs to, in plain JSON types; the disk holds the run then."""
        if not self.is_set or (self._path is None and not self._models):
            return {"schema": 1, "run": None}
        self._check_there()
        folder = self._open.folder
        if folder is None:
            folder = self._folder() if self._path is None else RunFolder.open(self._path)
        folder.sync()
        return {
            "schema": 1,
            "run": folder.path.name,
            "id": folder.meta.get("id"),
            "head": folder.head,
            "lines": folder.lines,
        }

    def finish(self, guarantee: Guarantee, model: Mapping[str, object] | None = None) -> None:
        """Write what was reached, and let others have the folder; it is opened again when a further step comes."""
        if self._path is None or not get_distributed_context().is_rank_zero:
            return
        self._check_there()
        folder = self._folder()
        if model is not None:
            folder.save_model(cast("Mapping[str, object]", model))  # pyright: ignore[reportArgumentType]
        folder.write_guarantee(guarantee)
        self.let_go()


def is_open_here(path: str | Path) -> bool:
    """Whether an engine of this process has a run folder open."""
    journal = _OPEN.get(Path(path).resolve())
    return journal is not None and journal.is_writing


def next_run_folder(root: str | Path) -> Path:
    """A run folder that is not there yet, among those of `root`: numbered from 1."""
    folder = Path(root) / RUN_FOLDERS
    taken = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / str(max(taken, default=0) + 1)


def find_run_folder(note: Mapping[str, object], near: Sequence[str | Path], *, what: str) -> Path | None:
    """The run folder that a checkpoint belongs to; None when nothing was charged for it.

    Args:
        note: what `Journal.note` said when the checkpoint was made.
        near: run folders, or folders that may contain it or lie next to it, the likeliest first.
        what: the checkpoint's name in the caller's own words.

    Raises:
        InvalidArgument: it is not there, or lacks the lines that came before the checkpoint.
    """
    if note.get("schema") != 1 or "run" not in note:
        raise InvalidArgument(f"{what} must say which run it belongs to, got none: what was spent is not known.")
    if note["run"] is None:
        return None
    for folder in near:
        for base in (Path(folder).absolute(), *Path(folder).absolute().parents):
            runs = base / RUN_FOLDERS
            for path in (base, runs / str(note["run"]), *sorted(runs.glob("*"))):
                if (path / "run.json").is_file() and _id_of(path) == note.get("id"):
                    _check_contained(path, note, what)
                    return path
    raise InvalidArgument(
        f"{what} must have its run folder, {RUN_FOLDERS}/{note['run']}, next to it or in a folder above, got none: "
        "what was spent since is not known. Move them together, or name it with run_folder=."
    )


def _id_of(path: Path) -> object:
    try:
        return RunFolder.open(path).meta.get("id")
    except InvalidArgument:
        return None


def _check_contained(path: Path, note: Mapping[str, object], what: str) -> None:
    lines, count = (path / "transcript.jsonl").read_bytes().split(b"\n")[:-1], int(str(note["lines"]))
    if len(lines) < count or (count and hashlib.sha256(lines[count - 1]).hexdigest() != note["head"]):
        raise InvalidArgument(
            f"{what} must not be newer than its run folder, got one after line {count} of another transcript than "
            f"that of {str(path)!r}: what was spent is not known. Put the run folder back that lay next to it."
        )


def _close(opened: _OpenFolder) -> None:
    """At the end of the engine. A folder that is being deleted meanwhile, at the end of a process, is no error."""
    with suppress(OSError):
        opened.close()
