"""Shapes and types in the signatures of the tensor rooms are checked while the tests run, and only then."""

from jaxtyping import install_import_hook

install_import_hook(["sordino.gradients", "sordino.clipping", "sordino.mechanisms"], "typechecking.check")
