"""The operator's commands, one module each, and shared options."""
