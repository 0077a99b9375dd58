"""`sordino schema draft | check`: a schema file from a table's header, and how well a table fits its schema."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.ledger import (
    DatasetNameOption,
    DryRunOption,
    LedgerOption,
    open_account,
    print_no_charge,
    print_preview,
)
from sordino.cli.table_options import DecimalOption, EncodingOption, SeparatorOption, table_format
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.data import Schema
    from sordino.definitions import Guarantee
    from sordino.ledger import Account

__all__ = ["schema"]

schema = typer.Typer(help="The declared schema of your table: draft it, check it.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A .csv, .tsv, .parquet or .feather file.")]
_SHOWN = 12


@schema.command("draft")
def draft(
    file: FileArgument,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where to, .toml or .json; NAME.schema.toml if not given.")
    ] = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a schema with blanks to fill in. Only the file's header is read, and no record."""
    from sordino.data import TableFormat
    from sordino.data.schema_files import draft_schema

    out = Output(as_json=as_json)
    place = Path(f"{file.name.partition('.')[0]}.schema.toml") if out_file is None else out_file
    if place.suffix.lower() not in (".toml", ".json"):
        raise InvalidArgument(f"out must end with .toml or .json, got {place.name!r}. Rename it.")
    form = table_format(None, separator, decimal, encoding) or TableFormat()
    text, names = draft_schema(file, target=target, table_format=form, out=place)
    try:
        with place.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise InvalidArgument(f"out must be a new file, got {str(place)!r}. Give --out another name.") from error
    except OSError as error:
        raise InvalidArgument(f"out must be a file that can be written, got {str(place)!r}. Check the path.") from error
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    rows = [
        ("schema", str(place)),
        ("columns", shown),
        ("next", 'replace every "?" by what is public, delete columns that are no features'),
        ("then", f"sordino schema check {file} --schema {place}"),
    ]
    out.print_result({"schema": str(place), "columns": list(names)}, key_value_table(rows))


