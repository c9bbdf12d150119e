"""The append-only log in the database; an entry is appended in the transaction of what it records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, insert, select

from coordinator.errors import StorageFault
from coordinator.storage import locks
from coordinator.storage.prepared import Prepared, insert_into, run_all
from coordinator.storage.schema import log_entries, log_nodes
from node.protocol import merkle
from node.protocol.messages import LogEntry
from shardcast.wire import encode

ENTRIES = log_entries.name
MAX_ENTRIES_PER_READ = 1000
MAX_BYTES_PER_READ = 4 * 1024 * 1024
NODES_AT_ONCE: Final = 32
_NODE_COLUMNS: Final = ("level", "index", "hash")
_NODE: Final = Prepared(
    select(log_nodes.c.hash).where(log_nodes.c.level == bindparam("level"), log_nodes.c.index == bindparam("index"))
)
_ADD_ENTRY: Final = Prepared(insert_into(log_entries, "index", "leaf"))
_LAST = Prepared(select(func.max(log_entries.c.index)))


def append(connection: Connection, entry: LogEntry) -> int:
    """Append `entry` and return its index; locks out other appends until the transaction ends."""
    locks.deciding(connection)
    leaf = encode(entry)
    index = size(connection)
    nodes = merkle.completed_nodes(index, merkle.leaf_hash(leaf), lambda level, at: _node(connection, level, at))
    run_all(connection, [(_ADD_ENTRY, {"index": index, "leaf": leaf}), *_additions(nodes)])
    return index


def add_nodes(connection: Connection, nodes: Sequence[tuple[int, int, bytes]]) -> None:
    """Store inner nodes of the Merkle tree as (level, index, hash)."""
    run_all(connection, _additions(nodes))


def _additions(nodes: Sequence[tuple[int, int, bytes]]) -> list[tuple[Prepared, dict[str, Any]]]:
    found: list[tuple[Prepared, dict[str, Any]]] = []
    for start in range(0, len(nodes), NODES_AT_ONCE):
        some = nodes[start : start + NODES_AT_ONCE]
        values = {f"{column}_{n}": node[at] for n, node in enumerate(some) for at, column in enumerate(_NODE_COLUMNS)}
        found.append((_adding(len(some)), values))
    return found


@cache
def _adding(number: int) -> Prepared:
    """Return the statement that adds so many nodes, whose columns are numbered."""
    return Prepared(
        insert(log_nodes).values([{one: bindparam(f"{one}_{n}") for one in _NODE_COLUMNS} for n in range(number)])
    )


def size(connection: Connection) -> int:
    """Return the number of entries."""
    last = _LAST.scalar(connection)
    return 0 if last is None else last + 1


def root(connection: Connection, size_: int) -> bytes:
    """Return the Merkle root of the first `size_` entries."""
    return merkle.root(size_, lambda level, at: _node(connection, level, at))


def leaves(connection: Connection, start: int, end: int) -> list[bytes]:
    """Return the exact bytes of entries start .. end - 1, cut after MAX_ENTRIES_PER_READ or MAX_BYTES_PER_READ."""
    end = min(end, start + MAX_ENTRIES_PER_READ)
    query = select(log_entries.c.leaf).where(log_entries.c.index >= start, log_entries.c.index < end)
    found, size_bytes = [], 0
    for leaf in connection.execute(query.order_by(log_entries.c.index)).scalars():
        found.append(bytes(leaf))
        size_bytes += len(leaf)
        if size_bytes >= MAX_BYTES_PER_READ:
            break
    return found


def inclusion(connection: Connection, index: int, size_: int) -> list[bytes]:
    """Return the inclusion proof of entry `index` in the log of `size_` entries."""
    return merkle.inclusion_proof(index, size_, lambda level, at: _node(connection, level, at))


def consistency(connection: Connection, first: int, second: int) -> list[bytes]:
    """Return the consistency proof that the first `first` entries are a prefix of the first `second`."""
    return merkle.consistency_proof(first, second, lambda level, at: _node(connection, level, at))


def _node(connection: Connection, level: int, index: int) -> bytes:
    found = _NODE.scalar(connection, {"level": level, "index": index})
    if found is None:
        raise StorageFault(f"Merkle node {level}/{index} of the log is missing")
    return bytes(found)
