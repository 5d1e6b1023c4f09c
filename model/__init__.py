"""Qwen3.5-VL and Qwen3-VL on megatron-core: the bundled model and trainer."""
