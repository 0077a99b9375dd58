"""`sordino explain NAME`: the section of the documentation that a message names, without a network."""

import difflib
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.text import Text

from sordino import errors
from sordino.cli.console import JsonOption, Output, heading
from sordino.errors import InvalidArgument, SordinoError

__all__ = ["explain"]


@dataclass(frozen=True)
class _Section:
    """A heading with the text below it, down to the next heading of its level."""

    page: str
    anchor: str
    title: str
    text: str

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


def _sections(page: str, text: str) -> list[_Section]:
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
        sections.append(_Section(page, anchor, title, "\n".join(lines[start + 1 : end]).strip()))
    return sections


@cache
def _all_sections() -> tuple[_Section, ...]:
    """All sections: those that errors name first, then the pages in alphabetical order."""
    pages = sorted(_folder().glob("*.md"), key=lambda path: (path.stem != "limitations", path.stem))
    return tuple(section for path in pages for section in _sections(path.stem, path.read_text(encoding="utf-8")))


def _error_named(name: str) -> type[SordinoError] | None:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, SordinoError) else None


def _find(name: str) -> _Section:
    """The section of an error, of an anchor (with ``page#anchor`` on one page only), of a page, or of a heading.

    Raises:
        InvalidArgument: there is none; the message names the closest ones.
    """
    wanted = name.strip()
    kind = _error_named(wanted)
    if kind is not None and not kind.section:
        text = "\n".join(line.strip() for line in (kind.__doc__ or "").splitlines()).strip()
        return _Section("limitations", "", kind.__name__, text)
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


def explain(
    name: Annotated[
        str, typer.Argument(help="An error (CoupledRecords), a section (coupled-records) or a page (tuning).")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print a section of the documentation: what an error means and what to do. Without a name, list them."""
    out = Output(as_json=as_json)
    if not name:
        pages = [section for section in _all_sections() if not section.anchor]
        refusals = [section.anchor for section in _all_sections() if section.page == "limitations" and section.anchor]
        kinds = [entry for entry in errors.__all__ if _error_named(entry)]
        out.print_result(
            {"errors": kinds, "sections": refusals, "pages": [page.page for page in pages]},
            heading("What can be explained", "sordino explain NAME; page#section names a section of any page"),
            *(
                Text.assemble((f"{title}\n", "bold"), ", ".join(names), "\n")
                for title, names in (
                    ("Errors", kinds),
                    ("Refusals", refusals),
                    ("Pages", [page.page for page in pages]),
                )
            ),
        )
        return
    section = _find(name)
    document = {
        "page": section.page,
        "section": section.anchor,
        "title": section.title,
        "text": section.text,
        "address": section.address,
    }
    out.print_result(document, heading(section.title, section.address), Markdown(section.text))
