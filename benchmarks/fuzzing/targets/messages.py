"""Canonical messages: what nodes and coordinator write to each other, each with its own decoder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed
from benchmarks.fuzzing.target import Harness, Target
from coordinator.run.health import NO_RELAY, Complaint, Health, HealthFigures, State
from node.commands.status_report import MAX_PROBLEMS, health_lines
from node.protocol.membership import Puzzle
from node.protocol.messages import (
    MAX_CLAIM_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGE_VERSION,
    REQUEST_DOMAIN,
    ErrorReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Registration,
    Rejection,
    RelayAnnouncement,
    RequestClaim,
    SlotName,
    SubmissionReply,
    UploadReply,
    UploadRequest,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import check_claim, open_claim, read_authorization, sign_request
from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    BatchSpec,
    Descriptor,
    EnvironmentSpec,
    PolicyHead,
    RunSpec,
    open_descriptor,
    run_id_of,
)
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import Wire, decode, encode

RUN_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
NODE_KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
RUN_ID = run_id_of(RUN_KEY.public_key().public_bytes_raw())
NOW = 1_800_000_000
DIGEST, OTHER_DIGEST = "ab" * 32, "cd" * 32

SPEC = RunSpec(
    name="fuzz",
    environments=(
        EnvironmentSpec(name="arithmetic", weight=2, arguments={"digits": 3}),
        EnvironmentSpec(name="reverse", arguments={"text": "x", "on": True, "much": 1e15, "little": -0.5}),
    ),
    batch=BatchSpec(max_async=1),
)
CLAIM = RequestClaim(
    run_id=RUN_ID,
    method="PUT",
    path=f"/v1/submissions/{DIGEST}",
    body_digest=OTHER_DIGEST,
    body_bytes=123_456,
    issued_at=NOW,
    nonce="0f" * 16,
    slot=SlotName(manifest_digest=OTHER_DIGEST, slot=7, candidate=3),
)
LEASE = Lease(lease_id=DIGEST, version=3, manifest_digest=OTHER_DIGEST, slot=7, expires_at=NOW + 60)
INSTANCE = "0f" * 16
REGISTRATIONS = (
    Registration(software="swarmproof 0.1.0", engine="torch", instance=INSTANCE, name="gpu-7"),
    Registration(software="", engine="é" * 200, instance=INSTANCE, name=""),
)
ANNOUNCEMENTS = (
    RelayAnnouncement(url="http://192.0.2.1:8720"),
    RelayAnnouncement(url="https://[2001:db8::1]:443/swarmproof/relay_1~x"),
)
LEASE_REQUESTS = (
    LeaseRequest(held_versions=(), slots=1, instance=INSTANCE),
    LeaseRequest(held_versions=(0, 1, 2**53 - 1), slots=1024, instance=INSTANCE),
)
LEASE_REPLIES = (
    LeaseReply(leases=(), head_version=-1, retry_after_seconds=1e-6),
    LeaseReply(leases=(LEASE, LEASE), head_version=3, retry_after_seconds=0.0),
)
UPLOAD = UploadRequest(body=DIGEST, body_bytes=123_456, sha256=OTHER_DIGEST)
OFFER = UploadReply(url="https://store.example/run/uploads/0f?X-Amz-Signature=0f&X-Amz-Expires=300", expires_at=NOW)
PUZZLE = Puzzle(salt=DIGEST, bits=20, expires_at=NOW)
REJECTION = Rejection(
    submission=DIGEST, reason=Reason.WRONG_TOKEN, detail="Row 3 has another token.", decided_at=NOW, log_index=17
)
STANDING = NodeStanding(
    node=OTHER_DIGEST,
    known=True,
    banned=True,
    banned_at=NOW,
    verified=0,
    strikes=3,
    probation=8,
    ban_after=3,
    admitted=9,
    rejected=3,
    indeterminate=0,
    vested=4096,
    unvested=0,
    void=512,
    stake=0,
    leases=1,
    unjudged=0,
    most_slots=0,
    wait_seconds=2.5,
    full_rate=1.0,
    rejections=(REJECTION, REJECTION),
)
ERROR_REPLIES = (
    ErrorReply(code="clock_skew", message="Set the clock.\x1b[2J", server_time=NOW, submission=None),
    ErrorReply(code="duplicate_submission", message='"\\\u0000é', server_time=0, submission=DIGEST),
)

PROBLEM = Complaint(NO_RELAY, "There is no relay: workers cannot fetch policies.")
HEALTHS = (
    Health(State.WORKS, (), HealthFigures(None, None, 0.5, {})),
    Health(State.STOPPED, (PROBLEM, PROBLEM), HealthFigures(60.0, 1.5, 0.0, {"trainer": 1.0})),
)


def same(cls: Any, data: bytes, *, max_bytes: int) -> Any:
    """Decode `data` as `cls`, and check that it encodes to the same bytes again."""
    value = decode(cls, data, max_bytes=max_bytes)
    assert msgspec.json.encode(value) == data, "it encodes to other bytes"
    return value


def message(cls: Any, *seeds: Wire, max_bytes: int = MAX_MESSAGE_BYTES) -> Harness:
    """Make a harness that decodes canonical values of one type."""

    def run(data: bytes) -> None:
        same(cls, data, max_bytes=max_bytes)

    return Harness([encode(seed) for seed in seeds], run, (PeerFault,), json_mutator())


def _authorization(_: ExitStack) -> Harness:
    """Feed the header as it arrives: Latin-1 text, as in HTTP."""

    def run(data: bytes) -> None:
        header = data.decode("latin-1")
        envelope = read_authorization(header)
        signer, claim = open_claim(envelope)
        check_claim(claim, run_id=RUN_ID, method=CLAIM.method, path=CLAIM.path, now=NOW)
        assert (signer, claim) == (NODE_KEY.public_key().public_bytes_raw(), CLAIM), "a signature was forged"

    header, _envelope = sign_request(CLAIM, key=NODE_KEY)
    tokens = (b"Swarmproof ", b"Basic ", b"=", b"==", b"-", b"_", b"+", b"/", b"\xff", b"A" * 5000)
    return Harness([header.encode()], run, (Refusal,), bytes_mutator(*tokens))


def _claim(_: ExitStack) -> Harness:
    """Feed claims that are really signed, by a node that writes what it likes."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=REQUEST_DOMAIN, version=MESSAGE_VERSION, key=NODE_KEY)
        _, claim = open_claim(envelope)
        assert encode(claim) == data, "it encodes to other bytes"
        assert len(data) <= MAX_CLAIM_BYTES
        check_claim(claim, run_id=RUN_ID, method=CLAIM.method, path=CLAIM.path, now=NOW)

    return Harness([encode(CLAIM)], run, (Refusal,), json_mutator())


