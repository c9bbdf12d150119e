"""Names of the tiny policies that a run can start from, and of layers. Imports nothing, since --help lists some."""

from __future__ import annotations

from typing import Final

TINY_FAMILIES: Final = ("tiny", "eagle", "finch", "goldfinch", "frame-action")
"""Values of `model.initial`: each is warm-started, or untrained with the prefix "random-". "tiny" is a Llama."""
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of every family with attention."""
TINY_POSITIONS: Final = 512
"""Longest sequence of the Llama among them; the recurrent ones have no limit."""
TINY_HIDDEN: Final = 128
"""Hidden units of each."""
