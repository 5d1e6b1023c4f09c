"""Pixels of items and their storage: decoding, resizing, codecs."""
