"""What a run tells its user: logs, profiles, and notes about data, memory and numbers that are not finite."""
