"""Docstrings as the site reads them: `Example:` has doctests, as the `Examples:` of the Google style."""

import re

import griffe

__all__ = ["ExamplesExtension"]


class ExamplesExtension(griffe.Extension):
    """Read `Example:` as `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the heading before the docstring is parsed."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
