"""Run folder → report (floor 5): a page that opens offline, and a picture. It reads run folders only, and no torch.

Example:
    >>> from sordino.report import attack_bound
    >>> round(attack_bound(epsilon=1.0, delta=1e-5, false_positive_rate=0.01), 5)
    0.02719
"""

from sordino.report.limits import attack_bound
from sordino.report.reading import read
from sordino.report.schema import Report
from sordino.report.writing import Written, write

__all__ = ["Report", "Written", "attack_bound", "read", "write"]
