"""What every process has: logs, metrics and signals."""
