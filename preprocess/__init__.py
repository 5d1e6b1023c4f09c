"""The offline side: from source rows to a dataset directory."""
