"""The newest descriptor of a run that this node has seen, from wherever it came: a coordinator, a peer, the disk.

Nobody who brings one is believed. The run's signature and the version decide: what is older than what was ever seen
here is stale, and two descriptors of one version are kept as the proof that they are. Safe to use from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from node.client.http import printable
from node.discovery.equivocation import Witness
from node.protocol.run import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shardcast.errors import LocalFault, PeerFault
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import digest

log = logging.getLogger(__name__)

MAX_ENVELOPE_BYTES: Final = MAX_DESCRIPTOR_BYTES + 512
FILE: Final = "descriptor.bin"


class News(StrEnum):
    """What an envelope was worth."""

    NEWER = "newer"
    KNOWN = "known"
    OLDER = "older"
    EQUIVOCAL = "equivocal"
    OTHER_RULES = "other_rules"


@dataclass(frozen=True, slots=True)
class Posted:
    """A verified descriptor: the exact envelope, and the run's public key (32 bytes), which signed it."""

    descriptor: Descriptor
    envelope: bytes
    run_key: bytes
    digest: str


class Board:
    """One run's newest descriptor. With `state`, what was seen survives a restart of the node."""

    def __init__(self, run_id: str, *, state: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.run_id = run_id
        self._clock = clock
        self._path = None if state is None else state / FILE
        self._witness = Witness(state)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._newest: Posted | None = None
        self._listeners: list[Callable[[Posted], None]] = []
        self._restore()

    @property
    def newest(self) -> Posted | None:
        """Return the newest descriptor that has not expired, if any."""
        newest = self._newest
        return None if newest is None or self._clock() >= newest.descriptor.expires_at else newest

    @property
    def last(self) -> Posted | None:
        """Return the newest descriptor, even if it has expired: whom it names may still be asked for a fresh one."""
        return self._newest

    def listen(self, listener: Callable[[Posted], None]) -> None:
        """Call `listener` with every newer descriptor, in the thread that brought it."""
        self._listeners.append(listener)

    def offer(self, envelope: bytes, *, source: str) -> News:
        """Take an envelope that `source` sent, if it is the run's and newer; raises PeerFault for what is not good."""
        known = self._newest
        if known is not None and known.envelope == envelope:
            return News.KNOWN
        descriptor, run_key = open_descriptor(envelope, run_id=self.run_id, now=self._clock())
        posted = Posted(descriptor, bytes(envelope), run_key, digest(envelope))
        with self._lock:
            before = self._newest
            news = self._compare(posted)
            if news is News.NEWER:
                self._newest = posted
        if news is News.NEWER:
            log.debug("descriptor %d from %s", descriptor.version, printable(source))
            for listener in self._listeners:
                listener(posted)
            self._keep(posted)
        elif news is News.EQUIVOCAL and before is not None:
            self._witness.keep(before.envelope, posted.envelope, version=descriptor.version)
        return news

    def _compare(self, posted: Posted) -> News:
        known, version = self._newest, posted.descriptor.version
        if known is None:
            return News.NEWER
        if version == known.descriptor.version:
            return News.KNOWN if known.envelope == posted.envelope else News.EQUIVOCAL
        if known.descriptor.spec != posted.descriptor.spec:
            return News.OTHER_RULES
        return News.NEWER if version > known.descriptor.version else News.OLDER

    def _restore(self) -> None:
        if self._path is None:
            return
        try:
            envelope = read_bounded(self._path, max_bytes=MAX_ENVELOPE_BYTES)
            # It was good when it was written, and may have expired since: whom it names is worth asking.
            descriptor, run_key = open_descriptor(envelope, run_id=self.run_id, now=0)
        except FileNotFoundError:
            return
        except (OSError, PeerFault) as error:
            log.warning("not using %s: %s", self._path, error)
            return
        self._newest = Posted(descriptor, envelope, run_key, digest(envelope))

    def _keep(self, posted: Posted) -> None:
        if self._path is None:
            return
        try:
            with self._writing:
                if posted is self._newest:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(self._path, posted.envelope)
        except (OSError, LocalFault) as error:
            log.warning("the newest descriptor is not kept: %s", error)
