"""Make a release: set the version and the dates, commit, tag. Nothing is pushed.

The version stands in ``src/sordino/__init__.py``; the wheel and `sordino --version` read it there. CITATION.cff repeats
it, and CHANGELOG.md gets a dated heading.

Run: ./run release VERSION [--check] [--date YYYY-MM-DD]
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from addresses import addresses

__all__ = ["changed_files", "main", "obstacles"]

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_HEADING = re.compile(r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", flags=re.MULTILINE)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _place(url: str) -> str:
    """Host and path of a repository: the same for https://host/a/b, git@host:a/b.git and ssh://git@host/a/b."""
    return re.sub(r"^(\w+://)?([^@/]*@)?", "", url).replace(":", "/", 1).removesuffix(".git").rstrip("/")


def obstacles(root: Path, version: str) -> list[str]:
    """What stands in the way of this release, each with what to do; empty if nothing does."""
    if not _VERSION.fullmatch(version):
        return [f"version must be MAJOR.MINOR.PATCH, got {version!r}."]
    found = []
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    news = changelog.partition("## Unreleased\n")[2].partition("\n## ")[0]
    if not re.search(r"^- ", news, flags=re.MULTILINE):
        found.append("CHANGELOG.md has nothing under Unreleased. Say what changed.")
    released = _HEADING.findall(changelog)
    if released and _number(version) <= max(map(_number, released)):
        found.append(f"{version} is not after {max(released, key=_number)}, the last release in CHANGELOG.md.")
    if "to be filled in by the maintainers" in (root / "SECURITY.md").read_text(encoding="utf-8"):
        found.append("SECURITY.md has no address for private reports. Fill it in.")
    if _git(root, "status", "--porcelain"):
        found.append("The working tree has changes. Commit them first.")
    if _git(root, "branch", "--show-current") != "main":
        found.append("A release is made on main. Check it out.")
    repository, origin = addresses(root)[1], _git(root, "config", "--default", "", "remote.origin.url")
    if origin and _place(origin) != _place(repository):
        found.append(
            f"pyproject.toml names the repository {repository}, and origin is {origin}. Run scripts/addresses.py."
        )
    if _git(root, "tag", "--list", f"v{version}"):
        found.append(f"The tag v{version} exists. Choose the next version.")
    return found


def _replaced(text: str, pattern: str, replacement: str, name: str) -> str:
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    if not count:
        raise SystemExit(f"{name} must have a line {pattern!r}, got none.")
    return changed


def changed_files(root: Path, version: str, date: str) -> dict[Path, str]:
    """The files of the release with their new text."""
    source, citation, changelog = (
        root / "src/sordino/__init__.py",
        root / "CITATION.cff",
        root / "CHANGELOG.md",
    )
    cited = _replaced(citation.read_text(encoding="utf-8"), r"^version: .*$", f"version: {version}", "CITATION.cff")
    cited = re.sub(r"^date-released: .*\n", "", cited, flags=re.MULTILINE)
    cited = _replaced(cited, r"^version: .*$", f"version: {version}\ndate-released: {date}", "CITATION.cff")
    heading = f"## Unreleased\n\n## {version} - {date}"
    return {
        source: _replaced(
            source.read_text(encoding="utf-8"), r'^__version__ = ".*"$', f'__version__ = "{version}"', source.name
        ),
        citation: cited,
        changelog: _replaced(changelog.read_text(encoding="utf-8"), r"^## Unreleased$", heading, "CHANGELOG.md"),
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Check, and without `--check` make the release."""
    parser = argparse.ArgumentParser(description="Set the version and the dates, commit, tag. Nothing is pushed.")
    parser.add_argument("version")
    parser.add_argument("--check", action="store_true", help="only say what stands in the way")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    chosen = parser.parse_args(arguments)
    stopped = obstacles(root, chosen.version)
    for obstacle in stopped:
        print(f"release: {obstacle}", file=sys.stderr)
    if stopped or chosen.check:
        return 1 if stopped else 0
    for path, text in changed_files(root, chosen.version, chosen.date).items():
        path.write_text(text, encoding="utf-8")
    _git(root, "commit", "-qam", f"Release {chosen.version}")
    _git(root, "tag", "-a", f"v{chosen.version}", "-m", f"sordino {chosen.version}")
    print(f"v{chosen.version} is tagged. Look at it (git show), then: git push origin main v{chosen.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
