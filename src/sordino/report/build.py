"""Reading a run folder into a report. Nothing in it is trusted more than needed: ε is computed again."""

import json
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sordino import accounting
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, compose, describe_sampling
from sordino.ledger import Account, Ledger, LedgerEntry
from sordino.report.formatting import describe_clipping, describe_noise, describe_schedule, format_epsilon, format_value
from sordino.report.interpretation import (
    AUDIT_HAZARD,
    Evidence,
    accounted,
    attack_bounds,
    bounds_from_epsilon,
    curves,
    is_exact,
    list_covered,
    list_not_covered,
    own_method,
    privacy_hazards,
    user_level,
    worst_case,
)
from sordino.report.schema import (
    Accounting,
    Attack,
    AttackResults,
    Audit,
    Composition,
    Curves,
    DataAccess,
    Declarations,
    GuaranteeSection,
    Mechanism,
    NotApplicable,
    PrivacyHazard,
    Process,
    ReleaseDecision,
    Report,
    losses_shown,
)
from sordino.report.utility import joint_epsilon, label_names, read_utility, summarize_evaluation
from sordino.runs import RunFolder, RunSegment, TranscriptLine
from sordino.runs.results import guarantee_body

# ----------------------------------------------------------------------------------------------------------------------
# What a run says of itself beyond the plan: data accesses outside the mechanism, randomness, other uses, audits.
#
# Everything is read through the run folder. What it does not say stays None, which a report shows as "not stated".
#
# | key of the run's facts | holds |
# |---|---|
# | `data_accesses` | text for each of preprocessing, normalization, schema, tuning, early_stopping, evaluation, logging
# |
# | `rng`, `noise_arithmetic` | class of the generator; kind of numbers |
# | `released`, `trust` | what is released; who is trusted with the records |
# | `composition` | other uses of the same records, in words |
# | `registry` | texts for the public registry of deployments |
# ----------------------------------------------------------------------------------------------------------------------


DATA_ACCESSES = {
    "preprocessing": "Preprocessing",
    "normalization": "Normalization and other statistics",
    "schema": "Bounds, categories, vocabulary",
    "tuning": "Tuning and choice of settings",
    "early_stopping": "Early stopping and choice of the model",
    "evaluation": "Validation and evaluation",
    "logging": "Printed, logged, plotted",
}
_AUDITS = TypeAdapter(list[Audit])
_REGISTRY = (
    "additional_information",
    "curator",
    "curator_type",
    "description",
    "intended_use",
    "justification",
    "name",
    "region",
    "registry_author",
    "sector",
)


def data_accesses(meta: Mapping[str, object], *, evaluations: int = 0) -> tuple[DataAccess, ...]:
    """Every use of the records outside the mechanism, as the run states it.

    `evaluations` is how many on private records lie in the run folder.
    """
    body = meta.get("data_accesses")
    said = body if isinstance(body, Mapping) else {}
    settings = meta.get("settings")
    found = {name: one_line(said.get(name)) for name in DATA_ACCESSES}
    if found["tuning"] is None and isinstance(settings, str) and settings.strip():
        found["tuning"] = one_line(f"{settings.strip().rstrip('.')}.")
    if meta.get("diagnostics") is not None:
        found["logging"] = "Losses and batch sizes were shown without noise during the run."
    if evaluations and found["evaluation"] is not None:
        times = {1: "once", 2: "twice"}.get(evaluations, f"{evaluations:,} times")
        paid = f"The finished model was evaluated on private records {times}, with noise and its own budget."
        found["evaluation"] += f" {paid}"
    return tuple(DataAccess(name=name, title=title, text=found[name]) for name, title in DATA_ACCESSES.items())


