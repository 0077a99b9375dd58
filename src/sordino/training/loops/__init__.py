"""A user's own loop, followed from the batch to the loss (floor 3): what it did, and what that proves."""
