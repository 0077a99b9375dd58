"""From a run folder to the report's values."""

import math
from collections.abc import Mapping
from itertools import pairwise

from sordino import accounting
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, compose
from sordino.report.limits import attack, covered, not_covered
from sordino.report.schema import Accuracy, Point, Report
from sordino.runs import Line, Metric, RunFolder
from sordino.wording import sampling_words

__all__ = ["read"]

_MOST_POINTS = 240
_FEWEST_POINTS = 24
_NAMES = {
    "noise_multiplier": "noise multiplier",
    "max_grad_norm": "clipping norm",
    "sample_rate": "sample rate",
    "steps": "steps planned",
    "expected_batch_size": "expected batch size (public divisor)",
    "delta": "δ",
    "neighboring_relation": "neighbouring relation",
    "privacy_unit": "privacy unit",
    "dataset_size_is_public": "size of the data set is public",
    "poisson_sampling": "Poisson sampling",
}


def read(run: RunFolder) -> Report:
    """Read a run, and compute its ε again from the transcript.

    The guarantee shown is the run's own, unless the transcript, asked anew, gives a larger ε: then that one.

    Raises:
        InvalidArgument: the folder lacks what a report needs, or was changed.
    """
    lines = list(run)
    event = compose([line.event for line in lines])
    plan, meta = run.plan, run.meta
    claim = run.guarantee
    guarantee = claim or _guarantee(event, plan)
    relation, delta = guarantee.relation, guarantee.delta
    again = accounting.epsilon(event, delta, relation=relation)
    if again.upper > guarantee.epsilon * (1 + 1e-9):
        guarantee = Guarantee(
            epsilon=again.upper,
            delta=delta,
            accountant=again.accountant,
            sampler=guarantee.sampler,
            relation=relation,
            unit=guarantee.unit,
            caveats=(*guarantee.caveats, "the transcript says more than the run claimed"),
        )
    accuracy = _accuracy(run.metrics)
    target = meta.get("target_epsilon")
    return Report(
        name=run.path.resolve().name,
        started=str(meta.get("started", "")),
        guarantee=guarantee,
        claimed_epsilon=claim.epsilon if claim else None,
        recomputed_epsilon=again.upper,
        steps=len(lines),
        curve=_curve(lines, delta=delta, relation=relation),
        target_epsilon=float(target) if isinstance(target, int | float) else None,
        accuracy=accuracy,
        withheld=sum(not metric.public for metric in run.metrics.values()),
        attack=attack(guarantee),
        covered=covered(guarantee),
        not_covered=not_covered(guarantee, meta=meta, plan=plan, measured=bool(accuracy)),
        training=_training(plan, meta),
        data=_rows(meta.get("data")),
        environment=_environment(run.environment),
        not_for_release=_not_for_release(guarantee, meta),
    )


def _guarantee(event: Event, plan: Mapping[str, object]) -> Guarantee:
    """The guarantee of a run that did not get to write its own: what the transcript says."""
    try:
        delta = float(str(plan["delta"]))
        relation = NeighboringRelation(str(plan["neighboring_relation"]))
        unit = PrivacyUnit(str(plan["privacy_unit"]))
    except (KeyError, ValueError) as error:
        raise InvalidArgument(
            "plan.json must hold delta, neighboring_relation and privacy_unit, got one that lacks "
            "or garbles one of them. The run folder was changed."
        ) from error
    spent = accounting.epsilon(event, delta, relation=relation)
    return Guarantee(
        epsilon=spent.upper,
        delta=delta,
        accountant=spent.accountant,
        sampler=sampling_words(event),
        relation=relation,
        unit=unit,
        caveats=("the run did not finish: this counts the steps it took",),
    )


def _curve(lines: list[Line], *, delta: float, relation: NeighboringRelation) -> tuple[Point, ...]:
    """ε over the steps: what the transcript says where it says it, otherwise computed at a few steps."""
    told = [Point(steps=line.step + 1, epsilon=line.epsilon) for line in lines if line.epsilon is not None]
    # Where many steps share one upper bound it is tight at the last of them: only that one is drawn.
    written = [point for point, later in pairwise(told) if point.epsilon != later.epsilon] + told[-1:]
    if len(told) < min(_FEWEST_POINTS, len(lines)):
        wanted = sorted({math.ceil(len(lines) * k / _FEWEST_POINTS) for k in range(1, _FEWEST_POINTS + 1)})
        events = [line.event for line in lines]
        written = [
            Point(steps=count, epsilon=accounting.epsilon(compose(events[:count]), delta, relation=relation).upper)
            for count in wanted
        ]
    if len(written) > _MOST_POINTS:
        last = len(written) - 1
        written = [written[round(last * k / (_MOST_POINTS - 1))] for k in range(_MOST_POINTS)]
    return (Point(steps=0, epsilon=0.0), *written)


def _accuracy(metrics: Mapping[str, Metric]) -> tuple[Accuracy, ...]:
    names = {
        "test_accuracy": "this model, private",
        "twin_test_accuracy": "its twin, not private",
        "majority_accuracy": "always the commonest label",
    }
    return tuple(
        Accuracy(
            name=words,
            value=metrics[name].value,
            is_private_model=name == "test_accuracy",
            is_twin=name == "twin_test_accuracy",
        )
        for name, words in names.items()
        if name in metrics and metrics[name].public
    )


def _training(plan: Mapping[str, object], meta: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    rows = [(words, _show(plan[name])) for name, words in _NAMES.items() if name in plan]
    return (*_rows(meta.get("training")), *rows)


def _rows(body: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(body, Mapping):
        return ()
    return tuple((str(name).replace("_", " "), _show(value)) for name, value in body.items() if value is not None)


def _environment(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    plain = {name: value for name, value in body.items() if name != "packages"}
    return (*_rows(plain), *_rows(body.get("packages")))


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("_", " ") if value in set(NeighboringRelation) else str(value)


def _not_for_release(guarantee: Guarantee, meta: Mapping[str, object]) -> str:
    if not guarantee.is_private:
        return "This run is not private."
    return "The noise came from a chosen seed." if meta.get("reproducible") else ""