def training_process(run: RunFolder, lines: list[TranscriptLine], meta: Mapping[str, object]) -> Process:
    """Randomness, arithmetic, and the processes that worked on the run."""
    segments = run.segments()
    keys = [segment.key for segment in segments]
    seeded = _seeded(run, segments, meta)
    rng = one_line(meta.get("rng"))
    if seeded:
        rng = "chosen seed, so that the run can be repeated"
    elif rng is None and seeded is False:
        rng = "AES-256 in counter mode (on a card ChaCha20), keyed by the operating system's entropy"
    return Process(
        rng=rng,
        seeded=seeded,
        arithmetic=_arithmetic(run, meta),
        segments=len(segments) or None,
        repeated_steps=sum(line.attempt > 1 for line in lines),
        fresh_keys=len(set(keys)) == len(keys) if keys and None not in keys else None,
        head=run.chain_head,
    )


def _arithmetic(run: RunFolder, meta: Mapping[str, object]) -> str | None:
    """What the plan says of the numbers the noise is drawn in, otherwise what the facts of the run say."""
    planned = run.plan.get("secure_mode")
    if isinstance(planned, bool):
        return "integers on a grid, drawn exactly" if planned else "floating point"
    return one_line(meta.get("noise_arithmetic"))


def _seeded(run: RunFolder, segments: Sequence[RunSegment], meta: Mapping[str, object]) -> bool | None:
    """Whether a chosen seed took part: one word for it anywhere is enough; silence everywhere is None."""
    said = meta.get("reproducible")
    claim = run.guarantee
    warned = claim is not None and any("not for release" in caveat for caveat in claim.caveats)
    if said or warned or any(segment.seeded for segment in segments):
        return True
    return False if said is False or any(segment.key is not None for segment in segments) else None


def audits(run: RunFolder) -> tuple[Audit, ...]:
    """The lower bounds in the run folder's ``audit.json``: a list, or one, of `Audit`.

    Raises:
        InvalidArgument: the file holds something else.
    """
    file = run.path / "audit.json"
    if not file.is_file():
        return ()
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        return tuple(_AUDITS.validate_python(body if isinstance(body, list) else [body]))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidArgument(
            f"audit.json must hold audits, got one that fails at {where}: {first['msg']}. See `sordino explain report`."
        ) from error
    except ValueError as error:
        raise InvalidArgument("audit.json must be JSON, got other text. See `sordino explain report`.") from error


