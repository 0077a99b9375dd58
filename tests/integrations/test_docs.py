"""The pages on other libraries' trainers are true: their code runs from top to bottom, their links lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"lightning.md": ("lightning",), "accelerate.md": ("accelerate",)}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_from_top_to_bottom(page, capsys):
    for name in PAGES[page]:
        pytest.importorskip(name, reason=f"{name} is not installed")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert "differentially private: unit one record" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_it_is_in_the_navigation(page):
    assert page in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_setting_that_is_refused_is_on_the_page():
    pytest.importorskip("lightning", reason="lightning is not installed")
    from sordino.integrations import lightning

    text = (DOCS / "lightning.md").read_text(encoding="utf-8")
    names = [*lightning._CALLBACKS, *lightning._WHY]
    shown = {"val_dataloaders": "Validation"}
    assert all(shown.get(name, name) in text for name in names)
