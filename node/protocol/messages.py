"""Messages between nodes and the coordinator, and the log's entries (docs/protocol.md, sections 3 and 8)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from node.protocol.admission import Figures, Finding, Outcome, Verdict
from node.protocol.evidence import Totals
from node.protocol.membership import MAX_INVITE_ENVELOPE_BYTES, ProofOfWork
from node.protocol.profiles import Hardware
from node.protocol.reasons import Reason
from node.protocol.run import Url
from node.protocol.slots import MOST_CANDIDATES
from shardcast.urls import valid_sources
from shardcast.wire import Count, Digest, PublicKey, Wire

REQUEST_DOMAIN = "swarmproof/request"
RECEIPT_DOMAIN = "swarmproof/receipt"
MESSAGE_VERSION = 1

MAX_CLAIM_BYTES = 2048
MAX_MESSAGE_BYTES = 64 * 1024
MAX_ENTRY_BYTES = 1024 * 1024
MAX_RECEIPT_LINE_BYTES = 256 * 1024
MAX_REJECTIONS = 10
MOST_MISSED = 1000
"""Entries of `missed` in one log entry, and for one slot: the last ones."""
MOST_MISSED_OF_SLOT = 8
AUTHORIZATION_SCHEME = "Swarmproof"

Text = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
PlainUrl = Annotated[
    str,
    Meta(
        max_length=500,
        pattern=r"^https?://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]{0,200})?\Z",
    ),
]
"""A web address without user name, query or fragment."""

UploadUrl = Annotated[str, Meta(max_length=4096, pattern=r"^https?://[!-~]{1,4000}\Z")]
"""A web address whose query is a credential."""

InviteBytes = Annotated[
    bytes,
    Meta(
        max_length=MAX_INVITE_ENVELOPE_BYTES,
        # The one encoding of section 1.1, said to who reads the OpenAPI document.
        extra_json_schema={
            "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"
        },
    ),
]

Nonce = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Candidate = Annotated[int, Meta(ge=0, lt=MOST_CANDIDATES)]
"""Which of a slot's candidates it is for; left out where the run has no pools (section 5.1)."""


class SlotName(Wire, frozen=True):
    """A slot, by all that its problem and seeds follow from."""

    manifest_digest: Digest
    slot: Count
    candidate: Candidate | UnsetType = UNSET


class RequestClaim(Wire, frozen=True):
    """The signed claim of one HTTP request; its envelope is the Authorization header.

    `slot` is in that of a submission: whose work the node says the file is.
    """

    run_id: Digest
    method: Literal["GET", "POST", "PUT"]
    path: Annotated[str, Meta(max_length=500)]
    body_digest: Digest
    body_bytes: Count
    issued_at: Count
    nonce: Nonce
    slot: SlotName | UnsetType = UNSET


class Registration(Wire, frozen=True):
    """Registration of a node; its key is the request's signer.

    `instance` distinguishes machines with the same key, `name` is this machine's host name. `invite` and `work` are
    what a new key shows where the run asks for it (section 3.7), and left out elsewhere. `nickname` and `hardware` are
    what the run's pages show of the node, left out where it does not say (section 3.8).
    """

    software: Text
    engine: Text
    instance: Nonce
    name: Text
    invite: InviteBytes | UnsetType = UNSET
    work: ProofOfWork | UnsetType = UNSET
    nickname: Text | UnsetType = UNSET
    hardware: Hardware | UnsetType = UNSET


class ReceivedFrom(Wire, frozen=True):
    """What one relay got from another: bytes per second of a transfer."""

    url: PlainUrl
    bytes_per_s: Count


class RelayAnnouncement(Wire, frozen=True):
    """Announcement of a relay's URL and of its measured sources; open to all, since nothing served is trusted.

    `version` is the newest complete policy, null before the first. A URL that clients would not use as a source is
    refused: it would be told to everybody.
    """

    url: Annotated[PlainUrl, Meta(description="One that clients take as a source: docs/protocol.md, 3.6.")]
    received: Annotated[tuple[ReceivedFrom, ...], Meta(max_length=32)] = ()
    version: Count | None = None

    def __post_init__(self) -> None:
        if valid_sources([self.url]) != (self.url,):
            raise ValueError("url is no source: use http://host:port with an IP address in its usual form, or a name")


class RelayList(Wire, frozen=True):
    """Announced relays, and the candidates of each stripe in order of preference.

    Chunk i is of stripe i mod the number of stripes (`shardcast.tree`); without stripes anybody may be asked for any
    chunk. Relays and list are untrusted.
    """

    relays: Annotated[tuple[Url, ...], Meta(max_length=256)]
    stripes: Annotated[tuple[Annotated[tuple[Url, ...], Meta(max_length=16)], ...], Meta(max_length=16)] = ()


class LeaseRequest(Wire, frozen=True):
    """Request for up to `slots` leases on one of the held (verified, on disk) policies.

    `instance` is that of its last Registration. `lacks`: the environments of the run, by their place in its list, that
    are not installed there; no slot of these is leased.
    """

    held_versions: Annotated[tuple[Count, ...], Meta(max_length=64)]
    slots: Annotated[int, Meta(ge=1, le=1024)]
    instance: Nonce
    lacks: Annotated[tuple[Annotated[int, Meta(ge=0, le=99)], ...], Meta(min_length=1, max_length=100)] | UnsetType = (
        UNSET
    )


class Lease(Wire, frozen=True):
    """The right to submit one slot until `expires_at`."""

    lease_id: Digest
    version: Count
    manifest_digest: Digest
    slot: Count
    expires_at: Count
    candidate: Candidate | UnsetType = UNSET


