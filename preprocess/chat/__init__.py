"""Chat templates, tokenization and targets."""
