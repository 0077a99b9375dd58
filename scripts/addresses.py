"""Set the two addresses of the project, that of the site and that of the repository, in every file that has them.

`[project.urls]` of pyproject.toml says what they are; this is the one place to ask, and this script the one way to
change them. Commit what it changed.

Run: python scripts/addresses.py --site https://example.org/sordino/ --repository https://github.com/example/sordino
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

__all__ = ["addresses", "files_with", "main"]

ROOT = Path(__file__).parents[1]


def addresses(root: Path) -> tuple[str, str]:
    """The address of the site, which ends in a slash, and that of the repository, which does not."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return urls["Documentation"].removesuffix("latest/"), urls["Source"]


def files_with(root: Path, *wanted: str) -> list[Path]:
    """Files of the repository that have one of these texts."""
    patterns = [word for text in wanted for word in ("-e", text)]
    found = subprocess.run(["git", "grep", "-lzF", *patterns], cwd=root, capture_output=True, text=True, check=False)
    if found.returncode > 1:
        raise SystemExit(f"addresses: {found.stderr.strip()}")
    return [root / name for name in found.stdout.split("\0") if name]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Replace the addresses; an address that is left out stays."""
    site, repository = addresses(root)
    parser = argparse.ArgumentParser(description="Set the addresses of the site and of the repository everywhere.")
    parser.add_argument("--site", default=site, help=f"now {site}")
    parser.add_argument("--repository", default=repository, help=f"now {repository}")
    chosen = parser.parse_args(arguments)
    wanted = {site: chosen.site.rstrip("/") + "/", repository: chosen.repository.rstrip("/").removesuffix(".git")}
    for address in wanted.values():
        if not address.startswith("https://") or any(sign in address for sign in " \"'#?\\"):
            parser.error(f"an address must begin with https:// and be plain, got {address!r}.")
    old = re.compile("|".join(map(re.escape, wanted)))
    for path in files_with(root, *wanted):
        text = path.read_text(encoding="utf-8")
        # In one pass, so that an address that was just set is not read again.
        changed = old.sub(lambda found: wanted[found[0]], text)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
            print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
