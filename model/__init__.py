"""Qwen3.5-VL on megatron-core: the bundled model and trainer."""
