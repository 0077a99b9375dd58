"""Commands made of functions of `sordino.commands`: parameters become options, docstrings say what they are for.

`command` makes a command of the function with its name and of a printer, which says how the result is shown to people.
What a parameter alone doesn't say, such as a metavariable, is a `Form`; options that only change what is printed are
parameters of the printer.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.text import Text

from sordino import commands
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.commands.outcomes import Format
from sordino.commands.running import DryRun, open_account
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.events import event_counts

if TYPE_CHECKING:
    from sordino.events import Event

_Printer = TypeVar("_Printer", bound=Callable[..., None])

COMMANDS: dict[str, Callable[..., None]] = {}
"""Every command by its words, for typer."""

_KINDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Path": Path,
    "Sequence[str]": list[str],
    "tuple[float, float]": tuple[float, float],
    "Format": Format,
    "NeighboringRelation": NeighboringRelation,
    "PrivacyUnit": PrivacyUnit,
}
"""What the command line reads, by the name in a parameter's annotation."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an option is written where its parameter does not say it; what is left out follows from the parameter.

    Args:
        kind: its type.
        metavar: what stands for its value in the help.
        flag: its name, with dashes.
        help: what it is for.
        default: its value when it is not given.
    """

    kind: Any = None
    metavar: str | None = None
    flag: str | None = None
    help: str | None = None
    default: Any = inspect.Parameter.empty


DATA = Form(metavar="DATA")
_FORMS = {
    "target_bounds": Form(metavar="LOW HIGH"),
    "separator": Form(metavar="CHAR"),
    "decimal": Form(metavar="CHAR"),
    "dry_run": Form(help="Print the cost and whether the ledger covers it (exit code 3 if not); run nothing."),
}
_LEDGER = Form(kind=str | None, help="Ledger to charge, a file or URL; with --dataset-name.")
_DATASET_NAME = Form(kind=str | None, help="Account in --ledger to charge.")


def command(
    words: str,
    *,
    calls: str | None = None,
    forms: Mapping[str, Form] | None = None,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    derived: bool = True,
) -> Callable[[_Printer], _Printer]:
    """Make a command of the decorated printer (output, what the function returned, its own options) ↦ None.

    Args:
        words: of the command.
        calls: the function of `sordino.commands`; its name is that of the command if not given.
        forms: of options, by the names of the parameters.
        prepare: options as they were read ↦ options as the function takes them.
        derived: whether the options follow from the function's parameters, which imports its module; otherwise all of
            them are parameters of the printer.
    """
    name = words.replace(" ", "_") if calls is None else calls

    def register(printer: _Printer) -> _Printer:
        own = {one.name: one for one in inspect.signature(printer).parameters.values() if one.kind is one.KEYWORD_ONLY}
        options = _options(getattr(commands, name), forms or {}) if derived else []
        taken = {one.name for one in options}
        every = [*options, *(one for one in own.values() if one.name not in taken)]
        every.append(_parameter("as_json", JsonOption, default=False))

        def run(**given: Any) -> None:
            output = Output(as_json=given["as_json"])
            found = _call(output, name, given if prepare is None else prepare(dict(given)))
            # Processes that a launcher started work together; the first one writes and speaks.
            if found is not None:
                printer(output, found, **{name: given[name] for name in own})

        run.__doc__ = printer.__doc__
        run.__signature__ = inspect.Signature(every)
        run.__annotations__ = {one.name: one.annotation for one in every}
        COMMANDS[words] = run
        return printer

    return register


def _parameter(name: str, annotation: Any, *, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _options(function: Callable[..., object], forms: Mapping[str, Form]) -> list[inspect.Parameter]:
    """The options of a function's parameters; those of a table stand behind ``--epsilon``."""
    helps, found = _documented(function), []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            at = [option.name for option in found].index("epsilon") + 1
            found[at:at] = _table_options()
        elif one.name == "ledger" and "Account" in str(one.annotation):
            found += [_option(one, _LEDGER, ""), _option(one.replace(name="dataset_name"), _DATASET_NAME, "")]
        elif one.name != "progress":
            form = forms.get(one.name) or _FORMS.get(one.name) or Form()
            found.append(_option(one, form, helps.get(one.name, "")))
    return found


