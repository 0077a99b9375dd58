"""Versions and platform of a run, without anything that names the machine or the user (floor 2)."""

import os
import platform
from importlib import metadata

__all__ = ["environment"]

_PACKAGES = ("sordino", "torch", "numpy", "scipy", "safetensors", "cryptography")


def environment() -> dict[str, object]:
    """What `environment.json` holds."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": versions,
    }
