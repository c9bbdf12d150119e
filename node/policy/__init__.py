"""A policy as a file: configuration, families and safe loading."""
