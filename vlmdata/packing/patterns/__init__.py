"""Packing by patterns: few distinct ways to fill a pack, found by linear programming, and lower bounds."""
