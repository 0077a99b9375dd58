"""Run folder → report (floor 6): a page that opens offline, Markdown, JSON, a registry entry, a picture. No torch.

Example:
    >>> from sordino.report import attack_bound
    >>> round(attack_bound(epsilon=1.0, delta=1e-5, false_positive_rate=0.01), 5)
    0.02719
"""

from sordino.report.evaluation import private_utility
from sordino.report.limits import attack_bound
from sordino.report.markdown import comparison_markdown, markdown
from sordino.report.measured import utility
from sordino.report.parts import Audit
from sordino.report.picture import draw
from sordino.report.reading import read
from sordino.report.registry import registry_yaml
from sordino.report.schema import Report
from sordino.report.writing import Written, comparison_html, html, write

__all__ = [
    "Audit",
    "Report",
    "Written",
    "attack_bound",
    "comparison_html",
    "comparison_markdown",
    "draw",
    "html",
    "markdown",
    "private_utility",
    "read",
    "registry_yaml",
    "utility",
    "write",
]
