"""The signed envelope: what a stranger may do to the bytes between the signer and the reader."""

from __future__ import annotations

import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.envelope import KEY_BYTES, MAGIC, SIGNATURE_BYTES, open_envelope, seal
from shardcast.errors import BadSignature, Malformed, PeerFault

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
DOMAIN, PAYLOAD = "swarmproof/test", b'{"payload":1}'
SEALED = seal(PAYLOAD, domain=DOMAIN, version=3, key=KEY)


def opened(data: bytes, **changes: object) -> bytes:
    settings = {"domain": DOMAIN, "versions": (3,), "max_payload_bytes": 1000} | changes
    return open_envelope(data, **settings).payload


def test_what_was_sealed_comes_out() -> None:
    result = open_envelope(SEALED, domain=DOMAIN, versions=(2, 3), max_payload_bytes=len(PAYLOAD), signer=PUBLIC)
    assert (result.signer, result.domain, result.version, result.payload) == (PUBLIC, DOMAIN, 3, PAYLOAD)


def test_the_layout_is_the_documented_one() -> None:
    tag = DOMAIN.encode()
    header = b"VSW1" + bytes([len(tag)]) + tag + (3).to_bytes(2, "big") + PUBLIC + len(PAYLOAD).to_bytes(4, "big")
    assert SEALED[:-64] == header + PAYLOAD
    assert SEALED[-64:] == KEY.sign(header + PAYLOAD)


def test_every_truncation_is_refused() -> None:
    for size in range(len(SEALED)):
        with pytest.raises(Malformed):
            opened(SEALED[:size])


def test_every_flipped_bit_is_refused() -> None:
    for at in range(len(SEALED)):
        for bit in range(8):
            with pytest.raises(PeerFault):
                opened(SEALED[:at] + bytes([SEALED[at] ^ (1 << bit)]) + SEALED[at + 1 :])


@pytest.mark.parametrize("extra", [b"\x00", b"\n", SEALED])
def test_bytes_after_the_signature_are_refused(extra: bytes) -> None:
    with pytest.raises(Malformed):
        opened(SEALED + extra)


def test_a_signature_for_another_purpose_is_worth_nothing() -> None:
    """A receipt's signature must not open as a checkpoint, though one key makes both."""
    for domain in ("swarmproof/other", "swarmproof/tes", "swarmproof/testt", "", "SWARMPROOF/TEST"):
        with pytest.raises(Malformed) as caught:
            opened(SEALED, domain=domain)
        assert caught.value.code == "wrong_domain"


@pytest.mark.parametrize("versions", [(), (2,), (4,), (0, 1, 2, 4)])
def test_a_version_that_the_reader_does_not_know_is_refused(versions: tuple[int, ...]) -> None:
    with pytest.raises(Malformed) as caught:
        opened(SEALED, versions=versions)
    assert caught.value.code == "wrong_domain"


def test_anothers_valid_signature_is_not_the_signers() -> None:
    sealed = seal(PAYLOAD, domain=DOMAIN, version=3, key=OTHER)
    assert opened(sealed) == PAYLOAD
    with pytest.raises(BadSignature) as caught:
        opened(sealed, signer=PUBLIC)
    assert caught.value.code == "wrong_signer"


def test_a_swapped_key_is_refused() -> None:
    """Claiming somebody else's work: the key is part of what is signed."""
    at = SEALED.index(PUBLIC)
    swapped = SEALED[:at] + OTHER.public_key().public_bytes_raw() + SEALED[at + KEY_BYTES :]
    with pytest.raises(BadSignature):
        opened(swapped)


def test_a_swapped_domain_or_version_is_refused() -> None:
    for forged in (
        SEALED.replace(b"swarmproof/test", b"swarmproof/evil"),
        SEALED.replace(b"test\x00\x03", b"test\x00\x04"),
    ):
        with pytest.raises(PeerFault):
            opened(forged, domain="swarmproof/evil" if b"evil" in forged else DOMAIN, versions=(3, 4))


def test_a_signature_made_malleable_by_adding_the_group_order_is_refused() -> None:
    """One message with two valid signatures would have two ids, and be accepted twice."""
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(SEALED[-32:], "little") + order
    with pytest.raises(BadSignature):
        opened(SEALED[:-32] + scalar.to_bytes(32, "little"))


SMALL_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    b"\xec" + b"\xff" * 30 + b"\x7f",
    b"\xed" + b"\xff" * 30 + b"\x7f",
    b"\xee" + b"\xff" * 30 + b"\x7f",
]


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda point: point.hex()[:8])
@pytest.mark.parametrize("sign", [0, 0x80])
def test_a_key_that_signs_anything_signs_nothing(point: bytes, sign: int) -> None:
    """Under the neutral element the constant signature (1, 0) is valid for every message, without a private key."""
    key = point[:-1] + bytes([point[-1] | sign])
    tag = DOMAIN.encode()
    body = MAGIC + bytes([len(tag)]) + tag + struct.pack(">H", 3) + key + struct.pack(">I", len(PAYLOAD)) + PAYLOAD
    with pytest.raises(BadSignature) as caught:
        opened(body + b"\x01" + bytes(63))
    assert caught.value.code == "weak_key"


def test_a_declared_length_is_not_believed() -> None:
    at = len(SEALED) - SIGNATURE_BYTES - len(PAYLOAD) - 4
    for length in (0, len(PAYLOAD) - 1, len(PAYLOAD) + 1, 2**31, 2**32 - 1):
        with pytest.raises(Malformed):
            opened(SEALED[:at] + struct.pack(">I", length) + SEALED[at + 4 :])


def test_the_size_limits_come_before_the_signature() -> None:
    with pytest.raises(Malformed) as caught:
        opened(SEALED, max_payload_bytes=len(PAYLOAD) - 1)
    assert caught.value.code == "oversized"
    with pytest.raises(Malformed) as caught:
        opened(bytes(1_000_000), max_payload_bytes=1000)
    assert caught.value.code == "oversized"


@pytest.mark.parametrize("domain", ["", "x", "d" * 255])
@pytest.mark.parametrize("payload", [b"", b"\x00", bytes(1000)])
@pytest.mark.parametrize("version", [0, 1, 65535])
def test_every_boundary_of_the_layout_comes_back(domain: str, payload: bytes, version: int) -> None:
    sealed = seal(payload, domain=domain, version=version, key=KEY)
    assert opened(sealed, domain=domain, versions=(version,)) == payload


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_the_reader_raise_anything_else(data: bytes) -> None:
    for hostile in (data, MAGIC + data):
        with pytest.raises(PeerFault):
            opened(hostile)
