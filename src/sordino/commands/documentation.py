"""`explain`, `learn`, `recipes` and `data_…`: documentation, course, recipes and datasets that come with sordino."""

import difflib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino import checks, errors
from sordino.commands.running import SILENT, Progress, write_new_file
from sordino.errors import InvalidArgument, SordinoError

if TYPE_CHECKING:
    from sordino.data.loading import DatasetDescription, DatasetInfo
    from sordino.recipes import Recipe


@dataclass(frozen=True)
class DocumentationSection:
    """A heading with the text below it, down to the next heading of its level."""

    page: str
    anchor: str
    title: str
    text: str

    def to_dict(self) -> dict[str, str]:
        """As JSON types."""
        return {
            "page": self.page,
            "section": self.anchor,
            "title": self.title,
            "text": self.text,
            "address": self.address,
        }

    @property
    def address(self) -> str:
        """Where the site has it."""
        return f"{errors.DOCUMENTATION}{self.page}/" + (f"#{self.anchor}" if self.anchor else "")


def _folder() -> Path:
    """The pages: next to the package where it was installed, in the repository where it is developed."""
    package = Path(__file__).parents[1]
    return package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"


def _anchor(title: str) -> str:
    """The site's anchor of a heading, as Python-Markdown makes it."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _sections(page: str, text: str) -> list[DocumentationSection]:
    """The page itself, then its headings in their order."""
    lines, headings, fenced = text.splitlines(), [], False
    for index, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and (found := re.match(r"(#{1,4}) (.+)", line)):
            headings.append((index, len(found[1]), found[2].strip()))
    sections = []
    for number, (start, level, title) in enumerate(headings):
        end = next((index for index, other, _ in headings[number + 1 :] if other <= level), len(lines))
        anchor = "" if level == 1 else _anchor(title)
        sections.append(DocumentationSection(page, anchor, title, "\n".join(lines[start + 1 : end]).strip()))
    return sections


@cache
def _all_sections() -> tuple[DocumentationSection, ...]:
    """All sections: those that errors name first, then the pages in alphabetical order."""
    pages = sorted(_folder().glob("*.md"), key=lambda path: (path.stem != "limitations", path.stem))
    return tuple(section for path in pages for section in _sections(path.stem, path.read_text(encoding="utf-8")))


def _error_named(name: str) -> type[SordinoError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, SordinoError) else None


def _find(name: str) -> DocumentationSection:
    """The section of an error, of an anchor (with ``page#anchor`` on one page only), of a page, or of a heading.

    Raises:
        InvalidArgument: there is none; the message names the closest ones.
    """
    wanted = name.strip()
    kind = _error_named(wanted)
    if kind is not None and not kind.section:
        text = "\n".join(line.strip() for line in (kind.__doc__ or "").splitlines()).strip()
        return DocumentationSection("limitations", "", kind.__name__, text)
    page, _, anchor = wanted.removeprefix("docs/").partition("#")
    page = page.strip("/").removesuffix(".md")
    if kind is not None:
        page, anchor = "limitations", kind.section
    on_page = [section for section in _all_sections() if section.page == _anchor(page)]
    if on_page:
        found = next((section for section in on_page if section.anchor == _anchor(anchor)), None)
        if found is not None:
            return found
    elif found := next((section for section in _all_sections() if section.anchor == _anchor(wanted)), None):
        return found
    names = {section.anchor or section.page for section in _all_sections()}
    kinds = {entry for entry in dir(errors) if _error_named(entry)}
    near = difflib.get_close_matches(wanted, kinds, n=2, cutoff=0.6)
    near += difflib.get_close_matches(_anchor(wanted), names, n=3, cutoff=0.6)
    advice = f"Close to it: {', '.join(near)}." if near else "`sordino explain` lists the names."
    raise InvalidArgument(f"name must be an error, a page or a section of the documentation, got {name!r}. {advice}")


@dataclass(frozen=True, kw_only=True)
class DocumentationIndex:
    """What can be explained.

    Args:
        errors: names of errors.
        sections: refusals, sections of the page on limitations.
        pages: of the documentation.
    """

    errors: Sequence[str]
    sections: Sequence[str]
    pages: Sequence[str]

    def to_dict(self) -> dict[str, list[str]]:
        """As JSON types."""
        return {"errors": list(self.errors), "sections": list(self.sections), "pages": list(self.pages)}


def explain(name: str = "") -> DocumentationSection | DocumentationIndex:
    """The section of the documentation with this name, offline.

    Args:
        name: Name of an error (CoupledRecords), a section (coupled-records) or a page (tuning).
    """
    if name:
        return _find(name)
    return DocumentationIndex(
        errors=[entry for entry in errors.__all__ if _error_named(entry)],
        sections=[section.anchor for section in _all_sections() if section.page == "limitations" and section.anchor],
        pages=[section.page for section in _all_sections() if not section.anchor],
    )


@dataclass(frozen=True, kw_only=True)
class CourseLesson:
    """A lesson of the course as a notebook, or the lessons that there are.

    Args:
        titles: of the lessons, by name.
        lesson: the one that was written, or None.
        notebook: its file, or None.
    """

    titles: Mapping[str, str]
    lesson: str | None = None
    notebook: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        from sordino.course import EXERCISES

        if self.lesson is not None:
            return {"lesson": self.lesson, "notebook": str(self.notebook)}
        exercises = {name: one.question for name, one in EXERCISES.items()}
        return {"lessons": dict(self.titles), "exercises": exercises}


def learn(lesson: str | None = None, *, out: Path | str | None = None) -> CourseLesson:
    """Write a lesson of the course as a notebook, with exercises that check your answers.

    Args:
        lesson: Name of a lesson. Default: list all.
        out: Notebook to write. Default: LESSON.ipynb.
    """
    from sordino.course import lessons, notebook, read_lesson

    found = lessons()
    titles = {
        name: read_lesson(path.read_text(encoding="utf-8"))[0].source.splitlines()[0].removeprefix("# ")
        for name, path in found.items()
    }
    if lesson is None:
        if out is not None:
            raise InvalidArgument("lesson must be named when --out is given, got none. Name one of the lessons.")
        return CourseLesson(titles=titles)
    checks.one_of(tuple(found), lesson=lesson)
    path = Path(out or f"{lesson}.ipynb")
    body = json.dumps(notebook(read_lesson(found[lesson].read_text(encoding="utf-8"))), indent=1, ensure_ascii=False)
    write_new_file(path, body + "\n")
    return CourseLesson(titles=titles, lesson=lesson, notebook=path)


def recipes() -> "list[Recipe]":
    """The recipes: whole pipelines from raw records to a private model."""
    from sordino.recipes import RECIPES, get_recipe

    return [get_recipe(name) for name in RECIPES]


def data_list() -> "list[DatasetInfo]":
    """The named datasets, see `sordino.data.list_datasets`."""
    from sordino.data import list_datasets

    return list_datasets()


def data_show(name: str) -> "DatasetDescription":
    """What is known about a named dataset, see `sordino.data.describe_dataset`.

    Args:
        name: Name from `sordino data list`.
    """
    from sordino.data import describe_dataset

    return describe_dataset(name)


def data_get(name: str, *, progress: Progress = SILENT) -> Path:
    """Put a named dataset on this machine, checked against its checksum.

    Args:
        name: Name from `sordino data list`.
        progress: what is said meanwhile.

    Returns:
        The folder that it is in.
    """
    from sordino.data import download_dataset

    with progress.stage(f"fetching {name}"):
        return download_dataset(name)
