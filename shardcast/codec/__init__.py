"""Deltas: a new version told as changes of an earlier one."""
