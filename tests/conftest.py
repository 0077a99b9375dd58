"""Shapes and types in the signatures of the tensor rooms are checked while the tests run, and only then.

Property tests have no deadline: how long an example takes says how busy the machine is.
"""

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook(["sordino.gradients", "sordino.clipping", "sordino.mechanisms"], "typechecking.check")
settings.register_profile("sordino", deadline=None)
settings.load_profile("sordino")
