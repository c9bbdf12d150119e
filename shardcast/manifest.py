"""What a publisher signs: the manifest of one version, and the short-lived head that names the newest.

No file names travel: a manifest lists the BLAKE3 digests of chunks, and a version is named by the digest of its
manifest. A version can be had as a whole, or as a delta from an earlier one (`shardcast.codec.delta`); what is
transferred of either is a payload, named by the digest of its chunk list. The head is
re-signed every few seconds, so that a relay which withholds a new version can show nothing but a head that has
expired (after TUF's timestamp role).

Everything here is pure: bytes in, value or typed error out. Whether a valid manifest is also the one to
believe is `shardcast.trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import wire
from shardcast.envelope import open_envelope, seal
from shardcast.errors import Malformed
from shardcast.wire import Count, Digest, Wire

MANIFEST_DOMAIN = "shardcast/manifest"
HEAD_DOMAIN = "shardcast/head"
HEAD_VERSION = 1
MANIFEST_VERSION = 2
DIGEST_BYTES = 32
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on sizes and clock skew, checked before anything is parsed, allocated or kept.

    The defaults allow 128 GiB in chunks of 1 MiB, or 2 TiB in chunks of 16 MiB: a manifest of 2**17 digests takes 5.6
    MiB in base64.
    """

    max_head_bytes: int = KIB
    max_manifest_bytes: int = 6 * MIB
    max_payload_bytes: int = 2048 * GIB
    max_chunks: int = 2**17
    max_deltas: int = 4
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


class Payload(Wire, frozen=True, kw_only=True):
    """Bytes to be transferred in chunks. `chunk_digests` are concatenated 32-byte BLAKE3 digests."""

    chunk_bytes: Count
    payload_bytes: Count
    chunk_digests: bytes

    @property
    def digest(self) -> str:
        """Digest of the canonical encoding, which covers sizes and chunks; it names this payload."""
        return wire.digest(wire.encode(self))

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_digests) // DIGEST_BYTES

    def chunk_digest(self, index: int) -> str:
        return self.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES].hex()

    def chunk_length(self, index: int) -> int:
        """Return the length of chunk `index` in bytes; only the last may be shorter than `chunk_bytes`."""
        return min(self.chunk_bytes, self.payload_bytes - index * self.chunk_bytes)

    def chunks(self) -> Iterator[tuple[str, int]]:
        """Yield (digest, length in bytes) of every chunk, in order."""
        return ((self.chunk_digest(index), self.chunk_length(index)) for index in range(self.chunk_count))


class Delta(Wire, frozen=True, kw_only=True):
    """A delta to the result from the result with digest `base`, published as `base_version`."""

    base: Digest
    base_version: Count
    payload: Payload