@schema.command("check")
def check_table(
    file: FileArgument,
    schema_file: Annotated[Path, typer.Option("--schema", help="The declared schema, .json or .toml.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Release noisy shares for this ε, instead of exact ones for your own eyes.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="With --epsilon: δ for Gaussian noise; 0 for geometric noise.")
    ] = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how many values of each column can be read, lie in range and are listed, and how many records have no label.

    Without --epsilon the shares are exact: for anyone who may see the records, and NOT FOR RELEASE. With --epsilon they
    are noisy, all of them together ε-private, and may be shown.
    """
    from dataclasses import replace

    from sordino.data.schema import Schema, read_schema

    out, account = Output(as_json=as_json), open_account(ledger, dataset_name)
    declared = read_schema(schema_file)
    if not isinstance(declared, Schema):
        raise InvalidArgument("schema must describe the columns of a table, got an array schema. Declare the columns.")
    form = table_format(schema_file, separator, decimal, encoding)
    declared = declared if form is None else replace(declared, table_format=form)
    if epsilon is None:
        if delta is not None or account is not None:
            raise InvalidArgument(
                "delta and ledger must be left out without --epsilon, got one: exact shares are no release and cost "
                "nothing. Give --epsilon, or drop them."
            )
        if dry_run:
            print_no_charge(out, "exact shares are no release")
            return
        with out.progress("counting"):
            counts, guarantee, noise = _exact(file, declared), None, {}
    elif dry_run:
        print_preview(
            out,
            lambda payer, _: _released(file, declared, checks.positive(epsilon=epsilon), delta or 0.0, payer),
            account,
            delta=delta or 0.0,
        )
        return
    else:
        counts, guarantee, noise = _released(file, declared, checks.positive(epsilon=epsilon), delta or 0.0, account)
    document = _document(declared, counts, guarantee, noise)
    out.print_result(document, *_page(declared, counts, guarantee, noise))


Counts = Mapping[str, Sequence[int]]


def _exact(file: Path, declared: "Schema") -> Counts:
    from sordino.data.schema_files import column_statuses, declared_statuses

    counts = {name: np.zeros(len(kinds), dtype=np.int64) for name, kinds in declared_statuses(declared).items()}
    for part in column_statuses(file, declared):
        for name, codes in part.items():
            counts[name] += np.bincount(codes, minlength=len(counts[name]))
    return {name: found.tolist() for name, found in counts.items()}


def _released(
    file: Path, declared: "Schema", epsilon: float, delta: float, account: "Account | None"
) -> "tuple[Counts, Guarantee, dict[str, float]]":
    """Noisy counts, their guarantee, and the standard deviation of their noise; charged before a record is read.

    Guarantee: (ε, δ) for one record added or removed. A record is in one cell of one histogram a column.
    """
    from sordino import accounting
    from sordino.data.schema_files import column_statuses, declared_statuses
    from sordino.data.tables import require_declared_columns
    from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
    from sordino.events import compose
    from sordino.mechanisms import PrivateHistogram, make_budget
    from sordino.mechanisms.calibration import PureBudget
    from sordino.randomness import KeyedRNG

    checks.probability(one=False, delta=delta)
    kinds, rng = declared_statuses(declared), KeyedRNG()
    shares = make_budget(epsilon=epsilon, delta=delta).split(*[1.0] * len(kinds))
    mechanisms = {
        name: PrivateHistogram(budget=share, categories=tuple(range(len(kinds[name]))), rng=rng)
        for name, share in zip(kinds, shares, strict=True)
    }
    total = compose([mechanism.event() for mechanism in mechanisms.values()])
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    spent = accounting.epsilon(total, delta, neighboring_relation=relation)
    require_declared_columns(file, declared)
    if account is not None:
        account.charge(total, note="schema check", neighboring_relation=relation, privacy_unit=PrivacyUnit.RECORD)
    parts = list(column_statuses(file, declared))
    counts = {
        name: mechanism.release(np.concatenate([part[name] for part in parts]).tolist()).tolist()
        for name, mechanism in mechanisms.items()
    }
    factor = 2**0.5 if isinstance(shares[0], PureBudget) else 1.0
    noise = {name: factor * float(mechanism.noise.scales.max()) for name, mechanism in mechanisms.items()}
    guarantee = Guarantee(
        epsilon=min(spent.upper, epsilon),
        delta=delta,
        accountant=spent.accountant,
        sampler="none",
        neighboring_relation=relation,
    )
    return counts, guarantee, noise


def _shares(counts: Sequence[int]) -> list[float]:
    """Shares in [0, 1] that add up to 1, also of noisy counts; all 0 where there is nothing."""
    positive = np.maximum(np.asarray(counts, dtype=np.float64), 0.0)
    return (positive / positive.sum() if positive.sum() > 0 else positive).tolist()


def _document(
    declared: "Schema", counts: Counts, guarantee: "Guarantee | None", noise: Mapping[str, float]
) -> dict[str, object]:
    from sordino.data.schema_files import declared_statuses

    columns = [
        {
            "name": name,
            "role": "target" if name == declared.target else "feature",
            "counts": dict(zip(kinds, counts[name], strict=True)),
            "shares": dict(zip(kinds, _shares(counts[name]), strict=True)),
            **({"noise_stddev": noise[name]} if noise else {}),
        }
        for name, kinds in declared_statuses(declared).items()
    ]
    if guarantee is None:
        return {"release": "not for release: exact shares of private records", "columns": columns}
    claim = {"epsilon": guarantee.epsilon, "delta": guarantee.delta, "description": guarantee.describe()}
    return {"release": "may be released", "guarantee": claim, "columns": columns}


def _page(
    declared: "Schema", counts: Counts, guarantee: "Guarantee | None", noise: Mapping[str, float]
) -> tuple[RenderableType, ...]:
    from sordino.data.schema_files import declared_statuses

    kinds = {column.name: str(column.to_dict()["type"]) for column in declared.columns}
    kinds = {declared.target: "label" if declared.target_bounds is None else "number"} | kinds
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("column", overflow="fold")
    for name in ("type", "fits", "does not", "missing", "unreadable"):
        table.add_column(name, justify="left" if name == "type" else "right", no_wrap=True)
    for name, statuses in declared_statuses(declared).items():
        shares = [f"{100 * share:.1f} %" for share in _shares(counts[name])]
        style = "bold" if name == declared.target else ""
        table.add_row(Text(name, style=style), kinds[name], *shares, *[""] * (4 - len(statuses)))
    meaning = "fits: in range or listed. Does not: outside the range or not listed. A record counts if its target fits."
    if guarantee is None:
        title = heading("NOT FOR RELEASE", "exact shares of private records, for the curator's own eyes")
        return title, table, Text(), Text(meaning, style="dim")
    title = heading(guarantee.describe(), "noisy shares; they may be released")
    spread = ", ".join(sorted({f"{value:.3g}" for value in noise.values()}))
    return title, table, Text(), Text(f"{meaning} Standard deviation of the noise, in records: {spread}.", style="dim")
