"""The plan of an epoch: which samples share a pack, in which order packs come, and which rank gets them."""
