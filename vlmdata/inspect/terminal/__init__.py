"""Draws descriptions with Rich. Reads no data, and never interprets data as markup."""
