"""Parsers of the broadcast: envelopes, heads, manifests, fraud proofs, relay lists and deltas."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed, scramble
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import DIGEST, NOW, RUN_ID, RUN_KEY, same
from node.protocol.endpoints import MAX_RELAY_LIST_BYTES
from node.protocol.messages import RelayList
from shardcast import FraudProof, check_fraud_proof, wire
from shardcast.codec.delta import DeltaFile
from shardcast.codec.delta import encode as encode_delta
from shardcast.envelope import MAGIC, open_envelope, seal
from shardcast.errors import Malformed, PeerFault
from shardcast.fetch.sources import Sources
from shardcast.manifest import (
    HEAD_DOMAIN,
    HEAD_VERSION,
    KIB,
    MANIFEST_DOMAIN,
    MANIFEST_VERSION,
    Delta,
    Head,
    Manifest,
    Payload,
    SignedManifest,
    seal_head,
    seal_manifest,
)
from shardcast.trust import Seen, TrustedState
from shardcast.urls import valid_sources

PUBLIC_KEY = RUN_KEY.public_key().public_bytes_raw()
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
MAX_PAYLOAD_BYTES = KIB
DELTA_BYTES = 20 * KIB
WEAK_KEYS = ("00" * 32, "01" + "00" * 31, "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
# With this signature (R the neutral element, S = 0) a key of small order signs much of anything.
WEAK_SIGNATURE = bytes.fromhex("01" + "00" * 63)


def head(version: int = 5, digest: str = DIGEST) -> Head:
    return Head(run_id=RUN_ID, version=version, manifest_digest=digest, issued_at=NOW, expires_at=NOW + 60)


def manifest(chunks: int = 3, *, version: int = 5, last: int = 100, previous: str | None = DIGEST) -> Manifest:
    return Manifest(
        run_id=RUN_ID,
        version=version,
        previous=previous,
        issued_at=NOW,
        expires_at=NOW + 3600,
        result_digest=DIGEST,
        full=_payload(chunks, last),
        deltas=(),
    )


def _payload(chunks: int, last: int) -> Payload:
    return Payload(
        chunk_bytes=4 * KIB,
        payload_bytes=(chunks - 1) * 4 * KIB + last,
        chunk_digests=b"".join(bytes.fromhex(wire.digest(bytes([index]))) for index in range(chunks)),
    )


def _with_deltas() -> Manifest:
    ways = [Delta(base=DIGEST, base_version=version, payload=_payload(2, 7)) for version in (4, 0)]
    return replace(manifest(), deltas=tuple(ways))


def _trust() -> TrustedState:
    """Return a client's state that has seen version 4."""
    envelope = seal_head(head(4), RUN_KEY)
    seen = Seen(run_id=RUN_ID, version=4, manifest_digest=DIGEST, head=envelope)
    return TrustedState(run_id=RUN_ID, publisher_key=PUBLIC_KEY, seen=seen)


# Envelopes.


def _envelope_of(fields: Sequence[bytes]) -> bytes:
    return b"".join(fields)


def _fields(data: bytes) -> list[bytes]:
    """Split an honest envelope: magic, domain with its length, version, key, payload's length, payload, signature."""
    after = 5 + data[4]
    edges = (0, 4, after, after + 2, after + 34, after + 38, len(data) - 64, len(data))
    return [data[start:end] for start, end in pairwise(edges)]


