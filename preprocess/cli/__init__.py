"""The commands of preprocessing: options, progress and reports."""
