"""What `fit` writes into a run folder, and how it takes a run up again.

Order is everything here: a step is in the transcript before its records are read, the transcript is on the disk before
a checkpoint or a model is, and a checkpoint is there whole or not at all. So whatever a crash leaves behind, all that
can be seen of the records has been charged. Steps after the last checkpoint are lost and taken again; both count.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino import accounting, checks
from sordino.definitions import Guarantee, format_upper_bound
from sordino.errors import InvalidArgument
from sordino.events import NoOp
from sordino.installation import is_installed
from sordino.randomness import KeyedRNG
from sordino.runs import ReleasedLoss, ReleasedLosses, RunFolder
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.averaging import WeightAverage
from sordino.training.charging import ChargeLog
from sordino.training.checkpoint import (
    gather_state,
    load_module,
    load_optimizer,
    module_state,
    read,
    shard_state,
    to_bytes,
)
from sordino.training.distributed import DistributedContext
from sordino.training.plan import Plan
from sordino.training.private_run import ChargedBatch, PrivateRun

if TYPE_CHECKING:
    from rich.progress import Progress


# ----------------------------------------------------------------------------------------------------------------------
# A commitment to the batch that a step drew.
#
# Amplification by sampling holds because no attacker knows which records a batch holds. With a plain hash a
# guess of the batch, or of the number of records, could be checked. So the hash is keyed with a stream of the run's own
# secret key, one for every step. Without the key it is as good as random; with the key the batch that was drawn can be
# shown later, and no other one.
#
# References:
#     RFC 7693 (BLAKE2 with a key).
# ----------------------------------------------------------------------------------------------------------------------


_BYTES = 32


def commit_to_batch(indices: np.ndarray, *, step: int, rng: KeyedRNG) -> str:
    """The commitment to batch `step`, 64 hexadecimal digits whatever the batch holds.

    Guarantee: without the key of `rng` the digits can't be distinguished from random ones, whatever the indices are, as
    long as keyed BLAKE2b is a pseudorandom function.

    Args:
        indices: int64 positions, shape (b,), sorted.
        step: number of the step.
        rng: that of the segment.
    """
    key = bytearray(_BYTES)
    rng.stream("commitment", step=step).fill(memoryview(key))
    content = np.ascontiguousarray(indices, dtype="<i8")
    return hashlib.blake2b(content.data, key=bytes(key), digest_size=_BYTES).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# What `fit` writes into a run folder, and how it takes a run up again.
# ----------------------------------------------------------------------------------------------------------------------


_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What training changes from step to step."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    average: WeightAverage | None

    def kinds(self) -> dict[str, object]:
        """What the parts are, in words that another process can compare."""
        return {
            "optimizer": type(self.optimizer).__name__,
            "schedule": None if self.schedule is None else type(self.schedule).__name__,
            "averaging": None if self.average is None else repr(self.average.rule),
        }

    def state(self, *, keep: bool = True) -> dict[str, object]:
        """Everything that is needed to go on, except randomness; who doesn't `keep` it helps to gather shards."""
        return {
            "model": gather_state(module_state(self.model), keep=keep),
            "optimizer": gather_state(self.optimizer.state_dict(), keep=keep),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "averaging": None if self.average is None else gather_state(self.average.state_dict(), keep=keep),
        }

    def load(self, facts: Mapping[str, object], state: Mapping[str, object]) -> None:
        """Put the saved state into the parts.

        Raises:
            InvalidArgument: names the part that is not what was saved.
        """
        for name, kind in self.kinds().items():
            if name != "optimizer" and facts.get(name) != kind:
                raise InvalidArgument(f"{name} must be {facts.get(name)} as in the checkpoint, got {kind}.")
        load_optimizer(self.optimizer, facts.get("optimizer"), state["optimizer"])
        load_module(self.model, state["model"])
        if self.schedule is not None:
            self.schedule.load_state_dict(cast("dict[str, object]", state["schedule"]))
        if self.average is not None:
            saved = cast("list[Tensor] | None", state["averaging"])
            pairs = zip(saved or (), self.model.parameters(), strict=saved is not None)
            self.average.load_state_dict(None if saved is None else [shard_state(part, like) for part, like in pairs])


