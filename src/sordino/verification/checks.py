"""What a verification says."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sordino import accounting, checks
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import LedgerError, SordinoError
from sordino.events import (
    DiscreteLaplace,
    Event,
    Gaussian,
    NonPrivate,
    NoOp,
    PoissonSampled,
    RandomAllocation,
    SampledWithoutReplacement,
    SampledWithReplacement,
    describe_sampling,
    event_counts,
)
from sordino.ledger import Ledger, LedgerEntry
from sordino.mechanisms.correlated import (
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    participation_from_dict,
    strategy_from_dict,
)
from sordino.runs import Evaluation, RunFolder, RunSegment, TranscriptLine
from sordino.runs.transcript import file_digest
from sordino.sampling import CyclicPoissonSampling, FixedBatchSampling, PoissonSampling
from sordino.schedules import schedule_from_dict, schedule_value


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One thing that was looked at.

    Args:
        name: of the item, one or two words.
        status: "pass", "fail" or "not checked".
        detail: what was found, in a sentence.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """All items of one run.

    Args:
        items: in the order in which they were looked at.
        head: the end of the run's chain; "" when the chain is broken. Publish it to anchor the run.
    """

    items: tuple[CheckResult, ...]
    head: str

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(item.status != "fail" for item in self.items)

    @property
    def complete(self) -> bool:
        """Whether nothing failed and everything was checked."""
        return all(item.status == "pass" for item in self.items)

    def item(self, name: str) -> CheckResult:
        """The item called `name`."""
        return next(item for item in self.items if item.name == name)

    def to_dict(self) -> dict[str, object]:
        """The result as plain JSON types."""
        items = [{"name": item.name, "status": item.status, "detail": item.detail} for item in self.items]
        return {"passed": self.passed, "complete": self.complete, "head": self.head, "items": items}


def passed(name: str, detail: str) -> CheckResult:
    """An item that holds."""
    return CheckResult(name=name, status="pass", detail=detail)


def failed(name: str, detail: str) -> CheckResult:
    """An item that doesn't hold."""
    return CheckResult(name=name, status="fail", detail=detail)


def not_checked(name: str, detail: str) -> CheckResult:
    """An item that can't be checked here."""
    return CheckResult(name=name, status="not checked", detail=detail)


# ----------------------------------------------------------------------------------------------------------------------
# The event that a plan asks for at a step, worked out from plan.json without the training code.
# ----------------------------------------------------------------------------------------------------------------------


_NEEDED = {"noise_multiplier", "sample_rate", "steps", "poisson_sampling", "delta", "neighboring_relation"}


def is_plan(plan: Mapping[str, object]) -> bool:
    """Whether this is a plan that says what each step does."""
    return plan.keys() >= _NEEDED


def same_plan(one: object, other: Mapping[str, object]) -> bool:
    """Whether two plans say the same: a field that an earlier schema lacks is as good as null."""
    stated = [
        {name: value for name, value in plan.items() if name != "schema" and value is not None}
        for plan in (one, other)
        if isinstance(plan, Mapping)
    ]
    return len(stated) == 2 and stated[0] == stated[1]


def planned_loss_stddev(plan: Mapping[str, object], step: int, *, asked: tuple[float, float] | None = None) -> float:
    """Standard deviation of the noise on the loss that step `step` releases: z L / (√share · B).

    Args:
        plan: plan.json, with a loss curve.
        step: number of the step.
        asked: the noise multiplier and sample rate that were chosen on the way, instead of the plan's.
    """
    curve = plan["loss_release"]
    assert isinstance(curve, Mapping)
    noise, rate, size = (
        schedule_value(schedule_from_dict(plan[name]), step, int(str(plan["steps"])))
        for name in ("noise_multiplier", "sample_rate", "expected_batch_size")
    )
    if asked is not None:
        noise, size = asked[0], size * asked[1] / rate
    return noise * float(str(curve["max_loss"])) / (math.sqrt(float(str(curve["budget_fraction"]))) * size)


