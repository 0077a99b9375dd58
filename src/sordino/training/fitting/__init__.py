"""What stands behind `fit` (floor 3): its optimizer, its run folder, its progress, its compiled step."""
