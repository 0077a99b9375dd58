"""Handwritten digits over simulated clients, with client-level differential privacy."""
