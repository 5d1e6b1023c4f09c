"""Weights: names and layouts in Hugging Face and megatron-core, and conversion between the two."""
