"""Several processes that train one model (floor 3)."""
