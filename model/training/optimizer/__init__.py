"""Gradients and weights: reduction over ranks, AdamW, copies of weights, fully sharded parameters."""
