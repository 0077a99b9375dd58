"""The engine's pages are true: their code runs, and every refusal has its section."""

import re
from pathlib import Path

import pytest

from sordino import errors

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {
    heading.lower().replace(" ", "-")
    for heading in re.findall(r"^## (.+)$", (DOCS / "limitations.md").read_text(), re.MULTILINE)
}
KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.section], ids=lambda kind: kind.__name__)
def test_every_refusal_has_its_section(kind):
    assert kind.section in SECTIONS
    assert f"limitations/#{kind.section}" in str(kind("message"))


def test_the_migration_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "migrating-from-opacus.md").read_text(), re.MULTILINE | re.DOTALL
    )
    exec(compile("\n".join(blocks), "migrating-from-opacus.md", "exec"), {})
    assert "differentially private: unit one record" in capsys.readouterr().out


def test_the_performance_page_runs_from_top_to_bottom():
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "performance.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 1
    exec(compile("\n".join(blocks), "performance.md", "exec"), {})


@pytest.mark.parametrize("page", ["performance.md", "limitations.md", "migrating-from-opacus.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists()