def _edited_envelope(rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Change one field, and half of the time sign again, by the key that is named in it or another."""
    data = rng.choice(corpus)
    if data[:4] != MAGIC or len(data) < 200:
        return scramble(rng, data)
    fields = _fields(data)
    at = rng.randrange(len(fields))
    fields[at] = rng.choice((scramble(rng, fields[at]), _fields(rng.choice(corpus[:1]))[at], *_replacements(rng, at)))
    if rng.random() < 0.5:
        fields[6] = rng.choice((RUN_KEY, OTHER_KEY)).sign(_envelope_of(fields[:6]))
    return _envelope_of(fields)


def _replacements(rng: Random, at: int) -> tuple[bytes, ...]:
    """Return other values of a field."""
    if at == 1:
        domain = rng.choice((b"", b"shardcast/manifest", b"swarmproof/run", b"\xff" * 255, b"shardcast/head\0"))
        return (bytes([len(domain)]) + domain, bytes([rng.randrange(256)]) + domain)
    if at == 3:
        return (*map(bytes.fromhex, WEAK_KEYS), b"\xff" * 32, b"\x80".rjust(32, b"\0"))
    if at == 4:
        return tuple(struct.pack(">I", size) for size in (0, 1, 64, 2**31, 2**32 - 1, 2**32 - 64))
    return (WEAK_SIGNATURE, b"\xff" * 64) if at == 6 else (b"",)


def _envelope(_: ExitStack) -> Harness:
    def run(data: bytes) -> None:
        opened = open_envelope(data, domain=HEAD_DOMAIN, versions=(1, 2), max_payload_bytes=MAX_PAYLOAD_BYTES)
        start = len(data) - 64 - len(opened.payload)
        fields = (
            MAGIC,
            bytes([len(opened.domain)]),
            opened.domain.encode("ascii"),
            struct.pack(">H", opened.version),
            opened.signer,
            struct.pack(">I", len(opened.payload)),
        )
        assert data[:start] == b"".join(fields), "it encodes to other bytes"
        honest = (key.public_key().public_bytes_raw() for key in (RUN_KEY, OTHER_KEY))
        assert opened.signer in honest, "signed by a key that nobody has"

    payloads = (wire.encode(head()), b"", b"x" * MAX_PAYLOAD_BYTES)
    seeds = [seal(payload, domain=HEAD_DOMAIN, version=1, key=RUN_KEY) for payload in payloads]
    mutate = mixed((3, _edited_envelope), (1, bytes_mutator(MAGIC, bytes(64), WEAK_SIGNATURE)))
    return Harness(seeds, run, (PeerFault,), mutate)


# What is in them.


def _head(_: ExitStack) -> Harness:
    """Feed heads that are really signed: the publisher may be an attacker."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=HEAD_DOMAIN, version=HEAD_VERSION, key=RUN_KEY)
        trust = _trust()
        believed = trust.accept_head(envelope, now=NOW)
        assert wire.encode(believed) == data, "it encodes to other bytes"
        assert trust.seen is not None
        assert believed.version >= 4, "rolled back"

    return Harness([wire.encode(head()), wire.encode(head(4))], run, (PeerFault,), json_mutator())


def _manifest(_: ExitStack) -> Harness:
    """Feed manifests that are really signed, as the newest one and as an archived one."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=MANIFEST_DOMAIN, version=MANIFEST_VERSION, key=RUN_KEY)
        signed = _trust().accept_archived(envelope, 5)
        _check_manifest(signed, data)
        assert _trust().accept_manifest(envelope, NOW, signed.digest).manifest == signed.manifest

    honest = (manifest(), manifest(1, last=1), manifest(40, last=4 * KIB, previous=None), _with_deltas())
    return Harness([wire.encode(one) for one in honest], run, (PeerFault,), json_mutator())


def _check_manifest(signed: SignedManifest, data: bytes) -> None:
    believed = signed.manifest
    assert wire.encode(believed) == data, "it encodes to other bytes"
    for payload in believed.payloads:
        chunks = list(payload.chunks())
        assert sum(length for _, length in chunks) == payload.payload_bytes, "the chunks are not the payload"
        assert all(0 < length <= payload.chunk_bytes for _, length in chunks)
        assert all(wire.is_digest(digest) for digest, _ in chunks)
    assert all(delta.base_version < believed.version for delta in believed.deltas), "a delta from the future"


def _fraud_proof(_: ExitStack) -> Harness:
    """Feed evidence against a publisher, from whoever claims to have it."""

    def run(data: bytes) -> None:
        proof = same(FraudProof, data, max_bytes=64 * KIB)
        version = check_fraud_proof(proof, run_id=RUN_ID, publisher_key=PUBLIC_KEY)
        assert version in (4, 5), "a publisher was convicted of what it never signed"

    envelopes = (
        seal_head(head(5), RUN_KEY),
        seal_head(head(5, "ee" * 32), RUN_KEY),
        seal_manifest(manifest(version=6), RUN_KEY).envelope,
        seal_manifest(manifest(previous="ee" * 32), RUN_KEY).envelope,
    )
    first, second, third, fourth = envelopes
    convicting = (FraudProof(first=first, second=second), FraudProof(first=second, second=third))
    proves_nothing = FraudProof(first=first, second=fourth)
    seeds = [wire.encode(proof) for proof in convicting]
    return Harness(seeds, run, (PeerFault,), json_mutator(), hostile=[wire.encode(proves_nothing)])


def _relay_list(_: ExitStack) -> Harness:
    """Feed URLs that a coordinator lists, until they are sources to fetch from."""

    def run(data: bytes) -> int:
        listed = same(RelayList, data, max_bytes=MAX_RELAY_LIST_BYTES)
        sound = valid_sources(listed.relays)
        # A LocalFault here would end a worker for what a stranger has announced.
        sources = Sources(sound)
        assert len(sources.urls) <= len(sound)
        stripes = tuple(valid_sources(each) for each in listed.stripes)
        sources.set_urls(sound, stripes=stripes)
        assert 1 <= sources.stripes <= max(1, len(stripes))
        return len(sources.urls)

    urls = (
        *("http://192.0.2.1:8720", "https://relay.example/a/b/", "http://[2001:db8::1]:80", "http://a:0"),
        *("https://user:pw@host/", "http://x?q#f", "http://[::1", "http://é.example", "http://a/\u200b", "http://%zz"),
    )
    seeds = [wire.encode(RelayList(relays=urls, stripes=(urls[:2], urls[2:5]))), wire.encode(RelayList(relays=()))]
    characters = (b"://", b"[", b"]", b"@", b":", b"?", b"#", b"%", b"\xc2\xa0", b"\xe2\x80\xae", b"\\t", b"http")
    return Harness(seeds, run, (PeerFault,), mixed((2, json_mutator()), (1, bytes_mutator(*characters))))


def _delta(stack: ExitStack) -> Harness:
    """Feed deltas that a publisher signed, whatever is in them."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="fuzz-delta-")))
    base_path, delta_path = folder / "base", folder / "delta"
    words = np.random.default_rng(0).standard_normal(DELTA_BYTES // 2).astype(np.float16)
    base = words.tobytes()
    base_path.write_bytes(base)

    def encoded(change: Callable[[npt.NDArray[np.uint16]], None]) -> bytes:
        changed = words.view(np.uint16).copy()
        change(changed)
        (folder / "result").write_bytes(changed.tobytes())
        size = encode_delta(base_path, folder / "result", delta_path, chunk_bytes=4 * KIB, max_bytes=10**6, threads=1)
        assert size is not None
        return delta_path.read_bytes()

    def few(changed: npt.NDArray[np.uint16]) -> None:
        changed[::150] += 1
        changed[::1000] += 77

    def most(changed: npt.NDArray[np.uint16]) -> None:
        changed += np.arange(len(changed), dtype=np.uint16) % 7

    def run(data: bytes) -> int:
        delta_path.write_bytes(data)
        with DeltaFile.open(delta_path, result_bytes=DELTA_BYTES, chunk_bytes=4 * KIB) as delta:
            assert delta.window_count == 1
            if not delta.changed(0):
                return 0
            delta.apply(0, memoryview(bytearray(base)))
        return 1

    numbers = tuple(struct.pack("<I", number) for number in (0, 1, 2**16, 2**21, 2**31, 2**32 - 1))
    seeds = [encoded(few), encoded(most), encoded(lambda changed: changed.fill(0))]
    return Harness(seeds, run, (Malformed,), bytes_mutator(b"SCDELTA1", *numbers))


TARGETS = (
    Target("broadcast.delta", "a run's publisher", 20, _delta),
    Target("broadcast.envelope", "anybody", 90, _envelope),
    Target("broadcast.head", "a run's publisher, any relay", 40, _head),
    Target("broadcast.manifest", "a run's publisher, any relay", 60, _manifest),
    Target("broadcast.fraud_proof", "anybody with evidence", 30, _fraud_proof),
    Target("broadcast.relay_list", "whoever answers as the coordinator", 40, _relay_list),
)
