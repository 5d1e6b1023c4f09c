"""Engines, which run shard jobs. ``base`` defines the interface; each other file is an engine."""
