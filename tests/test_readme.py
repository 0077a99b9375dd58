"""The README is true: its code runs, its tree and its links exist, its commands are the entry point's."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_diff_runs_with_and_without_its_added_lines():
    (diff,) = blocks("diff")
    added = [line[2:] for line in diff.splitlines() if not line.startswith("- ")]
    plain = [line[2:] for line in diff.splitlines() if line.startswith("  ") or not line]
    dataset = TensorDataset(torch.randn(256, 20), torch.randint(0, 2, (256,)))
    for lines in (plain, added):
        exec(compile("\n".join(lines), "README.md", "exec"), {"dataset": dataset})


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(number, capsys):
    exec(compile(blocks("python")[number], "README.md", "exec"), {})
    assert "(ε = 1.00, δ = 1e-05)" in capsys.readouterr().out


def test_every_path_of_the_tree_exists():
    (tree,) = (block for block in README.split("```")[1::2] if block.startswith("\nrun "))
    for line in filter(str.strip, tree.splitlines()):
        name = line.split()[0]
        base = ROOT / "src/sordino" if line.startswith("  ") else ROOT
        assert (base / name).exists(), name


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_entry_point_names_the_commands_of_the_readme():
    usage = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True).stdout
    for command in ("demo", "test", "check", "bench", "docs", "shell"):
        assert re.search(rf"^  {command} ", usage, flags=re.MULTILINE)
        assert command in README


@pytest.mark.parametrize("line", [line.strip() for line in README.splitlines() if line.startswith("    sordino ")])
def test_the_commands_shown_exist_with_their_options(line):
    from typer.testing import CliRunner

    from sordino.cli import app

    command, *arguments = line.split("#")[0].split()[1:]
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in result.output
