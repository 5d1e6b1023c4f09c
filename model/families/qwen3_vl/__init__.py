"""Qwen3-VL. Start with ``spec.py`` for the family's interface and ``model.py`` for the computation."""