def planned_event(plan: Mapping[str, object], step: int, *, first: int, repeats: bool = False) -> Event:
    """What step `step` of a segment that starts at step `first` must charge.

    Args:
        plan: plan.json.
        step: number of the step.
        first: first step of its segment; it pays for what is left of an epoch that is charged as a whole.
        repeats: whether steps from `first` on were carried out before; matters under correlated noise only.
    """
    if isinstance(noise := plan.get("correlated_noise"), dict):
        return _correlated_event(noise, float(str(plan["noise_multiplier"])), step, first=first, repeats=repeats)
    # A loop of the user's own has no last step.
    steps = int(str(plan["steps"])) or None
    noise = schedule_value(schedule_from_dict(plan["noise_multiplier"]), step, steps)
    rate = schedule_value(schedule_from_dict(plan["sample_rate"]), step, steps)
    if _charges_epochs(plan) and step != first and step % max(1, round(1 / rate)):
        return NoOp()
    if noise == 0:
        return NonPrivate(reason="noise_multiplier is 0")
    event = Gaussian(noise_multiplier=noise)
    if plan["poisson_sampling"]:
        return PoissonSampled(sample_rate=rate, event=event) if rate != 1 else event
    match plan.get("sampling"):
        case "without_replacement":
            return SampledWithoutReplacement(**_fixed_size(plan), event=event)
        case "with_replacement":
            return SampledWithReplacement(**_fixed_size(plan), event=event)
        case "balls_in_bins":
            return RandomAllocation(steps=max(1, round(1 / rate)), participations=1, epochs=1, event=event)
    return event


def _charges_epochs(plan: Mapping[str, object]) -> bool:
    """Whether the steps of an epoch are charged together: shuffled epochs and balls in bins."""
    return not plan["poisson_sampling"] and plan.get("sampling") in (None, "balls_in_bins")


def _fixed_size(plan: Mapping[str, object]) -> dict[str, int]:
    """Of batches of fixed size: how many records are drawn from how many."""
    size = checks.integer(1, dataset_size=plan.get("dataset_size"))
    return {"dataset_size": size, "sample_size": round(float(str(plan["sample_rate"])) * size)}


def _correlated_event(
    noise: Mapping[str, object], noise_multiplier: float, step: int, *, first: int, repeats: bool
) -> Event:
    participation = participation_from_dict(noise["participation"])
    mechanism = CorrelatedGaussianMechanism(
        strategy=strategy_from_dict(noise["strategy"]),
        participation=participation,
        noise_multiplier=noise_multiplier,
        l2_sensitivity=1.0,
    )
    if repeats and noise_multiplier:
        return mechanism.branch_event(first) if step == first else NoOp()
    cyclic = isinstance(participation, CyclicPoisson)
    if step % participation.groups if cyclic else step:
        return NoOp()
    if noise_multiplier == 0:
        return NonPrivate(reason="noise_multiplier is 0")
    one = Gaussian(noise_multiplier=noise_multiplier)
    if not cyclic:
        return mechanism.event()
    rate = participation.group_rate
    return one if rate == 1 else PoissonSampled(sample_rate=rate, event=one)


