"""The command line: one module per command, found through entry points."""
