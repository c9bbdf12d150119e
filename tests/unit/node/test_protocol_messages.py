"""Messages: values out of range are refused by their type, before any code sees them."""

from __future__ import annotations

import msgspec
import pytest

from node.protocol import messages as m
from node.protocol.admission import Figures, Outcome
from node.protocol.evidence import Totals
from node.protocol.reasons import Reason
from shardcast.errors import Malformed
from shardcast.wire import MAX_INTEGER, decode, encode

DIGEST = "ab" * 32
FIGURES = Figures(
    exponent_mismatches=0.0,
    mantissa_mean=0.0,
    mantissa_median=0.0,
    token_margin=0.0,
    margin_mean=0.0,
    logprob_error=0.0,
)
VERDICT = m.VerdictEntry(
    submission=DIGEST,
    node=DIGEST,
    version=1,
    manifest_digest=DIGEST,
    slot=2,
    request=DIGEST,
    body=DIGEST,
    outcome=Outcome.REJECTED,
    reason=Reason.WRONG_TOKEN,
    finding=None,
    detail="",
    figures=FIGURES,
    totals=Totals(),
    rewards=(0.0, 1.0),
    tokens=3,
    decided_at=4,
)
CLAIM = m.RequestClaim(
    run_id=DIGEST, method="GET", path="/v1/run", body_digest=DIGEST, body_bytes=0, issued_at=0, nonce="0" * 32
)
SLOT = m.SlotName(manifest_digest=DIGEST, slot=MAX_INTEGER, candidate=31)
RECEIPT = m.Receipt(
    run_id=DIGEST,
    submission=DIGEST,
    node=DIGEST,
    version=0,
    slot=0,
    outcome=Outcome.INDETERMINATE,
    reason=Reason.VERIFIER_FAILED,
    detail="x",
    tokens=0,
    log_index=0,
    leaf_hash=DIGEST,
)
REGISTRATION = m.Registration(software="s", engine="e", instance="0f" * 16, name="n")
LEASE_REQUEST = m.LeaseRequest(held_versions=(), slots=1, instance="0f" * 16)
REJECTION = m.Rejection(submission=DIGEST, reason=Reason.WRONG_SEED, detail="d", decided_at=0, log_index=MAX_INTEGER)
STANDING = m.NodeStanding(
    node=DIGEST,
    known=True,
    banned=True,
    banned_at=1,
    verified=0,
    strikes=3,
    probation=8,
    ban_after=3,
    admitted=2,
    rejected=3,
    indeterminate=1,
    vested=4,
    unvested=5,
    void=6,
    stake=0,
    leases=1,
    unjudged=1,
    most_slots=0,
    wait_seconds=1.5,
    full_rate=1.0,
    rejections=(REJECTION,) * m.MAX_REJECTIONS,
)
EXAMPLES = [
    STANDING,
    REJECTION,
    CLAIM,
    SLOT,
    msgspec.structs.replace(CLAIM, slot=SLOT),
    RECEIPT,
    VERDICT,
    REGISTRATION,
    m.RelayAnnouncement(url="https://relay.example/a"),
    m.RelayAnnouncement(
        url="http://r", received=(m.ReceivedFrom(url="http://s", bytes_per_s=MAX_INTEGER),), version=MAX_INTEGER
    ),
    m.RelayList(relays=("http://r",), stripes=(("http://r", "http://s"), ("http://s",))),
    m.LeaseRequest(held_versions=(0, MAX_INTEGER), slots=1024, instance="0f" * 16),
    m.Lease(lease_id=DIGEST, version=0, manifest_digest=DIGEST, slot=0, expires_at=0),
    m.LeaseReply(leases=(), head_version=-1, retry_after_seconds=0.5),
    m.UploadRequest(body=DIGEST, body_bytes=4096, sha256=DIGEST),
    m.UploadReply(url="https://store.example/run/uploads/1?X-Amz-Expires=300", expires_at=1),
    m.SubmissionReply(submission=DIGEST),
    m.ErrorReply(code="c", message="", server_time=0),
    m.RunEntry(run_id=DIGEST, spec_digest=DIGEST),
    m.PolicyEntry(version=0, manifest_digest=DIGEST, result_digest=DIGEST),
    m.BatchEntry(step=0, submissions=(DIGEST,)),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_message_comes_back_from_the_wire(value: msgspec.Struct) -> None:
    raw = encode(value)
    assert decode(type(value), raw, max_bytes=len(raw)) == value


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_no_message_takes_a_field_it_does_not_know(value: msgspec.Struct) -> None:
    with pytest.raises(Malformed):
        decode(type(value), encode(value)[:-1] + b',"extra":1}', max_bytes=10_000)


@pytest.mark.parametrize(
    ("value", "field", "bad"),
    [
        (CLAIM, "method", "DELETE"),
        (CLAIM, "path", "/" * 501),
        (CLAIM, "nonce", "A" * 32),
        (CLAIM, "slot", None),
        (SLOT, "candidate", 32),
        (CLAIM, "nonce", "a" * 31),
        (CLAIM, "nonce", "a" * 32 + "\n"),
        (CLAIM, "issued_at", -1),
        (CLAIM, "issued_at", 1.5),
        (CLAIM, "body_bytes", MAX_INTEGER + 1),
        (REGISTRATION, "software", "x" * 201),
        (REGISTRATION, "instance", "0f" * 15),
        (REGISTRATION, "instance", "0F" * 16),
        (REGISTRATION, "name", "a\nb"),
        (LEASE_REQUEST, "instance", ""),
        (STANDING, "rejections", [msgspec.to_builtins(REJECTION)] * (m.MAX_REJECTIONS + 1)),
        (STANDING, "wait_seconds", -0.5),
        (STANDING, "full_rate", 1.5),
        (REJECTION, "detail", "\x1b[2J"),
        (LEASE_REQUEST, "slots", 0),
        (LEASE_REQUEST, "slots", 1025),
        (LEASE_REQUEST, "held_versions", (0,) * 65),
        (LEASE_REQUEST, "held_versions", (-1,)),
        (m.RelayAnnouncement(url="http://r"), "url", "file:///etc/passwd"),
        (m.RelayAnnouncement(url="http://r"), "url", "http://r\n"),
        (m.RelayAnnouncement(url="http://r"), "url", "http://" + "r" * 501),
        (VERDICT, "outcome", "Admitted"),
        (VERDICT, "reason", "no_such_reason"),
        (VERDICT, "figures", {"token_margin": 1.0}),
        (RECEIPT, "leaf_hash", "x"),
    ],
)
def test_a_value_outside_its_range_is_refused(value: msgspec.Struct, field: str, bad: object) -> None:
    raw = msgspec.json.encode(msgspec.to_builtins(value) | {field: bad})
    with pytest.raises(Malformed) as caught:
        decode(type(value), raw, max_bytes=100_000)
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("value", [VERDICT, EXAMPLES[-1], EXAMPLES[-2], EXAMPLES[-3]], ids=lambda v: type(v).__name__)
def test_an_entry_is_told_by_its_type_alone(value: msgspec.Struct) -> None:
    assert decode(m.LogEntry, encode(value), max_bytes=m.MAX_ENTRY_BYTES) == value


@pytest.mark.parametrize(
    "raw", [b"{}", b'{"type":"coup"}', b'{"type":"batch"}', b"[]", b"", b'{"step":0,"type":"batch"}']
)
def test_an_entry_of_an_unknown_type_is_refused(raw: bytes) -> None:
    """An auditor that skipped what it does not know would not see what was slipped in."""
    with pytest.raises(Malformed):
        decode(m.LogEntry, raw, max_bytes=m.MAX_ENTRY_BYTES)


def test_domains_are_distinct() -> None:
    """Equal domains would let a request's signature pass for a receipt's."""
    assert m.REQUEST_DOMAIN != m.RECEIPT_DOMAIN
