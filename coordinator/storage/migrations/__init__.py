"""Alembic steps; the newest equals schema.py."""
