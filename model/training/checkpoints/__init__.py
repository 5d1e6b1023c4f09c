"""Checkpoints of a run: what they hold, how they are written and read, and where a run starts from."""
