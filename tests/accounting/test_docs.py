"""The page on accounting runs as it stands."""

import re
from pathlib import Path


def test_every_snippet_of_the_accounting_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text()
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(snippet, names)
