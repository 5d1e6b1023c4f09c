"""Recipes: from a row to a conversation."""
