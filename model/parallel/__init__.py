"""Process groups, the CPU mode, and what ranks exchange."""
