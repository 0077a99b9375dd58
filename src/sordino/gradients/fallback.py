"""Any module that no rule reads: per-record gradients by ``torch.func`` (floor 1, gradients)."""
