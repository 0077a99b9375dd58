"""The workflows, forms and start pages that a visitor of the project meets are whole."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from sordino.cli import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/readers").glob("*.md")])
READERS = sorted((ROOT / "docs/readers").glob("*.md"))


def test_the_workflows_are_those_of_the_project():
    assert {path.stem for path in WORKFLOWS} == {"check", "docs", "gpu", "matrix", "nightly", "wheel"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_commands_that_exist(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    usage = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True).stdout
    for command in re.findall(r"\./run (\w+)", text):
        assert re.search(rf"^  {command} ", usage, flags=re.MULTILINE), command
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 350
        assert job["steps"]
    for file in re.findall(r"bash (\S+)", text):
        assert (ROOT / file).exists()


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_is_one(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem != "config":
        assert {"name", "description", "body"} <= set(form)
        names = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_a_start_page_runs_and_leads_to_pages_that_exist(path, capsys):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if target.startswith("../tutorials/"):
            source = ROOT / target.removeprefix("../").replace(".md", ".py")
            assert source.exists() or target.endswith("index.md"), target
        elif not target.startswith("https://"):
            assert (path.parent / target).exists(), target
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, path.name, "exec"), {"__name__": "page"})
        assert capsys.readouterr().out


def test_there_is_a_page_for_each_reader():
    assert {path.stem for path in READERS} == {"analyst", "privacy-officer", "pytorch", "researcher", "teacher"}


def commands(path):
    """Lines of the blocks of a page that call sordino, with the lines that continue them."""
    blocks = re.findall(r"^```(\w*).*?\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for block in (block for language, block in blocks if language in ("", "sh")):
        for line in re.findall(r"^sordino .*(?:\n .*)*", block, flags=re.MULTILINE):
            yield " ".join(part.split(" # ")[0] for part in line.splitlines())


@pytest.mark.parametrize("path", [path for path in PAGES if any(commands(path))], ids=lambda path: path.stem)
def test_the_commands_of_a_page_exist_with_their_options(path):
    root = get_command(app)
    for line in commands(path):
        words = re.findall(r"[^\s\[\]|]+", line)[1:]
        command = root
        while words and hasattr(command, "commands"):
            # What is none of audit's commands belongs to the first one.
            name = words[0] if command.name != "audit" or words[0] in command.commands else "training"
            assert name in command.commands, line
            command = command.commands[name]
            words = words[words[0] == name :]
        offered = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= offered, line
