"""Programs for maintainers, which need a checkout."""
