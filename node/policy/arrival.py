"""Numbers of policies that are looked at while they arrive, so that nobody reads a new policy once more for that.

A chunk of a policy is in memory, and has its digest, when the broadcast client writes it: in any order, long before the
header is known that says where numbers are. Noted is which chunks hold nothing but finite numbers if they hold numbers
of the run's dtype alone. Of a whole file, `inspect_once` then reads the header and what is not noted; so it finds what
it would have found, with the same code, and what is noted wrongly or not at all costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Final

from node.policy.config import DTYPES
from node.policy.errors import PolicyError
from node.policy.memory import unless_out_of_memory
from node.policy.reading import inspect_once
from node.policy.streaming import SeenChunks, are_finite
from node.policy.weights import ITEM_BYTES
from shardcast import Payload

MOST_ARRIVING: Final = 4
"""Policies of whose chunks something is noted, a byte for each."""


class ArrivingPolicies:
    """A broadcast client's `ResultReader` of a run's policies, whose numbers have `dtype`. Thread-safe."""

    def __init__(self, dtype: str) -> None:
        self._stored_as = next(name for name, of_torch in DTYPES.items() if of_torch == dtype)
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, bytearray] = OrderedDict()

    def chunk(self, name: str, payload: Payload, index: int, data: bytes | bytearray | memoryview) -> None:
        """Look at a chunk that is being written."""
        if len(data) % ITEM_BYTES[self._stored_as]:
            return
        with self._lock:
            if name not in self._seen:
                self._seen[name] = bytearray(payload.chunk_count)
            seen = self._seen[name]
            while len(self._seen) > MOST_ARRIVING:
                self._seen.popitem(last=False)
        with contextlib.suppress(MemoryError):  # then it is read later, as one of which nothing is noted
            seen[index] = are_finite(data, stored_as=self._stored_as)

    def whole(self, name: str, payload: Payload, path: Path) -> None:
        """Look at what is left of a policy that has arrived; whoever uses it is told what is wrong with it."""
        with self._lock:
            seen = self._seen.pop(name, None)
        if seen is not None:
            chunks = SeenChunks(self._stored_as, payload.chunk_bytes, bytes(seen))
            with contextlib.suppress(PolicyError):
                unless_out_of_memory(partial(inspect_once, path, seen=chunks))
