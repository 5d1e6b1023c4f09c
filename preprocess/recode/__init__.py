"""``vlmdata recode``: changes how a finished dataset stores its images, without its source."""
