"""Ways in which private training goes wrong, each held against what the run folder tells."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sordino.definitions import round_up
from sordino.events import Event, Gaussian, NoPrivacy, Nothing, PoissonSampled, ShuffledEpochs
from sordino.report.parts import Accounting, Audit, Composition, Measurements, Pitfall, Process, Statement, Touch
from sordino.runs import Line

__all__ = ["Evidence", "is_exact", "pitfalls"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the list of pitfalls is judged by: parts of the report, the transcript, the plan, the facts of the run."""

    guarantee: Statement
    accounting: Accounting
    process: Process
    touches: tuple[Touch, ...]
    composition: Composition
    audits: tuple[Audit, ...]
    utility: Measurements
    lines: list[Line]
    plan: Mapping[str, object]
    meta: Mapping[str, object]


def pitfalls(evidence: Evidence) -> tuple[Pitfall, ...]:
    """Every pitfall with its status: violated ones first, then unknown ones."""
    order = {"violated": 0, "unknown": 1, "ok": 2}
    weight = {"critical": 0, "theoretical": 1, "negligible": 2}
    found = [*_accounting(evidence), *_mechanism(evidence), *_randomness(evidence), *_surroundings(evidence)]
    return tuple(sorted(found, key=lambda item: (order[item.status], weight[item.severity])))


def _of(title: str, ok: bool | None, severity: str, yes: str, no: str, unknown: str = "") -> Pitfall:
    status = "unknown" if ok is None else "ok" if ok else "violated"
    text = {"ok": yes, "violated": no}.get(status, unknown)
    return Pitfall.model_validate({"title": title, "status": status, "severity": severity, "text": text})


def _accounting(evidence: Evidence) -> Iterator[Pitfall]:
    accounting = evidence.accounting
    yield _of(
        "The claim is borne out by the transcript",
        None if accounting.claimed_epsilon is None else accounting.agrees,
        "critical",
        "ε was computed again from what each step charged, and does not exceed the claim.",
        "The transcript gives a larger ε than the run claimed. The larger one is shown.",
        "The run did not end with a claim. ε is computed from the transcript.",
    )
    yield _of(
        "The transcript is whole",
        not any(line.torn for line in evidence.lines),
        "negligible",
        "Each line holds the hash of the one before it, and steps follow without gaps.",
        "The machine stopped while a line was written; it is counted as the most that a step can charge.",
    )
    records = _records(evidence.meta)
    delta = evidence.guarantee.delta
    yield _of(
        "δ is well below one in the number of records",
        None if records is None else delta * records < 1,
        "critical",
        f"δ = {delta:g}, and {records or 0:,} records.",
        f"δ = {delta:g} allows one of {records or 0:,} records to be published outright.",
        "The number of records is not stated.",
    )
    bound = max((audit.epsilon_lower for audit in evidence.audits), default=None)
    yield _of(
        "No audit contradicts the claim",
        None if bound is None else bound <= evidence.guarantee.epsilon,
        "critical",
        "Every measured lower bound is below the claimed ε. That is no proof of privacy.",
        f"An audit proves ε ≥ {bound or 0:.2f}, which is more than was claimed. The claim is false, or the audit is.",
        "No audit is in the run folder.",
    )


def _mechanism(evidence: Evidence) -> Iterator[Pitfall]:
    plan = evidence.plan
    yield _of(
        "Batches are drawn as they are accounted for",
        _sampling_fits(plan, evidence.lines),
        "critical",
        "Each step was charged by the sampler that drew its batch, at the rate that was planned.",
        "Some step was charged for another way of sampling than was planned.",
        "The plan names no single sample rate. ε counts what each step charged.",
    )
    yield _of(
        "The noise is at least what was planned",
        _noise_fits(plan, evidence.lines),
        "critical",
        "Every step was charged with the noise multiplier of the plan or more.",
        "Some step was charged with less noise than was planned. ε counts what was charged.",
        "The plan names no single noise multiplier. ε counts what each step charged.",
    )
    planned = plan.get("steps")
    steps = len({line.step for line in evidence.lines})
    yield _of(
        "No more steps than planned",
        steps <= planned if isinstance(planned, int) and planned > 0 else None,
        "critical",
        "The steps taken are among those planned. ε counts the steps taken.",
        "The run took more steps than planned. ε counts them.",
        "The plan does not limit the steps.",
    )
    public = plan.get("dataset_size_is_public")
    yield _of(
        "The noise is not scaled by a secret number",
        True if isinstance(public, bool) else None,
        "theoretical",
        "The divisor of the noisy sum comes from the size of the data set, which is treated as public."
        if public
        else "The divisor of the noisy sum was declared.",
        "",
        "The plan does not say where the divisor comes from.",
    )