@dataclass(kw_only=True)
class Course:
    """The steps of one model, line by line, compared with its plan.

    Args:
        plan: plan.json, or what the segment at hand states in its place.
        ends: whether the plan says how many steps there are; in a loop of the user's own it doesn't, and an epoch of
            shuffled batches begins when the loop says so.
    """

    plan: Mapping[str, object]
    ends: bool
    first: int = 0
    begun: int = 0
    _repeats: bool = False
    _uncharged: int = 0

    def begin(self, plan: Mapping[str, object], first: int) -> None:
        """A segment begins at step `first`."""
        # The step after a checkpoint may have been under way, and broken off, when that was written.
        self.plan, self.first, self._repeats = plan, first, 0 < first < self.begun - 1
        self._uncharged = 0

    def fault(self, line: TranscriptLine) -> str:
        """What is wrong with the next line, or an empty string."""
        correlated = isinstance(self.plan.get("correlated_noise"), dict)
        if line.step == self.first and self.first:
            again = planned_event(self.plan, self.first, first=self.first, repeats=True)
            self._repeats = self._repeats or line.event == again
        self.begun = max(self.begun, line.step + 1)
        steps = int(str(self.plan["steps"]))
        if (self.ends or correlated) and line.step >= steps:
            return f"step {line.step} is beyond the plan's {steps} steps"
        if line.torn:
            return ""
        if not self.ends and not correlated and _charges_epochs(self.plan):
            return self._epoch_fault(line)
        if line.event != planned_event(self.plan, line.step, first=self.first, repeats=self._repeats):
            return f"step {line.step}, attempt {line.attempt}, charges another event than the plan's"
        return ""

    def _epoch_fault(self, line: TranscriptLine) -> str:
        """An epoch is charged before its first batch, and has no more batches than the plan says."""
        if isinstance(line.event, NoOp):
            self._uncharged += 1
            batches = max(1, round(1 / float(str(self.plan["sample_rate"]))))
            if line.step == self.first or self._uncharged >= batches:
                return f"step {line.step}, attempt {line.attempt}, belongs to an epoch that nothing was charged for"
            return ""
        self._uncharged = 0
        if line.event != planned_event(self.plan, line.step, first=line.step):
            return f"step {line.step}, attempt {line.attempt}, charges another event than the plan's"
        return ""


# ----------------------------------------------------------------------------------------------------------------------
# Items about files: the manifest, the chain, the checkpoint.
# ----------------------------------------------------------------------------------------------------------------------


_LENGTH = 8  # bytes of the header's length, at the start of a safetensors file
_LARGEST_HEADER = 100_000_000
# What lies in a folder while its run goes on; all else says what came of it.
_UNFINISHED = {"checkpoint.safetensors", "environment.json", "plan.json", "run.json", "transcript.jsonl"}
_UNFINISHED |= {f".{name}.draft" for name in _UNFINISHED}


@dataclass(frozen=True, kw_only=True)
class TranscriptChain:
    """The lines of a transcript that fit together, and the hash after each."""

    entries: tuple[TranscriptLine | RunSegment, ...]
    heads: tuple[str, ...]

    @property
    def lines(self) -> tuple[TranscriptLine, ...]:
        """The steps, in the order in which they were charged."""
        return tuple(entry for entry in self.entries if isinstance(entry, TranscriptLine))

    @property
    def segments(self) -> tuple[RunSegment, ...]:
        """The processes that worked on the run, in order."""
        return tuple(entry for entry in self.entries if isinstance(entry, RunSegment))


def read_chain(run: RunFolder) -> tuple[TranscriptChain | None, CheckResult]:
    """The transcript, every hash computed again; None when it is broken."""
    try:
        entries = tuple(run.entries())
    except (SordinoError, KeyError, UnicodeDecodeError) as error:
        return None, failed("chain", str(error))
    raw = (run.path / "transcript.jsonl").read_bytes().split(b"\n")[:-1]
    heads = tuple(hashlib.sha256(line).hexdigest() for line in raw)
    chain = TranscriptChain(entries=entries, heads=heads)
    count = len(chain.segments)
    words = f"{len(heads)} lines, {count} {'segment' if count == 1 else 'segments'}"
    torn = sum(line.torn for line in chain.lines)
    return chain, passed("chain", words + (f"; {torn} torn, counted as steps" if torn else ""))


def check_files(run: RunFolder) -> CheckResult:
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
        if (run.path / name).is_symlink() or file_digest(run.path / name) != listed[name]
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


