"""Hooks of the site's build: executed tutorials, pages of the API, links from the guides to it, no foreign hosts.

`SORDINO_TUTORIALS=skip` shows tutorials without running them, for a quick look at the other pages.
"""

import ast
import os
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "website"))
import tutorials  # noqa: E402
import typeset  # noqa: E402

PACKAGE = ROOT / "src/sordino"
INTERNAL = {"sordino.cli", "sordino.shapes", "sordino.checks", "sordino.plot_style", "sordino.installation"}


@cache
def public_modules() -> dict[str, tuple[str, ...]]:
    """Every public module and its `__all__`: packages, and modules that no package lists the names of."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: path.as_posix().replace("__init__.py", "")):
        parts = ["sordino", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        if any(part.startswith("_") for part in parts[:-1] + ([] if is_package else parts[-1:])):
            continue
        if any(module == name or module.startswith(f"{name}.") for name in INTERNAL):
            continue
        stated = _all_of(path)
        top_level = len(parts) == 2
        if stated and (is_package or top_level or parts[1] == "integrations"):
            found[module] = stated
    return found


def _all_of(path: Path) -> tuple[str, ...]:
    """The names in `__all__`, without dunder names, and without classes that another library passes through."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("sordino")
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                names = ast.literal_eval(node.value)
            except ValueError:
                return ()
            modules = {entry.stem for entry in path.parent.iterdir()} if path.parent == PACKAGE else set()
            return tuple(name for name in names if not name.startswith("__") and name not in modules | foreign)
    return ()


@cache
def _addresses() -> dict[str, str]:
    """Public name → its full name; a name that two packages have has none of its own. The shortest way in wins."""
    found: dict[str, set[str]] = {}
    for module, names in public_modules().items():
        for name in names:
            found.setdefault(name, set()).add(f"{module}.{name}")
    addresses = {f"{module}.{name}": f"{module}.{name}" for module, names in public_modules().items() for name in names}
    addresses |= {module: module for module in public_modules()}
    for name, full in found.items():
        best = f"sordino.{name}" if f"sordino.{name}" in full else next(iter(full)) if len(full) == 1 else ""
        if best:
            addresses[name] = best
    return addresses


