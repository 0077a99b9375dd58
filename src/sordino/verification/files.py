"""Items about files: the manifest, the chain, the checkpoint (floor 6)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sordino.errors import SordinoError
from sordino.runs import Line, RunFolder, Segment
from sordino.runs.files import fingerprint
from sordino.verification.items import Item, failed, not_checked, passed
from sordino.verification.planned import same_plan

__all__ = ["Chain", "check_anchor", "check_checkpoint", "check_files", "check_model", "read_chain"]

_LENGTH = 8  # bytes of the header's length, at the start of a safetensors file
_LARGEST_HEADER = 100_000_000
# What lies in a folder while its run goes on; all else says what came of it.
_UNFINISHED = {"checkpoint.safetensors", "environment.json", "plan.json", "run.json", "transcript.jsonl"}
_UNFINISHED |= {f".{name}.draft" for name in _UNFINISHED}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The lines of a transcript that fit together, and the hash after each."""

    entries: tuple[Line | Segment, ...]
    heads: tuple[str, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """The steps, in the order in which they were charged."""
        return tuple(entry for entry in self.entries if isinstance(entry, Line))

    @property
    def seeded(self) -> bool:
        """Whether some process took its noise from a chosen seed."""
        return any(isinstance(entry, Segment) and entry.seeded for entry in self.entries)

    @property
    def plans(self) -> tuple[Mapping[str, object], ...]:
        """What segments state in place of plan.json, in order."""
        return tuple(entry.plan for entry in self.entries if isinstance(entry, Segment) and entry.plan is not None)

    @property
    def last_plan(self) -> Mapping[str, object] | None:
        """What the last segment states in place of plan.json, or None."""
        segments = [entry for entry in self.entries if isinstance(entry, Segment)]
        return segments[-1].plan if segments else None

    @property
    def segments(self) -> int:
        """How many processes worked on the run."""
        return sum(isinstance(entry, Segment) for entry in self.entries)


def read_chain(run: RunFolder) -> tuple[Chain | None, Item]:
    """The transcript, every hash computed again; None when it is broken."""
    try:
        entries = tuple(run.entries())
    except (SordinoError, KeyError, UnicodeDecodeError) as error:
        return None, failed("chain", str(error))
    raw = (run.path / "transcript.jsonl").read_bytes().split(b"\n")[:-1]
    heads = tuple(hashlib.sha256(line).hexdigest() for line in raw)
    chain = Chain(entries=entries, heads=heads)
    words = f"{len(heads)} lines, {chain.segments} segments"
    torn = sum(line.torn for line in chain.lines)
    return chain, passed("chain", words + (f"; {torn} torn, counted as steps" if torn else ""))


def check_files(run: RunFolder) -> Item:
    """Whether every file is the one that the manifest lists."""
    file = run.path / "manifest.json"
    if not file.is_file():
        return not_checked("files", "there is no manifest: the run is being written or was cut off")
    try:
        manifest = run.manifest
    except (SordinoError, UnicodeDecodeError):
        return failed("files", "manifest.json is not what sordino wrote")
    listed = manifest.get("files")
    canonical = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
    if not isinstance(listed, dict) or set(manifest) != {"schema", "head", "lines", "files"} or manifest["schema"] != 1:
        return failed("files", "manifest.json lacks what it must hold")
    if file.read_bytes() != canonical:
        return failed("files", "manifest.json is not as sordino writes it")
    there = set(run.files())
    differing = sorted(there ^ set(listed))
    differing += sorted(
        name
        for name in there & set(listed)
        if (run.path / name).is_symlink() or fingerprint(run.path / name) != listed[name]
    )
    if differing:
        return failed("files", f"not as in the manifest: {', '.join(differing)}")
    chain_end = run.chain_head if _readable(run) else ""
    if manifest["head"] != chain_end:
        return failed("files", "the manifest names another end of the chain")
    if manifest["lines"] != run.lines:
        return failed("files", "the manifest counts another number of lines")
    return passed("files", f"{len(listed)} files have the SHA-256 that the manifest lists")


def _readable(run: RunFolder) -> bool:
    try:
        return bool(run.chain_head)
    except SordinoError:
        return False


def check_model(run: RunFolder) -> Item:
    """Whether the model is the one that the manifest lists."""
    file = run.path / "model.safetensors"
    if not file.is_file():
        return not_checked("model", "there is no model: the run did not finish")
    digest = str(fingerprint(file)["sha256"])
    try:
        files = run.manifest.get("files")
    except (SordinoError, UnicodeDecodeError):
        files = None
    listed = files.get("model.safetensors") if isinstance(files, dict) else None
    if listed is None:
        return not_checked("model", f"no manifest lists it; its SHA-256 is {digest}")
    if not isinstance(listed, dict) or listed.get("sha256") != digest:
        return failed("model", f"its SHA-256 is {digest}, and the manifest lists another")
    return passed("model", f"SHA-256 {digest}")


def check_checkpoint(run: RunFolder, chain: Chain | None) -> Item | None:
    """Whether the checkpoint was made in this run, after the lines that it names; None when there is none."""
    file = run.path / "checkpoint.safetensors"
    if not file.is_file():
        return None
    facts = _facts(file)
    if facts is None:
        return failed("checkpoint", "it is not a checkpoint that sordino wrote")
    if not same_plan(facts.get("plan"), run.plan):
        return failed("checkpoint", "it was made under another plan")
    if chain is None:
        return not_checked("checkpoint", "the chain is broken")
    lines = facts.get("lines")
    if not isinstance(lines, int) or not 0 < lines <= len(chain.heads) or chain.heads[lines - 1] != facts.get("head"):
        return failed("checkpoint", "the transcript does not hold the line after which it was made")
    return passed("checkpoint", f"made after line {lines} of the transcript")


def _facts(file: Path) -> Mapping[str, object] | None:
    """What the JSON in the header says; tensors are not read, and nothing is unpickled."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(_LENGTH), "little")
        try:
            header = json.loads(content.read(min(length, _LARGEST_HEADER)))
            facts = json.loads(header["__metadata__"]["content"])["facts"]
        except (ValueError, KeyError, TypeError):
            return None
    return facts if isinstance(facts, dict) else None


def check_anchor(run: RunFolder, chain: Chain | None, head: str, files: Item) -> Item:
    """Whether the whole folder is the one whose hash was noted down elsewhere."""
    closed = (run.path / "manifest.json").is_file()
    if closed and run.head == head:
        if files.status != "pass":
            return failed("anchor", "the manifest is the published one, and the files are not those that it lists")
        return passed("anchor", "every file is the one that was published")
    if chain is None:
        return failed("anchor", "the chain is broken")
    if head not in chain.heads:
        return failed("anchor", "nothing in the folder has the published hash: it is not the run that was published")
    later = len(chain.heads) - 1 - chain.heads.index(head)
    if closed or {"guarantee.json", "model.safetensors"} & set(run.files()):
        return failed(
            "anchor",
            "the hash is one of the transcript, which stands for no model, metrics or guarantee; publish the hash that "
            "`sordino verify --anchor` prints for the finished run",
        )
    beside = sorted(set(run.files()) - _UNFINISHED)
    if beside:
        return failed(
            "anchor",
            f"the hash is one of the transcript, and does not stand for what lies beside it: {', '.join(beside)}",
        )
    words = f"{later} lines came after it" if later else "the chain ends with the published hash"
    return passed("anchor", f"{words}; the run did not finish: the hash stands for plan.json, run.json and transcript")
