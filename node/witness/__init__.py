"""A witness of logs: it signs checkpoints that extend what it has seen, and nothing else."""
