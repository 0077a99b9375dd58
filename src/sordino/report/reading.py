"""Reading a run folder into a report. Nothing in it is trusted more than needed: ε is computed again."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, compose
from sordino.report import stated
from sordino.report.bought import losses_shown
from sordino.report.composition import composition
from sordino.report.limits import covered, not_covered
from sordino.report.measured import utility_of
from sordino.report.mechanism_words import clipping_words, noise_words, schedule_words
from sordino.report.numerals import shown
from sordino.report.paid import paid_evaluation, together
from sordino.report.parts import Accounting, Mechanism, Process, Statement
from sordino.report.pitfalls import Evidence, is_exact, pitfalls
from sordino.report.quantities import accounted, curves, risk, user_level
from sordino.report.required import missing
from sordino.report.schema import Report
from sordino.runs import Line, RunFolder
from sordino.wording import sampling_words

__all__ = ["read"]


def read(run: RunFolder, *, ledger: str | Path | None = None) -> Report:
    """Read a run, and compute its ε again from the transcript.

    The guarantee shown is the run's own, unless the transcript, asked anew, gives a larger ε: then that one.

    Args:
        run: the run.
        ledger: the ledger that the run was charged to, a file or a URL, for what else was spent on the same records.

    Raises:
        InvalidArgument: the folder lacks what a report needs, or was changed.
    """
    lines, plan, meta = list(run), run.plan, run.meta
    event = compose([line.event for line in lines])
    claim = run.guarantee
    delta, relation, unit = (claim.delta, claim.relation, claim.unit) if claim else _planned(plan)
    found = accounted(
        event, delta, relation=relation, claimed=claim.epsilon if claim else None, version=metadata.version("sordino")
    )
    budget = _budget(meta) if claim is None else None
    guarantee = _guarantee(
        claim, found, budget, delta=delta, relation=relation, unit=unit, sampler=sampling_words(event)
    )
    drawn = curves(lines, event, delta, relation=relation, answer=found)
    process = stated.process(run, lines, meta)
    parts = {
        "guarantee": guarantee,
        "accounting": found,
        "process": process,
        "touches": stated.touches(meta, evaluations=len(run.evaluations)),
        "composition": composition(lines, meta, ledger, paid=_evaluation_charges(run)),
        "audits": stated.audits(run),
        "utility": utility_of(run.metrics),
    }
    report = Report.model_validate(
        {
            **parts,
            "name": run.path.resolve().name,
            **_told(run, meta),
            "user_level": user_level(event, delta, relation=relation, unit=unit),
            "mechanism": _mechanism(plan, meta, lines, claimed=guarantee.sampler, charged=sampling_words(event)),
            "curves": drawn,
            "losses": losses_shown(run.loss_curve),
            "evaluations": tuple(map(paid_evaluation, run.evaluations)),
            "epsilon_together": _together(run, event, guarantee),
            "risk": risk(drawn, guarantee.epsilon, delta, relation=relation, unit=unit),
            "pitfalls": pitfalls(Evidence(**parts, lines=lines, plan=plan, meta=meta)),
            "covered": covered(guarantee, losses=run.loss_curve is not None),
            "not_covered": not_covered(
                guarantee,
                meta=meta,
                plan=plan,
                measured=bool(parts["utility"].accuracy),
                evaluated=bool(run.evaluations),
                seeded=process.seeded is True,
                exact=is_exact(process.arithmetic) is True,
            ),
            "not_for_release": _not_for_release(guarantee, process, meta),
            "missing": (),
        }
    )
    return report.model_copy(update={"missing": missing(report)})


def _told(run: RunFolder, meta: Mapping[str, object]) -> dict[str, object]:
    """What is taken over as the run says it."""
    target = meta.get("target_epsilon")
    return {
        "started": str(meta.get("started", "")),
        "released": stated.released(run, meta),
        "trust": stated.trust(meta),
        "target_epsilon": target if isinstance(target, int | float) else None,
        "training": _rows(meta.get("training")),
        "data": _rows(meta.get("data")),
        "environment": _environment(run.environment),
        "registry": stated.registry_texts(meta),
    }


def _planned(plan: Mapping[str, object]) -> tuple[float, NeighboringRelation, PrivacyUnit]:
    """δ, relation and unit of a run that did not get to write its guarantee."""
    try:
        return (
            float(str(plan["delta"])),
            NeighboringRelation(str(plan["neighboring_relation"])),
            PrivacyUnit(str(plan["privacy_unit"])),
        )
    except (KeyError, ValueError) as error:
        raise InvalidArgument(
            "plan.json must hold delta, neighboring_relation and privacy_unit, got one that lacks "
            "or garbles one of them. The run folder was changed."
        ) from error


def _guarantee(
    claim: Guarantee | None,
    found: Accounting,
    budget: float | None,
    *,
    delta: float,
    relation: NeighboringRelation,
    unit: PrivacyUnit,
    sampler: str,
) -> Statement:
    """The run's claim; what the transcript says when it says more, or when there is no claim and no budget."""
    said = claim
    if claim is None or not found.agrees:
        caveats = ("the run did not finish: this counts the steps it took",)
        if budget is not None:
            caveats = ("the run did not finish: this is the budget that it could spend",)
        if claim is not None:
            caveats = (*claim.caveats, "the transcript says more than the run claimed")
        said = Guarantee(
            epsilon=max(found.interval.upper, budget or 0.0),
            delta=delta,
            accountant=found.accountant,
            sampler=claim.sampler if claim else sampler,
            relation=relation,
            unit=unit,
            caveats=caveats,
        )
    assert said is not None
    return Statement(
        epsilon=said.epsilon,
        delta=said.delta,
        relation=said.relation,
        unit=said.unit,
        sampler=said.sampler,
        accountant=said.accountant,
        caveats=said.caveats,
        sentence=said.sentence(),
    )