def _randomness(evidence: Evidence) -> Iterator[Pitfall]:
    process = evidence.process
    yield _of(
        "Nobody can draw the noise again",
        None if process.seeded is None else not process.seeded,
        "critical",
        "Noise and sampling come from the operating system's entropy.",
        "The noise came from a chosen seed. Whoever knows or guesses it can subtract the noise.",
        "The run does not say where its randomness comes from.",
    )
    yield _of(
        "Resuming replays no noise and forgets no step",
        process.fresh_keys if process.segments else None,
        "critical",
        "Each process that worked on the run drew a key of its own, and steps that were repeated are charged again."
        if (process.segments or 0) > 1
        else "One process did the whole run.",
        "Two processes drew noise from the same key.",
        "The transcript does not say which processes worked on the run.",
    )
    yield _of(
        "Noise is drawn exactly",
        is_exact(process.arithmetic),
        "theoretical",
        "The noise is drawn on whole numbers, as in the proof.",
        "Noise is drawn in floating point; the proof is about real numbers. Attacks on rounding (Mironov 2012) read "
        "the lowest bits of what is released.",
        "The run does not say in which arithmetic noise is drawn.",
    )


def is_exact(arithmetic: str | None) -> bool | None:
    """Whether the noise is drawn on whole numbers, as far as the run says."""
    return None if arithmetic is None else any(word in arithmetic.lower() for word in ("integer", "exact"))


def _surroundings(evidence: Evidence) -> Iterator[Pitfall]:
    silent = [touch.title.lower() for touch in evidence.touches if touch.text is None]
    yield _of(
        "Whatever else touched the records is told",
        None if silent else True,
        "critical",
        "All of it is stated in this report. A statement is not checked.",
        "",
        f"Not stated: {', '.join(silent)}.",
    )
    logged = next(touch.text for touch in evidence.touches if touch.name == "logging")
    yield _of(
        "Nothing computed from the records was shown without noise",
        False if evidence.meta.get("diagnostics") is not None else None if logged is None else True,
        "critical",
        "As the run states under what was printed, logged and plotted.",
        "Losses and batch sizes were shown while the run went on. What was seen there is not covered.",
        "The run does not say what was printed, logged or plotted.",
    )
    known = evidence.composition
    total, budget = known.spent, known.budget
    yield _of(
        "Other uses of the same records are counted",
        (budget is None or total <= budget) if total is not None else (True if known.text else None),
        "critical",
        f"All charges to the account together: ε = {round_up(total)}." if total is not None else (known.text or ""),
        "The account of the data set is overdrawn.",
        "No ledger is named, and the run says nothing of other uses.",
    )
    withheld = evidence.utility.withheld
    yield _of(
        "Nothing measured on private records lies in the folder",
        not withheld,
        "critical",
        "Every value in metrics.json is marked public.",
        f"{withheld} measured value{'s are' if withheld != 1 else ' is'} marked private. Publish the folder only "
        "without metrics.json.",
    )


def _records(meta: Mapping[str, object]) -> int | None:
    data = meta.get("data")
    records = data.get("records") if isinstance(data, Mapping) else None
    return records if isinstance(records, int) and not isinstance(records, bool) else None


def _sampling_fits(plan: Mapping[str, object], lines: list[Line]) -> bool | None:
    rate, poisson = plan.get("sample_rate"), plan.get("poisson_sampling", True)
    if not isinstance(rate, int | float):
        return None
    return all(_drawn_as_planned(event, float(rate), poisson=bool(poisson)) for event in _distinct(lines))


def _drawn_as_planned(event: Event, rate: float, *, poisson: bool) -> bool:
    if isinstance(event, PoissonSampled):
        return poisson and event.sample_rate <= rate
    if isinstance(event, ShuffledEpochs):
        return not poisson
    # Charged as if every record took part: right for full batches, and on the safe side otherwise.
    return True


def _noise_fits(plan: Mapping[str, object], lines: list[Line]) -> bool | None:
    planned = plan.get("noise_multiplier")
    if not isinstance(planned, int | float):
        return None
    found = [_noise(event) for event in _distinct(lines) if not isinstance(event, Nothing)]
    return None if None in found else all(noise >= planned * (1 - 1e-12) for noise in found if noise is not None)


def _noise(event: Event) -> float | None:
    inner = getattr(event, "event", event)
    if isinstance(inner, NoPrivacy):
        return 0.0
    return inner.noise_multiplier if isinstance(inner, Gaussian) else None


def _distinct(lines: list[Line]) -> list[Event]:
    return list(dict.fromkeys(line.event for line in lines))
