"""Clipping (floor 1): per-record gradient norms to factors, each method with its sensitivity."""

from sordino.clipping.flat import FlatClipping

__all__ = ["FlatClipping"]
