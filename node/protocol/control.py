"""Control: authorities, requests to nodes and their replies (docs/protocol.md, section 14).

An `Authority`, signed by the run's key, grants one key purposes for a time. A request is for one node, one purpose and
one minute, and must come from its signer; a reply is bound to one request. Nothing signed here can be replayed
elsewhere, later or by others. Pure: the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeAlias, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from node.protocol.messages import Nonce, Text
from node.protocol.reasons import Reason
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS
from node.protocol.run import Url
from shardcast.envelope import open_envelope, seal
from shardcast.errors import BadSignature, Malformed, PeerFault
from shardcast.wire import Count, Digest, PublicKey, Wire, decode, encode

AUTHORITY_DOMAIN: Final = "swarmproof/authority"
CONTROL_DOMAIN: Final = "swarmproof/control"
REPLY_DOMAIN: Final = "swarmproof/control-reply"
CONTROL_VERSION: Final = 1

MAX_AUTHORITY_BYTES: Final = 2048
MAX_REQUEST_BYTES: Final = 16 * 1024
MAX_REPLY_BYTES: Final = 1024 * 1024
MAX_AUTHORITY_SECONDS: Final = 30 * 24 * 3600
MAX_LOG_LINES: Final = 200
MAX_LOG_LINE: Final = 300
MAX_LOG_BYTES: Final = 64 * 1024
MAX_SAMPLES: Final = 8
MAX_SAMPLE_TOKENS: Final = 128
MAX_CHALLENGE_BYTES: Final = 512 * 1024

Purpose: TypeAlias = Literal["status", "invite", "challenge", "drain", "restart", "logs"]
PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)
FREE_PURPOSES: Final[frozenset[Purpose]] = frozenset({"status", "invite"})
"""Purposes that cost a contributor nothing and reveal nothing about the machine; allowed by default."""

_ENVELOPE_BYTES: Final = 512
"""More than what an envelope adds to its payload."""


class ControlReason(StrEnum):
    """Stable codes of refused requests with `advice` for the requester, in the order of the checks."""

    advice: str

    def __new__(cls, code: str, advice: str) -> Self:
        """Make the member of one row; its value is the code."""
        member = str.__new__(cls, code)
        member._value_, member.advice = code, advice
        return member

    TOO_MANY_REQUESTS = "too_many_requests", "Too much at once from this asker, or from all; wait a minute."
    BAD_REQUEST = "bad_request", "The request is not what the node takes; update swarmproof on the asking side."
    BAD_SIGNATURE = "bad_signature", "The signature does not match what was sent; sign the exact bytes."
    WRONG_PEER = "wrong_peer", "The signer is not the peer that brought it; ask with the key that signs."
    WRONG_NODE = "wrong_node", "The request is for another node; sign one for each node."
    WRONG_RUN = "wrong_run", "The node takes part in another run; check --join."
    CLOCK_SKEW = "clock_skew", "The request's time is too far from the node's; set the clocks (NTP) and retry."
    NO_AUTHORITY = "no_authority", "Only who holds an authority of the run may ask: `swarmproof authority` makes one."
    BAD_AUTHORITY = (
        "bad_authority",
        "The authority is not one that this run's key signed; make one with `swarmproof authority` and the run's key.",
    )
    EXPIRED_AUTHORITY = "expired_authority", "The authority does not hold now; have a new one made."
    FOREIGN_AUTHORITY = "foreign_authority", "The authority was given to another key; ask with that one."
    WRONG_PURPOSE = "wrong_purpose", "The authority does not cover this purpose; have one made that does."
    WRONG_SUBJECT = "wrong_subject", "The authority is for another node; have one made for this one, or for any."
    STALE_RUN = (
        "stale_run",
        (
            "The node has no current descriptor of the run, and cannot know what is revoked; see that it reaches "
            "a coordinator or a peer."
        ),
    )
    REVOKED = "revoked", "The run's operator has revoked this key; use another."
    REPLAYED_REQUEST = "replayed_request", "This signed request was seen before; sign every request anew."
    NOT_ALLOWED = "not_allowed", "The contributor does not allow this; they would have to give --allow-control."
    # Refusals of authorised requests.
    BUSY = "busy", "The node has no room for it now; ask again later, or drain it first."
    UNAVAILABLE = "unavailable", "The node has nothing to do it with yet; ask again once it holds a policy."
    UNKNOWN_ENDPOINT = "unknown_endpoint", "The run's descriptor does not name that coordinator; name one that it does."
    FAILED = "failed", "The node tried and failed; its own log says why."


class ControlRefusal(Exception):
    """A control request refused for a stable reason; `detail` says what was seen, without secrets."""

    def __init__(self, reason: ControlReason, detail: str = "") -> None:
        super().__init__(" ".join(filter(None, (f"{reason.value}:", detail, reason.advice))))
        self.reason, self.code, self.detail = reason, reason.value, detail


class Authority(Wire, frozen=True):
    """The run lets `node` ask for `purposes`, of `subject` or, where that is null, of any node, for a while."""

    run_id: Digest
    node: PublicKey
    purposes: Annotated[tuple[Purpose, ...], Meta(min_length=1, max_length=len(PURPOSES))]
    subject: PublicKey | None
    issued_at: Count
    expires_at: Count

    def __post_init__(self) -> None:
        """Refuse invalid values; msgspec turns the ValueError into its own error."""
        if len(set(self.purposes)) < len(self.purposes):
            raise ValueError("a purpose is named twice")
        if not self.issued_at < self.expires_at <= self.issued_at + MAX_AUTHORITY_SECONDS:
            raise ValueError("it must end after it began, and within 30 days")


# -- requests; the tag is the purpose


class AskStatus(Wire, frozen=True, tag_field="purpose", tag="status"):
    """Report the status."""


class AskInvite(Wire, frozen=True, tag_field="purpose", tag="invite"):
    """Request leases now, from the coordinator `endpoint` or the one in use; ends a drain."""

    endpoint: Url | None


class AskChallenge(Wire, frozen=True, tag_field="purpose", tag="challenge"):
    """Generate completions for a problem derived from the request's nonce."""

    samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_SAMPLE_TOKENS)]


