"""The page on Hugging Face models is true: its code runs from top to bottom."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Model has:UserWarning")
def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), PAGE.name, "exec"), {})
    assert "differentially private: unit one record" in capsys.readouterr().out


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists()
