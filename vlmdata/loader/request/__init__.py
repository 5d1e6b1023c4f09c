"""Which samples: the requests of a rank, from the plan and the index."""
