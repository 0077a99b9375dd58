"""Fixed feature maps and public models to put in front of private training."""

from sordino.transfer.public_models import (
    TRAINABLE,
    FixedNorm,
    FrozenFeatures,
    PublicInput,
    feature_extractor,
    file_sha256,
    module_digest,
    replace_head,
    set_trainable,
)
from sordino.transfer.scattering import (
    PatchFeatures,
    Scattering,
    scattering_features,
    synthetic_images,
    synthetic_second_moments,
)

__all__ = [
    "FixedNorm",
    "FrozenFeatures",
    "PatchFeatures",
    "PublicInput",
    "Scattering",
    "TRAINABLE",
    "feature_extractor",
    "file_sha256",
    "module_digest",
    "replace_head",
    "scattering_features",
    "set_trainable",
    "synthetic_images",
    "synthetic_second_moments",
]
