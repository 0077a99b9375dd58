"""Run the blocks of a page of the installed package from top to bottom, as a reader would.

Run: python run_page.py PAGE [--commands]
"""

import re
import subprocess
import sys
from importlib.resources import files


def main(page: str, *, commands: bool) -> None:
    """Python blocks share their names; with `commands` those of the shell run between them."""
    text = (files("sordino") / "docs" / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, page, "exec"), names)
        elif commands:
            subprocess.run(["/bin/sh", "-e", "-c", block], check=True)


if __name__ == "__main__":
    main(sys.argv[1], commands="--commands" in sys.argv[2:])
