"""The page: a self-contained HTML file, or the same page served for a whole dataset."""
