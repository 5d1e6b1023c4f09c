"""The streaming side: from an epoch plan to packed batches, read in part, in order, and resumable."""
