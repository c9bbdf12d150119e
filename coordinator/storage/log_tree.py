"""Merkle tree over a log read from the beginning, independent of the inner nodes in the database."""

from __future__ import annotations

from node.protocol import merkle


class LogTree:
    """Merkle tree of the entries appended so far; only the right edge is kept."""

    def __init__(self) -> None:
        self.size = 0
        self._edge: dict[int, tuple[int, bytes]] = {}

    def append(self, leaf: bytes) -> list[tuple[int, int, bytes]]:
        """Append an entry's exact bytes; return the nodes (level, index, hash) it completes."""
        added = merkle.completed_nodes(self.size, merkle.leaf_hash(leaf), self._node)
        self._edge |= {level: (at, value) for level, at, value in added}
        self.size += 1
        return added

    def root(self) -> bytes:
        """Return the root over all entries so far."""
        return merkle.root(self.size, self._node)

    def _node(self, level: int, index: int) -> bytes:
        at, value = self._edge[level]
        if at != index:
            raise KeyError(f"node {level}/{index} of the log is not on its right edge")
        return value
