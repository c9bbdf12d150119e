"""Checks of this machine before a node starts on it."""