def _docstring_title(module: str) -> str:
    path = PACKAGE / "/".join(module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def _api_page(module: str, names: tuple[str, ...]) -> str:
    listed = "".join(f"\n        - {name}" for name in names)
    return f"# {module}\n\n::: {module}\n    options:\n      members:{listed}\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that are made here."""
    chapters: list[dict[str, str]] = []
    course: list[dict[str, str]] = []
    for tutorial in tutorials.find_tutorials():
        entry = {tutorial.title: f"tutorials/{tutorial.name}.md"}
        (course if tutorial.name.startswith("course/") else chapters).append(entry)
    made = {
        "Tutorials": [{"Gallery": "tutorials/index.md"}, *chapters, *([{"Course": course}] if course else [])],
        "API reference": [
            {"All modules": "api/index.md"},
            *({module: f"api/{module}.md"} for module in public_modules()),
        ],
    }
    config.nav = [
        {title: made.get(title, content)} if isinstance(entry, dict) else entry
        for entry in config.nav or []
        for title, content in (entry.items() if isinstance(entry, dict) else [("", "")])
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tutorials, their gallery, and the pages of the API."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    add("assets/site.css", (ROOT / "website/site.css").read_text(encoding="utf-8"))
    gallery = {"": [], "course": []}
    for tutorial in tutorials.find_tutorials():
        gallery["course" if tutorial.name.startswith("course/") else ""].append(tutorial)
        for path, content in _tutorial_files(tutorial).items():
            add(path, content)
    add("tutorials/index.md", _gallery(gallery[""], gallery["course"]))
    rows = "".join(f"| [`{module}`]({module}.md) | {_docstring_title(module)} |\n" for module in public_modules())
    intro = (
        "Every public module, from its docstrings. Names that a module lists in `__all__` are public and covered by\n"
    )
    intro += "the [deprecation policy](../stability.md); everything else may change without notice.\n\n"
    add("api/index.md", f"# API reference\n\n{intro}| module | what it holds |\n|---|---|\n{rows}")
    for module, names in public_modules().items():
        add(f"api/{module}.md", _api_page(module, names))
    return files


def _tutorial_files(tutorial: tutorials.Tutorial) -> dict[str, str | bytes]:
    if os.environ.get("SORDINO_TUTORIALS") == "skip":
        folder = ROOT / ".cache/tutorials/skipped"
        tutorials.write_page(tutorial, folder)
    else:
        try:
            folder = tutorials.executed_page(tutorial, ROOT / ".cache/tutorials")
        except RuntimeError as error:
            raise PluginError(str(error)) from error
    stem = tutorial.path.stem
    mine = re.compile(rf"{re.escape(stem)}(-\d+)?\.(md|txt|ipynb|png)")
    place = (folder / tutorial.name).parent
    return {
        f"tutorials/{path.relative_to(folder).as_posix()}": path.read_text("utf-8")
        if path.suffix in {".md", ".txt", ".ipynb"}
        else path.read_bytes()
        for path in sorted(place.iterdir())
        if mine.fullmatch(path.name)
    }


def _gallery(chapters: list[tutorials.Tutorial], course: list[tutorials.Tutorial]) -> str:
    def cards(entries: list[tutorials.Tutorial]) -> str:
        return (
            '<div class="grid cards" markdown>\n\n'
            + "\n".join(f"-   [**{entry.title}**]({entry.name}.md)\n\n    {entry.summary}\n" for entry in entries)
            + "\n</div>\n"
        )

    text = (
        "# Tutorials\n\nEach page is a notebook that was run when this site was built: what you see is what the code\n"
    )
    text += (
        "printed. Download it from its page, or open the file of the same name in `tutorials/` (percent cells, which\n"
    )
    text += "Jupyter reads with jupytext). None needs the network or a graphics card.\n\n"
    text += cards(chapters)
    if course:
        text += "\n## The course\n\n" + cards(course)
    return text


_FENCE = re.compile(r"^(\s*)(```|~~~)")
_NAME = re.compile(r"(?<![\[`\w])`([A-Za-z_][\w.]*)(\([^`]*\))?`(?![`\]])")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Link the first use of each public name on a page to the API reference."""
    if page.file.src_uri.startswith("api/") or page.file.src_uri.startswith("course/"):
        return markdown
    addresses, linked, inside = _addresses(), set(), False
    lines = []
    for line in markdown.split("\n"):
        if _FENCE.match(line):
            inside = not inside
        if not inside and not line.startswith(("#", "    ")):
            line = _NAME.sub(lambda found: _link(found, addresses, linked, page.file.src_uri), line)
        lines.append(line)
    return "\n".join(lines)


def _link(found: re.Match[str], addresses: dict[str, str], linked: set[str], page: str) -> str:
    """A link for names that can be meant in one way only: with capitals, a package before them, or a call behind."""
    name = found[1]
    clear = "." in name or found[2] or (name[0].isupper() and not name.isupper()) or name.count("_") > 1
    address = addresses.get(name, "")
    if not clear or not address or address in linked:
        return found[0]
    linked.add(address)
    if address in public_modules():
        return f"[{found[0]}]({'../' * page.count('/')}api/{address}.md)"
    return f"[{found[0]}][{address}]"


class _Loads(HTMLParser):
    """What a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("src", "href", "srcset"):
            value = values.get(name) or ""
            loads = tag in {"script", "img", "iframe", "source", "video"} or (
                tag == "link" and values.get("rel") not in {"canonical", "prev", "next", "alternate"}
            )
            if loads and re.match(r"(https?:)?//", value):
                self.foreign.append(f"<{tag} {name}={value}>")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Set formulas, numbers and pictures; put the laboratory's script, with its table, below what it draws into."""
    for change in (typeset.set_formulas, typeset.set_numbers, typeset.break_names, typeset.link_pictures):
        html = change(html)
    if "data-laboratory" not in html:
        return html
    from sordino.report.render import laboratory_script

    return f"{html}\n<script>{laboratory_script()}</script>"


_ASKS = ' data-md-component="source"'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Leave the repository's link as it is: with this mark the theme's script asks its host for stars and releases."""
    return output.replace(_ASKS, "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:  # noqa: ARG001
    """The same for the page that is shown for a wrong address."""
    return output_content.replace(_ASKS, "")


def on_post_build(config: MkDocsConfig) -> None:
    """Raise if a page would load a font, a script or a picture from another host, or have the theme ask one."""
    for page in Path(config.site_dir).rglob("*.html"):
        reader = _Loads()
        text = page.read_text(encoding="utf-8")
        reader.feed(text)
        if _ASKS in text:
            reader.foreign.append(_ASKS.strip())
        if reader.foreign:
            raise PluginError(f"{page.name} loads from another host: {', '.join(reader.foreign)}")
