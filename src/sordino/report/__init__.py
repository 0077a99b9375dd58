"""Run folder → report: a page that opens offline, Markdown, JSON, a registry entry, a picture. No torch.

Example:
    >>> from sordino.report import max_true_positive_rate
    >>> round(max_true_positive_rate(epsilon=1.0, delta=1e-5, false_positive_rate=0.01), 5)
    0.02719
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names, require

if TYPE_CHECKING:
    from sordino.report.build import build_report, store_declarations
    from sordino.report.interpretation import max_true_positive_rate
    from sordino.report.registry import registry_yaml
    from sordino.report.render import (
        ReportFiles,
        plot_report,
        render_comparison_html,
        render_comparison_markdown,
        render_html,
        render_markdown,
        render_worksheet,
        write_report,
    )
    from sordino.report.schema import Audit, Declarations, Report
    from sordino.report.utility import (
        compute_label_utility,
        compute_regression_utility,
        compute_utility,
        describe_figures,
        label_names,
        measure_private_utility,
    )

__all__ = [
    "Audit",
    "Declarations",
    "Report",
    "ReportFiles",
    "build_report",
    "compute_label_utility",
    "compute_regression_utility",
    "compute_utility",
    "describe_figures",
    "label_names",
    "max_true_positive_rate",
    "measure_private_utility",
    "plot_report",
    "registry_yaml",
    "render_comparison_html",
    "render_comparison_markdown",
    "render_html",
    "render_markdown",
    "render_worksheet",
    "store_declarations",
    "write_report",
]

require("report", "jinja2", "pydantic", "yaml", user="sordino.report")
__getattr__, __dir__ = lazy_names(__name__)
