"""Signing an HTTP request, and checking one (docs/protocol.md, section 3)."""

from __future__ import annotations

import base64
import binascii

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.protocol.messages import (
    AUTHORIZATION_SCHEME,
    MAX_CLAIM_BYTES,
    MESSAGE_VERSION,
    REQUEST_DOMAIN,
    RequestClaim,
)
from node.protocol.reasons import Reason, Refusal
from shardcast.envelope import open_envelope, seal
from shardcast.errors import PeerFault
from shardcast.wire import decode, encode

MAX_CLOCK_SKEW_SECONDS = 60
MAX_HEADER_BYTES = 4096


def sign_request(claim: RequestClaim, *, key: Ed25519PrivateKey) -> tuple[str, bytes]:
    """Return the Authorization header for `claim`, and the envelope inside it (a submission's id is its digest)."""
    envelope = seal(encode(claim), domain=REQUEST_DOMAIN, version=MESSAGE_VERSION, key=key)
    return f"{AUTHORIZATION_SCHEME} {base64.urlsafe_b64encode(envelope).decode('ascii')}", envelope


def read_authorization(header: str) -> bytes:
    """Return the envelope inside an Authorization header; raises Refusal."""
    scheme, _, text = header.partition(" ")
    if scheme != AUTHORIZATION_SCHEME or len(text) > MAX_HEADER_BYTES:
        raise Refusal(Reason.BAD_SIGNATURE, f"Authorization must be '{AUTHORIZATION_SCHEME} <envelope>'.")
    try:
        envelope = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise Refusal(Reason.BAD_SIGNATURE, "The Authorization header is not base64url.") from error
    if base64.urlsafe_b64encode(envelope).decode("ascii") != text:
        raise Refusal(Reason.BAD_SIGNATURE, "The Authorization header is not canonical base64url.")
    return envelope


def open_claim(envelope: bytes) -> tuple[bytes, RequestClaim]:
    """Return the signer (public key) and the claim of a request envelope; raises Refusal."""
    try:
        opened = open_envelope(
            envelope, domain=REQUEST_DOMAIN, versions=(MESSAGE_VERSION,), max_payload_bytes=MAX_CLAIM_BYTES
        )
        return opened.signer, decode(RequestClaim, opened.payload, max_bytes=MAX_CLAIM_BYTES)
    except PeerFault as error:
        raise Refusal(Reason.BAD_SIGNATURE, f"{error}.") from error


def check_claim(claim: RequestClaim, *, run_id: str, method: str, path: str, now: float) -> None:
    """Raise Refusal unless the claim is for this run, this endpoint and this minute."""
    if claim.run_id != run_id:
        raise Refusal(Reason.WRONG_RUN, f"Signed for run {claim.run_id[:16]}….")
    if claim.method != method or claim.path != path:
        raise Refusal(Reason.BAD_SIGNATURE, f"Signed for {claim.method} {claim.path}.")
    if abs(now - claim.issued_at) > MAX_CLOCK_SKEW_SECONDS:
        raise Refusal(Reason.CLOCK_SKEW, f"Signed {now - claim.issued_at:+.0f} s ago by this clock.")