class RunWriter:
    """One segment of a run: from its beginning, or from its checkpoint, to its end.

    Guarantee: every step is in the transcript before its records are read. The files hold what `fit` releases anyway,
    and commitments that say nothing without the key; under correlated noise the checkpoint holds noise besides, and
    is as secret as the records.

    Args:
        folder: open for writing.
        plan: what is run.
        every: steps between checkpoints; None makes none.
        is_new: whether the folder may be thrown away when nothing was charged.
        writes: False where another process writes the run: its checkpoint is loaded here too, and nothing is written;
            where the model is sharded, what is written there is gathered from here too.
        adaptive: the budget that chooses each step's noise, if there is one. What the transcript holds is taken from it
            before the first step, so that it is never spent twice.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        *,
        every: int | None,
        is_new: bool,
        adaptive: AdaptiveBudgetRun | None = None,
        writes: bool = True,
    ) -> None:
        self.folder, self._writes = folder, writes
        self._adaptive = adaptive
        self.receipt: str | None = None
        self.first_step = 0
        self.earlier = ChargeLog()
        self._plan = plan
        self._every = every
        self.seeded = False
        self._is_new = is_new
        self._charged = ChargeLog()
        self._saved = -1
        self.run_state: Mapping[str, object] | None = None
        self._taken = 0
        self.repeats = False

    @property
    def is_resumed(self) -> bool:
        """Whether something was charged before this segment."""
        return not isinstance(self.earlier.event(), NoOp)

    @property
    def is_diagnosed(self) -> bool:
        """Whether the run began with private diagnostics on display."""
        return self.folder.meta.get("diagnostics") is not None

    def start(self, parts: TrainingState, rng: KeyedRNG) -> None:
        """Load the checkpoint into the parts, if there is one, and write that a segment begins.

        Raises:
            InvalidArgument: the checkpoint is not one of this plan and these parts.
        """
        self.load(parts)
        segments = self.folder.segments()
        if self._writes and rng.commitment in {segment.key for segment in segments}:
            raise InvalidArgument(
                "rng must be fresh for a resumed run, got the key of an earlier segment, whose noise would come "
                "again. Leave it out, or give another seed."
            )
        self.seeded = rng.reproducible or any(segment.seeded for segment in segments)
        self._randomness = rng
        if not self._writes:
            return
        begun = self.folder.begin(
            key=rng.commitment,
            first_step=self.first_step,
            most=self._plan.max_step_event() if self._adaptive is None else self._adaptive.event(),
            seeded=rng.reproducible,
        )
        self._lineage = [{"key": one.key, "first_step": one.first_step} for one in (*segments, begun)]

    def load(self, parts: TrainingState) -> None:
        """Read what was charged, and load the checkpoint into the parts, if there is one.

        Raises:
            InvalidArgument: the checkpoint is not one of this plan and these parts.
        """
        for line in self.folder:
            if not isinstance(line.event, NoOp):
                self.earlier.add(line.event)
            self.receipt = line.charge or self.receipt
            self._taken += 1
        self._charged = self.earlier.copy()
        if self._adaptive is not None:
            for event, times in self.earlier.runs():
                self._adaptive.take_over(event, times)
        file = self.folder.path / "checkpoint.safetensors"
        if not self._is_new and file.is_file():
            facts, state = read(file)
            if _differing(facts.get("plan"), self._plan):
                raise InvalidArgument(
                    "checkpoint must be one of this plan, got another plan's. Was the file exchanged?"
                )
            self.first_step = self._saved = checks.integer(0, step=facts.get("step"))
            parts.load(facts, state)
            self.run_state = cast("Mapping[str, object]", state["run"])
            # A step that was under way when the checkpoint was written had released nothing.
            self.repeats = self._taken > checks.integer(0, taken=facts.get("taken"))

    def charge(self, batch: ChargedBatch, *, epsilon: float) -> None:
        """Write a step to the transcript; call it before its records are read."""
        if not isinstance(batch.event, NoOp):
            self._charged.add(batch.event)
        self._taken += 1
        if not self._writes:
            return
        assert batch.indices is not None
        commitment = commit_to_batch(batch.indices, step=batch.step, rng=self._randomness)
        self.folder.append(
            step=batch.step, event=batch.event, epsilon=epsilon, indices=commitment, charge=batch.receipt
        )

    def after_step(self, parts: TrainingState, run: PrivateRun, done: int) -> None:
        """Save a checkpoint when one is due after `done` steps."""
        if self._every is not None and done % self._every == 0 and done < self._plan.steps:
            self.save(parts, run, done)

    def save(self, parts: TrainingState, run: PrivateRun, done: int) -> None:
        """Save a checkpoint: the state after `done` steps."""
        if done == self._saved:
            return
        self._saved = done
        state = parts.state(keep=self._writes)
        if not self._writes:
            return
        facts = {
            "schema": _SCHEMA,
            "step": done,
            "plan": json.loads(self._plan.to_json()),
            **parts.kinds(),
            "head": self.folder.chain_head,
            "lines": self.folder.lines,
            "taken": self._taken,
            "charged": self._charged.state_dict(),
            "lineage": self._lineage,
        }
        self.folder.save_checkpoint(to_bytes(facts, state | {"run": run.state_dict()}))

    def guarantee(self, planned: Guarantee) -> Guarantee:
        """`planned` for all that was charged: repeated steps, earlier segments, runs that are charged as a whole."""
        if self._adaptive is not None or (not self.is_resumed and self._plan.correlated_noise is None):
            return planned
        neighboring_relation = self._plan.neighboring_relation
        spent = accounting.epsilon(self._charged.event(), self._plan.delta, neighboring_relation=neighboring_relation)
        return replace(planned, epsilon=spent.upper, accountant=spent.accountant)

    def finish(
        self,
        model: nn.Module,
        guarantee: Guarantee,
        *,
        complete: bool,
        losses: tuple[ReleasedLoss, ...] = (),
    ) -> None:
        """Write model, guarantee, losses and manifest; a complete run no longer needs the noise in its checkpoint."""
        state = gather_state(model.state_dict(), keep=self._writes)
        if not self._writes:
            return
        if complete and self._plan.correlated_noise is not None:
            (self.folder.path / "checkpoint.safetensors").unlink(missing_ok=True)
        if self._plan.loss_release is not None:
            release = self._plan.loss_release
            self.folder.write_loss_curve(
                ReleasedLosses(max_loss=release.max_loss, budget_fraction=release.budget_fraction, points=losses)
            )
        self.folder.save_model(cast("Mapping[str, Tensor]", state))
        self.folder.write_guarantee(guarantee)
        self.folder.close()

    def abort(self) -> None:
        """After a failure: a folder in which nothing was charged is thrown away, any other is closed."""
        if not self._writes:
            return
        self.folder.close()
        if self._is_new and not any(self.folder):
            shutil.rmtree(self.folder.path)


def open_run_writer(
    plan: Plan,
    *,
    run_folder: RunFolder | str | Path | None,
    resume_from: str | Path | None,
    every: int | None,
    diagnostics: str | None = None,
    adaptive: AdaptiveBudgetRun | None = None,
    ranks: DistributedContext | None = None,
) -> RunWriter | None:
    """The record that was asked for, or None.

    Of several processes the first one writes it; the others only read a run that is resumed, from the same disk. Those
    of a sharded model help to write every run.

    Raises:
        InvalidArgument: both a new run and one to resume, checkpoints without a run, a run of another plan or budget,
            or one that is finished.
    """
    ranks = DistributedContext() if ranks is None else ranks
    if ranks.shards is not None:
        ranks.require_same(
            run_folder=run_folder is not None, resume_from=resume_from is not None, checkpoint_every=every
        )
    made: list[RunWriter | None] = []

    def write() -> None:
        folder = _folder_to_write(plan, run_folder, resume_from, every, diagnostics, adaptive)
        if folder is None:
            made.append(None)
        else:
            made.append(RunWriter(folder, plan, every=every, is_new=resume_from is None, adaptive=adaptive))

    ranks.broadcast_from_rank_zero(write)
    if made:
        return made[0]
    if resume_from is not None:
        seen = every if ranks.shards is not None else None
        folder = RunFolder.open(resume_from)
        return RunWriter(folder, plan, every=seen, is_new=False, adaptive=adaptive, writes=False)
    if run_folder is None or ranks.shards is None:
        return None
    path = run_folder.path if isinstance(run_folder, RunFolder) else run_folder
    return RunWriter(RunFolder.open(path), plan, every=every, is_new=True, writes=False)


def _folder_to_write(
    plan: Plan,
    run_folder: RunFolder | str | Path | None,
    resume_from: str | Path | None,
    every: int | None,
    diagnostics: str | None,
    adaptive: AdaptiveBudgetRun | None,
) -> RunFolder | None:
    budget = None if adaptive is None else adaptive.facts()
    if every is not None:
        checks.integer(1, checkpoint_every=every)
        if run_folder is None and resume_from is None:
            raise InvalidArgument(
                "checkpoint_every must be None without a run, got a number. Give run_folder=… a folder."
            )
    if run_folder is not None and resume_from is not None:
        raise InvalidArgument(
            "resume_from must be None for a new run, got both. Give run_folder=… to begin, resume_from=… to resume."
        )
    existing = run_folder if isinstance(run_folder, RunFolder) else None
    existing = existing if resume_from is None else RunFolder.open(resume_from)
    if existing is not None and existing.meta.get("budget") != budget:
        raise InvalidArgument(
            f"budget must be that of the run folder, {existing.meta.get('budget')}, got {budget}. Give the same "
            "AdaptiveBudget, or begin a new run by the path of its folder."
        )
    if existing is not None and (differing := _differing(existing.plan, plan)):
        raise InvalidArgument(
            f"plan must be that of the run folder, got one that differs in {', '.join(differing)}. "
            "Use Plan.from_json on the folder's plan.json, or begin a new run."
        )
    if existing is not None and resume_from is not None:
        reached = max((line.step + 1 for line in existing), default=0)
        if existing.guarantee is not None and reached >= plan.steps:
            raise InvalidArgument(
                f"run must be unfinished to be resumed, got {str(existing.path)!r}, which is complete."
            )
        return RunFolder.resume(resume_from)
    if existing is not None or run_folder is None or isinstance(run_folder, RunFolder):
        return existing
    said = {"diagnostics": diagnostics, "budget": budget}
    meta = {name: value for name, value in said.items() if value is not None}
    return RunFolder.create(run_folder, plan=plan.to_json(), meta=meta)


def _differing(written: object, plan: Plan) -> list[str]:
    """Names of fields that differ."""
    body, given = written if isinstance(written, dict) else {}, json.loads(plan.to_json())
    return sorted(name for name in body.keys() | given.keys() if body.get(name) != given.get(name))


# ----------------------------------------------------------------------------------------------------------------------
# One key, one run.
# ----------------------------------------------------------------------------------------------------------------------


_USED: WeakValueDictionary[int, KeyedRNG] = WeakValueDictionary()


def require_unused_key(rng: KeyedRNG) -> KeyedRNG:
    """A second run with the same key would repeat its noise, and the difference of two gradients would be bare."""
    if _USED.get(id(rng)) is rng and not rng.reproducible:
        raise InvalidArgument("rng must be fresh for every run, got one that was used. Make a new KeyedRNG().")
    _USED[id(rng)] = rng
    return rng


# ----------------------------------------------------------------------------------------------------------------------
# The progress line of a run: step, ε so far, time left. Nothing in it depends on a record.
#
# Diagnostics are the exception: asked for by name, shown on standard error, never written, and a caveat in the
# guarantee.
# ----------------------------------------------------------------------------------------------------------------------


DIAGNOSTICS_CAVEAT = "losses and batch sizes were shown while it ran: what was seen there is not covered"
_BANNER = (
    "PRIVATE DIAGNOSTICS: the losses and batch sizes below are computed from the records without noise. They are not "
    "covered by the guarantee. Keep this terminal to yourself, and choose nothing by what you see."
)


class Diagnostics:
    """Mean loss and size of the batch that is being read. Private: for anyone who may see the records themselves."""

    def __init__(self) -> None:
        self._total, self._records = 0.0, 0

    def add(self, losses: Tensor) -> None:
        """Take in the losses of a chunk, shape (records,)."""
        self._total += float(losses.detach().sum())
        self._records += len(losses)

    def describe(self) -> str:
        """What was taken in since the last call."""
        mean = self._total / self._records if self._records else float("nan")
        text = f"loss {mean:.4f}, {self._records} records"
        self._total, self._records = 0.0, 0
        return text


def get_diagnostics(name: str | None) -> Diagnostics | None:
    """The diagnostics that were asked for; only "private" ones can be, so that they can't be taken for safe."""
    if name is None:
        return None
    checks.one_of(("private",), diagnostics=name, hint="Leave it out for a run whose output may be shared.")
    return Diagnostics()


class ProgressBar:
    """A line on standard error while a ``with`` block runs, where rich is installed (``sordino[cli]``).

    Args:
        steps: length of the run.
        delta: the δ at which ε is shown.
        visible: False shows nothing.
        diagnostics: shown after every step, below a warning, whatever `visible` says.
    """

    def __init__(self, *, steps: int, delta: float, visible: bool, diagnostics: Diagnostics | None = None) -> None:
        self._diagnostics = diagnostics
        self._progress: Progress | None = None
        if (visible or diagnostics is not None) and is_installed("rich"):
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TextColumn(f"ε ≤ {{task.fields[epsilon]}} at δ = {delta:g}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=steps, epsilon="0.00")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        if self._diagnostics is not None:
            self._print(_BANNER, style="bold red")
        return self

    def _print(self, words: str, style: str | None = None) -> None:
        if self._progress is None:
            sys.stderr.write(words + "\n")
        else:
            self._progress.console.print(words, style=style, highlight=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, *, steps: int, epsilon: float) -> None:
        """`steps` steps are done; all that was charged comes to at most `epsilon`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=steps, epsilon=format_upper_bound(epsilon))
        if self._diagnostics is not None:
            self._print(f"step {steps}: {self._diagnostics.describe()} (private)")