def _table_options() -> list[inspect.Parameter]:
    helps = _documented(commands.TableOptions)
    parameters = [
        _parameter(name, getattr(kind, "__forward_arg__", kind), default=False if kind is bool else None)
        for name, kind in commands.TableOptions.__annotations__.items()
    ]
    return [_option(one, _FORMS.get(one.name) or Form(), helps[one.name]) for one in parameters]


def _option(parameter: inspect.Parameter, form: Form, help: str) -> inspect.Parameter:
    """The option, or the argument where the parameter is given by its position."""
    kind = _kind(parameter.annotation) if form.kind is None else form.kind
    said = form.help or help
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and form.flag is None:
        information = typer.Argument(metavar=form.metavar, help=said)
    else:
        # A flag alone: without its name typer would add one that turns it off.
        flag = form.flag or f"--{parameter.name.replace('_', '-')}"
        information = typer.Option(flag, metavar=form.metavar, help=said)
    default = parameter.default if form.default is inspect.Parameter.empty else form.default
    return _parameter(parameter.name, Annotated[kind, information], default=default)


def _kind(annotation: Any) -> type | UnionType:
    """The first type of an annotation that the command line reads, with None if that is one of them."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    parts = [re.sub(r"\w+\.", "", part) for part in text.split(" | ")]
    kind = next(_KINDS[part] for part in parts if part in _KINDS)
    return kind | None if "None" in parts else kind


def _documented(function: Callable[..., object]) -> dict[str, str]:
    """What the docstring says of each argument, on one line."""
    _, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", arguments.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _call(output: Output, name: str, options: dict[str, Any]) -> Any:
    """What the function of `sordino.commands` gives for options of the command line, of which it takes what it knows.

    ``--ledger`` and ``--dataset-name`` become the account. What a model prints goes to standard error: standard output
    is for the command's own words. A dry run is printed, and ends the command.
    """
    if "dataset_name" in options:
        options = {**options, "ledger": open_account(options["ledger"], options["dataset_name"])}
    function = getattr(commands, name)
    known = inspect.signature(function).parameters
    extra = commands.TableOptions.__annotations__ if "table" in known else ()
    given = {option: value for option, value in options.items() if option in known or option in extra}
    shows_progress = "progress" in known
    if shows_progress:
        given["progress"] = output
    with redirect_stdout(sys.stderr), nullcontext() if shows_progress else output.stage(name.replace("_", " ")):
        found = function(**given)
    if isinstance(found, DryRun):
        print_dry_run(output, found)
        raise typer.Exit(0 if found.fits else 3)
    return found


def print_dry_run(output: Output, found: DryRun) -> None:
    """What a command would charge, and whether the account covers it."""
    if found.charge is None or found.cost is None:
        output.print_result(found.to_dict(), heading("would cost nothing", f"{found.why}; nothing was done"))
        return
    charge, account = found.charge, found.account
    rows = [
        ("unit", charge.privacy_unit.describe()),
        ("neighbors", charge.neighboring_relation.describe()),
        ("events", describe_event(charge.event)),
    ]
    verdict = "no ledger was named, so no budget was checked"
    if account is not None:
        left, budget = account.remaining_epsilon(), account.budget()
        rows.append(("left", f"ε ≈ {left:.3g} of {budget.epsilon:g} at δ = {budget.delta:g}, account {account.name}"))
        verdict = "the account covers it" if found.fits else "the account does NOT cover it"
    refusal = [Text(), Text(charge.refusal)] if charge.refusal else []
    claim = f"would cost ε = {format_upper_bound(found.cost.upper)} at δ = {found.delta:g}: {verdict}"
    output.print_result(found.to_dict(), heading(claim, "nothing was done"), key_value_table(rows), *refusal)


def describe_event(event: "Event") -> str:
    """The kinds of an event's leaves with their counts."""
    leaves = event_counts(event)
    return ", ".join(f"{leaf.kind} × {count:,}" if count > 1 else leaf.kind for leaf, count in leaves.items())
