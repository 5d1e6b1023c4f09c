"""bins."""
