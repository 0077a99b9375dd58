"""Run a tutorial and make its page: percent notebook → Markdown with outputs, and a notebook to download.

A tutorial is a Python file of cells (the "percent" form, which Jupyter opens with jupytext and editors know):

    # %% [markdown]
    # # Title
    # What the reader can do afterwards, in one paragraph; the gallery shows it.

    # %%
    print("a code cell; its output, its figures and the value of its last expression go on the page")

    # %%
    # !sordino verify runs/first

    # %% tags=["answer"]
    print("code that the page folds away under 'Answer'")

    # %% tags=["raises-exception"]
    raise ValueError("a cell that must raise; the page shows the message")

Only the standard library is needed here, and matplotlib where a cell draws.

Run: python website/tutorials.py [NAME…] [--out FOLDER]
"""

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Cell", "Tutorial", "execute", "find_tutorials", "main", "write_page"]

ROOT = Path(__file__).parents[1]
_MARKER = re.compile(r"^# %%(?P<options>.*)$")
_TAGS = re.compile(r"tags=(\[[^]]*\])")


@dataclass
class Cell:
    """One cell: its kind ("markdown" or "code"), source and tags; text and figures once it has been run."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()
    output: str = ""
    figures: list[bytes] = field(default_factory=list)

    @property
    def is_shell(self) -> bool:
        """Whether every line is a command for the shell (``# !command``)."""
        return self.kind == "code" and all(line.startswith("# !") for line in self.source.splitlines())


@dataclass
class Tutorial:
    """A tutorial's file and cells. `name` is its path below ``tutorials/`` without the ending."""

    path: Path
    name: str
    cells: list[Cell]

    @property
    def title(self) -> str:
        """The text of the first heading."""
        return self.cells[0].source.splitlines()[0].removeprefix("# ").strip()

    @property
    def summary(self) -> str:
        """The paragraph below the title, as one line."""
        return " ".join(self.cells[0].source.split("\n\n")[1].split())


def read_tutorial(path: Path) -> Tutorial:
    """Read a percent notebook.

    Raises:
        ValueError: it does not begin with a title and a paragraph, or a line stands before the first cell.
    """
    cells: list[Cell] = []
    lines: list[str] = []
    kind, tags = "", ()

    def close() -> None:
        text = "\n".join(lines).strip("\n")
        if not kind:
            if text and not text.startswith("# ---"):  # jupytext's header may stand there
                raise ValueError(f"{path.name} must begin with a cell, got a line before it. Put '# %%' above it.")
        elif kind == "markdown":
            cells.append(Cell(kind, "\n".join(re.sub(r"^# ?", "", line) for line in text.splitlines()), tags))
        elif text:
            cells.append(Cell(kind, text, tags))

    for line in path.read_text(encoding="utf-8").splitlines():
        if found := _MARKER.match(line):
            close()
            lines, options = [], found["options"]
            kind = "markdown" if "[markdown]" in options else "code"
            stated = _TAGS.search(options)
            tags = tuple(json.loads(stated[1])) if stated else ()
        else:
            lines.append(line)
    close()
    if not cells or not re.match(r"# \S.*\n\n\S", cells[0].source):
        raise ValueError(f"{path.name} must begin with a title and a paragraph, got neither. See website/tutorials.py.")
    return Tutorial(path, path.relative_to(ROOT / "tutorials").with_suffix("").as_posix(), cells)


def find_tutorials() -> list[Tutorial]:
    """All tutorials, in the order of their paths; those of the course come last."""
    paths = sorted((ROOT / "tutorials").rglob("*.py"), key=lambda path: (len(path.parts), path.as_posix()))
    return [read_tutorial(path) for path in paths]


def execute(tutorial: Tutorial, folder: Path) -> None:
    """Run all cells in one namespace, with `folder` as the working directory; fills outputs and figures.

    Raises:
        AssertionError: a cell that is tagged "raises-exception" raised nothing.
        Exception: whatever another cell raises.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    folder.mkdir(parents=True, exist_ok=True)
    namespace: dict[str, object] = {"__name__": "__tutorial__"}
    with contextlib.chdir(folder):
        for number, cell in enumerate(tutorial.cells):
            if cell.kind == "code":
                _run_cell(cell, namespace, f"{tutorial.name}.py, cell {number}")


def _run_cell(cell: Cell, namespace: dict[str, object], name: str) -> None:
    if cell.is_shell:
        cell.output = "".join(_shell(line.removeprefix("# !")) for line in cell.source.splitlines())
        return
    written = io.StringIO()
    tree = ast.parse(cell.source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    expected = "raises-exception" in cell.tags
    try:
        with contextlib.redirect_stdout(written):
            exec(compile(tree, name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
                if value is not None:
                    print(value if isinstance(value, str) else repr(value))
    except Exception as error:
        if not expected:
            raise
        written.write(f"{type(error).__name__}: {error}\n")
    else:
        assert not expected, f"{name} raised nothing, and is tagged 'raises-exception'"
    cell.output = written.getvalue()
    cell.figures = list(_take_figures())


def _shell(command: str) -> str:
    """A command's output; the programs of this environment come first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _take_figures() -> Iterator[bytes]:
    """The open figures as PNG; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=144, bbox_inches="tight", facecolor="white")
        yield file.getvalue()
    pyplot.close("all")


def _markdown(tutorial: Tutorial) -> str:
    """The page: text, code, and outputs below it. Figures lie beside it as NAME-1.png, …"""
    stem = tutorial.path.stem
    first, *others = tutorial.cells
    title, text = first.source.split("\n", 1)
    links = f'[Notebook]({stem}.ipynb){{ download }} · [Python file]({stem}.txt){{ download="{stem}.py" }}'
    parts = [f'{title}\n\n<p class="downloads" markdown>{links}</p>\n{text}']
    figure = 0
    for cell in others:
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        source = cell.source.replace("# !", "") if cell.is_shell else cell.source
        block = [f"```{'sh' if cell.is_shell else 'python'}\n{source}\n```"]
        if cell.output.strip():
            block.append(f'```text title="Output"\n{cell.output.rstrip()}\n```')
        for _ in cell.figures:
            figure += 1
            block.append(f"![What the cell above drew]({stem}-{figure}.png)")
        shown = "\n\n".join(block)
        if "answer" in cell.tags:
            shown = '??? success "Answer"\n' + re.sub(r"^(?=.)", "    ", shown, flags=re.MULTILINE)
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def _notebook(tutorial: Tutorial) -> dict[str, object]:
    """The same as a Jupyter notebook with outputs (nbformat 4.5)."""
    cells: list[dict[str, object]] = []
    for number, cell in enumerate(tutorial.cells):
        entry: dict[str, object] = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {"tags": [*cell.tags]}}
        source = cell.source.replace("# !", "!") if cell.is_shell else cell.source
        entry["source"] = source.splitlines(keepends=True)
        if cell.kind == "code":
            outputs: list[dict[str, object]] = []
            if cell.output:
                text = cell.output.splitlines(keepends=True)
                outputs.append({"output_type": "stream", "name": "stdout", "text": text})
            for figure in cell.figures:
                data = {"image/png": base64.b64encode(figure).decode()}
                outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
            entry |= {"execution_count": None, "outputs": outputs}
        cells.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_page(tutorial: Tutorial, folder: Path) -> None:
    """Write the page, its figures, the notebook and the source below `folder`, by the tutorial's name."""
    place = folder / tutorial.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".md").write_text(_markdown(tutorial), encoding="utf-8")
    place.with_suffix(".txt").write_text(tutorial.path.read_text(encoding="utf-8"), encoding="utf-8")
    place.with_suffix(".ipynb").write_text(json.dumps(_notebook(tutorial), indent=1) + "\n", encoding="utf-8")
    figures = [figure for cell in tutorial.cells for figure in cell.figures]
    for number, figure in enumerate(figures, 1):
        (place.parent / f"{place.name}-{number}.png").write_bytes(figure)


