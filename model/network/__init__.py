"""The network: vision tower, decoder, and their merging. Start reading at ``qwen35_vl.py``."""
