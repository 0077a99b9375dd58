"""`sordino learn`: the course, a lesson as a notebook to work in."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.course import EXERCISES, lessons, notebook, read_lesson
from sordino.errors import InvalidArgument

__all__ = ["learn"]


def learn(
    lesson: Annotated[str | None, typer.Argument(help="A lesson; all are listed if none is named.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where to write the notebook; LESSON.ipynb if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a lesson of the course as a notebook, with exercises that check your answers."""
    out, found = Output(as_json=as_json), lessons()
    titles = {name: _title(path) for name, path in found.items()}
    if lesson is None:
        if out_file is not None:
            raise InvalidArgument("lesson must be named when --out is given, got none. Name one of the lessons.")
        rows = [
            *titles.items(),
            ("", ""),
            ("next", "sordino learn LESSON, then open the notebook, in Jupyter for instance"),
        ]
        document = {"lessons": titles, "exercises": {name: one.question for name, one in EXERCISES.items()}}
        out.print_result(document, heading("The course"), key_value_table(rows))
        return
    checks.one_of(tuple(found), lesson=lesson)
    path = out_file or Path(f"{lesson}.ipynb")
    body = json.dumps(notebook(read_lesson(found[lesson].read_text(encoding="utf-8"))), indent=1, ensure_ascii=False)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(body + "\n")
    except FileExistsError as error:
        raise InvalidArgument(f"out must be a new file, got {str(path)!r}. Give --out another name.") from error
    except OSError as error:
        raise InvalidArgument(f"out must be a file that can be written, got {str(path)!r}. Check the path.") from error
    rows = [("lesson", titles[lesson]), ("notebook", str(path)), ("next", f"jupyter lab {path}")]
    out.print_result({"lesson": lesson, "notebook": str(path)}, key_value_table(rows))


def _title(path: Path) -> str:
    return read_lesson(path.read_text(encoding="utf-8"))[0].source.splitlines()[0].removeprefix("# ")
