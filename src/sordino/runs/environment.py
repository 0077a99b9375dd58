"""Versions and platform of a run, without anything that names the machine or the user (floor 2)."""

import os
import platform
import shutil
import subprocess
import sys
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
        "accelerator": _accelerator(),
        "code": _commit(),
        "packages": versions,
    }


def _accelerator() -> str | None:
    """The model of the first CUDA device, when the process has torch loaded and a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


def _commit() -> str | None:
    """The git commit of the working directory, with a mark when tracked files differ from it; None outside git.

    It says which code a run was made with; names of files, branches and remotes stay out.
    """
    git = shutil.which("git")
    if git is None:
        return None
    try:
        head, changes = (
            subprocess.run([git, *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}, changed since" if changes else head
