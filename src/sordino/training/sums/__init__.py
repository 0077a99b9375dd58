"""Clipped sums of a logical batch (floor 3): their bounds, and the kinds that are not plain sums of rows."""
