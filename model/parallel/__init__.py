"""Process groups, the CPU mode and collectives."""
