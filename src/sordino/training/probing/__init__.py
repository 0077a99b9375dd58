"""Experiments on synthetic records before any private record is read."""