def _descriptor(_: ExitStack) -> Harness:
    """Feed descriptors that are really signed: a run may be an attacker's own."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=RUN_KEY)
        descriptor, _ = open_descriptor(envelope, run_id=RUN_ID, now=NOW)
        assert encode(descriptor) == data, "it encodes to other bytes"
        assert decode(RunSpec, encode(descriptor.spec), max_bytes=len(data)).digest == descriptor.spec.digest

    urls = tuple(announcement.url for announcement in ANNOUNCEMENTS)
    described = Descriptor(
        run_id=RUN_ID,
        version=NOW,
        spec=SPEC,
        endpoints=urls[:1],
        relays=urls,
        peers=("/ip4/192.0.2.1/tcp/8701/p2p/12D3KooWBGofiw47QiCNCcskyT5V99sKjiTuqKE4f65WPQgjqq8w",),
        head=PolicyHead(version=3, manifest_digest=DIGEST),
        revoked=(OTHER_DIGEST,),
        issued_at=NOW,
        expires_at=NOW + 3600,
    )
    return Harness([encode(described)], run, (PeerFault,), json_mutator())


def _submission_reply(_: ExitStack) -> Harness:
    harness = message(SubmissionReply, SubmissionReply(submission=DIGEST))
    mutate = mixed((9, harness.mutate), (1, bytes_mutator(b'"', b"{", b"}", b":", b"\\u0061")))
    return replace(harness, mutate=mutate)


def _run_status(_: ExitStack) -> Harness:
    """Feed what `swarmproof status` shows of a run; it shows nothing of what it does not know."""

    def run(data: bytes) -> int:
        lines = health_lines(data)
        assert len(lines) <= MAX_PROBLEMS
        return len(lines)

    seeds = [msgspec.json.encode({"health": health.as_json()}) for health in HEALTHS]
    return Harness(seeds, run, (), json_mutator())


def _plain(cls: Any, *seeds: Wire, **limits: int) -> Any:
    return lambda _stack: message(cls, *seeds, **limits)


TARGETS = (
    Target("messages.authorization", "anybody, to the coordinator", 90, _authorization),
    Target("messages.claim", "any key, to the coordinator", 50, _claim),
    Target("messages.registration", "any key, to the coordinator", 40, _plain(Registration, *REGISTRATIONS)),
    Target("messages.relay_announcement", "any key, to the coordinator", 40, _plain(RelayAnnouncement, *ANNOUNCEMENTS)),
    Target("messages.lease_request", "any key, to the coordinator", 40, _plain(LeaseRequest, *LEASE_REQUESTS)),
    Target("messages.upload_request", "any key, to the coordinator", 20, _plain(UploadRequest, UPLOAD)),
    Target("messages.descriptor", "whoever answers for a run", 60, _descriptor),
    Target(
        "messages.lease_reply",
        "whoever answers as the coordinator",
        40,
        _plain(LeaseReply, *LEASE_REPLIES, max_bytes=512 * 1024),
    ),
    Target("messages.upload_reply", "whoever answers as the coordinator", 20, _plain(UploadReply, OFFER)),
    Target("messages.puzzle", "whoever answers as the coordinator", 20, _plain(Puzzle, PUZZLE)),
    Target("messages.node_standing", "whoever answers as the coordinator", 20, _plain(NodeStanding, STANDING)),
    Target("messages.run_status", "whoever answers as the coordinator", 20, _run_status),
    Target("messages.submission_reply", "whoever answers as the coordinator", 20, _submission_reply),
    Target("messages.error_reply", "whoever answers as the coordinator", 30, _plain(ErrorReply, *ERROR_REPLIES)),
)
