"""Datasets of a run's operator: the canonical file, how it is made of other files, and how it reaches a node."""
