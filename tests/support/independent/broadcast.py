"""Policies as they travel: heads, manifests, chunks and deltas from sources that nobody trusts (section 10)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .delta import apply_delta
from .envelope import open_envelope
from .http_api import send
from .messages import HEAD, MANIFEST, PAYLOAD
from .values import Refused, decode, digest, encode

MAX_HEAD_BYTES = 1024
MAX_MANIFEST_BYTES = 6 * 2**20
CLOCK_TOLERANCE_S = 30


def chunk_digests(payload: Mapping[str, Any]) -> list[str]:
    """Return the digest of each chunk of a payload; raises Refused where their number does not fit its size."""
    raw = base64.b64decode(payload["chunk_digests"])
    count = -(-payload["payload_bytes"] // payload["chunk_bytes"])
    if len(raw) != 32 * count:
        raise Refused("bad_manifest", f"{len(raw)} bytes of digests for {count} chunks")
    return [raw[at : at + 32].hex() for at in range(0, len(raw), 32)]


def payload_name(payload: Mapping[str, Any]) -> str:
    """Return the digest by which sources know a payload."""
    return digest(encode(PAYLOAD, payload))


def check_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return `manifest` after the checks that its types do not make."""
    chunk_digests(manifest["full"])
    bases = [delta["base_version"] for delta in manifest["deltas"]]
    for delta in manifest["deltas"]:
        chunk_digests(delta["payload"])
        smaller = delta["payload"]["payload_bytes"] < manifest["full"]["payload_bytes"]
        if not smaller or delta["base_version"] >= manifest["version"] or len(set(bases)) != len(bases):
            raise Refused("bad_manifest", "a delta that cannot be one")
    if manifest["expires_at"] <= manifest["issued_at"]:
        raise Refused("bad_manifest", "it ends before it begins")
    return manifest


@dataclass
class Publications:
    """What a run has published, as far as this reader has seen: which statements to believe."""

    run_id: str
    run_key: str
    highest: int = -1
    contradictions: list[tuple[bytes, bytes]] = field(default_factory=list)
    _stated: dict[int, tuple[str, bytes]] = field(default_factory=dict)

    def _open(self, envelope: bytes, domain: str, kind: Any, most: int) -> tuple[dict[str, Any], bytes]:
        opened = open_envelope(envelope, domain, max_payload_bytes=most, signer=self.run_key)
        value = decode(kind, opened.payload, max_bytes=most)
        if value["run_id"] != self.run_id:
            raise Refused("wrong_run")
        return value, opened.payload

    def _state(self, version: int, manifest_digest: str, envelope: bytes) -> None:
        known = self._stated.setdefault(version, (manifest_digest, envelope))
        if known[0] != manifest_digest:
            self.contradictions.append((known[1], envelope))
            raise Refused("equivocation", f"two manifests of version {version}")

    def accept_head(self, envelope: bytes, *, now: float) -> dict[str, Any]:
        """Return a head that holds; raises Refused: `equivocation`, `rollback`, `not_yet_valid`, `expired`."""
        head, _ = self._open(envelope, "shardcast/head", HEAD, MAX_HEAD_BYTES)
        self._state(head["version"], head["manifest_digest"], envelope)
        if head["issued_at"] > now + CLOCK_TOLERANCE_S:
            raise Refused("not_yet_valid")
        self._refuse_expired(head, now)
        if head["version"] < self.highest:
            raise Refused("rollback", f"version {head['version']} after {self.highest}")
        self.highest = head["version"]
        return head

    def accept_manifest(self, envelope: bytes, manifest_digest: str, *, now: float | None) -> dict[str, Any]:
        """Return the manifest with this digest.

        `now` is None for an old version that is asked for on purpose: age and order are no matter then. Otherwise
        raises Refused with `rollback` or `expired`, too.
        """
        manifest, payload = self._open(envelope, "shardcast/manifest", MANIFEST, MAX_MANIFEST_BYTES)
        if digest(payload) != manifest_digest:
            raise Refused("wrong_manifest")
        self._state(manifest["version"], manifest_digest, envelope)
        if manifest["previous"] is not None:
            self._state(manifest["version"] - 1, manifest["previous"], envelope)
        if now is not None:
            self._refuse_expired(manifest, now)
            if manifest["version"] < self.highest:
                raise Refused("rollback")
        return check_manifest(manifest)

    def _refuse_expired(self, value: dict[str, Any], now: float) -> None:
        if value["expires_at"] < now - CLOCK_TOLERANCE_S:
            raise Refused("expired", f"{now - value['expires_at']:.0f} s ago")


