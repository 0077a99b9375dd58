"""What a run has charged, may still charge, and pays ahead (floor 3)."""
