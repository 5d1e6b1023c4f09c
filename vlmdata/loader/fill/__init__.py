"""fill."""
