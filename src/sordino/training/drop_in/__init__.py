"""What stands behind the engine that leaves users their loop (floor 3)."""
