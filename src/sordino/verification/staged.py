"""Whether a run of several stages charged what its plan lists (floor 6)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from sordino.errors import SordinoError
from sordino.events import Event, from_dict
from sordino.runs import Line
from sordino.verification.items import Item, failed, passed
from sordino.verification.planned import is_plan, planned_event

__all__ = ["check_stages"]


def check_stages(plan: Mapping[str, object], lines: Sequence[Line]) -> Item:
    """Line by line against the stages of plan.json, and each training stage against the plan that it states."""
    try:
        stages = [_stage(body) for body in _list(plan["stages"])]
    except (SordinoError, KeyError, TypeError, ValueError):
        return failed("plan", "plan.json garbles its stages")
    for name, charges, training in stages:
        if training is not None and charges != _planned(training):
            return failed("plan", f"stage {name} lists other charges than its own plan asks for")
    planned = [event for _, charges, _ in stages for event in charges]
    for number, (line, event) in enumerate(zip_longest(lines, planned)):
        if line is None:
            break
        if event is None:
            return failed("plan", f"charge {number} is beyond the {len(planned)} that are planned")
        if not line.torn and line.event != event:
            return failed("plan", f"charge {number} is for another event than the plan's")
    told = ", ".join(f"{name} ({len(charges)})" for name, charges, _ in stages)
    return passed("plan", f"{len(lines)} of {len(planned)} charges, in order, are the plan's: {told}")


def _stage(body: object) -> tuple[str, list[Event], Mapping[str, object] | None]:
    """Name, charges, and the training plan that it states, if any."""
    if not isinstance(body, Mapping):
        raise TypeError
    charges = list(_charges(_list(body["charges"])))
    settings = body.get("settings")
    stated = settings.get("plan") if isinstance(settings, Mapping) else None
    training = stated if isinstance(stated, Mapping) and is_plan(stated) else None
    return str(body["name"]), charges, training


def _charges(groups: Sequence[object]) -> Iterator[Event]:
    for group in groups:
        if not isinstance(group, Mapping):
            raise TypeError
        yield from [from_dict(group["event"])] * int(group["count"])


def _planned(plan: Mapping[str, object]) -> list[Event]:
    return [planned_event(plan, step, first=0) for step in range(int(str(plan["steps"])))]


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError
    return value
