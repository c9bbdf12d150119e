"""The command line: one module a command, and shared options."""
