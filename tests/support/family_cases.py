"""Families with attention as a test's parameters: three beside the tier's other tests, the others where a mark says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Final

import pytest

from node.policy.families import ATTENTION_FAMILIES

KINDS: Final = ("llama", "gemma2", "glm4_moe")
"""Attending to everything, with windows and caps, with experts: a change that breaks a family mostly breaks one of
these."""
IS_TIED: Final = dict(zip(sorted(ATTENTION_FAMILIES), cycle([True, False])))
"""Whether a family is tested with one tensor for both embeddings: half are, since nothing of a family depends on it."""


def families(others: pytest.MarkDecorator, names: Iterable[str] = sorted(ATTENTION_FAMILIES)) -> list[object]:
    """Return `names` as parameters; those of families that are not of `KINDS` have the mark `others`."""
    return [
        pytest.param(name, marks=others) if name in ATTENTION_FAMILIES and name not in KINDS else name for name in names
    ]
