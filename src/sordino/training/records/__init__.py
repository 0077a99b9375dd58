"""Batches of records (floor 3): how they are collated, laid out, counted by unit, and drawn."""
