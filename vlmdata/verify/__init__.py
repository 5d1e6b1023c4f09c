"""The audit of a dataset directory: every byte re-hashed, every sample checked against what it must be."""
