"""Weights: names and layouts of Hugging Face and megatron-core, and conversion between them."""
