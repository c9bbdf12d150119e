"""Comparison of the run's stored state with what follows from its log."""
