"""Storage of equivocation proofs: two different descriptors of one version, byte for byte."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from node.protocol.endpoints import ENVELOPE_OVERHEAD_BYTES
from node.protocol.equivocation import EquivocationProof, find_equivocation
from node.protocol.run import MAX_DESCRIPTOR_BYTES
from shardcast.errors import LocalFault, Malformed
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import digest

log = logging.getLogger(__name__)

FOLDER: Final = "evidence"
MAX_PAIRS: Final = 16
MAX_ENVELOPE_BYTES: Final = MAX_DESCRIPTOR_BYTES + ENVELOPE_OVERHEAD_BYTES


class EquivocationStore:
    """Logs each equivocation once, and keeps it in `state`/evidence if there is a state folder. Thread-safe.

    At most MAX_PAIRS are kept and logged: a hostile key can sign any number, and one is proof.
    """

    def __init__(self, state: Path | None) -> None:
        self._folder = None if state is None else state / FOLDER
        self._seen: set[frozenset[str]] = set()
        self._lock = threading.Lock()

    def keep(self, first: bytes, second: bytes, *, version: int) -> None:
        """Keep two descriptors of `version` if they are an equivocation; raises PeerFault for unsigned ones.

        Disk failures are logged, not raised.
        """
        found = find_equivocation(first, second)
        pair = frozenset((digest(first), digest(second)))
        with self._lock:
            if found is None or pair in self._seen or len(self._seen) >= MAX_PAIRS:
                return
            self._seen.add(pair)
            stored = self._store(found)
        log.error(
            "the key of run %s… signed two different descriptors of version %d: its operator tells nodes different "
            "things, or somebody else has the key as well. %s",
            found.run_id[:16],
            version,
            stored,
        )

    def _store(self, found: EquivocationProof) -> str:
        """Store both and describe the outcome, for the log."""
        if self._folder is None:
            return "Nothing is kept: this node has no state folder"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            first = _path(self._folder, found.first, version=found.version)
            second = _path(self._folder, found.second, version=found.version, beside=first)
            pair = {first: found.first, second: found.second}
            missing = {path: envelope for path, envelope in pair.items() if not path.exists()}
            if len(list(self._folder.glob("descriptor-*.bin"))) + len(missing) > 2 * MAX_PAIRS:
                return f"They are not kept: {self._folder} holds {MAX_PAIRS} such pairs already"
            for path, envelope in missing.items():
                write_atomically(path, envelope)
        except (OSError, LocalFault) as error:
            return f"They could not be kept: {error}"
        return f"Both are kept, as {first} and {second.name}; whoever runs an auditor wants them"


def _path(folder: Path, envelope: bytes, *, version: int, beside: Path | None = None) -> Path:
    """Return a path named by 12 digits of the digest, by all of it on a collision."""
    name = digest(envelope)
    short = folder / f"descriptor-{version}-{name[:12]}.bin"
    free = short != beside and (not short.exists() or _holds(short, envelope))
    return short if free else folder / f"descriptor-{version}-{name}.bin"


def _holds(path: Path, envelope: bytes) -> bool:
    try:
        return read_bounded(path, max_bytes=MAX_ENVELOPE_BYTES) == envelope
    except Malformed:
        return False
