"""`save_checkpoint` and `load_checkpoint` of the engine: one safetensors file, and charges that cannot shrink.

What an engine charged is kept by segment: one engine's own share, under a name that no other engine has. A checkpoint
holds the charges of its own line of descent. One that is loaded next to others of its family, in the same folder, takes
over their charges too: anyone who goes back to an older checkpoint pays for what the newer ones have shown, and under
correlated noise for the steps that come twice. A budget that adapts has spent what was charged.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.runs.transcript import write_bytes
from sordino.training.checkpoint import (
    from_bytes,
    gather_state,
    load_module,
    load_optimizer,
    module_state,
    read,
    to_bytes,
)
from sordino.training.distributed import get_distributed_context
from sordino.training.engine_run_folder import Journal
from sordino.training.private_model import PrivateModel

_KIND = "engine"
_ANY_DELTA = 1e-5
_Charges = dict[str, Counter[str]]


class _Engine(Protocol):
    journal: Journal

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...

    def guarantee(self, delta: float) -> Guarantee: ...

    def private_model(self, module: nn.Module) -> PrivateModel | None: ...


def save_checkpoint(  # noqa: D417 (self is the engine)
    self: _Engine,
    *,
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    checkpoint_dict: Mapping[str, object] | None = None,
) -> None:
    """Write module, optimizer, scheduler and everything charged so far to one file, whole or not at all.

    Kept besides: the number of the next step, adapted bounds, what a budget has spent, buffers of correlated noise.
    Of several processes the first one writes; with a sharded model all of them call it.

    Guarantee: the file holds what private training released, and what it cost. No key and no generator's state is in
    it: anyone who loads it draws fresh noise. Under correlated noise it holds past noise, which later steps take back,
    and is as secret as the records.

    Args:
        path: the file, by custom ``….safetensors``. Keep the checkpoints of a family in one folder.
        module: the one that was made private.
        optimizer: its optimizer.
        scheduler: of its learning rate.
        checkpoint_dict: more to keep: nested dicts and lists of tensors, numbers and texts.

    Raises:
        InvalidArgument: something to keep is a Python object that only pickle could hold.
    """
    kinds = {"optimizer": _kind(optimizer), "scheduler": _kind(scheduler)}
    attached = self.private_model(module)
    position = None if attached is None else {"number": attached.number, **attached.run.facts()}
    facts = {
        "kind": _KIND,
        "neighboring_relation": _relation(self),
        "charges": _saved_charges(self),
        "attached": position,
        **kinds,
    }
    ranks = get_distributed_context()
    facts["run"] = ranks.broadcast_from_rank_zero(self.journal.note)
    keep = ranks.is_rank_zero
    state = {
        "model": gather_state(module_state(module), keep=keep),
        "optimizer": None if optimizer is None else gather_state(optimizer.state_dict(), keep=keep),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "attached": None if attached is None else attached.run.state_dict(),
        "more": dict(checkpoint_dict or {}),
    }
    if keep:
        write_bytes(Path(path), to_bytes(facts, state))


def load_checkpoint(  # noqa: D417 (self is the engine)
    self: _Engine,
    *,
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> dict[str, object]:
    """Load what `save_checkpoint` wrote into module, optimizer and scheduler, after ``make_private``.

    Steps go on with the next number, so schedules, cycles and adapted bounds go on where they stopped.

    Guarantee: with a run folder, everything in it is charged, whichever of its checkpoints is loaded. Without one, this
    engine's charges become at least those of the checkpoint, together with what checkpoints of the same family in the
    same folder have charged since. What is charged from now on comes on top; a budget has only what remains.

    Args:
        path: the file. Pickle files are refused.
        module: private, and built as it was for the checkpoint.
        optimizer: of the same kind over the same parameters.
        scheduler: of the same kind.

    Returns:
        ``checkpoint_dict`` as it was saved.

    Raises:
        InvalidArgument: the file is no checkpoint, or one of another module, optimizer, relation, budget or run.
        NonPrivateStep: correlated noise, and this engine took steps already.
    """
    facts, state = read(Path(path))
    if facts.get("kind") != _KIND:
        raise InvalidArgument(
            f"path must be a checkpoint of an engine, got {str(path)!r}, which fit made. Use resume_from=."
        )
    if facts["neighboring_relation"] != _relation(self):
        raise InvalidArgument(
            f"neighboring_relation must be {facts['neighboring_relation']!r} as in the checkpoint, got "
            f"{_relation(self)!r}. "
            "Call make_private with it first."
        )
    if scheduler is not None and _kind(scheduler) != facts["scheduler"]:
        raise InvalidArgument(f"scheduler must be {facts['scheduler']} as in the checkpoint, got {_kind(scheduler)}.")
    attached = self.private_model(module)
    in_run = get_distributed_context().broadcast_from_rank_zero(lambda: _charged_in_run(self.journal, facts))
    position = cast("Mapping[str, object] | None", facts.get("attached"))
    if attached is not None and position is not None:
        attached.run.check_facts(position)
    if optimizer is not None:
        load_optimizer(optimizer, facts["optimizer"], state["optimizer"])
    load_module(module, state["model"])
    if scheduler is not None:
        scheduler.load_state_dict(cast("dict[str, object]", state["scheduler"]))
    charges, reached = _family(Path(path), facts) if in_run is None else ({}, in_run)
    if attached is not None and position is not None:
        repeats = reached > cast("int", position["next_step"])
        saved = cast("Mapping[str, object]", state["attached"])
        attached.run.resume(int(str(position["next_step"])), saved, repeats=repeats)
    if in_run is None:
        _take_over(self, charges)
    return cast("dict[str, object]", state["more"])


def _charged_in_run(journal: Journal, facts: Mapping[str, object]) -> int | None:
    """How far the checkpoint's model got in the run folder that holds all charges; None when there is no folder.

    Raises:
        InvalidArgument: the checkpoint is of another run than the engine's.
    """
    run = facts.get("run")
    name = run.get("run") if isinstance(run, Mapping) else None
    if name is None and not journal.is_set:
        return None
    if name is None or journal.path is None or journal.run_id != cast("Mapping[str, object]", run)["id"]:
        wanted = "none" if name is None else f"the one called {name}, where its steps since are"
        raise InvalidArgument(
            f"run_folder must be that of the checkpoint, {wanted}, got another. Make the engine with that run folder, "
            "or without one where the checkpoint has none."
        )
    return journal.reached(cast("int", _position(facts)[0] or 0))


def _kind(part: object) -> str | None:
    return None if part is None else type(part).__name__


def _relation(engine: _Engine) -> str:
    return engine.guarantee(_ANY_DELTA).neighboring_relation.value


# --- the charges ---------------------------------------------------------------------------------------------------


def _saved_charges(engine: _Engine) -> dict[str, dict[str, int]]:
    """Everything charged, by segment: events as JSON, with their counts."""
    own: Counter[str] = Counter()
    for event, times in cast("list[tuple[object, int]]", engine.state_dict()["history"]):
        own[json.dumps(event, sort_keys=True)] += times
    for part in engine.journal.earlier_segments.values():
        own.subtract(part)
    segments = engine.journal.earlier_segments | {engine.journal.segment: +own}
    return {name: dict(part) for name, part in segments.items()}


def _read_saved_charges(facts: Mapping[str, object]) -> _Charges:
    charges = cast("dict[str, dict[str, int]]", facts["charges"])
    return {name: Counter(part) for name, part in charges.items()}


def _family(path: Path, facts: Mapping[str, object]) -> tuple[_Charges, int]:
    """The charges together with those of checkpoints next to it that share a segment, directly or through others; and
    the furthest step that one of them reached with the same model.

    Of one segment the larger count holds: a later checkpoint's share contains an earlier one's.
    """
    number = _position(facts)[0]
    found = [body for file in sorted(path.parent.glob("*.safetensors")) if (body := _facts_of(file)) is not None]
    charges = _joined(_read_saved_charges(facts), [_read_saved_charges(body) for body in found])
    related = [_position(body) for body in found if _read_saved_charges(body).keys() & charges.keys()]
    return charges, max((reached for whose, reached in related if whose == number), default=0)


def _joined(charges: _Charges, others: Sequence[_Charges]) -> _Charges:
    """`charges` with those of `others` that share a segment with it, directly or through others."""
    while True:
        joined = dict(charges)
        for other in others:
            for name, part in other.items() if other.keys() & charges.keys() else ():
                joined[name] = joined.get(name, Counter()) | part
        if joined == charges:
            return joined
        charges = joined


def name_alike(engine: _Engine) -> None:
    """Give the engine's own segment one name in all processes: charges that rank zero wrote are each one's own."""
    journal = engine.journal
    journal.segment = get_distributed_context().broadcast_from_rank_zero(lambda: journal.segment)


def _position(facts: Mapping[str, object]) -> tuple[object, int]:
    """Which of its engine's models a checkpoint is of, and the step it reached."""
    position = facts.get("attached")
    if not isinstance(position, Mapping):
        return None, 0
    return position["number"], int(str(position["next_step"]))


def _facts_of(file: Path) -> dict[str, object] | None:
    try:
        facts, _ = from_bytes(file.read_bytes())
    except InvalidArgument:
        return None
    return facts if facts.get("kind") == _KIND else None


def _take_over(engine: _Engine, charges: _Charges) -> None:
    journal, more = engine.journal, Counter[str]()
    for name, part in charges.items():
        if name != journal.segment:
            known = journal.earlier_segments.get(name, Counter())
            more.update(part - known)
            journal.earlier_segments[name] = known | part
    engine.load_state_dict({"schema": 1, "history": [[json.loads(event), times] for event, times in more.items()]})
