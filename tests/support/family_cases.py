"""Model families as a test's parameters: one of each kind in the test's own tier, the others where a mark says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Final

import pytest

from node.policy.families import ATTENTION_FAMILIES, TINY_RECURRENT

KINDS: Final = ("llama", "gemma2", "glm4_moe", "qwen3_next", "goldfinch")
"""Attending to everything, with windows and caps, with experts, with recurrent layers too, a recurrence with attention
behind it: a change that
breaks a family mostly breaks one of these."""
IS_TIED: Final = dict(zip(sorted(ATTENTION_FAMILIES), cycle([True, False])))
"""Whether a family is tested with one tensor for both embeddings: half are, since nothing of a family depends on it."""


def families(others: pytest.MarkDecorator, names: Iterable[str] = sorted(ATTENTION_FAMILIES)) -> list[object]:
    """Return `names` as parameters; those of families that are not of `KINDS` have the mark `others`."""
    elsewhere = {*ATTENTION_FAMILIES, *TINY_RECURRENT} - {*KINDS}
    return [pytest.param(name, marks=others) if name in elsewhere else name for name in names]