class LeaseReply(Wire, frozen=True):
    """Leases of one policy version, or none and when to ask again."""

    leases: tuple[Lease, ...]
    head_version: int
    retry_after_seconds: float


class Rejection(Wire, frozen=True):
    """One verdict that counted against a node, as the log has it at `log_index`."""

    submission: Digest
    reason: Reason
    detail: Text
    decided_at: Count
    log_index: Count


class NodeStanding(Wire, frozen=True):
    """What the log and the queue say about a node (section 7.6): anybody can sum up the same from the log.

    `vested`, `unvested` and `void` are tokens of admitted groups that are the node's, may still become its own, and
    never will. `wait_seconds` is for how long it gets no lease, `most_slots` how many it may have afterwards: `leases`
    and submissions without a verdict (`unjudged`) together, 0 if it gets none at all. `full_rate` is the probability
    that all of its next slot is measured. `banned_at` is null unless it is banned. `rejections` are the last ones, the
    newest first. `nickname` and `hardware` are what the node says of itself, left out where it does not.
    """

    node: PublicKey
    known: bool
    banned: bool
    banned_at: Count | None
    verified: Count
    strikes: Count
    probation: Count
    ban_after: Count
    admitted: Count
    rejected: Count
    indeterminate: Count
    vested: Count
    unvested: Count
    void: Count
    stake: Count
    leases: Count
    unjudged: Count
    most_slots: Count
    wait_seconds: Annotated[float, Meta(ge=0)]
    full_rate: Annotated[float, Meta(ge=0, le=1)]
    rejections: Annotated[tuple[Rejection, ...], Meta(max_length=MAX_REJECTIONS)]
    nickname: Text | UnsetType = UNSET
    hardware: Hardware | UnsetType = UNSET


class UploadRequest(Wire, frozen=True):
    """Announcement of an upload to the run's object store, by its digests."""

    body: Digest
    body_bytes: Count
    sha256: Digest


class UploadReply(Wire, frozen=True):
    """A presigned URL for exactly these bytes, until `expires_at`; a credential."""

    url: UploadUrl
    expires_at: Count


class SubmissionReply(Wire, frozen=True):
    """A submission was stored; its receipt follows under this id."""

    submission: Digest


class ErrorReply(Wire, frozen=True):
    """The reply to a refused request.

    `server_time` lets a node correct its clock. `submission` names the node's own earlier submission when a
    duplicate is refused, so that a worker whose answer was lost finds its receipt.
    """

    code: str
    message: str
    server_time: Count
    submission: Digest | None = None


class Receipt(Wire, frozen=True):
    """The coordinator's signed statement of a verdict, with its place in the log."""

    run_id: Digest
    submission: Digest
    node: PublicKey
    version: Count
    slot: Count
    outcome: Outcome
    reason: Reason | None
    detail: str
    tokens: Count
    log_index: Count
    leaf_hash: Digest


class KeptReceipt(Wire, frozen=True):
    """A line of a worker's receipts.ndjson: a receipt and its signed envelope."""

    receipt: Receipt
    envelope: bytes


class RunEntry(Wire, frozen=True, tag_field="type", tag="run"):
    """The log's first entry: the rules, by digest of the run's spec."""

    run_id: Digest
    spec_digest: Digest


class PolicyEntry(Wire, frozen=True, tag_field="type", tag="policy"):
    """A policy was published."""

    version: Count
    manifest_digest: Digest
    result_digest: Digest


class VerdictEntry(Wire, frozen=True, tag_field="type", tag="verdict"):
    """A submission was judged: whose and which it is, and its `Verdict`, field by field in the order of the encoding.

    `request` and `body` are the digests of the evidence: the signed envelope and the submitted file. `recheck` marks
    the second verdict on a group of which the first measured one row (`spot`).
    """

    submission: Digest
    node: PublicKey
    version: Count
    manifest_digest: Digest
    slot: Count
    request: Digest
    body: Digest
    outcome: Outcome
    reason: Reason | None
    finding: Finding | None
    detail: str
    figures: Figures | None
    totals: Totals | None
    rewards: tuple[float, ...] | None
    tokens: Count
    decided_at: Count
    spot: Count | None = None
    recheck: bool = False
    candidate: Candidate | UnsetType = UNSET

    @property
    def verdict(self) -> Verdict:
        """The decision alone, without whose it is and when it was taken."""
        return Verdict(**{name: getattr(self, name) for name in Verdict.__struct_fields__})


class Gap(Wire, frozen=True):
    """A slot that no step trains on, because nobody delivered it in time (section 7.7)."""

    version: Count
    slot: Count


class MissedSlot(Wire, frozen=True):
    """A node that had a slot leased and delivered nothing: the lease expired, was returned, or went to another node."""

    version: Count
    slot: Count
    node: PublicKey
    how: Literal["expired", "returned", "overtaken"]


class BatchEntry(Wire, frozen=True, tag_field="type", tag="batch"):
    """The training step that makes policy `step` + 1 uses exactly these submissions.

    `gaps` are the slots whose last chance it was and that are missing; `missed` says who had them, or a slot of
    `submissions`, before without delivering it.
    """

    step: Count
    submissions: tuple[Digest, ...]
    gaps: tuple[Gap, ...] = ()
    missed: tuple[MissedSlot, ...] = ()


LogEntry = RunEntry | PolicyEntry | VerdictEntry | BatchEntry


def slot_name(named: Lease | VerdictEntry) -> SlotName:
    """Return the slot of a lease or a verdict."""
    return SlotName(manifest_digest=named.manifest_digest, slot=named.slot, candidate=named.candidate)


def candidate_of(named: Lease | VerdictEntry) -> int:
    """Return the candidate of a lease or a verdict; 0 in a run without pools."""
    return 0 if isinstance(named.candidate, UnsetType) else named.candidate
