"""Experiments on made-up records before any private record is read."""