def _evaluation_charges(run: RunFolder) -> list[str]:
    return [one.charge for one in run.evaluations if one.charge is not None]


def _together(run: RunFolder, event: Event, guarantee: Statement) -> float | None:
    """ε of training and evaluations; None when there are none."""
    found, told = run.evaluations, {"delta": guarantee.delta, "relation": guarantee.relation}
    return together(found, event, claimed=guarantee.epsilon, **told) if found else None


def _budget(meta: Mapping[str, object]) -> float | None:
    """ε of a run that chose its noise on the way: a run that was cut off has still the whole of it as its guarantee."""
    body = meta.get("budget")
    epsilon = body.get("epsilon") if isinstance(body, Mapping) else None
    return float(epsilon) if isinstance(epsilon, int | float) else None


def _mechanism(
    plan: Mapping[str, object], meta: Mapping[str, object], lines: list[Line], *, claimed: str, charged: str
) -> Mechanism:
    steps, public = plan.get("steps"), plan.get("dataset_size_is_public")
    return Mechanism(
        noise_multiplier=_setting(plan.get("noise_multiplier")),
        max_grad_norm=_setting(plan.get("max_grad_norm")),
        clipping=clipping_words(plan.get("clipping")),
        noise=noise_words(plan, meta),
        sample_rate=_setting(plan.get("sample_rate")),
        expected_batch_size=_setting(plan.get("expected_batch_size")),
        steps_planned=steps if isinstance(steps, int) and not isinstance(steps, bool) else None,
        steps_charged=len(lines),
        dataset_size_is_public=public if isinstance(public, bool) else None,
        sampler_claimed=claimed,
        sampler_charged=charged,
        committed_steps=sum(line.indices is not None for line in lines),
    )


def _setting(value: object) -> float | str | None:
    """One number; or a schedule, in words."""
    if isinstance(value, Mapping):
        return schedule_words(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rows(body: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(body, Mapping):
        return ()
    return tuple((str(name).replace("_", " "), shown(value)) for name, value in body.items() if value is not None)


def _environment(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    plain = {name: value for name, value in body.items() if name != "packages"}
    return (*_rows(plain), *_rows(body.get("packages")))


def _not_for_release(guarantee: Statement, process: Process, meta: Mapping[str, object]) -> str:
    if not guarantee.is_private:
        return "This run is not private."
    if process.seeded:
        return "The noise came from a chosen seed."
    if process.fresh_keys is False:
        return "Two processes of the run drew noise from the same key."
    return "This was a run for debugging." if meta.get("debug") else ""
