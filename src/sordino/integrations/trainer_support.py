"""What a private run inside another library's trainer needs, and the noise that keeps its ε."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sordino import accounting, checks
from sordino.clipping import Clipping, get_clipping
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.events import compose
from sordino.ledger import Account, Reservation
from sordino.runs.results import guarantee_body
from sordino.runs.transcript import write_json
from sordino.training import Plan
from sordino.training.distributed import get_distributed_context
from sordino.training.engine import PrivacyEngine
from sordino.training.engine_run_folder import RUN_FOLDERS, find_run_folder, is_open_here, next_run_folder
from sordino.training.loader import PrivateLoader, dataset_size_of
from sordino.training.plan import Gradients

__all__ = [
    "LogicalBatch",
    "LogicalBatches",
    "PrivacyArguments",
    "TrainerRun",
    "begin_run",
    "check_count",
    "check_settings",
    "cut_off_run",
    "logical_steps_per_epoch",
    "resume_run",
    "write_guarantee",
    "write_note",
]


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """The private run's settings, in addition to the other library's. Give `target_epsilon` or `noise_multiplier`.

    Args:
        delta: δ in (0, 1).
        target_epsilon: ε of the whole training, never exceeded; the noise follows from it.
        noise_multiplier: noise standard deviation over the sensitivity, ≥ 0; 0 is for debugging.
        max_grad_norm: clipping norm > 0 of one record's gradient. (The other library's own clipping is not used.)
        clipping: "flat", "per_layer", "automatic", "psac", "global", or an object of `sordino.clipping`.
        neighboring_relation: which datasets count as neighbors.
        eval_data_are_public: whether evaluation may be shown: no noise covers what is measured on private records.
        diagnostics: "private" shows losses on this terminal, outside the guarantee.
        public_records: at least five public or invented items of the dataset's form, where the engine's own synthetic
            ones don't run.
        gradients: "one-by-one" runs plain autograd on one record at a time, as in
            `sordino.training.PerformanceOptions`.
    """

    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    clipping: str | Clipping = "flat"
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    eval_data_are_public: bool = False
    diagnostics: str | None = None
    public_records: Sequence[object] | None = None
    gradients: Gradients = "auto"

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.positive(max_grad_norm=self.max_grad_norm)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InvalidArgument("target_epsilon or noise_multiplier must be given, and not both. Give one of them.")
        if self.target_epsilon is not None:
            checks.positive(target_epsilon=self.target_epsilon)
        if self.noise_multiplier is not None:
            checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.one_of((None, "private"), diagnostics=self.diagnostics)
        checks.one_of(get_args(Gradients), gradients=self.gradients)


def check_settings(refused: Mapping[str, object], reasons: Mapping[str, str]) -> None:
    """Refuse settings of another library: by name whether one is such a setting, and what it is and what to do.

    Raises:
        InvalidArgument: names the first that is.
    """
    for name, is_refused in refused.items():
        if is_refused:
            raise InvalidArgument(f"{name} must be left at its default for a private run, got {reasons[name]}")


class TrainerRun:
    """A private run inside another library's trainer: its engine, its run folder, and how many steps were planned.

    Args:
        privacy: ε and δ, clipping.
        ledger: the dataset's account.
        run_folder: as the user gave it.
    """

    def __init__(
        self, privacy: PrivacyArguments, *, ledger: Account | Reservation | None, run_folder: str | Path | None
    ) -> None:
        self.privacy, self.run_folder = privacy, run_folder
        self.engine = PrivacyEngine(ledger=ledger, delta=privacy.delta, gradients=privacy.gradients)
        self.shows_losses = privacy.diagnostics is not None
        self._steps_left: int | None = None

    def begin(
        self,
        *,
        under: str,
        training: Mapping[str, object],
        continues: bool,
        note: Callable[[], Mapping[str, object]] | None = None,
        near: Sequence[str | Path] = (),
        what: str = "",
    ) -> None:
        """Begin the run, or go on with the one that a checkpoint belongs to, or with one that was killed.

        Args:
            under: where the other library keeps its files.
            training: public facts of the training, for run.json.
            continues: whether a training that begins again continues the charges of one that was killed in its place:
                what that one released is out.
            note: what a checkpoint says of its run; None without a checkpoint.
            near: where the checkpoint's run folder may lie, next to it or above.
            what: the checkpoint's name in the caller's own words.
        """
        self.engine.journal.diagnosed |= self.shows_losses
        facts = {"training": training, "target_epsilon": self.privacy.target_epsilon}
        if note is not None:
            resume_run(self.engine, note, self.run_folder, near=(*near, under), what=what, facts=facts)
            return
        cut_off = get_distributed_context().broadcast_from_rank_zero(lambda: cut_off_run(under) if continues else None)
        begin_run(self.engine, self.run_folder or cut_off, under=under, facts=facts)

    def attach(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        loader: "DataLoader[object]",
        *,
        steps: int,
        steps_per_epoch: int,
        first_step: int,
        microbatch_size: int | None,
    ) -> PrivateLoader:
        """Make the parts private with the noise of the privacy arguments.

        Args:
            module: to train.
            optimizer: steps it.
            loader: the user's.
            steps: to come; 0 counts as one.
            steps_per_epoch: logical batches an epoch.
            first_step: number of the first batch: so many came before the checkpoint.
            microbatch_size: most records in one forward and backward.
        """
        privacy, rate = self.privacy, 1 / steps_per_epoch
        noise = privacy.noise_multiplier
        if privacy.target_epsilon is not None:
            self._steps_left = max(1, steps)
            noise = self._calibrated(privacy.target_epsilon, self._steps_left, rate, len(dataset_size_of(loader)))
        _, _, private = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=privacy.max_grad_norm,
            sample_rate=rate,
            clipping=privacy.clipping,
            neighboring_relation=privacy.neighboring_relation,
            microbatch_size=microbatch_size,
            public_records=privacy.public_records,
        )
        if first_step:
            self.engine.start_at([first_step])
        return private

    def _calibrated(self, target: float, steps: int, sample_rate: float, records: int) -> float:
        """The least noise multiplier with which `steps` more steps, and all that was charged, stay within the target.

        Raises:
            InvalidArgument: nothing of the target is left.
        """
        privacy, spent = self.privacy, self.engine.event()
        if self.engine.get_epsilon(privacy.delta) >= target * (1 - 1e-3):
            raise InvalidArgument(
                f"target_epsilon must leave something for further steps, got {target:g}, which is spent. Raise it."
            )
        plan = Plan(
            noise_multiplier=1.0,
            max_grad_norm=privacy.max_grad_norm,
            sample_rate=sample_rate,
            steps=steps,
            expected_batch_size=records * sample_rate,
            delta=privacy.delta,
            neighboring_relation=privacy.neighboring_relation,
            clipping=get_clipping(privacy.clipping),
        )
        # Once for all processes: two kinds of machine may differ in the last digit.
        return get_distributed_context().broadcast_from_rank_zero(
            lambda: accounting.calibrate_noise_multiplier(
                lambda noise: compose([spent, replace(plan, noise_multiplier=noise).event()]),
                target_epsilon=target,
                delta=privacy.delta,
                neighboring_relation=privacy.neighboring_relation,
            )
        )

    def count_step(self, advice: str) -> None:
        """Refuse a step beyond those that the noise was chosen for."""
        if self._steps_left == 0:
            raise NonPrivateStep(
                f"training must end with the steps that target_epsilon was planned for, got one more{advice}"
            )
        if self._steps_left is not None:
            self._steps_left -= 1

    def show_loss(self, step: int, loss: float) -> None:
        """Write a private loss to this terminal only: what is logged goes to files, callbacks and services."""
        sys.stderr.write(f"private diagnostics: step {step}, loss {loss:.4g}\n")

    def epsilon(self) -> float:
        """ε spent so far; the transcript is on the disk before it is shown."""
        self.engine.journal.sync()
        return self.engine.get_epsilon(self.privacy.delta)

    def require_public(self, what: str) -> None:
        """Refuse to evaluate private records.

        Raises:
            InvalidArgument: the data were not declared public.
        """
        if not self.privacy.eval_data_are_public:
            raise InvalidArgument(
                f"eval_data_are_public must be True for {what}, got False: no noise covers what is measured on private "
                "records. Declare it, or buy an evaluation from the budget (`sordino explain report`)."
            )


# ----------------------------------------------------------------------------------------------------------------------
# A private loader whose items are whole logical batches, for loops that take one step an item.
# ----------------------------------------------------------------------------------------------------------------------


class LogicalBatches:
    """Gives one `LogicalBatch` a step; what fetches items ahead has fetched no record yet.

    Args:
        loader: gives their chunks.
    """

    def __init__(self, loader: PrivateLoader) -> None:
        # The parts of a batch are gone through here, whole: nothing outside counts them.
        loader.split_by_size()
        self._loader = loader
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        chunks = iter(self._loader)
        for _ in range(len(self._loader)):
            yield LogicalBatch(chunks, self._loader)


class LogicalBatch:
    """The chunks of one logical batch; it is drawn and charged when the first is asked for, and can be read once."""

    def __init__(self, chunks: Iterator[object], loader: PrivateLoader) -> None:
        self._chunks, self._loader, self._was_read = chunks, loader, False

    @property
    def is_complete(self) -> bool:
        """Whether the chunk that was given last is the last one."""
        return self._loader.is_last_microbatch

    def __iter__(self) -> Iterator[object]:
        if self._was_read:
            raise NonPrivateStep(
                "a logical batch must be gone through once, got a second pass: its records would count twice (a "
                "closure that is called twice, an optimizer that evaluates the loss several times). Take one pass a "
                "step."
            )
        self._was_read = True
        yield next(self._chunks)
        while not self.is_complete:
            yield next(self._chunks)


# ----------------------------------------------------------------------------------------------------------------------
# Several processes under other libraries' launchers: batches of them all, no wrapping.
# ----------------------------------------------------------------------------------------------------------------------


def logical_steps_per_epoch(loader: "DataLoader[object]", *, processes: int, accumulated: int = 1) -> int:
    """Logical batches an epoch: one has as many records on average as all processes would take between two steps.

    Args:
        loader: the user's; its batches are those of one process, as they are elsewhere.
        processes: that train together, ≥ 1.
        accumulated: batches of one process between two steps, ≥ 1.
    """
    # Where the user has shared the records out already, the loader's length is that of one process.
    shared_out = 1 if isinstance(getattr(loader, "sampler", None), DistributedSampler) else processes
    return max(1, math.ceil(len(loader) / (accumulated * shared_out)))


def check_count(owner: str, found: int, hint: str) -> None:
    """Refuse a trainer that knows of fewer processes than there are: each would write and evaluate as if it were alone.

    Args:
        owner: the setting that says how many there are.
        found: what it says.
        hint: what to do.

    Raises:
        InvalidArgument: torch's process group, or the launcher's environment, says otherwise.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else launched
    if count != found:
        raise InvalidArgument(f"{owner} must be the {count} that were started, got {found}. {hint}")


