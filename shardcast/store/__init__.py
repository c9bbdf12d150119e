"""Versions and chunks as files, whole after a crash at any point."""
