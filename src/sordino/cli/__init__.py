"""The command line: one file a subject, options made of the functions of `sordino.commands`. All have `--json`.

Exit codes: 0 done, 2 usage (also a value out of range or a missing declaration), 3 the budget was refused,
1 anything else. An error is one line on stderr.
"""

from sordino.installation import require

require("cli", "rich", "typer", user="the command line")

from sordino.cli.app import app, main  # noqa: E402

__all__ = ["app", "main"]
