"""The processes of a run: agreement between ranks, failures, signals, one run per folder, garbage collection."""
