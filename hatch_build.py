"""The README as a package index shows it: links into the repository become addresses of the site and the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["ReadmeHook"]


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the text with absolute links."""
        site, source = metadata["urls"]["Documentation"], metadata["urls"]["Source"]

        def absolute(link: re.Match[str]) -> str:
            target, _, anchor = link[1].partition("#")
            page = re.fullmatch(r"docs/(.*)\.md", target)
            address = f"{site}{page[1]}/" if page else f"{source}/blob/main/{target}"
            return f"]({address}{'#' + anchor if anchor else ''})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https://|#)([^)\s]+)\)", absolute, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
