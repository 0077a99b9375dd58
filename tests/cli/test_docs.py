"""The quickstart and the page on the command line are true: what they show runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from sordino.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page):
    return re.findall(
        r"^```(sh|python)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", ["quickstart.md", "command-line.md"])
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, page, "exec"), names)
            continue
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "sordino"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.stderr
    if page == "quickstart.md":
        assert (tmp_path / "runs/first/report.html").is_file()
        assert (tmp_path / "runs/own/report.png").is_file()
        assert capsys.readouterr().out.count("(ε = 1.00") >= 2


def test_the_shown_output_of_account_is_the_output():
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^(sordino account --sample-rate.* --delta 1e-5)$", text, flags=re.MULTILINE)
    (shown,) = re.findall(r"^(ε = 0\.9\d+ at δ = .*)$", text, flags=re.MULTILINE)
    assert shown in CliRunner().invoke(app, shlex.split(line)[1:]).stdout


def test_every_option_of_train_is_on_the_page_and_the_reverse():
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    synopsis = text.split("## train")[1].split("```")[1]
    shown = set(re.findall(r"--[a-z-]+", synopsis))
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    offered = set(re.findall(r"(--[a-z][a-z-]+)", CliRunner().invoke(app, ["train", "--help"], env=env).stdout))
    assert shown == offered - {"--help", "--json"}


@pytest.mark.parametrize("page", ["quickstart.md", "command-line.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target


def test_the_error_document_is_as_described():
    body = json.loads(CliRunner().invoke(app, ["data", "show", "nothing", "--json"]).stdout)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"kind", "message"}


def options_by_command(command, name=""):
    given = {name: {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}}
    for inner, one in getattr(command, "commands", {}).items():
        given |= options_by_command(one, f"{name} {inner}".strip())
    return given


def test_commands_on_pages_and_in_messages_have_the_options_they_name():
    given = options_by_command(get_command(app))
    given["audit"] = given["audit training"]
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "src").rglob("*.py")):
        for call in re.findall(r"\bsordino ([a-z][^|`\n]*)", path.read_text().replace("\\\n", " ")):
            words = call.split()
            command = " ".join(words[:2]) if " ".join(words[:2]) in given else words[0]
            if command in given:
                named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", call))
                assert named <= given[command], (path.name, call)
