"""The newest descriptor of a run seen by this node, from a coordinator, a peer or the disk.

Sources are untrusted: signature and version decide. An older version is stale (rollback protection), and two of one
version are kept as proof of equivocation. Thread-safe.
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
from node.discovery.equivocation import MAX_ENVELOPE_BYTES, EquivocationStore
from node.protocol.run import Descriptor, open_descriptor
from shardcast.errors import LocalFault, PeerFault
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import digest

log = logging.getLogger(__name__)

FILE: Final = "descriptor.bin"


class OfferResult(StrEnum):
    """Outcome of `DescriptorStore.offer`."""

    NEWER = "newer"
    KNOWN = "known"
    OLDER = "older"
    EQUIVOCAL = "equivocal"
    OTHER_RULES = "other_rules"


@dataclass(frozen=True, slots=True)
class VerifiedDescriptor:
    """A verified descriptor: the exact envelope, and the run's public key (32 bytes), which signed it."""

    descriptor: Descriptor
    envelope: bytes
    run_key: bytes
    digest: str


class DescriptorStore:
    """One run's newest descriptor; with `state`, it survives restarts."""

    def __init__(self, run_id: str, *, state: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.run_id = run_id
        self._clock = clock
        self._path = None if state is None else state / FILE
        self._equivocations = EquivocationStore(state)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._newest: VerifiedDescriptor | None = None
        self._listeners: list[Callable[[VerifiedDescriptor], None]] = []
        self._restore()

    @property
    def newest(self) -> VerifiedDescriptor | None:
        """The newest descriptor, if it has not expired."""
        newest = self._newest
        return None if newest is None or self._clock() >= newest.descriptor.expires_at else newest

    @property
    def last(self) -> VerifiedDescriptor | None:
        """The newest descriptor, even if expired: the endpoints in it may still serve a newer one."""
        return self._newest

    def listen(self, listener: Callable[[VerifiedDescriptor], None]) -> None:
        """Call `listener` with every newer descriptor, in the thread that brought it."""
        self._listeners.append(listener)

    def offer(self, envelope: bytes, *, source: str) -> OfferResult:
        """Verify an envelope from `source` and keep it if newer; raises PeerFault."""
        known = self._newest
        if known is not None and known.envelope == envelope:
            return OfferResult.KNOWN
        descriptor, run_key = open_descriptor(envelope, run_id=self.run_id, now=self._clock())
        verified = VerifiedDescriptor(descriptor, bytes(envelope), run_key, digest(envelope))
        with self._lock:
            before = self._newest
            news = self._compare(verified)
            if news is OfferResult.NEWER:
                self._newest = verified
        if news is OfferResult.NEWER:
            log.debug("descriptor %d from %s", descriptor.version, printable(source))
            for listener in self._listeners:
                listener(verified)
            self._keep(verified)
        elif news is OfferResult.EQUIVOCAL and before is not None:
            self._equivocations.keep(before.envelope, verified.envelope, version=descriptor.version)
        return news

    def _compare(self, verified: VerifiedDescriptor) -> OfferResult:
        known, version = self._newest, verified.descriptor.version
        if known is None:
            return OfferResult.NEWER
        if version == known.descriptor.version:
            return OfferResult.KNOWN if known.envelope == verified.envelope else OfferResult.EQUIVOCAL
        if known.descriptor.spec != verified.descriptor.spec:
            return OfferResult.OTHER_RULES
        return OfferResult.NEWER if version > known.descriptor.version else OfferResult.OLDER

    def _restore(self) -> None:
        if self._path is None:
            return
        try:
            envelope = read_bounded(self._path, max_bytes=MAX_ENVELOPE_BYTES)
            # It was valid when written and may have expired: its endpoints are still worth trying.
            descriptor, run_key = open_descriptor(envelope, run_id=self.run_id, now=0)
        except FileNotFoundError:
            return
        except (OSError, PeerFault) as error:
            log.warning("not using %s: %s", self._path, error)
            return
        self._newest = VerifiedDescriptor(descriptor, envelope, run_key, digest(envelope))

    def _keep(self, verified: VerifiedDescriptor) -> None:
        if self._path is None:
            return
        try:
            with self._writing:
                if verified is self._newest:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(self._path, verified.envelope)
        except (OSError, LocalFault) as error:
            log.warning("the newest descriptor is not kept: %s", error)
