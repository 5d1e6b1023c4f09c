"""Offline preprocessing: from source rows to a dataset directory."""
