"""The log's leaves against its stored Merkle tree, and against the checkpoints that are kept outside of the database.

Two hashes a leaf, twice if something differs; memory for one page and the tree's right edge. Leaves are confirmed by
the kept checkpoints, and those after the last one by the stored tree. Only from confirmed leaves is anything derived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from coordinator.errors import StorageFault
from coordinator.integrity.differences import Difference, shown
from coordinator.storage import derived_rows, log
from coordinator.storage.database import Connection
from coordinator.storage.log_tree import LogTree
from node.protocol.checkpoints import Checkpoint

Report = Callable[[Difference], None]


def check_tree(connection: Connection, kept: Mapping[Path, Checkpoint], *, repair: bool, report: Report) -> bool:
    """Report where leaves, tree and kept checkpoints differ; return whether the leaves are confirmed.

    With `repair`, nodes of the stored tree that differ from confirmed leaves are written.
    """
    size = log.size(connection)
    recomputed = _Recomputed(connection, wanted={one.size for one in kept.values()})
    wrong = sum(1 for _ in recomputed.differing_nodes())
    if recomputed.missing is not None:
        report(_lost("log_entries", str(recomputed.missing), "leaf", "nothing", "an entry"))
        return False
    published = {path: one for path, one in kept.items() if recomputed.roots.get(one.size) != one.root}
    for path, one in published.items():
        has = f"{size} entries" if one.size > size else recomputed.roots[one.size].hex()
        report(_lost("log", str(path), f"root of {one.size} entries", has, one.root.hex()))
    covered = max((one.size for one in kept.values()), default=0)
    confirmed = not published and (covered >= size or _stored_root(connection, size) == recomputed.tree.root())
    # The stored tree is the published one: then it is the leaves that changed, and the nodes above follow from them.
    leaves_changed = bool(published) and all(_stored_root(connection, one.size) == one.root for one in kept.values())
    for level, index, stored, derived in recomputed.differing_nodes() if wrong else ():
        if leaves_changed:
            if level == 0:
                report(_lost("log_entries", str(index), "leaf", f"hash {shown(derived)}", f"hash {shown(stored)}"))
            continue
        report(Difference("log_nodes", f"{level}/{index}", "hash", shown(stored), shown(derived), confirmed))
        if confirmed and repair:
            derived_rows.put_tree_node(connection, level, index, derived)
    for level, index in derived_rows.surplus_tree_nodes(connection, size):
        report(Difference("log_nodes", f"{level}/{index}", "", "a node", "nothing", confirmed))
        if confirmed and repair:
            derived_rows.remove_tree_node(connection, level, index)
    return confirmed


def _lost(table: str, key: str, column: str, stored: str, derived: str) -> Difference:
    return Difference(table, key, column, stored, derived, can_repair=False)


def _stored_root(connection: Connection, size: int) -> bytes | None:
    try:
        return log.root(connection, size)
    except StorageFault:
        return None


class _Recomputed:
    """The tree that the leaves give, its roots at the `wanted` sizes, and the first entry that is `missing`."""

    def __init__(self, connection: Connection, *, wanted: set[int]) -> None:
        self._connection, self._wanted = connection, wanted
        self.tree = LogTree()
        self.roots: dict[int, bytes] = {}
        self.missing: int | None = None

    def differing_nodes(self) -> Iterator[tuple[int, int, bytes | None, bytes]]:
        """Yield (level, index, stored, derived) of each stored node that is not the leaves'."""
        self.tree = LogTree()
        self._note_root()
        while page := derived_rows.leaves_from(self._connection, self.tree.size):
            nodes = defaultdict[int, dict[int, bytes]](dict)
            for index, leaf in page:
                if index != self.tree.size:
                    self.missing = self.tree.size
                    return
                for level, at, value in self.tree.append(leaf):
                    nodes[level][at] = value
                self._note_root()
            for level, derived in nodes.items():
                stored = derived_rows.tree_nodes(self._connection, level, min(derived), max(derived) + 1)
                for at, value in derived.items():
                    if stored.get(at) != value:
                        yield level, at, stored.get(at), value

    def _note_root(self) -> None:
        if self.tree.size in self._wanted:
            self.roots[self.tree.size] = self.tree.root()