def check_model(run: RunFolder) -> CheckResult:
    """Whether the model is the one that the manifest lists."""
    file = run.path / "model.safetensors"
    if not file.is_file():
        finished = (run.path / "guarantee.json").is_file()
        return not_checked("model", f"there is no model: the run {'releases none' if finished else 'did not finish'}")
    digest = str(file_digest(file)["sha256"])
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


def check_checkpoint(run: RunFolder, chain: TranscriptChain | None) -> CheckResult | None:
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


def check_anchor(run: RunFolder, chain: TranscriptChain | None, head: str, files: CheckResult) -> CheckResult:
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
    extra_files = sorted(set(run.files()) - _UNFINISHED)
    if extra_files:
        return failed(
            "anchor",
            f"the hash covers the transcript, not the other files in the folder: {', '.join(extra_files)}",
        )
    words = f"{later} lines came after it" if later else "the chain ends with the published hash"
    return passed("anchor", f"{words}; the run did not finish: the hash stands for plan.json, run.json and transcript")


# ----------------------------------------------------------------------------------------------------------------------
# Items about what was released in addition to the model: the loss curve.
# ----------------------------------------------------------------------------------------------------------------------


_SAME = 1e-9


def check_released_losses(run: RunFolder, chain: TranscriptChain | None) -> CheckResult | None:
    """Whether the losses that were released are those of the plan, with its noise; None without any."""
    try:
        return _check_loss_curve(run, chain)
    except (SordinoError, UnicodeDecodeError, KeyError, ValueError) as error:
        return failed("loss curve", f"it can't be held against the plan: {error}")


def _check_loss_curve(run: RunFolder, chain: TranscriptChain | None) -> CheckResult | None:
    planned, curve = run.plan.get("loss_release"), run.released_losses
    if curve is None:
        return None if planned is None else not_checked("loss curve", "none is written: the run did not finish")
    if planned != {"max_loss": curve.max_loss, "budget_fraction": curve.budget_fraction}:
        return failed("loss curve", "its bound or share is not the plan's, or the plan releases none")
    if chain is None:
        return not_checked("loss curve", "the chain is broken")
    charged: dict[int, TranscriptLine] = {line.step: line for line in chain.lines}
    steps = [point.step for point in curve.points]
    if steps != sorted(set(steps)) or not charged.keys() >= set(steps):
        return failed("loss curve", "it holds a step twice, or one that was not charged")
    chosen = run.meta.get("budget") is not None
    for point in curve.points:
        asked = _asked(charged[point.step].event) if chosen else None
        stddev = planned_loss_stddev(run.plan, point.step, asked=asked)
        if abs(point.stddev - stddev) > _SAME * stddev:
            return failed("loss curve", f"step {point.step} states another noise than the plan's")
    return passed("loss curve", f"{len(steps)} values, with the noise that the plan gives them")


def _asked(event: Event) -> tuple[float, float] | None:
    """(noise multiplier, sample rate) that a step under a budget asked for; None where its event does not say."""
    inner, rate = (event.event, event.sample_rate) if isinstance(event, PoissonSampled) else (event, 1.0)
    return (inner.noise_multiplier, rate) if isinstance(inner, Gaussian) else None


# ----------------------------------------------------------------------------------------------------------------------
# The item about evaluations on private records: what was charged is what the noise on the counts costs.
# ----------------------------------------------------------------------------------------------------------------------


_EVALUATED_SAME = 1e-6


def check_evaluations(run: RunFolder, chain: TranscriptChain | None, place: str | Path | None) -> CheckResult | None:
    """Whether every evaluation states the noise that its event means, and cost no more than it says; None without any.

    Args:
        run: the run folder.
        chain: its transcript; None when it is broken.
        place: the ledger, or None.
    """
    try:
        found = run.evaluations
        if not found:
            return None
        for number, evaluation in enumerate(found, 1):
            if fault := _fault(evaluation, chain):
                return failed("evaluations", f"evaluation {number} {fault}")
        return _with_ledger(found, place)
    except (SordinoError, UnicodeDecodeError, ValueError, OverflowError) as error:
        return failed("evaluations", str(error))


