"""The command line: one module a command, found through entry points."""
