"""Fixed feature maps and public models to put in front of private training (floor 1: knows torch and the words)."""

from sordino.transfer.features import FrozenFeatures, features
from sordino.transfer.heads import TRAINABLE, FixedNorm, replace_head, set_trainable
from sordino.transfer.patches import PatchFeatures
from sordino.transfer.pictures import made_pictures, second_moments_of_pictures
from sordino.transfer.public import PublicInput, file_sha256, fingerprint
from sordino.transfer.scattering import Scattering, scattering_features

__all__ = [
    "FixedNorm",
    "FrozenFeatures",
    "PatchFeatures",
    "PublicInput",
    "Scattering",
    "TRAINABLE",
    "features",
    "file_sha256",
    "fingerprint",
    "made_pictures",
    "replace_head",
    "scattering_features",
    "second_moments_of_pictures",
    "set_trainable",
]
