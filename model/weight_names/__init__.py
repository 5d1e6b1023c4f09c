"""Weight name tables: which Hugging Face tensors form which parameter. Families list their entries with these."""
