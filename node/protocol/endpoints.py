"""The coordinator's HTTP endpoints, each declared once (docs/protocol.md, section 3).

The coordinator routes by these declarations and bounds request bodies by them, the client builds its requests from
them and bounds the replies, and the OpenAPI document describes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from types import NoneType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from msgspec import Meta

from node.protocol.membership import Puzzle
from node.protocol.merkle import MAX_PROOF_HASHES
from node.protocol.messages import (
    MAX_CLAIM_BYTES,
    MAX_MESSAGE_BYTES,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Registration,
    RelayAnnouncement,
    RelayList,
    SubmissionReply,
    UploadReply,
    UploadRequest,
)
from node.protocol.notes import MAX_NOTE_BYTES
from node.protocol.reasons import Reason
from node.protocol.run import MAX_DESCRIPTOR_BYTES
from shardcast.wire import Digest, Wire

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain"
LINES: Final = "application/x-ndjson"

ENVELOPE_OVERHEAD_BYTES: Final = 512
"""How much longer a signed envelope may be than its payload."""

MAX_REQUEST_ENVELOPE_BYTES: Final = MAX_CLAIM_BYTES + ENVELOPE_OVERHEAD_BYTES
MAX_LEASE_REPLY_BYTES: Final = 512 * 1024  # 1024 leases of about 300 bytes
MAX_RELAY_LIST_BYTES: Final = 256 * 1024
MAX_LOG_PAGE_BYTES: Final = 64 * 1024 * 1024
MAX_WAIT_SECONDS: Final = 30.0
"""How long the coordinator holds back an answer for a client that asks it to wait for news."""

_SIGNED: Final = (
    Reason.BAD_SIGNATURE,
    Reason.REPLAYED_REQUEST,
    Reason.CLOCK_SKEW,
    Reason.WRONG_RUN,
    Reason.UNKNOWN_IDENTITY,
    Reason.BODY_MISMATCH,
    Reason.BAD_REQUEST,
    Reason.OVERSIZED_BODY,
)
_MEMBERSHIP: Final = (
    Reason.INVITE_REQUIRED,
    Reason.BAD_INVITE,
    Reason.EXPIRED_INVITE,
    Reason.FOREIGN_INVITE,
    Reason.SPENT_INVITE,
    Reason.STAKE_REQUIRED,
    Reason.WORK_REQUIRED,
)
_LEASED: Final = (
    Reason.UNKNOWN_LEASE,
    Reason.FOREIGN_LEASE,
    Reason.EXPIRED_LEASE,
    Reason.STALE_POLICY,
    Reason.DUPLICATE_SUBMISSION,
)


class Empty(Wire, frozen=True):
    """An empty reply."""


class LogProof(Wire, frozen=True):
    """An inclusion or consistency proof of the log (RFC 6962), the hashes in hexadecimal."""

    hashes: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PROOF_HASHES)]


class Pending(Wire, frozen=True):
    """The reply in place of a receipt while a submission has no verdict."""

    state: Literal["queued", "verifying"]


BodyT = TypeVar("BodyT")
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, kw_only=True)  # slots would make Endpoint[...](...) raise TypeError
class Endpoint(Generic[BodyT, ReplyT]):
    """One method of one path, and everything that client and server must agree on.

    `body` and `reply` are `Wire` types, or `bytes` for what is not one canonical value. A `max_body_bytes` of None
    stands for the run's `limits.max_submission_bytes`. `max_reply_bytes` is how much a node reads unless its caller
    knows better. `refusals` are the reasons for which it refuses besides too many requests. With `pending`, status 202
    and that reply say that the answer is not known yet.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    summary: str
    reply: type[ReplyT]
    body: type[BodyT] = NoneType  # type: ignore[assignment]
    media_type: str = JSON
    status: int = 200
    max_body_bytes: int | None = 0
    max_reply_bytes: int = MAX_MESSAGE_BYTES
    refusals: tuple[Reason, ...] = ()
    pending: type[Wire] | None = None

    @property
    def signed(self) -> bool:
        """Whether a request needs a node's signature."""
        return Reason.BAD_SIGNATURE in self.refusals

    @property
    def names(self) -> list[str]:
        """The names of the path's variable parts, all of which are digests."""
        return [name for _, name, _, _ in Formatter().parse(self.path) if name]

    def at(self, **names: str) -> str:
        """Return the path with its variable parts filled in."""
        return self.path.format(**names)


