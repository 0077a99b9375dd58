"""Private synthetic tables: noisy marginals, a graphical model that fits them, and records drawn from it."""
