"""The release script sets the version everywhere, and stops where a release would be wrong."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sordino
import sordino.errors

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import addresses  # noqa: E402
import release  # noqa: E402


@pytest.fixture
def project(tmp_path):
    for name in ("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", "src/sordino/__init__.py"):
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
    assert "version" in project["dynamic"]


@pytest.mark.parametrize("form", ["{}.git", "git@{}.git", "ssh://git@{}"])
def test_a_release_goes_to_the_repository_that_the_project_names(project, form):
    host = addresses.addresses(project)[1].removeprefix("https://")
    own = {"{}.git": f"https://{host}.git", "git@{}.git": f"git@{host.replace('/', ':', 1)}.git"}.get(form)
    commit(project, "remote", "add", "origin", own or form.format(host))
    assert release.obstacles(project, "9.1.0") == []
    commit(project, "remote", "set-url", "origin", "git@github.com:somebody/else.git")
    (found,) = release.obstacles(project, "9.1.0")
    assert "somebody/else.git" in found
    assert "scripts/addresses.py" in found


def test_the_addresses_of_the_project_are_those_of_pyproject_everywhere():
    # A host of the project's that a file has on its own would stay behind when the addresses change.
    site, repository = addresses.addresses(ROOT)
    assert f"{site}latest/" == sordino.errors.DOCUMENTATION
    owner = repository.removeprefix("https://github.com/").split("/")[0]
    places = [path for path in addresses.files_with(ROOT, owner) if path.suffix not in {".png", ".xz"}]
    assert len(places) >= 5
    for path in places:
        rest = path.read_text(encoding="utf-8").replace(site, "").replace(repository, "")
        assert owner not in rest, path


def test_addresses_are_set_in_every_file(project):
    for name in ("mkdocs.yml", "src/sordino/errors.py", ".github/ISSUE_TEMPLATE/config.yml"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    old = addresses.addresses(project)
    (project / "docs").mkdir()
    (project / "docs/page.md").write_text(f"[a]({old[0]}latest/ledger/) and [b]({old[1]}/issues)\n", encoding="utf-8")
    commit(project, "add", ".")
    # The new repository stands where the old site's address is looked for, and the reverse.
    new = f"https://docs.example.org/{old[1].removeprefix('https://')}/", "https://example.org/a/b"
    assert addresses.main(["--site", new[0], "--repository", f"{new[1]}.git"], project) == 0
    assert addresses.addresses(project) == new
    assert (project / "docs/page.md").read_text() == f"[a]({new[0]}latest/ledger/) and [b]({new[1]}/issues)\n"
    assert f'DOCUMENTATION = "{new[0]}latest/"' in (project / "src/sordino/errors.py").read_text()
    assert f"site_url: {new[0]}\nrepo_url: {new[1]}\n" in (project / "mkdocs.yml").read_text()
    assert addresses.files_with(project, old[0]) == []
    # Again, from the new ones: nothing of the first change is in the way of the second.
    assert addresses.main(["--site", old[0], "--repository", old[1]], project) == 0
    assert commit(project, "diff", "--name-only") == ""


@pytest.mark.parametrize("address", ["example.org", "http://example.org/", "https://example.org/a b"])
def test_an_address_that_is_none_is_refused(project, address, capsys):
    with pytest.raises(SystemExit):
        addresses.main(["--site", address], project)
    assert "must begin with https://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "takes_latest"), [("0.1.3", False), ("0.10.1", True), ("0.10.0", True), ("1.0.0", True)]
)
def test_the_site_of_an_older_version_does_not_become_the_latest(project, version, takes_latest):
    for name in ("run", "constraints.txt"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    for tag in ("v0.1.0", "v0.2.0", "v0.10.0"):
        commit(project, "tag", tag)
    # An environment that is up to date, with a program that says how it was called.
    tools = project / ".venv/bin"
    tools.mkdir(parents=True)
    (tools / "mike").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "mike").chmod(0o755)
    state = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum; echo", shell=True, cwd=project, capture_output=True
    )
    (project / ".venv/sordino-docs").write_bytes(state.stdout.rstrip(b"\n") + b"\n")
    environment = {name: value for name, value in os.environ.items() if name != "SORDINO_TORCH"}
    done = subprocess.run(
        ["sh", "run", "docs", "--deploy", version],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    series = version.rpartition(".")[0]
    latest = f"deploy --push --update-aliases {series} latest\nset-default --push latest\n"
    assert done.stdout == (latest if takes_latest else f"deploy --push {series}\n")