HEALTH: Final = Endpoint[None, bytes](method="GET", path="/health", summary="Liveness", reply=bytes, media_type=TEXT)
METRICS: Final = Endpoint[None, bytes](
    method="GET",
    path="/metrics",
    summary="Prometheus figures, at most a second old",
    reply=bytes,
    media_type=TEXT,
)
RUN: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/run",
    summary="The signed Descriptor of the run; with `after` and `wait`, once there is a newer one",
    reply=bytes,
    media_type=BYTES,
    max_reply_bytes=MAX_DESCRIPTOR_BYTES + ENVELOPE_OVERHEAD_BYTES,
    refusals=(Reason.BAD_REQUEST,),
)
POLICY: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/policy",
    summary="The signed Manifest of the newest policy",
    reply=bytes,
    media_type=BYTES,
    refusals=(Reason.NOT_FOUND,),
)
STATUS_OF_RUN: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/status",
    summary="The run for people, at most a second old; not part of the protocol",
    reply=bytes,
)
RELAYS: Final = Endpoint[None, RelayList](
    method="GET",
    path="/v1/relays",
    summary="Where relays serve, and whom a node should ask",
    reply=RelayList,
    max_reply_bytes=MAX_RELAY_LIST_BYTES,
    refusals=(Reason.BAD_REQUEST,),
)
ANNOUNCE_RELAY: Final = Endpoint[RelayAnnouncement, RelayList](
    method="POST",
    path="/v1/relays",
    summary="Announce a relay",
    body=RelayAnnouncement,
    max_body_bytes=MAX_MESSAGE_BYTES,
    reply=RelayList,
    max_reply_bytes=MAX_RELAY_LIST_BYTES,
    refusals=_SIGNED,
)
MIN_KEPT_SECONDS: Final = 86400.0
"""How long after its verdict a submission's files are served at least."""
BLOB: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/blobs/{name}",
    summary="The bytes with this digest",
    reply=bytes,
    media_type=BYTES,
    refusals=(Reason.NOT_FOUND, Reason.EVIDENCE_EXPIRED),
)
LOG_CHECKPOINT: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/log/checkpoint",
    summary="The newest checkpoint of the log: a note that the run signed",
    reply=bytes,
    media_type=TEXT,
    max_reply_bytes=MAX_NOTE_BYTES,
)
LOG_WITNESSED: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/log/witnessed",
    summary="The newest checkpoint that witnesses have signed, with their signatures",
    reply=bytes,
    media_type=TEXT,
    max_reply_bytes=MAX_NOTE_BYTES,
    refusals=(Reason.NOT_FOUND,),
)
LOG_ENTRIES: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/log/entries",
    summary="Leaves of the log, each with a line feed; at most 1000",
    reply=bytes,
    media_type=LINES,
    max_reply_bytes=MAX_LOG_PAGE_BYTES,
    refusals=(Reason.BAD_REQUEST,),
)
_PROOF_REFUSALS: Final = (Reason.NOT_FOUND, Reason.BAD_REQUEST)
LOG_INCLUSION: Final = Endpoint[None, LogProof](
    method="GET", path="/v1/log/inclusion", summary="An inclusion proof", reply=LogProof, refusals=_PROOF_REFUSALS
)
LOG_CONSISTENCY: Final = Endpoint[None, LogProof](
    method="GET", path="/v1/log/consistency", summary="A consistency proof", reply=LogProof, refusals=_PROOF_REFUSALS
)
REGISTER: Final = Endpoint[Registration, Empty](
    method="POST",
    path="/v1/nodes",
    summary="Register a node",
    body=Registration,
    max_body_bytes=MAX_MESSAGE_BYTES,
    reply=Empty,
    refusals=(*_SIGNED, *_MEMBERSHIP, Reason.BAD_NICKNAME, Reason.KEY_IN_USE),
)
PUZZLE: Final = Endpoint[None, Puzzle](
    method="GET",
    path="/v1/puzzle",
    summary="What a new key solves to register, at most a second old; only of a run that asks for work",
    reply=Puzzle,
    refusals=(Reason.NOT_FOUND,),
)
STANDING: Final = Endpoint[None, NodeStanding](
    method="GET",
    path="/v1/nodes/{node}",
    summary="What a node's standing is, and why",
    reply=NodeStanding,
    refusals=(Reason.NOT_FOUND,),
)
LEASE: Final = Endpoint[LeaseRequest, LeaseReply](
    method="POST",
    path="/v1/leases",
    summary="Ask for work",
    body=LeaseRequest,
    max_body_bytes=MAX_MESSAGE_BYTES,
    reply=LeaseReply,
    max_reply_bytes=MAX_LEASE_REPLY_BYTES,
    refusals=(*_SIGNED, Reason.BANNED, Reason.KEY_IN_USE),
)
RETURN_LEASE: Final = Endpoint[None, Empty](
    method="POST",
    path="/v1/leases/{lease_id}/return",
    summary="Hand a lease back",
    reply=Empty,
    refusals=(*_SIGNED, *_LEASED),
)
SUBMIT: Final = Endpoint[bytes, SubmissionReply](
    method="PUT",
    path="/v1/submissions/{lease_id}",
    summary="Submit a group's rollouts as one file (section 6.1)",
    body=bytes,
    max_body_bytes=None,
    reply=SubmissionReply,
    status=202,
    refusals=(*_SIGNED, *_LEASED, Reason.WRONG_SLOT, Reason.UPLOAD_FIRST),
)
ANNOUNCE_UPLOAD: Final = Endpoint[UploadRequest, UploadReply](
    method="POST",
    path="/v1/uploads/{lease_id}",
    summary="Where to put the body of a submission; only of a run with an object store",
    body=UploadRequest,
    max_body_bytes=MAX_MESSAGE_BYTES,
    reply=UploadReply,
    refusals=(*_SIGNED, *_LEASED, Reason.NOT_FOUND),
)
SUBMIT_UPLOAD: Final = Endpoint[None, SubmissionReply](
    method="PUT",
    path="/v1/submissions/{lease_id}/{sha256}",
    summary="Submit what was uploaded; only of a run with an object store",
    max_body_bytes=None,
    reply=SubmissionReply,
    status=202,
    refusals=(*_SIGNED, *_LEASED, Reason.WRONG_SLOT, Reason.UPLOAD_FIRST, Reason.NOT_FOUND),
)
RECEIPT: Final = Endpoint[None, bytes](
    method="GET",
    path="/v1/receipts/{submission}",
    summary="The signed Receipt of a submission, once there is a verdict",
    reply=bytes,
    media_type=BYTES,
    max_reply_bytes=MAX_MESSAGE_BYTES + ENVELOPE_OVERHEAD_BYTES,
    refusals=(Reason.NOT_FOUND, Reason.BAD_REQUEST),
    pending=Pending,
)

ENDPOINTS: Final[tuple[Endpoint[Any, Any], ...]] = (
    HEALTH,
    METRICS,
    RUN,
    POLICY,
    STATUS_OF_RUN,
    RELAYS,
    ANNOUNCE_RELAY,
    BLOB,
    LOG_CHECKPOINT,
    LOG_WITNESSED,
    LOG_ENTRIES,
    LOG_INCLUSION,
    LOG_CONSISTENCY,
    REGISTER,
    PUZZLE,
    STANDING,
    LEASE,
    RETURN_LEASE,
    SUBMIT,
    ANNOUNCE_UPLOAD,
    SUBMIT_UPLOAD,
    RECEIPT,
)