class AskDrain(Wire, frozen=True, tag_field="purpose", tag="drain"):
    """Finish the active slots and lease no more."""


class AskRestart(Wire, frozen=True, tag_field="purpose", tag="restart"):
    """Return the leases and restart the engine."""


class AskLogs(Wire, frozen=True, tag_field="purpose", tag="logs"):
    """Return the last lines of the log."""

    lines: Annotated[int, Meta(ge=1, le=MAX_LOG_LINES)]


Ask: TypeAlias = AskStatus | AskInvite | AskChallenge | AskDrain | AskRestart | AskLogs


class ControlRequest(Wire, frozen=True):
    """One request to the node `to`, signed by the peer that brings it.

    `authority` is the envelope of an Authority, or null where the signer is the run's own key.
    """

    run_id: Digest
    to: PublicKey
    ask: Ask
    nonce: Nonce
    issued_at: Count
    authority: Annotated[bytes, Meta(max_length=MAX_AUTHORITY_BYTES + _ENVELOPE_BYTES)] | None


# -- replies

LogLine = Annotated[str, Meta(max_length=MAX_LOG_LINE, pattern=r"^[^\x00-\x1f\x7f]*\Z")]


class StatusBody(Wire, frozen=True, tag_field="purpose", tag="status"):
    """A worker at this moment. Nothing in it names a path, an address or a person.

    Versions are -1 where there is none; `seconds` is how long it has run.
    """

    software: Text
    engine: Text
    doing: Text
    draining: bool
    run_is_over: bool
    dismissed: bool
    coordinator_away: bool
    version: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    held_versions: Annotated[tuple[Count, ...], Meta(max_length=64)]
    descriptor_version: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    head_version: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    slots: Count
    undelivered: Count
    neighbours: Count
    tokens: Count
    tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    switches: Count
    engine_restarts: Count
    admitted: Count
    rejected: Count
    indeterminate: Count
    lost: Count
    expired: Count
    admitted_tokens: Count
    reasons: Annotated[dict[Reason, Count], Meta(max_length=len(Reason))]
    seconds: Count


