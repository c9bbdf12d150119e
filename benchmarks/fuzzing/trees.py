"""Edits of Python values, for formats whose documents have a writer that takes them: MessagePack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from benchmarks.fuzzing.mutation import MAX_INPUT_BYTES, Pairs, Tree, edit_tree, mixed, of_one, scramble
from benchmarks.fuzzing.target import Mutator

EDGES: tuple[Tree, ...] = (
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e-4, 1.0001e-4, 1e308, 5e-324, math.nan, math.inf, -math.inf),
    *("", "x", "\udcff", "é" * 300, b"", b"\xff", bytes(258), bytes(4096)),
    *([], [[]], [0] * 5000, [b""] * 200, [None], [1.5] * 300, Pairs()),
)


def edit_values(rng: Random, values: Any) -> Any:
    """Return a copy of `values` (mappings, lists, and what they may hold) with a few edits."""
    try:
        return _plain(edit_tree(rng, _tree(values), edges=EDGES))
    except RecursionError:  # nested deeper than can be written here
        return values


def msgpack_mutator() -> Mutator:
    """Edit MessagePack documents as trees, and as bytes."""

    def change(rng: Random, data: bytes) -> bytes:
        try:
            values = edit_values(rng, msgspec.msgpack.decode(data))
            return msgspec.msgpack.encode(values)[:MAX_INPUT_BYTES]
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            return scramble(rng, data)

    return mixed((5, of_one(change)), (1, of_one(scramble)))


def _tree(values: Any) -> Tree:
    if isinstance(values, Mapping):
        return Pairs([key, _tree(value)] for key, value in values.items())
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return [_tree(value) for value in values]
    return values


def _plain(tree: Tree) -> Any:
    if isinstance(tree, Pairs):
        return {str(key): _plain(value) for key, value in tree}
    return [_plain(item) for item in tree] if isinstance(tree, list) else tree
