"""What a shell asks of the program: completion of words, and one line where a line can't be read."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sordino.cli import app


@pytest.mark.parametrize(
    ("words", "expected"),
    [("sordino tr", {"train"}), ("sordino train --sche", {"--schema"}), ("sordino ledger de", {"declare"})],
)
def test_words_are_completed_in_bash(words, expected):
    environment = {"_SORDINO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "sordino"], env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell, monkeypatch):
    # Otherwise it is that of the shell which started the tests.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", shell])
    assert result.exit_code == 0
    assert "complete" in result.stdout.lower()


@pytest.mark.parametrize(
    "line",
    [
        "train", "nowhere", "ledger nowhere", "train a b", "plan --epsilon x", "plan --nowhere 3",
        "account --steps 1.5",
        "runs show", "train a --device", "compare a --repeats many",
        "account --neighboring-relation friends", "--nowhere",
    ],
)  # fmt: skip
def test_a_line_that_can_not_be_read_is_one_line_and_a_document(line):
    plain = CliRunner().invoke(app, line.split())
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert plain.stderr.startswith("sordino: ")
    assert plain.stderr.count("\n") == 1
    assert "--help" in plain.stderr
    result = CliRunner().invoke(app, [line.split()[0], "--json", *line.split()[1:]])
    assert result.exit_code == 2
    assert set(json.loads(result.stdout)["error"]) == {"kind", "message"}


def test_no_command_is_help_and_a_usage_error():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage" in result.stdout
