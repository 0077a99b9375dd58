"""Run folders that are damaged: `verify` says that they do not hold together; no command fails in an unforeseen way."""

import shutil

import pytest
from typer.testing import CliRunner

from reported_runs import PUBLIC, make
from sordino.cli import app

JUNK = {
    "text": b"not json",
    "empty": b"",
    "a list": b"[1]",
    "a number": b"7",
    "other bytes": b"\xff\xfe\x00",
    "brackets": b"[" * 100_000,
    "half": b'{"schema": 1, "steps":',
}
FILES = ("plan.json", "run.json", "guarantee.json", "metrics.json", "manifest.json", "transcript.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    make(path, metrics=PUBLIC)
    return path


def invoke(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert "unexpectedly" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.strip()]) <= 1
    return result


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_found_and_refused_in_one_line(whole, tmp_path, file, junk):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / file).write_bytes(JUNK[junk])
    checked = invoke("verify", run)
    assert checked.exit_code == 1, checked.stdout
    assert "is NOT consistent" in checked.stdout
    for words in (("runs", "show", run), ("account", run)):
        assert invoke(*words).exit_code in (0, 1, 2)
    if file in ("plan.json", "run.json"):  # a torn last line of a transcript is what a crash leaves
        assert invoke("runs", "show", run).exit_code in (1, 2)


@pytest.mark.parametrize("file", ["plan.json", "run.json", "transcript.jsonl"])
def test_a_folder_without_one_of_its_files_is_a_usage_error(whole, tmp_path, file):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / file).unlink()
    for words in (("verify", run), ("runs", "show", run), ("account", run), ("report", run)):
        result = invoke(*words)
        assert result.exit_code == 2
        assert f"lacks {file}" in result.stderr
