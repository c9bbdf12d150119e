"""Measure honest work on the available machines, and fit a run's limits to it."""
