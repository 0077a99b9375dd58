"""What a run says of itself beyond the plan: data touched outside the mechanism, randomness, other uses, audits.

Everything is read through the run folder. What it does not say stays None, which a report shows as "not stated".

| key of the run's facts | holds |
|---|---|
| `data_touches` | text for each of preprocessing, normalization, schema, tuning, early_stopping, evaluation, logging |
| `randomness`, `noise_arithmetic` | class of the generator; kind of numbers |
| `released`, `trust` | what is released; who is trusted with the records |
| `composition` | other uses of the same records, in words |
| `registry` | texts for the public registry of deployments |
"""

import json
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from sordino.errors import InvalidArgument
from sordino.report.parts import Audit, Process, Touch
from sordino.runs import Line, RunFolder, Segment

__all__ = ["TOUCHES", "audits", "one_line", "process", "registry_texts", "released", "touches", "trust"]

TOUCHES = {
    "preprocessing": "Preprocessing",
    "normalization": "Normalisation and other statistics",
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


def touches(meta: Mapping[str, object], *, evaluations: int = 0) -> tuple[Touch, ...]:
    """Everything that touched the records outside the mechanism, as the run states it.

    `evaluations` is how many on private records lie in the run folder.
    """
    body = meta.get("data_touches")
    said = body if isinstance(body, Mapping) else {}
    settings = meta.get("settings")
    found = {name: one_line(said.get(name)) for name in TOUCHES}
    if found["tuning"] is None and isinstance(settings, str):
        found["tuning"] = one_line(settings)
    if meta.get("diagnostics") is not None:
        found["logging"] = "Losses and batch sizes were shown while it ran, computed from the records without noise."
    if evaluations and found["evaluation"] is not None:
        times = {1: "once", 2: "twice"}.get(evaluations, f"{evaluations:,} times")
        paid = f"The finished model was evaluated on private records {times}, with noise, and that was paid for apart."
        found["evaluation"] += f" {paid}"
    return tuple(Touch(name=name, title=title, text=found[name]) for name, title in TOUCHES.items())


def process(run: RunFolder, lines: list[Line], meta: Mapping[str, object]) -> Process:
    """Randomness, arithmetic, and the processes that worked on the run."""
    segments = run.segments()
    keys = [segment.key for segment in segments]
    seeded = _seeded(run, segments, meta)
    randomness = one_line(meta.get("randomness"))
    if seeded:
        randomness = "chosen seed, so that the run can be repeated"
    elif randomness is None and seeded is False:
        randomness = "AES-256 in counter mode, keyed by the operating system's entropy"
    return Process(
        randomness=randomness,
        seeded=seeded,
        arithmetic=_arithmetic(run, meta),
        segments=len(segments) or None,
        repeated_steps=sum(line.attempt > 1 for line in lines),
        fresh_keys=len(set(keys)) == len(keys) if keys and None not in keys else None,
        head=run.chain_head,
    )


def _arithmetic(run: RunFolder, meta: Mapping[str, object]) -> str | None:
    """What the plan says of the numbers the noise is drawn in, otherwise what the facts of the run say."""
    planned = run.plan.get("secure_noise")
    if isinstance(planned, bool):
        return "integers on a grid, drawn exactly" if planned else "floating point"
    return one_line(meta.get("noise_arithmetic"))


def _seeded(run: RunFolder, segments: Sequence[Segment], meta: Mapping[str, object]) -> bool | None:
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
            f"audit.json must hold audits, got one that fails at {where}: {first['msg']}. See docs/report.md."
        ) from error
    except ValueError as error:
        raise InvalidArgument("audit.json must be JSON, got other text. See docs/report.md.") from error


def released(run: RunFolder, meta: Mapping[str, object]) -> str | None:
    """What is released, in words."""
    files = run.manifest.get("files")
    model = isinstance(files, Mapping) and "model.safetensors" in files
    return one_line(meta.get("released")) or ("the trained parameters, model.safetensors" if model else None)


def trust(meta: Mapping[str, object]) -> str:
    """Who has to be trusted with the records."""
    return one_line(meta.get("trust")) or (
        "Central: whoever runs the training holds the records and is trusted with them, and with the machine. "
        "Everyone who sees what is released is not trusted."
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
