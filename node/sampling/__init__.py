"""Forced sampling: draw the token determined by policy, seed and position."""
