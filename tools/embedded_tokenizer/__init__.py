"""Builds the embedded tokenizer from a training text of its own. No part of the installed package."""
