"""Descriptions drawn with Rich. Nothing here reads data, and no data is ever taken for markup."""
