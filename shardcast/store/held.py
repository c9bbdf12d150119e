"""Bookkeeping of one held version: its wanted payloads and their files."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcast.manifest import Payload, SignedManifest
from shardcast.store.payload_file import PayloadFile


@dataclass(slots=True)
class Held:
    """A version whose manifest is held. `names` are its payloads' digests, the result first; `wanted` those kept."""

    signed: SignedManifest
    names: tuple[str, ...]
    wanted: set[str]
    used: int
    files: dict[str, PayloadFile] = field(default_factory=dict)

    def payload(self, name: str) -> Payload:
        return self.signed.manifest.payloads[self.names.index(name)]

    @property
    def full(self) -> str:
        return self.names[0]

    @property
    def planned_bytes(self) -> int:
        return sum(self.payload(name).payload_bytes for name in self.wanted)