def executed_page(tutorial: Tutorial, cache: Path) -> Path:
    """The folder with a tutorial's executed page; it is run when its file or the package has changed since.

    Raises:
        RuntimeError: the tutorial failed; the message has the end of what it printed.
    """
    package = sorted((ROOT / "src").rglob("*.py"))
    state = hashlib.sha256(b"".join(path.read_bytes() for path in [Path(__file__), tutorial.path, *package]))
    folder = cache / state.hexdigest()[:24]
    if not (folder / tutorial.name).with_suffix(".md").exists():
        started = time.monotonic()
        command = [sys.executable, str(Path(__file__)), tutorial.name, "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"tutorial {tutorial.name} failed: {done.stderr[-3000:]}")
        print(f"tutorial {tutorial.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Run tutorials by name (all without one) and write their pages."""
    import tempfile

    parser = argparse.ArgumentParser(description="Run tutorials and write their pages and notebooks.")
    parser.add_argument("names", nargs="*", help="paths below tutorials/, without .py; without one all are run")
    parser.add_argument("--out", type=Path, default=ROOT / "build/tutorials", help="folder of the pages")
    chosen = parser.parse_args(arguments)
    tutorials = {tutorial.name: tutorial for tutorial in find_tutorials()}
    if unknown := set(chosen.names) - set(tutorials):
        parser.error(f"names must be among {', '.join(tutorials)}, got {', '.join(sorted(unknown))}.")
    for name in chosen.names or tutorials:
        with tempfile.TemporaryDirectory() as folder:
            execute(tutorials[name], Path(folder))
        write_page(tutorials[name], chosen.out)
        print(chosen.out / f"{name}.md")


if __name__ == "__main__":
    main()