class InviteBody(Wire, frozen=True, tag_field="purpose", tag="invite"):
    """The worker requests leases if it has `room` for slots."""

    room: Count


class ChallengeBody(Wire, frozen=True, tag_field="purpose", tag="challenge"):
    """The completions as a submission's file (section 6.1), and the policy that generated them."""

    version: Count
    manifest_digest: Digest
    rollouts: Annotated[bytes, Meta(max_length=MAX_CHALLENGE_BYTES)]


class DrainBody(Wire, frozen=True, tag_field="purpose", tag="drain"):
    """The worker leases no more; `slots` are active, `undelivered` have no receipt yet."""

    slots: Count
    undelivered: Count


class RestartBody(Wire, frozen=True, tag_field="purpose", tag="restart"):
    """The worker returns `slots` leases and restarts its engine."""

    slots: Count


class LogsBody(Wire, frozen=True, tag_field="purpose", tag="logs"):
    """The last log lines, oldest first."""

    lines: Annotated[tuple[LogLine, ...], Meta(max_length=MAX_LOG_LINES)]


Body: TypeAlias = StatusBody | InviteBody | ChallengeBody | DrainBody | RestartBody | LogsBody


class ControlReply(Wire, frozen=True):
    """The answer to the request whose envelope has the digest `request`, signed by the node that was asked.

    Exactly one of `reason` and `body` is there. `answered_at` is the node's clock.
    """

    run_id: Digest
    request: Digest
    reason: ControlReason | None
    detail: Text
    answered_at: Count
    body: Body | None

    def __post_init__(self) -> None:
        """Refuse a reply with both or neither."""
        if (self.reason is None) == (self.body is None):
            raise ValueError("a reply has a reason or a body, and never both")


def purpose_of(value: Ask | Body) -> Purpose:
    """Return the purpose of a request or a reply."""
    purpose: Purpose = value.__struct_config__.tag  # type: ignore[assignment]
    return purpose


# -- signing and opening


def sign_authority(authority: Authority, *, key: Ed25519PrivateKey) -> bytes:
    """Seal an authority with the run's key."""
    return seal(encode(authority), domain=AUTHORITY_DOMAIN, version=CONTROL_VERSION, key=key)


def open_authority(data: bytes) -> tuple[bytes, Authority]:
    """Return the signer (public key) and the authority; raises PeerFault. See `check_authority` for its validity."""
    opened = open_envelope(
        data, domain=AUTHORITY_DOMAIN, versions=(CONTROL_VERSION,), max_payload_bytes=MAX_AUTHORITY_BYTES
    )
    return opened.signer, decode(Authority, opened.payload, max_bytes=MAX_AUTHORITY_BYTES)


def sign_control(request: ControlRequest, *, key: Ed25519PrivateKey) -> bytes:
    """Seal a request with the requester's key."""
    return seal(encode(request), domain=CONTROL_DOMAIN, version=CONTROL_VERSION, key=key)


def open_control(data: bytes) -> tuple[bytes, ControlRequest]:
    """Return the signer (public key) and the request; raises ControlRefusal."""
    limit = MAX_REQUEST_BYTES - _ENVELOPE_BYTES
    try:
        opened = open_envelope(data, domain=CONTROL_DOMAIN, versions=(CONTROL_VERSION,), max_payload_bytes=limit)
        return opened.signer, decode(ControlRequest, opened.payload, max_bytes=limit)
    except BadSignature as error:
        raise ControlRefusal(ControlReason.BAD_SIGNATURE, f"{error}.") from error
    except PeerFault as error:
        raise ControlRefusal(ControlReason.BAD_REQUEST, f"{error.code}.") from error