# ----------------------------------------------------------------------------------------------------------------------
# The run folder of a training that another library keeps: begun, taken up again, named in checkpoints.
# ----------------------------------------------------------------------------------------------------------------------


def begin_run(
    engine: PrivacyEngine,
    run_folder: str | Path | None,
    *,
    under: str | Path,
    facts: Mapping[str, object],
    joins: bool = False,
) -> None:
    """Have the engine's steps written to `run_folder`, or to the next new one `under` a folder.

    An engine that has a run folder goes on in it.

    Args:
        engine: before its first step, or between two trainings.
        run_folder: as the user gave it.
        under: where the other library keeps its files.
        facts: public, for run.json.
        joins: at the first step, go on in the last run folder `under` if its run never ended: it has shown what it has
            shown, and anyone who begins again in its place goes on in its account.
    """
    if engine.journal.is_set:
        return
    if run_folder is not None:
        engine.journal.open(run_folder, **facts)
    else:
        cut_off = partial(cut_off_run, under) if joins else None
        engine.journal.will_create(partial(next_run_folder, under), cut_off, **facts)


def cut_off_run(under: str | Path) -> Path | None:
    """The last run folder under a folder, when its run was killed: its cost was not yet stated; otherwise None.

    A run that goes on in another engine of this process was not killed. One that another process has open may have
    been, for its workers outlive it by some seconds: to go on in it is refused until they are gone.
    """
    numbered = [path for path in (Path(under) / RUN_FOLDERS).glob("*") if path.name.isdecimal()]
    last = max(numbered, key=lambda path: int(path.name), default=None)
    is_cut_off = last is not None and (last / "run.json").is_file() and not (last / "guarantee.json").is_file()
    return last if last is not None and is_cut_off and not is_open_here(last) else None


