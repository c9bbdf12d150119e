"""Signed commands to a running node, by its owner or operator."""
