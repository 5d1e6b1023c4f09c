"""Chat templates, tokenization, and the tokens the loss is taken over."""
