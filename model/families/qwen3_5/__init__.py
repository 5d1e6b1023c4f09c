"""Qwen3.5-VL. Start reading at ``spec.py`` for what the family is, at ``model.py`` for what it computes."""
