"""What a node does with proof against the run's own key: lose it, and an operator can tell every node another story."""

from __future__ import annotations

import logging

import pytest
from msgspec import structs
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, RUN_KEY, sealed_descriptor

import node.discovery.equivocation
from node.discovery.equivocation import MAX_PAIRS, EquivocationStore
from node.protocol.equivocation import EquivocationProof, find_equivocation
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, run_id_of
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import digest, encode

FIRST = sealed_descriptor()


def variant(number=1, **changes):
    """A descriptor that names another relay."""
    relays = (f"http://192.0.2.1:{number}",)
    return sealed_descriptor(structs.replace(DESCRIPTOR, **({"relays": relays} | changes)))


def kept(state):
    return sorted((state / "evidence").glob("*"))


def test_two_contents_under_one_version_convict_the_runs_key():
    assert find_equivocation(FIRST, variant()) == EquivocationProof(RUN_ID, 1, FIRST, variant())


@pytest.mark.parametrize("changes", [{"expires_at": 2}, {"issued_at": 2}, {"endpoints": ("http://h:1",)}])
def test_whatever_differs_and_whenever_it_is_shown_it_is_the_same_offence(changes):
    assert find_equivocation(variant(), variant(**changes)) is not None
    assert find_equivocation(variant(**changes), variant()) is not None


def test_an_honest_key_is_not_accused():
    assert find_equivocation(FIRST, FIRST) is None
    assert find_equivocation(FIRST, variant(version=2)) is None


def test_the_same_content_signed_again_accuses_nobody():
    """A key that signs at random (RFC 8032 does not, other signers do) makes two envelopes of one content."""

    class OtherNonce:
        public_key = RUN_KEY.public_key

        def sign(self, data):
            return _sign_with_another_nonce(RUN_KEY.private_bytes_raw(), data)

    again = seal(encode(DESCRIPTOR), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=OtherNonce())
    assert again != FIRST
    assert find_equivocation(FIRST, again) is None


@pytest.mark.parametrize(
    "forgery",
    [
        sealed_descriptor(key=OTHER_KEY),
        sealed_descriptor(
            structs.replace(DESCRIPTOR, run_id=run_id_of(OTHER_KEY.public_key().public_bytes_raw())), key=OTHER_KEY
        ),
        variant()[:-1] + bytes([variant()[-1] ^ 1]),
        seal(encode(DESCRIPTOR), domain="swarmproof/other", version=DESCRIPTOR_VERSION, key=RUN_KEY),
        seal(encode(DESCRIPTOR) + b" ", domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=RUN_KEY),
        b"",
    ],
)
def test_attack_framing_an_honest_operator_with_what_its_key_never_signed(forgery):
    for pair in ((FIRST, forgery), (forgery, FIRST)):
        with pytest.raises(PeerFault):
            find_equivocation(*pair)


def test_both_envelopes_are_kept_exactly_as_they_came_and_it_is_said_once(tmp_path, caplog):
    witness = EquivocationStore(tmp_path)
    for _ in range(3):
        witness.keep(FIRST, variant(), version=1)
        witness.keep(variant(), FIRST, version=1)
    assert {path.read_bytes() for path in kept(tmp_path)} == {FIRST, variant()}
    assert [path.name for path in kept(tmp_path)] == sorted(
        f"descriptor-1-{digest(envelope)[:12]}.bin" for envelope in (FIRST, variant())
    )
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "signed two different descriptors of version 1" in line.getMessage()
    assert str(tmp_path / "evidence") in line.getMessage()
    assert "auditor" in line.getMessage()


def test_a_restarted_node_does_not_keep_the_same_proof_twice(tmp_path):
    for _ in range(2):
        EquivocationStore(tmp_path).keep(FIRST, variant(), version=1)
    assert len(kept(tmp_path)) == 2


def test_an_honest_pair_leaves_no_trace(tmp_path, caplog):
    EquivocationStore(tmp_path).keep(FIRST, variant(version=2), version=1)
    assert kept(tmp_path) == []
    assert caplog.records == []


def test_attack_equivocating_without_end_fills_no_disk_and_no_log(tmp_path, caplog):
    witness = EquivocationStore(tmp_path)
    for number in range(1, 3 * MAX_PAIRS):
        pair = (variant(number, version=number), variant(number + 1, version=number))
        witness.keep(*pair, version=number)
    assert len(kept(tmp_path)) == 2 * MAX_PAIRS
    assert len(caplog.records) == MAX_PAIRS
    EquivocationStore(tmp_path).keep(FIRST, variant(77), version=1)
    assert len(kept(tmp_path)) == 2 * MAX_PAIRS
    assert "not kept" in caplog.records[-1].getMessage()


def test_attack_two_envelopes_whose_short_names_collide_are_both_kept(tmp_path, monkeypatch):
    """48 bits collide after 2^24 tries, which whoever holds the key can afford; here they collide at once."""
    monkeypatch.setattr(node.discovery.equivocation, "digest", lambda data: "0" * 12 + digest(data)[12:])
    signed = [FIRST, *(variant(number) for number in (1, 2, 3))]
    for _ in range(2):
        witness = EquivocationStore(tmp_path)
        witness.keep(*signed[:2], version=1)
        witness.keep(*signed[2:], version=1)
        assert {path.read_bytes() for path in kept(tmp_path)} == set(signed)
        assert len(kept(tmp_path)) == 4


def test_a_disk_that_takes_nothing_is_said_and_does_not_end_the_node(tmp_path, caplog):
    (tmp_path / "evidence").write_text("a file is in the way")
    EquivocationStore(tmp_path).keep(FIRST, variant(), version=1)
    assert "could not be kept" in caplog.records[-1].getMessage()
    EquivocationStore(None).keep(FIRST, variant(), version=1)
    assert "no state folder" in caplog.records[-1].getMessage()


def _sign_with_another_nonce(seed, data):
    """Ed25519 (RFC 8032, 5.1.6) with a nonce of its own choice; slow and plain, for this test only."""
    from hashlib import sha512

    p, order = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
    d = -121665 * pow(121666, -1, p) % p

    def add(a, b):
        (x1, y1), (x2, y2) = a, b
        product = d * x1 * x2 * y1 * y2 % p
        x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, p) % p
        return x, (y1 * y2 + x1 * x2) * pow(1 - product, -1, p) % p

    def times(scalar, point):
        result = (0, 1)
        while scalar:
            if scalar & 1:
                result = add(result, point)
            point, scalar = add(point, point), scalar >> 1
        return result

    def encoded(point):
        return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")

    y = 4 * pow(5, -1, p) % p
    square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
    x = pow(square, (p + 3) // 8, p)
    if (x * x - square) % p:
        x = x * pow(2, (p - 1) // 4, p) % p
    base = (p - x if x & 1 else x, y)
    hashed = sha512(seed).digest()
    secret = int.from_bytes(hashed[:32], "little") & ((1 << 254) - 8) | (1 << 254)
    nonce = 123456789
    commitment, public = encoded(times(nonce, base)), encoded(times(secret, base))
    challenge = int.from_bytes(sha512(commitment + public + data).digest(), "little")
    return commitment + ((nonce + challenge * secret) % order).to_bytes(32, "little")
