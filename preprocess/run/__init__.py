"""A run: plans shards, has an engine make them, and completes, continues or repairs the dataset."""
