"""The tiny policies that a run can start from, by name. Imports nothing: command lines list them in --help."""

from __future__ import annotations

from typing import Final

TINY_FAMILIES: Final = ("tiny", "eagle", "finch", "goldfinch", "frame-action")
"""What `model.initial` names: each is warmed up, and untrained with "random-" before it. "tiny" is a Llama."""
