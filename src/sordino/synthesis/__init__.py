"""Private synthetic tables: noisy marginals, a graphical model that fits them, and records drawn from it."""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names, require

if TYPE_CHECKING:
    from sordino.synthesis.graphical_model import GraphicalModel, NoisyMarginal, fit_model
    from sordino.synthesis.synthesizer import TableSynthesizer

__all__ = ["GraphicalModel", "NoisyMarginal", "TableSynthesizer", "fit_model"]

require("estimators", "sklearn", user="sordino.synthesis")
__getattr__, __dir__ = lazy_names(__name__)