@dataclass
class Sources:
    """Origins and relays, asked in their order; `refused` says what each got wrong."""

    urls: Sequence[str]
    refused: list[tuple[str, str]] = field(default_factory=list)
    fetched_bytes: int = 0

    def head(self, publications: Publications, *, now: float) -> dict[str, Any]:
        """Return the newest head that any source has and that holds."""
        held = []
        for url in self.urls:
            try:
                reply = send(url, "GET", "/v1/head", max_bytes=64 * 1024, seconds=10)
                held.append(publications.accept_head(reply.expect(200), now=now))
            except Refused as error:
                self.refused.append((url, error.code))
        if not held:
            raise Refused("no_head", str(self.refused))
        return max(held, key=lambda head: head["version"])

    def manifest(self, publications: Publications, manifest_digest: str, *, now: float | None) -> dict[str, Any]:
        """Return the manifest with this digest from the first source that has it."""
        for url in self.urls:
            try:
                reply = send(url, "GET", f"/v1/manifests/{manifest_digest}", max_bytes=MAX_MANIFEST_BYTES + 1024)
                return publications.accept_manifest(reply.expect(200), manifest_digest, now=now)
            except Refused as error:
                self.refused.append((url, error.code))
        raise Refused("no_manifest", str(self.refused))

    def chunk(self, payload: Mapping[str, Any], index: int) -> bytes:
        """Return one chunk of a payload, of the first source whose bytes have its digest."""
        length = min(payload["chunk_bytes"], payload["payload_bytes"] - index * payload["chunk_bytes"])
        path = f"/v1/payloads/{payload_name(payload)}/{index}?wait=5"
        for url in self.urls:
            try:
                data = send(url, "GET", path, max_bytes=length, seconds=20).expect(200)
            except Refused as error:
                self.refused.append((url, error.code))
                continue
            if digest(data) == chunk_digests(payload)[index]:
                self.fetched_bytes += length
                return data
            self.refused.append((url, "wrong_chunk"))
        raise Refused("no_chunk", str(self.refused))

    def payload(self, payload: Mapping[str, Any]) -> bytes:
        """Return a whole payload."""
        return b"".join(self.chunk(payload, index) for index in range(len(chunk_digests(payload))))

    def file(self, manifest: Mapping[str, Any], held: Mapping[str, bytes]) -> bytes:
        """Return the result of a manifest: by a delta from a file in `held` (by result digest), else whole.

        Whatever a delta gives is compared with the chunks of `full`, and what differs is fetched.
        """
        full = manifest["full"]
        made = next(
            (self._patched(delta, full, held[delta["base"]]) for delta in manifest["deltas"] if delta["base"] in held),
            b"",
        )
        size = full["chunk_bytes"]
        chunks = []
        for index, wanted in enumerate(chunk_digests(full)):
            chunk = made[index * size : (index + 1) * size]
            chunks.append(chunk if digest(chunk) == wanted else self.chunk(full, index))
        result = b"".join(chunks)
        if digest(result) != manifest["result_digest"]:
            raise Refused("bad_manifest", "the chunks are not the result")
        return result

    def _patched(self, delta: Mapping[str, Any], full: Mapping[str, Any], base: bytes) -> bytes:
        try:
            return apply_delta(self.payload(delta["payload"]), base, full)
        except Refused as error:
            self.refused.append(("delta", error.code))
            return b""
