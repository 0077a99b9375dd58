"""The run folder of a training that another library keeps (floor 4): begun, taken up again, named in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from sordino.runs.claims import guarantee_body
from sordino.runs.files import write_json
from sordino.training.drop_in.journal import RUN_FOLDERS, find_run_folder, is_open_here, next_run_folder
from sordino.training.engine import PrivacyEngine
from sordino.training.processes.ranks import ranks_here

__all__ = ["begin_run", "cut_off_run", "resume_run", "write_guarantee", "write_note"]


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
            shown, and whoever begins anew in its place goes on in its account.
    """
    if engine.journal.is_set:
        return
    if run_folder is not None:
        engine.journal.open(run_folder, **facts)
    else:
        cut_off = partial(cut_off_run, under) if joins else None
        engine.journal.will_create(partial(next_run_folder, under), cut_off, **facts)


def cut_off_run(under: str | Path) -> Path | None:
    """The last run folder under a folder, when its run was killed: nobody has said yet what it cost; otherwise None.

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
        near: where the run folder may lie, beside or above.
        what: the checkpoint's name in the caller's own words.
        facts: public, for run.json of a run that is yet to begin.

    Raises:
        InvalidArgument: in all processes: the run folder is not there, another process writes it, or the engine has
            charged something that is not in it.
    """
    places = near if run_folder is None else (run_folder,)

    def found() -> str | None:
        path = find_run_folder(note(), places, what=what)
        return None if path is None else str(path)

    path = ranks_here().agreed(found)
    if path is None:
        begin_run(engine, run_folder, under=near[-1], facts=facts)
    else:
        engine.journal.open(path)


def write_note(
    engine: PrivacyEngine, folder: Path, *, note: str = "sordino.json", guarantee: str = "guarantee.json"
) -> None:
    """Write into a checkpoint, or beside saved weights, which run they belong to and what holds for them.

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
