"""What a worker hands in: writing it, and reading a stranger's."""
