"""One shard as a pure function of source rows and options."""
