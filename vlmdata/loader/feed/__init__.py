"""Filled buffers as batches to the consumer, in order and ahead of time."""
