"""Prometheus metrics of a run and of its processes, and curves."""
