"""Prometheus metrics of a run and its processes, and training curves."""
