"""The audit of a dataset directory: re-hashes every byte and checks every sample."""
