"""Chooses samples of a dataset, makes a dataset of them with the same shards, and compares two datasets."""
