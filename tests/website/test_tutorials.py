"""Tutorials are read, run and shown as their form promises; the slow test runs every one of them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "website"))
import tutorials

ALL = tutorials.find_tutorials()


def made(monkeypatch, tmp_path, text):
    monkeypatch.setattr(tutorials, "ROOT", tmp_path)
    path = tmp_path / "tutorials" / "one.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    (tutorial,) = tutorials.find_tutorials()
    return tutorial


HEAD = "# %% [markdown]\n# # One\n#\n# What it is\n# about.\n\n"


def test_output_values_figures_and_answers_are_on_the_page(monkeypatch, tmp_path):
    cells = (
        "# %%\nx = 3\nprint('printed')\nx + 1\n\n# %% tags=[\"answer\"]\nprint(x)\n\n"
        "# %%\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\n\n# %%\n# !echo shell\n"
    )
    tutorial = made(monkeypatch, tmp_path, HEAD + cells)
    tutorials.execute(tutorial, tmp_path / "work")
    tutorials.write_page(tutorial, tmp_path / "out")
    page = (tmp_path / "out/one.md").read_text(encoding="utf-8")
    assert (tutorial.title, tutorial.summary) == ("One", "What it is about.")
    assert '```text title="Output"\nprinted\n4\n```' in page
    assert '??? success "Answer"\n    ```python\n    print(x)\n    ```' in page
    assert '```sh\necho shell\n```\n\n```text title="Output"\nshell\n```' in page
    assert "(one-1.png)" in page
    assert (tmp_path / "out/one-1.png").read_bytes().startswith(b"\x89PNG")
    notebook = json.loads((tmp_path / "out/one.ipynb").read_text(encoding="utf-8"))
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code", "code", "code"]
    assert notebook["cells"][1]["outputs"][0]["text"] == ["printed\n", "4\n"]
    assert notebook["cells"][4]["source"] == ["!echo shell"]


def test_an_expected_exception_is_shown_and_must_come(monkeypatch, tmp_path):
    raising = made(monkeypatch, tmp_path, HEAD + '# %% tags=["raises-exception"]\nraise ValueError("told")\n')
    tutorials.execute(raising, tmp_path)
    assert raising.cells[1].output == "ValueError: told\n"
    quiet = made(monkeypatch, tmp_path, HEAD + '# %% tags=["raises-exception"]\n1\n')
    with pytest.raises(AssertionError, match="raised nothing"):
        tutorials.execute(quiet, tmp_path)


@pytest.mark.parametrize("cell", ["raise ValueError('unexpected')", "# !false"])
def test_a_cell_that_fails_fails_the_tutorial(monkeypatch, tmp_path, cell):
    tutorial = made(monkeypatch, tmp_path, HEAD + f"# %%\n{cell}\n")
    with pytest.raises((ValueError, RuntimeError)):
        tutorials.execute(tutorial, tmp_path)


@pytest.mark.parametrize("text", ["x = 1\n" + HEAD, "# %%\nx = 1\n", "# %% [markdown]\n# # Only a title\n"])
def test_a_file_that_is_no_tutorial_is_refused(monkeypatch, tmp_path, text):
    with pytest.raises(ValueError, match="must begin with"):
        made(monkeypatch, tmp_path, text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of transformers' own
@pytest.mark.parametrize("tutorial", ALL, ids=lambda tutorial: tutorial.name)
def test_the_tutorial_runs(tutorial, tmp_path):
    tutorials.execute(tutorial, tmp_path)
    assert any(cell.output for cell in tutorial.cells)
