"""Joining a run by a coordinator's URL or through peers."""