def _fault(evaluation: Evaluation, chain: TranscriptChain | None) -> str:
    """What is wrong with one of them, or an empty string."""
    if chain is not None and evaluation.head not in chain.heads:
        return "was made of another run's model"
    spent = accounting.epsilon(
        evaluation.event, evaluation.delta, neighboring_relation=evaluation.neighboring_relation
    ).upper
    if not spent <= evaluation.epsilon * (1 + _EVALUATED_SAME):
        return f"states ε = {evaluation.epsilon:.6g}, and its event comes to {spent:.6g}"
    leaves = event_counts(evaluation.event)
    spreads = [_stddev(leaf, evaluation.neighboring_relation) for leaf in leaves]
    if not spreads or any(
        spread is None or abs(spread - evaluation.stddev) > _EVALUATED_SAME * evaluation.stddev for spread in spreads
    ):
        return "states another noise than its event"
    # A table is one histogram, in which one record moves one count, or two when it is replaced: two Laplace leaves.
    replaces = evaluation.neighboring_relation is NeighboringRelation.REPLACE_ONE
    each = 2 if replaces and isinstance(next(iter(leaves)), DiscreteLaplace) else 1
    if evaluation.tables is not None and sum(leaves.values()) != len(evaluation.tables) * each:
        return "holds another number of tables than it paid for"
    return ""


def _stddev(event: Event, neighboring_relation: NeighboringRelation) -> float | None:
    """Standard deviation of the noise on a count, worked out from the event; None for another mechanism."""
    if isinstance(event, Gaussian):
        return event.noise_multiplier * (
            math.sqrt(2) if neighboring_relation is NeighboringRelation.REPLACE_ONE else 1.0
        )
    if isinstance(event, DiscreteLaplace):
        ratio = math.exp(-1 / event.scale)
        return math.sqrt(2 * ratio) / (1 - ratio)
    return None


def _with_ledger(found: Sequence[Evaluation], place: str | Path | None) -> CheckResult:
    answered = sum(one.tables is not None for one in found)
    words = f"{len(found)} paid for, {answered} answered; noise and price agree"
    named = [one for one in found if one.charge is not None]
    if place is None:
        return not_checked("evaluations", f"{words}; no ledger was given") if named else passed("evaluations", words)
    try:
        held = ledger_lines(Ledger(place))
    except LedgerError as error:
        return failed("evaluations", str(error))
    for one in named:
        entry = held.get(one.charge or "")
        if entry is None or entry.kind != "charge" or entry.event != one.event:
            return failed("evaluations", f"charge {(one.charge or '')[:12]}… is missing, or is for something else")
    if len(named) < len(found):
        return not_checked("evaluations", f"{words}; {len(found) - len(named)} name no charge")
    return passed("evaluations", f"{words}, and the ledger holds every charge")


def ledger_lines(ledger: Ledger) -> dict[str, LedgerEntry]:
    """All lines of a ledger by their digests."""
    return {entry.digest: entry for name in ledger.accounts() for entry in ledger.account(name).history()}


# ----------------------------------------------------------------------------------------------------------------------
# Whether a guarantee's words are those of its run: sampler, accountant and caveats.
# ----------------------------------------------------------------------------------------------------------------------


def describe_mismatch(
    plans: Sequence[Mapping[str, object]], claim: Guarantee, event: Event, accountant: str
) -> str | None:
    """What the guarantee says otherwise than plans and transcript; None when it agrees.

    Args:
        plans: plan.json, and what segments state in its place.
        claim: the guarantee as it was written.
        event: all that the transcript charges.
        accountant: which one answers for that event here.
    """
    charged = describe_sampling(event)
    if not all(map(is_plan, plans)):
        # Stages, estimators and loops of one's own: no rate may be named that no step charged.
        named = set(re.findall(r"(?<!cyclic )Poisson sampling at rate [\d.e+-]*\d", claim.sampler))
        if any(words not in charged for words in named):
            return f"its sampler is not what the transcript charges: {charged}"
        return None
    try:
        planned = dict.fromkeys(map(_sampler, plans))
    except (SordinoError, KeyError, TypeError, ValueError):
        return "plan.json says nothing of how batches are drawn"
    caveats = [caveat for plan in plans for caveat in _caveats(plan)]
    asked = f"the one that answers for the transcript: {accountant}"
    return _differing(claim, ", ".join(planned), "the plan's", accountant, asked, caveats)


