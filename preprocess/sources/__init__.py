"""Sources of rows: files on disk, in buckets and on the hub, read fragment by fragment."""