def read_attacks(run: RunFolder) -> tuple[AttackResults | None, bool]:
    """The attacks in ``attack.json`` if they are on public records, and whether there are some on private ones.

    Raises:
        InvalidArgument: the file is not one that `sordino attack` wrote.
    """
    file = run.path / "attack.json"
    if not file.is_file():
        return None, False
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        if body["public"] is not True:
            return None, True
        attacks = []
        for one in body["attacks"]:
            lower, upper = one["auc_interval"]
            attacks.append(
                Attack(name=one["name"], knowledge=one["knowledge"], auc=one["auc"], lower=lower, upper=upper)
            )
        found = AttackResults(
            attacks=tuple(attacks),
            bound=body["ceiling"]["auc"],
            members=body["members"],
            non_members=body["non_members"],
            above_bound=tuple(body["above_ceiling"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidArgument(
            "attack.json must be a file that `sordino attack` wrote, got another. Remove it or run the attack again."
        ) from error
    return found, False


_DECLARATIONS = "declarations.json"


def declarations(run: RunFolder, meta: Mapping[str, object]) -> Declarations:
    """What is declared for the run: in ``declarations.json``, otherwise in the facts of the run."""
    file = run.path / _DECLARATIONS
    stored: object = {}
    if file.is_file():
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(
                "declarations.json must be JSON, got other text. Remove it, and give --purpose and the others again."
            ) from error
    said = stored if isinstance(stored, Mapping) else {}
    registry = registry_texts(meta)
    instead = {"purpose": registry.get("intended_use"), "owner": registry.get("curator")}
    found = {
        name: one_line(said.get(name)) or one_line(meta.get(name)) or instead.get(name)
        for name in Declarations.model_fields
    }
    return Declarations(**found)


def store_declarations(run: RunFolder, declared: Declarations) -> None:
    """Write declarations into the run folder, for this report and later ones; what is None stays as it was."""
    file = run.path / _DECLARATIONS
    kept = declarations(run, {}) if file.is_file() else Declarations()
    changed = {name: " ".join(text.split()) for name, text in declared.model_dump(exclude_none=True).items()}
    body = kept.model_copy(update=changed).model_dump(exclude_none=True)
    file.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    run.vouch(file)


def released(run: RunFolder, meta: Mapping[str, object]) -> str | None:
    """What is released, in words."""
    files = run.manifest.get("files")
    model = isinstance(files, Mapping) and "model.safetensors" in files
    return one_line(meta.get("released")) or ("the trained parameters, model.safetensors" if model else None)


def trust(meta: Mapping[str, object]) -> str:
    """Who has to be trusted with the records."""
    return one_line(meta.get("trust")) or (
        "Central: the organization that runs the training holds the records, and is trusted with them and with the "
        "machine. Those who see the released results are not trusted."
    )


def registry_texts(meta: Mapping[str, object]) -> dict[str, str]:
    """What the user says for the registry; unknown names are left out."""
    body = meta.get("registry")
    said = body if isinstance(body, Mapping) else {}
    texts = {name: one_line(said.get(name)) for name in _REGISTRY}
    return {name: text for name, text in texts.items() if text is not None}


def one_line(value: object) -> str | None:
    """A text on one line; a list or an object is no text."""
    if isinstance(value, bool) or value is None or isinstance(value, Mapping | list):
        return None
    return " ".join(str(value).split()) or None


# ----------------------------------------------------------------------------------------------------------------------
# Other uses of the same records: what a ledger holds besides this run, or what the run states of them.
# ----------------------------------------------------------------------------------------------------------------------


def composition(
    lines: list[TranscriptLine], meta: Mapping[str, object], ledger: str | Path | None, *, paid: Collection[str] = ()
) -> Composition:
    """What is known of other uses of the records.

    Args:
        lines: the transcript, whose lines name the charges that paid for them.
        meta: facts of the run.
        ledger: the ledger, or None.
        paid: charges of evaluations, which may be all that the ledger holds of this run.

    Raises:
        InvalidArgument: the ledger holds no charge of this run.
    """
    said = one_line(meta.get("composition"))
    charges = {line.charge for line in lines if line.charge is not None}
    if ledger is None:
        if said is None and charges:
            said = (
                f"The run was charged to a ledger, with {len(charges):,} charges. What else was charged to the same "
                "account is in the ledger, which was not given for this report."
            )
        return Composition(text=said)
    book = Ledger(ledger)
    accounts = [(account, account.history()) for account in map(book.account, book.accounts())]
    # The account that paid for training, wherever evaluations were charged.
    for account, history, wanted in [(*one, set(wanted)) for wanted in (charges, paid) for one in accounts]:
        own = [entry for entry in history if entry.digest in wanted]
        if own:
            return _of(account, history, own, said)
    raise InvalidArgument(
        "ledger must hold charges of this run, got one without any. Give the ledger that the run was charged to."
    )


def _of(account: Account, history: list[LedgerEntry], own: list[LedgerEntry], said: str | None) -> Composition:
    charged = [entry for entry in history if entry.kind == "charge"]
    before = sum(entry.seq < own[0].seq for entry in charged)
    after = sum(entry.seq > own[-1].seq for entry in charged)
    others = len({entry.run for entry in charged} - {entry.run for entry in own})
    words = (
        f"This run made {_times(len(own), 'charge')} to the account; {_times(before, 'charge')} came before its first, "
        f"{_times(after, 'charge')} after its last, from {_times(others, 'other run or use', 'other runs or uses')}."
    )
    spent = account.spent()
    return Composition(
        account=account.name,
        text=" ".join(filter(None, (words, said, *(f"{caveat}." for caveat in spent.caveats)))),
        spent=spent.epsilon,
        budget=account.budget().epsilon,
    )


def _times(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# ----------------------------------------------------------------------------------------------------------------------
# What a report must state, and which of it a run leaves out.
# ----------------------------------------------------------------------------------------------------------------------


def missing_fields(report: Report) -> tuple[str, ...]:
    """Names of the required things that the run does not state, in the order of the report.

    Audits, evaluation and the registry's texts are no part of this: a report without them is complete.
    """
    mechanism, process, answer = report.mechanism, report.process, report.accounting
    private = report.guarantee.is_private
    stated: dict[str, object] = {
        "when the run began": report.started,
        "what is released": report.released,
        "noise multiplier": mechanism.noise_multiplier,
        "clipping norm": mechanism.max_grad_norm,
        "sample rate": mechanism.sample_rate,
        "expected batch size": mechanism.expected_batch_size,
        "steps planned": mechanism.steps_planned,
        "whether the size of the dataset is public": mechanism.dataset_size_is_public,
        "δ at every ε": report.curves.profile if private else "not private",
        "what an attacker can do": report.attack_bounds if private else "not private",
        "ε without amplification": answer.without_amplification,
        "class of the random generator": process.rng,
        "arithmetic of the noise": process.arithmetic,
        "processes and resumes": process.segments if mechanism.method is None else "not applicable",
        "composition with other uses of the records": report.composition.text or report.composition.spent,
        "versions of the software": report.environment,
        **{access.title.lower(): access.text for access in report.data_accesses},
    }
    return tuple(name for name, value in stated.items() if value is None or value == "" or value == ())


# ----------------------------------------------------------------------------------------------------------------------
# Reading a run folder into a report. Nothing in it is trusted more than needed: ε is computed again.
# ----------------------------------------------------------------------------------------------------------------------


def build_report(run: RunFolder, *, ledger: str | Path | None = None) -> Report:
    """Read a run, and compute its ε again from the transcript.

    The guarantee shown is the run's own, unless the transcript, asked again, gives a larger ε: then that one.

    Args:
        run: the run.
        ledger: the ledger that the run was charged to, a file or a URL, for what else was spent on the same records.

    Raises:
        InvalidArgument: the folder lacks what a report needs, or was changed.
    """
    lines, plan, meta = list(run), run.plan, run.meta
    event = compose([line.event for line in lines])
    claim = run.guarantee
    delta, neighboring_relation, unit = (
        (claim.delta, claim.neighboring_relation, claim.privacy_unit) if claim else _planned(plan)
    )
    found = accounted(
        event,
        delta,
        neighboring_relation=neighboring_relation,
        claimed=claim.epsilon if claim else None,
        version=metadata.version("sordino"),
    )
    budget = _budget(meta) if claim is None else None
    guarantee = _guarantee(
        claim,
        found,
        budget,
        delta=delta,
        neighboring_relation=neighboring_relation,
        privacy_unit=unit,
        sampler=describe_sampling(event),
    )
    drawn = curves(lines, event, delta, neighboring_relation=neighboring_relation, answer=found)
    process = training_process(run, lines, meta)
    attacks, has_private_attack = read_attacks(run)
    parts = {
        "guarantee": guarantee,
        "accounting": found,
        "process": process,
        "data_accesses": data_accesses(meta, evaluations=len(run.evaluations)),
        "composition": composition(lines, meta, ledger, paid=[one.charge for one in run.evaluations if one.charge]),
        "audits": audits(run),
        "attacks": attacks,
        "utility": read_utility(run.metrics, label_names(run)),
    }
    hazards = privacy_hazards(
        Evidence(**parts, has_private_attack=has_private_attack, lines=lines, plan=plan, meta=meta)
    )
    declared, blocked = declarations(run, meta), _not_for_release(guarantee, process, meta)
    together = _together(run, event, guarantee)
    report = Report.model_validate(
        {
            **parts,
            "name": run.path.resolve().name,
            **_is_declared(run, meta),
            "user_level": user_level(event, delta, neighboring_relation=neighboring_relation, privacy_unit=unit),
            "mechanism": _mechanism(plan, meta, lines, claimed=guarantee.sampler, charged=describe_sampling(event)),
            "curves": drawn,
            "losses": losses_shown(run.released_losses),
            "evaluations": tuple(map(summarize_evaluation, run.evaluations)),
            "epsilon_together": together,
            "attack_bounds": attack_bounds(
                drawn if together is None else _curves_together(run, event, guarantee, drawn, together),
                max(guarantee.epsilon, together or 0.0),
                delta,
                neighboring_relation=neighboring_relation,
                privacy_unit=unit,
            ),
            "privacy_hazards": hazards,
            "declarations": declared,
            "release": decide_release(unit, max(guarantee.epsilon, together or 0.0), blocked, hazards, declared),
            "covered": list_covered(
                guarantee,
                released=released(run, meta),
                losses=run.released_losses is not None,
                by_steps=plan.get("noise_multiplier") is not None,
            ),
            "not_covered": list_not_covered(
                guarantee,
                meta=meta,
                plan=plan,
                measured=bool(parts["utility"].accuracy),
                evaluated=bool(run.evaluations) and together is None,
                seeded=process.seeded is True,
                exact=is_exact(process.arithmetic) is True,
            ),
            "not_for_release": blocked,
            "missing": (),
        }
    )
    return report.model_copy(update={"missing": missing_fields(report)})


def _is_declared(run: RunFolder, meta: Mapping[str, object]) -> dict[str, object]:
    """What is taken over as the run says it."""
    target = meta.get("target_epsilon")
    return {
        "started": str(meta.get("started", "")),
        "released": released(run, meta),
        "trust": trust(meta),
        "target_epsilon": target if isinstance(target, int | float) else None,
        "training": _rows(meta.get("training")),
        "data": _rows(meta.get("data")),
        "environment": _environment(run.environment),
        "registry": registry_texts(meta),
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
    neighboring_relation: NeighboringRelation,
    privacy_unit: PrivacyUnit,
    sampler: str,
) -> GuaranteeSection:
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
            neighboring_relation=neighboring_relation,
            privacy_unit=privacy_unit,
            caveats=caveats,
        )
    assert said is not None
    return GuaranteeSection.model_validate(guarantee_body(said))


def _together(run: RunFolder, event: Event, guarantee: GuaranteeSection) -> float | None:
    """ε of training and evaluations; None when there are none."""
    if not run.evaluations:
        return None
    return joint_epsilon(
        run.evaluations,
        event,
        claimed=guarantee.epsilon,
        delta=guarantee.delta,
        neighboring_relation=guarantee.neighboring_relation,
    )


def _curves_together(
    run: RunFolder, event: Event, guarantee: GuaranteeSection, drawn: Curves, together: float
) -> Curves:
    """The curves of training and evaluations; a unit is in only one of two that are declared disjoint."""
    delta, relation = guarantee.delta, guarantee.neighboring_relation
    ours = [one.event for one in run.evaluations if not one.disjoint]
    others = [one.event for one in run.evaluations if one.disjoint]
    if guarantee.epsilon > accounting.epsilon(event, delta, neighboring_relation=relation).upper * (1 + 1e-9):
        # The claim is larger than what the transcript says: only ε and δ are known of both together.
        return bounds_from_epsilon(together, delta)
    found = []
    for one in (compose([event, *ours]) if ours else event, *((compose(others),) if others else ())):
        answer = accounted(one, delta, neighboring_relation=relation, claimed=None, version="")
        found.append(drawn if one is event else curves([], one, delta, neighboring_relation=relation, answer=answer))
    return worst_case(found)


def decide_release(
    privacy_unit: PrivacyUnit,
    epsilon: float,
    blocked: str,
    hazards: Sequence[PrivacyHazard],
    declared: Declarations,
) -> ReleaseDecision:
    """Whether the results may be released, as far as the run folder shows, and what the reader must still decide."""
    if blocked:
        return ReleaseDecision(
            verdict="no",
            text=f"No. {blocked} Train again with noise and without a seed.",
            conditions=(),
        )
    critical = [item for item in hazards if item.status == "limitation" and item.severity == "critical"]
    if critical:
        return ReleaseDecision(
            verdict="not yet",
            text="Not yet. Resolve these critical limitations first.",
            conditions=tuple(f"{item.title}: this does not hold. {item.text}" for item in critical),
        )
    accepted = f"The person responsible accepts ε = {format_epsilon(epsilon)} for each {privacy_unit.value}."
    approval = "No approval is stated." if declared.approved_by is None else f"Approved by {declared.approved_by}."
    silent = [
        item.title
        for item in hazards
        if item.status == "not stated" and item.severity == "critical" and item.title != AUDIT_HAZARD
    ]
    conditions = [
        f"{accepted} {approval}",
        "Only what is named as released is passed on. Checkpoints, logs and the records themselves stay private.",
        "Every other use of the same records is counted together with this ε.",
    ]
    if silent:
        conditions.append(f"The person responsible first answers what the run does not state: {'; '.join(silent)}.")
    return ReleaseDecision(
        verdict="yes, on conditions",
        text="Yes, if the conditions below are met. The run folder shows no critical limitation.",
        conditions=tuple(conditions),
    )


def _budget(meta: Mapping[str, object]) -> float | None:
    """ε of a run that chose its noise on the way: a run that was cut off has still the whole of it as its guarantee."""
    body = meta.get("budget")
    epsilon = body.get("epsilon") if isinstance(body, Mapping) else None
    return float(epsilon) if isinstance(epsilon, int | float) else None


def _mechanism(
    plan: Mapping[str, object], meta: Mapping[str, object], lines: list[TranscriptLine], *, claimed: str, charged: str
) -> Mechanism:
    steps, public, method = plan.get("steps"), plan.get("dataset_size_is_public"), own_method(plan)
    silent: NotApplicable | None = None if method is None else "not applicable"

    def setting(name: str) -> float | str | None:
        value = _setting(plan.get(name))
        return silent if value is None else value

    return Mechanism(
        method=method,
        parameters=_rows(plan.get("parameters")),
        noise_multiplier=setting("noise_multiplier"),
        max_grad_norm=setting("max_grad_norm"),
        clipping=describe_clipping(plan.get("clipping")) or silent,
        noise=describe_noise(plan, meta) or silent,
        sample_rate=setting("sample_rate"),
        expected_batch_size=setting("expected_batch_size"),
        steps_planned=steps if isinstance(steps, int) and not isinstance(steps, bool) else silent,
        steps_charged=len(lines),
        dataset_size_is_public=public if isinstance(public, bool) else None,
        sampler_claimed=claimed,
        sampler_charged=charged,
        committed_steps=sum(line.indices is not None for line in lines),
    )


def _setting(value: object) -> float | str | None:
    """One number; or a schedule, in words."""
    if isinstance(value, Mapping):
        return describe_schedule(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rows(body: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(body, Mapping):
        return ()
    return tuple(
        (str(name).replace("_", " "), format_value(value)) for name, value in body.items() if value is not None
    )


def _environment(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    plain = {name: value for name, value in body.items() if name != "packages"}
    return (*_rows(plain), *_rows(body.get("packages")))


def _not_for_release(guarantee: GuaranteeSection, process: Process, meta: Mapping[str, object]) -> str:
    if not guarantee.is_private:
        return "This run is not private."
    if process.seeded:
        return "The noise came from a chosen seed."
    if process.fresh_keys is False:
        return "Two processes of the run drew noise from the same key."
    return "This was a run for debugging." if meta.get("debug") else ""
