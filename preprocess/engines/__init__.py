"""Engines: where shard jobs run. ``base`` says what one is, every other file here is one."""
