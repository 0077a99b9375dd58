"""Value → noisy value, with the event that accounts for it (floor 1)."""

from sordino.mechanisms.gaussian import GaussianMechanism, standard_normal

__all__ = ["GaussianMechanism", "standard_normal"]
