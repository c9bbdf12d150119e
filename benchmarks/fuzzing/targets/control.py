"""Control of workers: what any peer may send to one, and what a worker answers to whoever asks it."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.fuzzing.mutation import json_mutator
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import DIGEST, NODE_KEY, NOW, OTHER_DIGEST, RUN_ID, RUN_KEY
from node.protocol.control import (
    AUTHORITY_DOMAIN,
    CONTROL_DOMAIN,
    CONTROL_VERSION,
    PURPOSES,
    REPLY_DOMAIN,
    Ask,
    AskChallenge,
    AskInvite,
    AskLogs,
    AskStatus,
    Authority,
    Body,
    ChallengeBody,
    ControlReason,
    ControlRefusal,
    ControlReply,
    ControlRequest,
    DrainBody,
    LogsBody,
    StatusBody,
    open_authority,
    open_control,
    open_reply,
    sign_authority,
)
from node.protocol.reasons import Reason
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import encode

NODE = NODE_KEY.public_key().public_bytes_raw()
AUTHORITY = Authority(
    run_id=RUN_ID,
    node=NODE.hex(),
    purposes=("status", "logs"),
    subject=None,
    issued_at=NOW,
    expires_at=NOW + 60,
)
ASKS: tuple[Ask, ...] = (
    AskStatus(),
    AskInvite(endpoint="http://192.0.2.1:8700"),
    AskChallenge(samples=1, max_tokens=1),
    AskLogs(lines=100),
)
STATUS = StatusBody(
    software="swarmproof 0.1.0",
    engine="torch",
    doing="",
    draining=False,
    run_is_over=False,
    dismissed=False,
    coordinator_away=True,
    version=-1,
    held_versions=(0, 2**53 - 1),
    descriptor_version=NOW,
    head_version=3,
    slots=1,
    undelivered=0,
    neighbours=8,
    tokens=4096,
    tokens_per_s=0.5,
    switches=0,
    engine_restarts=0,
    admitted=2,
    rejected=1,
    indeterminate=0,
    lost=0,
    expired=0,
    admitted_tokens=2048,
    reasons={Reason.WRONG_TOKEN: 1},
    seconds=3600,
)
BODIES: tuple[Body, ...] = (
    STATUS,
    ChallengeBody(version=3, manifest_digest=DIGEST, rollouts=b"\0\xff"),
    DrainBody(slots=1, undelivered=0),
    LogsBody(lines=("é", "")),
)


def _request(_: ExitStack) -> Harness:
    """Feed requests that are really signed: any peer has a key."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=CONTROL_DOMAIN, version=CONTROL_VERSION, key=NODE_KEY)
        signer, request = open_control(envelope)
        assert (signer, encode(request)) == (NODE, data), "it encodes to other bytes"

    seeds = [
        ControlRequest(run_id=RUN_ID, to=DIGEST, ask=ask, nonce="0f" * 16, issued_at=NOW, authority=authority)
        for ask, authority in zip(ASKS, (None, b"", sign_authority(AUTHORITY, key=RUN_KEY), b"\xff" * 9), strict=True)
    ]
    return Harness([encode(seed) for seed in seeds], run, (ControlRefusal,), json_mutator())


def _authority(_: ExitStack) -> Harness:
    """Feed authorities that are really signed, if by no run: a worker sees whose they are once it has opened them."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=AUTHORITY_DOMAIN, version=CONTROL_VERSION, key=NODE_KEY)
        signer, authority = open_authority(envelope)
        assert (signer, encode(authority)) == (NODE, data), "it encodes to other bytes"

    return Harness([encode(AUTHORITY)], run, (PeerFault,), json_mutator())


def _reply(_: ExitStack) -> Harness:
    """Feed replies that are really signed, by a worker that writes what it likes."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=REPLY_DOMAIN, version=CONTROL_VERSION, key=NODE_KEY)
        for purpose in PURPOSES:
            try:
                body = open_reply(envelope, node=NODE, run_id=RUN_ID, request=OTHER_DIGEST, purpose=purpose)
            except PeerFault as error:
                if error.code != "wrong_purpose":
                    raise
            else:
                assert encode(body) in data, "it encodes to other bytes"

    seeds = [encode(_answered(None, body)) for body in BODIES]
    refusal = _answered(ControlReason.BUSY, None)
    return Harness(seeds, run, (PeerFault, ControlRefusal), json_mutator(), hostile=[encode(refusal)])


def _answered(reason: ControlReason | None, body: Body | None) -> ControlReply:
    return ControlReply(run_id=RUN_ID, request=OTHER_DIGEST, reason=reason, detail="", answered_at=NOW, body=body)


TARGETS = (
    Target("control.request", "any key, to a worker", 40, _request),
    Target("control.authority", "any key, to a worker", 30, _authority),
    Target("control.reply", "a worker, to whoever asks it", 30, _reply),
)
