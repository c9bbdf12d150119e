"""Find a run's coordinator from the string its operator gave out."""