def resume_run(
    engine: PrivacyEngine,
    note: Callable[[], Mapping[str, object]],
    run_folder: str | Path | None,
    *,
    near: Sequence[str | Path],
    what: str,
    facts: Mapping[str, object],
) -> None:
    """Go on in the run folder of a checkpoint: all that it holds is charged, also what came after the checkpoint.

    Args:
        engine: before its first step, or one that writes this run already.
        note: what the checkpoint says of its run; read in the first process alone.
        run_folder: as the user gave it.
        near: where the run folder may lie, next to it or above.
        what: the checkpoint's name in the caller's own words.
        facts: public, for run.json of a run that is yet to begin.

    Raises:
        InvalidArgument: in all processes: the run folder is not there, another process writes it, or the engine has
            charged something that is not in it.
    """
    where = near if run_folder is None else (run_folder,)
    path = get_distributed_context().broadcast_from_rank_zero(lambda: find_run_folder(note(), where, what=what))
    if path is None:
        begin_run(engine, run_folder, under=near[-1], facts=facts)
    else:
        engine.journal.open(path)


def write_note(
    engine: PrivacyEngine, folder: Path, *, note: str = "sordino.json", guarantee: str = "guarantee.json"
) -> None:
    """Write into a checkpoint, or next to saved weights, which run they belong to and what holds for them.

    The transcript is on the disk before.

    Args:
        engine: charged what the weights cost.
        folder: made if need be.
        note: name of the file that says which run.
        guarantee: name of the file that says what holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    body = engine.journal.note()
    write_guarantee(engine, folder / guarantee, body)
    write_json(folder / note, body | {"next_steps": list(engine.next_steps)})


def write_guarantee(engine: PrivacyEngine, file: Path, note: Mapping[str, object] | None = None) -> None:
    """Write what holds for everything charged so far, with the run that it belongs to.

    Args:
        engine: charged it; δ is its own.
        file: its folder is made if need be.
        note: what `Journal.note` says now.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    body = engine.journal.note() if note is None else note
    write_json(file, {**guarantee_body(engine.guarantee(engine.delta)), **body})
