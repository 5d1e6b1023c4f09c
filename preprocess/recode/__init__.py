"""``vlmdata recode``: changes how a finished dataset stores its items, or brings it up to the current format."""
