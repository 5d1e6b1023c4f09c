"""Settings of a run: their groups, how they are read and checked. Nothing here needs torch."""
