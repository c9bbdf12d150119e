"""Signed requests: what somebody who sees a node's traffic can do with it (nothing), and how refusals read."""

from __future__ import annotations

import base64

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from node.protocol.messages import (
    MAX_CLAIM_BYTES,
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    REQUEST_DOMAIN,
    RequestClaim,
    SlotName,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import (
    MAX_CLOCK_SKEW_SECONDS,
    MAX_HEADER_BYTES,
    check_claim,
    open_claim,
    read_authorization,
    sign_request,
)
from shardcast.envelope import seal
from shardcast.wire import digest, encode

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RUN, NOW = "11" * 32, 1_760_000_000
CLAIM = RequestClaim(
    run_id=RUN,
    method="PUT",
    path="/v1/submissions/" + "22" * 32,
    body_digest=digest(b"body"),
    body_bytes=4,
    issued_at=NOW,
    nonce="ab" * 16,
)
HEADER, ENVELOPE = sign_request(CLAIM, key=KEY)


def check(claim: RequestClaim = CLAIM, **changes: object) -> None:
    given = {"run_id": RUN, "method": "PUT", "path": CLAIM.path, "now": float(NOW)} | changes
    check_claim(claim, **given)


def reason_of(call: object, *args: object, **kwargs: object) -> Reason:
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    return caught.value.reason


def test_a_signed_request_opens_to_its_signer_and_claim() -> None:
    assert read_authorization(HEADER) == ENVELOPE
    assert open_claim(ENVELOPE) == (KEY.public_key().public_bytes_raw(), CLAIM)
    check()


def test_the_longest_claim_fits_the_header() -> None:
    slot = SlotName(manifest_digest=RUN, slot=2**53 - 1, candidate=31)
    claim = msgspec.structs.replace(CLAIM, path="/" + "x" * 499, body_bytes=2**53 - 1, issued_at=2**53 - 1, slot=slot)
    header, _ = sign_request(claim, key=KEY)
    assert len(header) < MAX_HEADER_BYTES
    assert open_claim(read_authorization(header))[1] == claim


@pytest.mark.parametrize("skew", [0, 1, -1, MAX_CLOCK_SKEW_SECONDS, -MAX_CLOCK_SKEW_SECONDS])
def test_the_window_is_wide_enough_for_honest_clocks(skew: int) -> None:
    check(now=float(NOW + skew))


@pytest.mark.parametrize("skew", [60.001, -60.001, 3600, -1e9, 1e300])
def test_a_request_replayed_later_or_kept_for_later_is_refused(skew: float) -> None:
    assert reason_of(check, now=NOW + skew) is Reason.CLOCK_SKEW


@pytest.mark.parametrize("run_id", ["33" * 32, RUN[:-1] + "0"])
def test_a_request_to_another_run_is_refused_here(run_id: str) -> None:
    assert reason_of(check, run_id=run_id) is Reason.WRONG_RUN


@pytest.mark.parametrize("method", ["GET", "POST", "put"])
def test_a_request_cannot_be_used_with_another_method(method: str) -> None:
    assert reason_of(check, method=method) is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    "path",
    ["/v1/submissions/" + "44" * 32, CLAIM.path + "/", CLAIM.path + "?x=1", "/" + CLAIM.path, CLAIM.path.upper(), ""],
)
def test_a_request_cannot_be_used_for_another_lease(path: str) -> None:
    assert reason_of(check, path=path) is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    "header",
    [
        "",
        " ",
        "Swarmproof",
        "Swarmproof ",
        "swarmproof " + HEADER.partition(" ")[2],
        "Bearer " + HEADER.partition(" ")[2],
        HEADER.partition(" ")[2],
        "Swarmproof  " + HEADER.partition(" ")[2],
        HEADER + " ",
        HEADER + "\n",
        HEADER + "=",
        HEADER[:-1],
        HEADER[:-3] + "!!!",
        "Swarmproof é",
        "Swarmproof \x00",
        "Swarmproof " + "A" * (MAX_HEADER_BYTES + 1),
        "Swarmproof " + "A" * 4_000_000,
        "Basic dXNlcjpwYXNz",
    ],
)
def test_garbage_in_the_header_is_a_refusal_and_not_a_crash(header: str) -> None:
    def read() -> None:
        open_claim(read_authorization(header))

    assert reason_of(read) is Reason.BAD_SIGNATURE


@given(st.text(max_size=200) | st.text(max_size=100).map(lambda text: "Swarmproof " + text))
@settings(max_examples=300, deadline=None)
def test_no_header_makes_the_reader_raise_anything_else(header: str) -> None:
    def read() -> None:
        open_claim(read_authorization(header))

    assert reason_of(read) is Reason.BAD_SIGNATURE


def test_every_flipped_byte_of_a_signed_request_is_refused() -> None:
    for at in range(len(ENVELOPE)):
        forged = ENVELOPE[:at] + bytes([ENVELOPE[at] ^ 0x20]) + ENVELOPE[at + 1 :]
        assert reason_of(open_claim, forged) is Reason.BAD_SIGNATURE


def sealed(payload: bytes, *, domain: str = REQUEST_DOMAIN, version: int = MESSAGE_VERSION) -> bytes:
    return seal(payload, domain=domain, version=version, key=KEY)


@pytest.mark.parametrize(
    "envelope",
    [
        sealed(encode(CLAIM), domain=RECEIPT_DOMAIN),
        sealed(encode(CLAIM), version=MESSAGE_VERSION + 1),
        sealed(b""),
        sealed(b"null"),
        sealed(encode(CLAIM) + b" "),
        sealed(encode(CLAIM).replace(b'"PUT"', b'"DELETE"')),
        sealed(encode(CLAIM).replace(b'"nonce":"ab', b'"nonce":"AB')),
        sealed(encode(CLAIM).replace(b'"body_bytes":4', b'"body_bytes":4,"body_bytes":4')),
        sealed(encode(CLAIM).replace(b'"body_bytes":4', b'"body_bytes":-4')),
        sealed(b'{"run_id":"' + b"1" * MAX_CLAIM_BYTES + b'"}'),
    ],
    ids=["domain", "version", "empty", "null", "space", "method", "nonce", "duplicate", "negative", "oversized"],
)
def test_a_well_signed_claim_that_is_not_canonical_is_refused(envelope: bytes) -> None:
    assert reason_of(open_claim, envelope) is Reason.BAD_SIGNATURE


def test_a_request_has_one_header() -> None:
    """Caches and logs in front of the coordinator may compare headers: the same envelope is the same text."""
    standard = "Swarmproof " + base64.b64encode(ENVELOPE).decode()
    assert standard != HEADER, "the example must use a letter in which the two alphabets differ"
    assert reason_of(read_authorization, standard) is Reason.BAD_SIGNATURE
