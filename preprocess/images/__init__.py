"""Decoding, normalising and resizing images."""
