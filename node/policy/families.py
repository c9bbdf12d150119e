"""Names of the tiny policies that a run can start from. Imports nothing, since command lines list them in --help."""

from __future__ import annotations

from typing import Final

TINY_FAMILIES: Final = ("tiny", "eagle", "finch", "goldfinch", "frame-action")
"""Values of `model.initial`: each is warm-started, or untrained with the prefix "random-". "tiny" is a Llama."""
TINY_POSITIONS: Final = 512
"""Longest sequence of the Llama among them; the recurrent ones have no limit."""
TINY_HIDDEN: Final = 128
"""Hidden units of each."""