def sign_reply(reply: ControlReply, *, key: Ed25519PrivateKey) -> bytes:
    """Seal a reply with the node's key."""
    return seal(encode(reply), domain=REPLY_DOMAIN, version=CONTROL_VERSION, key=key)


def open_reply(data: bytes, *, node: bytes, run_id: str, request: str, purpose: Purpose) -> Body:
    """Verify and return the reply of `node` (public key) to the request with that digest.

    Raises PeerFault for an invalid reply, ControlRefusal for a refusal.
    """
    limit = MAX_REPLY_BYTES - _ENVELOPE_BYTES
    opened = open_envelope(data, domain=REPLY_DOMAIN, versions=(CONTROL_VERSION,), max_payload_bytes=limit, signer=node)
    reply = decode(ControlReply, opened.payload, max_bytes=limit)
    if reply.run_id != run_id:
        raise Malformed("an answer in another run", code="wrong_run")
    if reply.request != request:
        raise Malformed("an answer to another request", code="wrong_request")
    if reply.reason is not None:
        raise ControlRefusal(reply.reason, reply.detail)
    if reply.body is None or purpose_of(reply.body) != purpose:
        raise Malformed("an answer to something else than was asked", code="wrong_purpose")
    return reply.body


# -- the checks


def check_request(request: ControlRequest, *, signer: bytes, peer: bytes, node: bytes, run_id: str, now: float) -> None:
    """Raise ControlRefusal unless the authenticated `peer` signed it for this node, run and minute."""
    if signer != peer:
        raise ControlRefusal(ControlReason.WRONG_PEER, f"Signed by {signer.hex()[:16]}….")
    if request.to != node.hex():
        raise ControlRefusal(ControlReason.WRONG_NODE, f"Signed for {request.to[:16]}….")
    if request.run_id != run_id:
        raise ControlRefusal(ControlReason.WRONG_RUN, f"Signed for run {request.run_id[:16]}….")
    if abs(now - request.issued_at) > MAX_CLOCK_SKEW_SECONDS:
        raise ControlRefusal(ControlReason.CLOCK_SKEW, f"Signed {now - request.issued_at:+.0f} s ago by this clock.")


def check_authority(
    request: ControlRequest,
    *,
    signer: bytes,
    run_key: bytes,
    node: bytes,
    now: float,
    revoked: Collection[str] | None,
) -> None:
    """Raise ControlRefusal unless the signer is authorised for this request.

    `revoked` are the current descriptor's revoked keys; None without a current descriptor.
    """
    if signer == run_key:
        return
    if request.authority is None:
        raise ControlRefusal(ControlReason.NO_AUTHORITY)
    try:
        granter, authority = open_authority(request.authority)
    except PeerFault as error:
        raise ControlRefusal(ControlReason.BAD_AUTHORITY, f"{error.code}.") from error
    if granter != run_key or authority.run_id != request.run_id:
        raise ControlRefusal(ControlReason.BAD_AUTHORITY, f"Signed by {granter.hex()[:16]}….")
    if not authority.issued_at - MAX_CLOCK_SKEW_SECONDS <= now < authority.expires_at:
        raise ControlRefusal(ControlReason.EXPIRED_AUTHORITY)
    if authority.node != signer.hex():
        raise ControlRefusal(ControlReason.FOREIGN_AUTHORITY, f"Given to {authority.node[:16]}….")
    if purpose_of(request.ask) not in authority.purposes:
        raise ControlRefusal(ControlReason.WRONG_PURPOSE, f"It covers {', '.join(authority.purposes)}.")
    if authority.subject is not None and authority.subject != node.hex():
        raise ControlRefusal(ControlReason.WRONG_SUBJECT, f"It is for {authority.subject[:16]}….")
    if revoked is None:
        raise ControlRefusal(ControlReason.STALE_RUN)
    if authority.node in revoked:
        raise ControlRefusal(ControlReason.REVOKED)
