"""Private synthetic tables: noisy marginals, a graphical model that fits them, and records drawn from it."""

from typing import TYPE_CHECKING

from sordino.lazy_imports import lazy_names

if TYPE_CHECKING:
    from sordino.synthesis.graphical_model import GraphicalModel, NoisyMarginal, fit_model
    from sordino.synthesis.synthesizer import TableSynthesizer

__all__ = ["GraphicalModel", "NoisyMarginal", "TableSynthesizer", "fit_model"]

_HOMES = {
    "GraphicalModel": "graphical_model",
    "NoisyMarginal": "graphical_model",
    "TableSynthesizer": "synthesizer",
    "fit_model": "graphical_model",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
