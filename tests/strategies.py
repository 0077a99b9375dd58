"""Hypothesis strategies and seeds shared by tests."""

from hypothesis import strategies as st

__all__ = ["record_counts", "seeds", "sizes"]

record_counts = st.sampled_from([0, 1, 2, 5])
seeds = st.integers(min_value=0, max_value=2**31 - 1)
sizes = st.integers(min_value=1, max_value=5)
