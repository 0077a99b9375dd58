"""The release script sets the version everywhere, and stops where a release would be wrong."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sordino

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402


@pytest.fixture
def project(tmp_path):
    for name in ("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "src/sordino/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("to be filled in by the maintainers", "x"), encoding="utf-8")
    commit(tmp_path, "init", "-qb", "main")
    commit(tmp_path, "config", "user.name", "tester")
    commit(tmp_path, "config", "user.email", "tester@localhost")
    commit(tmp_path, "add", ".")
    commit(tmp_path, "commit", "-qm", "all")
    return tmp_path


def commit(root, *arguments):
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def test_a_release_sets_version_and_dates_and_tags(project):
    assert release.main(["9.1.0", "--date", "2030-01-31"], project) == 0
    assert '__version__ = "9.1.0"' in (project / "src/sordino/__init__.py").read_text()
    assert "version: 9.1.0\ndate-released: 2030-01-31\n" in (project / "CITATION.cff").read_text()
    assert "## Unreleased\n\n## 9.1.0 - 2030-01-31\n" in (project / "CHANGELOG.md").read_text()
    assert commit(project, "tag", "--list") == "v9.1.0\n"
    assert commit(project, "status", "--porcelain") == ""
    # The next one needs news, and a later version.
    assert len(release.obstacles(project, "9.1.0")) == 3
    assert len(release.obstacles(project, "9.0.9")) == 2


def test_checking_changes_nothing(project):
    assert release.main(["9.1.0", "--check"], project) == 0
    assert commit(project, "tag", "--list") == ""


def test_what_stands_in_the_way_is_named(project):
    assert "MAJOR.MINOR.PATCH" in release.obstacles(project, "1.0")[0]
    (project / "SECURITY.md").write_text("(to be filled in by the maintainers)")
    commit(project, "checkout", "-qb", "other")
    found = " ".join(release.obstacles(project, "9.1.0"))
    for words in ("SECURITY.md", "has changes", "on main"):
        assert words in found
    assert release.main(["9.1.0"], project) == 1
    assert commit(project, "tag", "--list") == ""


def test_the_version_is_one():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited[1] == sordino.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
