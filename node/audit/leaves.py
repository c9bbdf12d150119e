"""The leaves of a log as an auditor keeps them: in a temporary file, since a log may be larger than memory."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from node.errors import BadReply
from node.protocol.merkle import completed_nodes, leaf_hash, root
from node.protocol.messages import MAX_ENTRY_BYTES, LogEntry
from shardcast.errors import Malformed
from shardcast.wire import decode

MAX_LOG_ENTRIES: Final = 4_000_000
MAX_LOG_BYTES: Final = 16 * 1024**3
LOG_TOO_LARGE: Final = "log_too_large"
_ENTRY: Any = LogEntry  # a union, which type checkers do not take for a type


class LeafTree:
    """Merkle tree of a growing log, of which the newest hash of each level is kept: roots need no other."""

    def __init__(self) -> None:
        self.size = 0
        self._newest: list[bytes] = []

    def append(self, leaf: bytes) -> None:
        """Add one leaf's exact bytes."""
        for level, _, value in completed_nodes(self.size, leaf_hash(leaf), self._node):
            if level == len(self._newest):
                self._newest.append(value)
            self._newest[level] = value
        self.size += 1

    def root(self) -> bytes:
        """Return the root of everything appended so far."""
        return root(self.size, self._node)

    def _node(self, level: int, _index: int) -> bytes:
        return self._newest[level]


class LeafFile:
    """Leaves in a file without a name below `folder`; use as a context manager. Memory holds 8 bytes for each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._ends = array("Q", [0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, leaf: bytes) -> None:
        """Add a leaf; raises BadReply (`log_too_large`) where the log is larger than can be audited here."""
        end = self._ends[-1] + len(leaf)
        if end > MAX_LOG_BYTES:
            raise BadReply(f"The log has more than {MAX_LOG_BYTES} bytes, which is too much here.", code=LOG_TOO_LARGE)
        self._file.seek(self._ends[-1])
        self._file.write(leaf)
        self._ends.append(end)

    def __getitem__(self, index: int) -> bytes:
        start, end = self._ends[index], self._ends[index + 1]
        self._file.seek(start)
        return self._file.read(end - start)

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))


def read_entry(leaf: bytes) -> LogEntry:
    """Decode a leaf; raises Malformed."""
    entry: LogEntry = decode(_ENTRY, leaf, max_bytes=MAX_ENTRY_BYTES)
    return entry


def read_entries(leaves: Iterable[bytes]) -> Iterator[LogEntry | Malformed]:
    """Decode every leaf; the error in the place of a malformed one."""
    for leaf in leaves:
        try:
            yield read_entry(leaf)
        except Malformed as error:
            yield error