class Manifest(Wire, frozen=True, kw_only=True):
    """One published version: its payload, and deltas to it from earlier versions.

    `previous` is the manifest digest of the version published before this one. `result_digest` is the BLAKE3 digest of
    the whole file. However it is obtained, every chunk of the result must have the digest given in `full`.
    """

    run_id: Digest
    version: Count
    previous: Digest | None
    issued_at: Count
    expires_at: Count
    result_digest: Digest
    full: Payload
    deltas: tuple[Delta, ...]

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """Every payload of this version, the result first."""
        return (self.full, *(delta.payload for delta in self.deltas))

    @property
    def folded_delta(self) -> Delta | None:
        """The delta that reaches furthest back; None without deltas."""
        return min(self.deltas, key=lambda delta: delta.base_version, default=None)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with the digest that names it and the envelope it came in, byte for byte."""

    manifest: Manifest
    digest: str
    envelope: bytes


def seal_head(head: Head, key: Ed25519PrivateKey) -> bytes:
    """Sign a head and return its envelope."""
    return seal(wire.encode(head), domain=HEAD_DOMAIN, version=HEAD_VERSION, key=key)


def seal_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> SignedManifest:
    """Sign a manifest and return it with its digest and envelope."""
    payload = wire.encode(manifest)
    envelope = seal(payload, domain=MANIFEST_DOMAIN, version=MANIFEST_VERSION, key=key)
    return SignedManifest(manifest=manifest, digest=wire.digest(payload), envelope=envelope)


def open_head(data: bytes, *, run_id: str, publisher_key: bytes, limits: Limits = DEFAULT_LIMITS) -> Head:
    """Verify signature, encoding and run of a head; `TrustedState` judges its times."""
    opened = open_envelope(
        data,
        domain=HEAD_DOMAIN,
        versions=(HEAD_VERSION,),
        max_payload_bytes=limits.max_head_bytes,
        signer=publisher_key,
    )
    head = wire.decode(Head, opened.payload, max_bytes=limits.max_head_bytes)
    _check_run(head.run_id, run_id)
    return head


def open_manifest(
    data: bytes, *, run_id: str | None, publisher_key: bytes | None, limits: Limits = DEFAULT_LIMITS
) -> SignedManifest:
    """Verify signature, encoding, run and consistency of a manifest; `TrustedState` judges its times.

    `publisher_key` None accepts any signer and `run_id` None any run: only for stored manifests that were verified
    before.
    """
    opened = open_envelope(
        data,
        domain=MANIFEST_DOMAIN,
        versions=(MANIFEST_VERSION,),
        max_payload_bytes=limits.max_manifest_bytes,
        signer=publisher_key,
    )
    manifest = wire.decode(Manifest, opened.payload, max_bytes=limits.max_manifest_bytes)
    if run_id is not None:
        _check_run(manifest.run_id, run_id)
    check_consistency(manifest, limits)
    return SignedManifest(manifest=manifest, digest=wire.digest(opened.payload), envelope=data)


def check_consistency(manifest: Manifest, limits: Limits) -> None:
    """Raise Malformed if a manifest contradicts itself or exceeds `limits`."""
    if manifest.expires_at <= manifest.issued_at:
        raise Malformed("manifest expires before it is issued", code="bad_window")
    if len(manifest.deltas) > limits.max_deltas:
        raise Malformed(f"manifest has {len(manifest.deltas)} deltas, more than {limits.max_deltas}", code="bad_base")
    _check_payload(manifest.full, limits)
    bases = [delta.base_version for delta in manifest.deltas]
    if len(set(bases)) < len(bases) or any(base >= manifest.version for base in bases):
        raise Malformed("delta bases are not distinct earlier versions", code="bad_base")
    for delta in manifest.deltas:
        _check_payload(delta.payload, limits)
        if delta.payload.payload_bytes >= manifest.full.payload_bytes:
            raise Malformed("delta is not smaller than its result", code="payload_size")


def _check_payload(payload: Payload, limits: Limits) -> None:
    if not 1 <= payload.payload_bytes <= limits.max_payload_bytes:
        raise Malformed(f"payload of {payload.payload_bytes} bytes is out of bounds", code="payload_size")
    if not limits.min_chunk_bytes <= payload.chunk_bytes <= limits.max_chunk_bytes:
        raise Malformed(f"chunk size of {payload.chunk_bytes} bytes is out of bounds", code="chunk_size")
    expected = -(-payload.payload_bytes // payload.chunk_bytes)
    if expected > limits.max_chunks:
        raise Malformed(f"payload has {expected} chunks, more than {limits.max_chunks}", code="chunk_count")
    if len(payload.chunk_digests) != expected * DIGEST_BYTES:
        raise Malformed(
            f"payload has {len(payload.chunk_digests)} bytes of digests for {expected} chunks", code="chunk_count"
        )


def _check_run(found: str, expected: str) -> None:
    if found != expected:
        raise Malformed(f"envelope is signed for run {found[:16]}…, expected {expected[:16]}…", code="wrong_run")
