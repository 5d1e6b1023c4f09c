"""Makes a dataset again with another tokenizer, template or target rule, with the pixels of a finished one."""