def describe_budget_mismatch(plans: Sequence[Mapping[str, object]], claim: Guarantee, accountant: str) -> str | None:
    """What the guarantee of a run under a budget says otherwise than its plans; None when it agrees.

    Args:
        plans: plan.json, and what segments state in its place.
        claim: the guarantee as it was written.
        accountant: the budget's filter, in words.
    """
    is_full = plans[-1]["sample_rate"] == 1 and not any(isinstance(value, Mapping) for value in _planned(plans[-1]))
    sampler = "full batches" if is_full else "Poisson sampling at rates chosen under the filter"
    caveats = [*(caveat for plan in plans for caveat in _caveats(plan)), _KEPT]
    return _differing(claim, sampler, "the budget's", accountant, f"the budget's: {accountant}", caveats)


def _differing(
    claim: Guarantee, sampler: str, whose: str, accountant: str, asked: str, caveats: Sequence[str]
) -> str | None:
    """What the guarantee says otherwise of sampler and accountant, or which caveat it leaves out."""
    if sorted(claim.sampler.split(", ")) != sorted(sampler.split(", ")):
        return f"its sampler is not {whose}: {sampler}"
    if claim.accountant != accountant:
        return f"its accountant is not {asked}"
    missing = [caveat for caveat in caveats if caveat not in claim.caveats]
    return f"it leaves out that {missing[0]}" if missing else None


def _planned(plan: Mapping[str, object]) -> list[object]:
    """What may change from step to step."""
    return [plan.get(name) for name in ("noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch_size")]


_KEPT = "ε is a budget that a filter kept: the noise of each step was chosen on the way"


def _sampler(plan: Mapping[str, object]) -> str:
    """How batches are drawn, worked out from plan.json without the training code."""
    rate = plan["sample_rate"]
    if not isinstance(rate, int | float):
        return "Poisson sampling at planned rates"
    noise = plan.get("correlated_noise")
    if isinstance(noise, Mapping):
        participation = participation_from_dict(noise["participation"])
        if isinstance(participation, CyclicPoisson):
            return CyclicPoissonSampling(groups=participation.groups, sample_rate=rate).describe()
        return FixedBatchSampling(steps_per_epoch=max(1, round(1 / rate))).describe()
    if plan["poisson_sampling"]:
        return PoissonSampling(sample_rate=rate).describe()
    sampling = plan.get("sampling")
    if sampling == "balls_in_bins":
        return f"balls in bins, {max(1, round(1 / rate))} batches an epoch"
    if sampling is not None:
        sizes, how = _fixed_size(plan), "without" if sampling == "without_replacement" else "with"
        return f"fixed-size sampling {how} replacement, {sizes['sample_size']} of {sizes['dataset_size']}"
    return "shuffled epochs without amplification"


def _caveats(plan: Mapping[str, object]) -> list[str]:
    """What every guarantee of this plan must say."""
    added = plan["neighboring_relation"] == NeighboringRelation.ADD_OR_REMOVE_ONE.value
    said = {
        "noise_multiplier is 0: for debugging only": plan["noise_multiplier"] == 0,
        "the size of the dataset is treated as public": plan.get("dataset_size_is_public") is True,
        "records keep their numbers when one is added or removed": plan.get("correlated_noise") is not None and added,
        "secure noise holds to the last bit with microbatch_size=1": plan.get("secure_mode") is True,
    }
    return [caveat for caveat, applies in said.items() if applies]
