"""The Merkle tree over a log that is read from the beginning, whatever the database says of its inner nodes."""

from __future__ import annotations

from node.protocol import merkle


class LogTree:
    """The tree of the entries so far, of which only the right edge is kept."""

    def __init__(self) -> None:
        self.size = 0
        self._edge: dict[int, tuple[int, bytes]] = {}

    def append(self, leaf: bytes) -> list[tuple[int, int, bytes]]:
        """Add the next entry, its exact bytes; return the nodes (level, index, hash) that are complete by it."""
        added = merkle.completed_nodes(self.size, merkle.leaf_hash(leaf), self._node)
        self._edge |= {level: (at, value) for level, at, value in added}
        self.size += 1
        return added

    def root(self) -> bytes:
        """The root of all entries so far."""
        return merkle.root(self.size, self._node)

    def _node(self, level: int, index: int) -> bytes:
        at, value = self._edge[level]
        if at != index:
            raise KeyError(f"node {level}/{index} of the log is not at its edge")
        return value
