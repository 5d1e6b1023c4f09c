"""The page: one self-contained HTML file, or the same page served over a whole dataset."""
