"""What a publisher signs: the manifest of one version, and the short-lived head that names the newest.

No file names travel: a manifest lists chunks by BLAKE3 digest, and a version is named by the digest of its
manifest's payload. The head is re-signed every few seconds, so that a relay which withholds a new version
can show nothing but a head that has expired (after TUF's timestamp role).

Everything here is pure: bytes in, value or typed error out. Whether a valid manifest is also the one to
believe is `shardcast.trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import wire
from shardcast.envelope import open_envelope, seal
from shardcast.errors import Malformed
from shardcast.wire import Count, Digest, Wire

MANIFEST_DOMAIN = "shardcast/manifest"
HEAD_DOMAIN = "shardcast/head"
SCHEMA_VERSION = 1
DIGEST_BYTES = 32
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is believed about sizes and clocks before anything is parsed, allocated or kept.

    The defaults carry 128 GiB in chunks of 1 MiB, or 2 TiB in chunks of 16 MiB: a manifest of 2**17 digests
    takes 5.6 MiB in base64.
    """

    max_head_bytes: int = KIB
    max_manifest_bytes: int = 6 * MIB
    max_payload_bytes: int = 2048 * GIB
    max_chunks: int = 2**17
    min_chunk_bytes: int = 4 * KIB
    max_chunk_bytes: int = 16 * MIB
    clock_skew_s: float = 30.0


DEFAULT_LIMITS = Limits()


class Head(Wire, frozen=True, kw_only=True):
    """Which version is the newest, for a minute or so. Times are whole seconds since 1970 (UTC)."""

    run_id: Digest
    version: Count
    manifest_digest: Digest
    issued_at: Count
    expires_at: Count


class Manifest(Wire, frozen=True, kw_only=True):
    """One published version: what its chunks are, and what they must add up to.

    `previous` is the manifest digest of the version published before this one. The payload is what the
    chunks spell. With encoding "full" it is the result itself; with "delta" it is applied to the result
    whose digest is `base`, published as `base_version`. `chunk_digests` are 32-byte BLAKE3 digests end to end.
    """

    run_id: Digest
    version: Count
    previous: Digest | None
    issued_at: Count
    expires_at: Count
    encoding: Literal["full", "delta"]
    base: Digest | None
    base_version: Count | None
    chunk_bytes: Count
    payload_bytes: Count
    chunk_digests: bytes
    result_bytes: Count
    result_digest: Digest

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_digests) // DIGEST_BYTES

    def chunk_digest(self, index: int) -> str:
        return self.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES].hex()

    def chunk_length(self, index: int) -> int:
        """Bytes of chunk `index`; only the last may be shorter than `chunk_bytes`."""
        return min(self.chunk_bytes, self.payload_bytes - index * self.chunk_bytes)

    def chunks(self) -> Iterator[tuple[str, int]]:
        """(digest, length in bytes) of every chunk, in order."""
        return ((self.chunk_digest(index), self.chunk_length(index)) for index in range(self.chunk_count))


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with the digest that names it and the envelope it came in, byte for byte."""

    manifest: Manifest
    digest: str
    envelope: bytes


def seal_head(head: Head, key: Ed25519PrivateKey) -> bytes:
    return seal(wire.encode(head), domain=HEAD_DOMAIN, version=SCHEMA_VERSION, key=key)


def seal_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> SignedManifest:
    payload = wire.encode(manifest)
    envelope = seal(payload, domain=MANIFEST_DOMAIN, version=SCHEMA_VERSION, key=key)
    return SignedManifest(manifest=manifest, digest=wire.digest(payload), envelope=envelope)


def open_head(data: bytes, *, run_id: str, publisher_key: bytes, limits: Limits = DEFAULT_LIMITS) -> Head:
    """Check signature, form and run of a head; its time is for `TrustedState` to judge."""
    opened = open_envelope(
        data,
        domain=HEAD_DOMAIN,
        versions=(SCHEMA_VERSION,),
        max_payload_bytes=limits.max_head_bytes,
        signer=publisher_key,
    )
    head = wire.decode(Head, opened.payload, max_bytes=limits.max_head_bytes)
    _check_run(head.run_id, run_id)
    return head


def open_manifest(
    data: bytes, *, run_id: str, publisher_key: bytes | None, limits: Limits = DEFAULT_LIMITS
) -> SignedManifest:
    """Check signature, form, run and inner consistency of a manifest; its time is for `TrustedState` to judge.

    `publisher_key` None accepts any signer: only for manifests that were checked before they were stored.
    """
    opened = open_envelope(
        data,
        domain=MANIFEST_DOMAIN,
        versions=(SCHEMA_VERSION,),
        max_payload_bytes=limits.max_manifest_bytes,
        signer=publisher_key,
    )
    manifest = wire.decode(Manifest, opened.payload, max_bytes=limits.max_manifest_bytes)
    _check_run(manifest.run_id, run_id)
    check_consistency(manifest, limits)
    return SignedManifest(manifest=manifest, digest=wire.digest(opened.payload), envelope=data)


def check_consistency(manifest: Manifest, limits: Limits) -> None:
    """Refuse a manifest whose figures contradict each other or exceed `limits`."""
    if not 1 <= manifest.payload_bytes <= limits.max_payload_bytes:
        raise Malformed(f"a payload of {manifest.payload_bytes} bytes is out of bounds", code="payload_size")
    if not 1 <= manifest.result_bytes <= limits.max_payload_bytes:
        raise Malformed(f"a result of {manifest.result_bytes} bytes is out of bounds", code="payload_size")
    if not limits.min_chunk_bytes <= manifest.chunk_bytes <= limits.max_chunk_bytes:
        raise Malformed(f"chunks of {manifest.chunk_bytes} bytes are out of bounds", code="chunk_size")
    expected = -(-manifest.payload_bytes // manifest.chunk_bytes)
    if expected > limits.max_chunks:
        raise Malformed(f"{expected} chunks, more than {limits.max_chunks}", code="chunk_count")
    if len(manifest.chunk_digests) != expected * DIGEST_BYTES:
        raise Malformed(f"{len(manifest.chunk_digests)} bytes of digests for {expected} chunks", code="chunk_count")
    if manifest.expires_at <= manifest.issued_at:
        raise Malformed("a manifest that expires before it is issued", code="bad_window")
    _check_encoding(manifest)


def _check_encoding(manifest: Manifest) -> None:
    has_base = manifest.base is not None and manifest.base_version is not None
    has_any = manifest.base is not None or manifest.base_version is not None
    if manifest.encoding == "delta":
        if not has_base or (manifest.base_version or 0) >= manifest.version:
            raise Malformed("a delta without an earlier base", code="bad_base")
    elif has_any:
        raise Malformed("a full version that names a base", code="bad_base")
    elif manifest.payload_bytes != manifest.result_bytes:
        raise Malformed("a full version whose payload is not its result", code="payload_size")


def _check_run(found: str, expected: str) -> None:
    if found != expected:
        raise Malformed(f"signed for run {found[:16]}…, expected {expected[:16]}…", code="wrong_run")
