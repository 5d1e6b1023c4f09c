"""Packs with room for a number of tokens, and of patches: one limit and two."""
