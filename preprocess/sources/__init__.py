"""Sources of rows, all read through Hugging Face datasets."""
