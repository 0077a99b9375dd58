"""What a private training uses beside the private records, named and hashed (floor 1)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sordino.errors import InvalidArgument

__all__ = ["PublicInput", "file_sha256", "fingerprint"]

_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class PublicInput:
    """Something public that a training stands on: weights, or a data set.

    A guarantee speaks about the private records only. It says nothing for those whose records are in a public input, so
    a statement names every one of them, by a hash that anyone can compare.

    Args:
        name: what it is and where it comes from.
        sha256: of a file, or of weights as `fingerprint` counts them; 64 hexadecimal digits.

    Example:
        >>> PublicInput(name="weights of a net", sha256="0123456789abcdef" * 4).words
        'weights of a net (SHA-256 0123456789abcdef…)'
    """

    name: str
    sha256: str

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise InvalidArgument("sha256 must be 64 hexadecimal digits in lower case, got something else. Hash again.")

    @property
    def words(self) -> str:
        """Name and beginning of the hash, for a statement."""
        return f"{self.name} (SHA-256 {self.sha256[:_SHOWN]}…)"

    def require(self, file: Path) -> Path:
        """`file`, if it is this input.

        Raises:
            InvalidArgument: it is another one.
        """
        found = file_sha256(file)
        if found != self.sha256:
            raise InvalidArgument(
                f"{file.name} must be {self.words}, got a file of SHA-256 {found[:_SHOWN]}…. Install the version named."
            )
        return file


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over a module's parameters and buffers: their names, types, shapes and bytes, in the order of names.

    The same weights have the same fingerprint in whatever kind of file they came.

    Example:
        >>> fingerprint(nn.Linear(2, 1)) == fingerprint(nn.Linear(2, 1))
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
