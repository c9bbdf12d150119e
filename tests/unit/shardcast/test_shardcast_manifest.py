"""A manifest or head with one thing wrong must never be taken for an order by a relay or a worker."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from shardcast import Limits, wire
from shardcast.envelope import seal
from shardcast.errors import BadSignature, Malformed, PeerFault
from shardcast.manifest import (
    HEAD_DOMAIN,
    MANIFEST_DOMAIN,
    Head,
    open_head,
    open_manifest,
    seal_head,
    seal_manifest,
)

GOLDEN_HEAD = b'{"run_id":"%s","version":1,"manifest_digest":"' + b"ab" * 32 + b'","issued_at":1000,"expires_at":1060}'


def test_the_wire_form_of_a_head_is_golden(publisher: Any) -> None:
    """Publishers of an older release must stay readable: the bytes are part of the protocol."""
    assert wire.encode(publisher.head()) == GOLDEN_HEAD % publisher.run_id.encode()


def test_the_wire_form_of_a_manifest_is_golden(publisher: Any) -> None:
    payload = b"x" * 5000
    signed = seal_manifest(publisher.manifest(payload, deltas=(publisher.delta(),)), publisher.key)
    short = bytes.fromhex(wire.digest(b"d"))
    digests = bytes.fromhex(wire.digest(payload[:4096]) + wire.digest(payload[4096:]))
    golden = (
        f'{{"run_id":"{publisher.run_id}","version":1,"previous":null,"issued_at":1000,"expires_at":90000,'
        f'"result_digest":"{wire.digest(payload)}","full":{{"chunk_bytes":4096,"payload_bytes":5000,'
        f'"chunk_digests":"{base64.b64encode(digests).decode()}"}},"deltas":[{{"base":"{"cd" * 32}","base_version":0,'
        f'"payload":{{"chunk_bytes":4096,"payload_bytes":1,"chunk_digests":"{base64.b64encode(short).decode()}"}}}}]}}'
    )
    assert wire.encode(signed.manifest) == golden.encode()
    assert signed.digest == wire.digest(golden.encode())
    assert open_manifest(signed.envelope, run_id=publisher.run_id, publisher_key=publisher.public) == signed


def test_chunks_cover_the_payload_and_only_the_last_is_short(publisher: Any) -> None:
    payload = publisher.payload(b"x" * 10_000)
    assert [length for _, length in payload.chunks()] == [4096, 4096, 1808]
    assert payload.chunk_digest(0) == wire.digest(b"x" * 4096)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"expires_at": 1_000}, "bad_window"),
        ({"version": -1}, "malformed"),
        ({"version": 2**53}, "malformed"),
        ({"run_id": "AB" * 32}, "malformed"),
        ({"run_id": "00" * 32}, "wrong_run"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    publisher: Any, limits: Limits, changes: dict[str, Any], code: str
) -> None:
    assert refused(publisher, limits, **changes) == code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"payload_bytes": 0, "chunk_digests": b""}, "payload_size"),
        ({"payload_bytes": 2**40}, "payload_size"),
        ({"chunk_bytes": 0}, "chunk_size"),
        ({"chunk_bytes": 1}, "chunk_size"),
        ({"chunk_bytes": 2**30}, "chunk_size"),
        ({"chunk_digests": b""}, "chunk_count"),
        ({"chunk_digests": b"\0" * 31}, "chunk_count"),
        ({"chunk_digests": b"\0" * 64}, "chunk_count"),
        ({"payload_bytes": 2**20}, "chunk_count"),
    ],
)
def test_a_payload_that_contradicts_itself_is_refused(
    publisher: Any, limits: Limits, changes: dict[str, Any], code: str
) -> None:
    """Each would make a client allocate, loop or write what the publisher never meant; as a delta just as well."""
    assert refused(publisher, limits, full=publisher.payload(**changes)) == code
    assert refused(publisher, limits, deltas=(publisher.delta(**changes),)) == code


@pytest.mark.parametrize(
    ("bases", "size", "code"),
    [
        ([1], 1, "bad_base"),
        ([2], 1, "bad_base"),
        ([0, 0], 1, "bad_base"),
        ([0, 0, 0, 0, 0], 1, "bad_base"),
        ([0], 7, "payload_size"),
        ([0], 8, "payload_size"),
    ],
)
def test_a_delta_that_leads_nowhere_is_refused(
    publisher: Any, limits: Limits, bases: list[int], size: int, code: str
) -> None:
    """From the version itself or a later one, twice from one base, too many, or no shorter than the result."""
    deltas = tuple(publisher.delta(b"d" * size, base_version=base) for base in bases)
    assert refused(publisher, limits, deltas=deltas) == code


def refused(publisher: Any, limits: Limits, **changes: Any) -> str:
    signed = seal_manifest(publisher.manifest(**changes), publisher.key)
    with pytest.raises(Malformed) as caught:
        open_manifest(signed.envelope, run_id=publisher.run_id, publisher_key=publisher.public, limits=limits)
    return caught.value.code


def test_a_manifest_with_too_many_chunks_is_refused(publisher: Any) -> None:
    signed = seal_manifest(publisher.manifest(b"x" * 50_000), publisher.key)
    with pytest.raises(Malformed, match="chunks") as caught:
        open_manifest(
            signed.envelope,
            run_id=publisher.run_id,
            publisher_key=publisher.public,
            limits=Limits(max_chunks=12),
        )
    assert caught.value.code == "chunk_count"


def test_a_stranger_cannot_sign_for_the_publisher(publisher: Any) -> None:
    stranger = Ed25519PrivateKey.generate()
    with pytest.raises(BadSignature) as caught:
        open_head(seal_head(publisher.head(), stranger), run_id=publisher.run_id, publisher_key=publisher.public)
    assert caught.value.code == "wrong_signer"


def test_a_head_is_not_accepted_where_a_manifest_is_due(publisher: Any) -> None:
    """A signature made for one purpose must be worth nothing for another."""
    with pytest.raises(Malformed) as caught:
        open_manifest(
            seal_head(publisher.head(), publisher.key),
            run_id=publisher.run_id,
            publisher_key=publisher.public,
        )
    assert caught.value.code == "wrong_domain"


@pytest.mark.parametrize("payload", [b"{}", b"[]", b"", b"null", b'{"run_id":1}', b"[" * 500, b"\xff"])
def test_signed_nonsense_is_a_typed_error(publisher: Any, payload: bytes) -> None:
    for domain, version, opener in ((HEAD_DOMAIN, 1, open_head), (MANIFEST_DOMAIN, 2, open_manifest)):
        data = seal(payload, domain=domain, version=version, key=publisher.key)
        with pytest.raises(Malformed):
            opener(data, run_id=publisher.run_id, publisher_key=publisher.public)  # type: ignore[operator]


def test_an_oversized_head_is_refused_before_it_is_parsed(publisher: Any) -> None:
    data = seal(b" " * 5000, domain=HEAD_DOMAIN, version=1, key=publisher.key)
    with pytest.raises(Malformed) as caught:
        open_head(data, run_id=publisher.run_id, publisher_key=publisher.public)
    assert caught.value.code == "oversized"


@given(at=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 500))
def test_no_change_of_a_byte_survives(at: int, value: int, cut: int) -> None:
    """Any one byte changed or any tail cut by a relay is noticed, with a typed error."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    public = key.public_key().public_bytes_raw()
    head = Head(run_id=wire.digest(public), version=7, manifest_digest="00" * 32, issued_at=1, expires_at=2)
    sealed = seal_head(head, key)
    data = bytearray(sealed)
    data[at % len(data)] = value
    data = data[: len(data) - cut] if cut else data
    if bytes(data) == sealed:
        return
    with pytest.raises(PeerFault):
        open_head(bytes(data), run_id=wire.digest(public), publisher_key=public)
