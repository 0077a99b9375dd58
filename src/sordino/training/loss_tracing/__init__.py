"""A user's custom loop, followed from the batch to the loss: what it did, and whether that ties records together."""
