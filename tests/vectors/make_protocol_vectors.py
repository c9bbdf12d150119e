"""Write the golden vectors of docs/protocol.md: `python tests/vectors/make_protocol_vectors.py`.

The files under tests/vectors/protocol/ are normative. Running this again must change nothing; where it does,
the protocol has changed, and every participant in every run has to change with it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import torch
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.chat.render import render as render_chat
from node.chat.render import render_reply
from node.chat.samples import conversations
from node.chat.turns import whole_turn
from node.datasets.convert import Converted, ConvertSettings, convert
from node.datasets.format import Columns
from node.datasets.sources import SourceRow
from node.environments import load_environment
from node.environments.grading import grade
from node.graders import BadAnswer, check_answer
from node.graders import grade as grade_answer
from node.protocol import messages as m
from node.protocol.admission import Figures, Finding, Outcome, judge_drift, judge_group, judge_rows, worst
from node.protocol.challenge import CHALLENGE_SLOT, challenge_manifest
from node.protocol.chat import MAX_FORMAT_BYTES, ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS
from node.protocol.checkpoints import Checkpoint, log_key, origin_of, seal_checkpoint
from node.protocol.control import (
    AskChallenge,
    Authority,
    ControlReason,
    ControlReply,
    ControlRequest,
    DrainBody,
    sign_authority,
    sign_control,
    sign_reply,
)
from node.protocol.evidence import Drift, Total, Totals, evidences, follow
from node.protocol.grading import (
    ChoiceGrader,
    ExactGrader,
    GraderSpec,
    JsonGrader,
    MathGrader,
    NumberGrader,
    RegexGrader,
    UnitTestsGrader,
)
from node.protocol.membership import (
    Invite,
    MembershipSpec,
    ProofOfWork,
    Puzzle,
    find_work,
    invite_token,
    price_bits,
    sign_invite,
    work_bits,
    work_seed,
)
from node.protocol.merkle import completed_nodes, consistency_proof, inclusion_proof, leaf_hash, root
from node.protocol.notes import KeyKind, VerifierKey, cosign_text, join_note, parse_note
from node.protocol.peers import Address, Invitation, PeerRecord, peer_id_of, sign_peer
from node.protocol.pools import candidates, first_candidate, slot_pool
from node.protocol.profiles import Hardware, check_nickname
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import sign_request
from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    BatchSpec,
    Descriptor,
    EnvironmentSpec,
    HonestSpec,
    LengthSpec,
    LevelSpec,
    LimitsSpec,
    PolicyHead,
    PoolsSpec,
    ProblemsSpec,
    ProofSpec,
    RunSpec,
    SamplingSpec,
    run_id_of,
)
from node.protocol.sampling import TABLE_DIGEST, gumbel_noise, gumbel_table, philox4x32, table_index
from node.protocol.slots import group_seeds, sample_seed, slot_problem
from node.protocol.submission import Expected, Rollout, check_rollouts, chunk_count, chunk_sizes, proof_bytes
from node.protocol.terminal import BACKGROUND_BIT, CODEPOINT, FOREGROUND_BIT, Cells, Terminal
from node.protocol.turns import StopStrings, ThinkingBudget, TurnRules, interleaved, pieces, replay, turns_of
from node.submission.reader import bounds_of, read_rollouts
from node.submission.writer import write_rollouts
from node.verification.proofs import build_proofs
from shardcast.content import content_line
from shardcast.envelope import seal
from shardcast.wire import decode, derive, digest, encode

FOLDER = Path(__file__).parent / "protocol"
PUBLISHED_CHATS = Path(__file__).parent.parent / "support" / "chat_templates" / "published.json"
RUN_KEY = bytes(range(32))
NODE_KEY = bytes(range(32, 64))
HELD_OUT = 0.5
DIGEST_A, DIGEST_B = "aa" * 32, "0123456789abcdef" * 4

# The reference tree of Certificate Transparency's own tests.
CT_LEAVES = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")


def _key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


def _public(seed: bytes) -> str:
    return _key(seed).public_key().public_bytes_raw().hex()


def spec() -> RunSpec:
    """A run with two environments of unequal weight and small groups; everything else is the default."""
    return RunSpec(
        name="vectors",
        environments=(
            EnvironmentSpec(name="arithmetic", weight=3, arguments={"digits": 2, "carry": True}),
            EnvironmentSpec(name="reverse", length=LengthSpec(targets=(4, 10), penalty=0.01, form="short")),
        ),
        seed=7,
        sampling=SamplingSpec(group_size=4),
    )


RUN_ID = run_id_of(bytes.fromhex(_public(RUN_KEY)))


def claim() -> m.RequestClaim:
    return m.RequestClaim(
        run_id=RUN_ID,
        method="PUT",
        path=f"/v1/submissions/{DIGEST_B}",
        body_digest=digest(b"body"),
        body_bytes=4,
        issued_at=1_760_000_000,
        nonce="00112233445566778899aabbccddeeff",
        slot=m.SlotName(manifest_digest=DIGEST_A, slot=9, candidate=3),
    )


def log_entries() -> list[m.LogEntry]:
    figures = Figures(
        exponent_mismatches=2.0,
        mantissa_mean=0.25,
        mantissa_median=0.0,
        token_margin=0.001,
        margin_mean=1e-6,
        logprob_error=2.5e-7,
        margin_evidence=0.25,
    )
    totals = Totals(margin=Total(count=64, sum=0.0015))
    common: dict[str, Any] = {
        "submission": DIGEST_A,
        "node": _public(NODE_KEY),
        "version": 0,
        "manifest_digest": DIGEST_B,
        "slot": 5,
        "request": DIGEST_A,
        "body": DIGEST_B,
        "decided_at": 1_760_000_060,
    }
    rejected: dict[str, Any] = {"outcome": Outcome.REJECTED, "reason": Reason.WRONG_TOKEN, "rewards": None}
    finding = Finding(reason=Reason.WRONG_TOKEN, row=3, figure="token_margin", value=7.5, limit=1.0)
    together = Finding(reason=Reason.WRONG_TOKEN, row=None, figure="margin_evidence", value=20.5, limit=13.5)
    return [
        m.RunEntry(run_id=RUN_ID, spec_digest=spec().digest),
        m.PolicyEntry(version=0, manifest_digest=DIGEST_B, result_digest=DIGEST_A),
        m.VerdictEntry(
            **common,
            outcome=Outcome.ADMITTED,
            reason=None,
            finding=None,
            detail="",
            figures=figures,
            totals=totals,
            rewards=(0.0, 1.0, 0.5, 0.0),
            tokens=64,
        ),
        m.VerdictEntry(
            **common,
            **rejected,
            finding=finding,
            detail="Row 3: token_margin is 7.5, the limit is 1.",
            figures=msgspec.structs.replace(figures, token_margin=7.5),
            totals=totals,
            tokens=64,
        ),
        m.VerdictEntry(
            **common,
            **rejected,
            finding=together,
            detail="All rows together: margin_evidence is 20.5, the limit is 13.5.",
            figures=figures,
            totals=totals,
            tokens=64,
        ),
        m.BatchEntry(
            step=0,
            submissions=(DIGEST_A,),
            gaps=(m.Gap(version=0, slot=7),),
            missed=(m.MissedSlot(version=0, slot=7, node=_public(NODE_KEY), how="overtaken"),),
        ),
    ]


NICKNAMES = (
    *(
        "a",
        "Zo\u00eb 7",
        "a.b_c-d",
        "\u05d3\u05d5\u05d3",
        "\u6771\u4eac",
        "0" * 32,
        "\u0667",
        "0" * 33,
        "",
        " a",
        "a ",
        "a  b",
    ),
    *(
        "<b>",
        "a&b",
        "a\nb",
        "a\u00a0b",
        "a\u00adb",
        "a\u200bb",
        "a\u202eb",
        "\u3164",
        "\u2800",
        "\u212b",
        "e\u0301",
        "\u00bd",
        "\u2167",
    ),
    *(
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u0e19\u0e49\u0e33",
        "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
        "\u091c\u093c\u0940\u0902",
        "\u091c\u093c\u0940\u0902\u0902",
        "\u091c\u093c\u0940\u0902\u0902\u0902",
        "\u0301a",
        "7\u0301",
        "a\u20dd",
        "a\ufe0f",
        "a\u034f",
        "\u1780\u17b4",
        "\u1820\u180d",
        "\u1820\u180f",
        "a\U000e01ef",
    ),
)


def _is_nickname(text: str) -> bool:
    try:
        check_nickname(text)
    except Refusal:
        return False
    return True


def wire_vectors() -> dict[str, Any]:
    """Section 1: canonical values, digests, key derivation, envelopes."""
    values: list[msgspec.Struct] = [
        m.Registration(software="swarmproof 0.1.0", engine="torch", instance="0f" * 16, name="gpu-7"),
        m.Registration(
            software="swarmproof 0.1.0",
            engine="vllm",
            instance="0f" * 16,
            name="gpu-7",
            nickname="Zo\u00eb 7",
            hardware=Hardware(device="2 x NVIDIA H200", engine="vllm 0.32.0", dtype="bfloat16"),
        ),
        m.RelayAnnouncement(
            url="http://relay.example:8001",
            received=(m.ReceivedFrom(url="http://origin.example:8000", bytes_per_s=25_000_000),),
        ),
        m.RelayList(
            relays=("http://origin.example:8000", "http://relay.example:8001"),
            stripes=(("http://relay.example:8001", "http://origin.example:8000"),),
        ),
        m.LeaseRequest(held_versions=(3, 4), slots=2, instance="0f" * 16),
        m.LeaseRequest(held_versions=(4,), slots=1, instance="0f" * 16, lacks=(1,)),
        m.LeaseReply(
            leases=(
                m.Lease(lease_id=DIGEST_A, version=4, manifest_digest=DIGEST_B, slot=9, expires_at=1_760_000_060),
                m.Lease(
                    lease_id=DIGEST_B,
                    version=4,
                    manifest_digest=DIGEST_B,
                    slot=10,
                    expires_at=1_760_000_060,
                    candidate=3,
                ),
            ),
            head_version=4,
            retry_after_seconds=0.5,
        ),
        m.NodeStanding(
            node=_public(NODE_KEY),
            known=True,
            banned=False,
            banned_at=None,
            verified=0,
            strikes=1,
            probation=8,
            ban_after=3,
            admitted=9,
            rejected=1,
            indeterminate=0,
            vested=4096,
            unvested=0,
            void=512,
            stake=0,
            leases=1,
            unjudged=0,
            most_slots=1,
            wait_seconds=2.5,
            full_rate=1.0,
            rejections=(
                m.Rejection(
                    submission=DIGEST_A,
                    reason=Reason.WRONG_SEED,
                    detail="Row 0 has another seed.",
                    decided_at=1_760_000_000,
                    log_index=17,
                ),
            ),
        ),
        m.UploadRequest(body=DIGEST_A, body_bytes=4096, sha256=DIGEST_B),
        m.UploadReply(url="https://store.example/run/uploads/1?X-Amz-Expires=300", expires_at=1_760_000_300),
        m.SubmissionReply(submission=DIGEST_A),
        m.ErrorReply(code="clock_skew", message='Über "60 s"\n', server_time=1_760_000_000),
        claim(),
        msgspec.structs.replace(claim(), slot=m.SlotName(manifest_digest=DIGEST_A, slot=9)),
        msgspec.structs.replace(claim(), slot=msgspec.UNSET),
    ]
    floats = [0.0, -0.0, 1.0, 38.0, 0.1, 0.0001, 0.00001, 0.000001, 1.5e-7, 1e15, 1e16, 1e300, 5e-324]
    payload = b'{"software":"swarmproof 0.1.0","engine":"torch"}'
    return {
        "values": [
            {"type": type(v).__name__, "canonical": encode(v).decode(), "digest": digest(encode(v))} for v in values
        ],
        "floats": [{"float64_hex": v.hex(), "canonical": msgspec.json.encode(v).decode()} for v in floats],
        "derive": [
            {"context": context, "parts": [p.hex() for p in parts], "output": derive(context, *parts).hex()}
            for context, parts in (
                ("swarmproof/1 run id", (bytes.fromhex(_public(RUN_KEY)),)),
                ("swarmproof/1 test", ()),
                ("swarmproof/1 test", (b"", b"ab")),
                ("swarmproof/1 test", (b"a", b"b")),
            )
        ],
        "nicknames": [{"text": text, "is_one": _is_nickname(text)} for text in NICKNAMES],
        "envelope": {
            "private_key": NODE_KEY.hex(),
            "public_key": _public(NODE_KEY),
            "domain": "swarmproof/test",
            "version": 258,
            "payload": payload.hex(),
            "envelope": seal(payload, domain="swarmproof/test", version=258, key=_key(NODE_KEY)).hex(),
        },
    }


def run_vectors() -> dict[str, Any]:
    """Sections 2 and 3: a spec, its digest, the run's id, a descriptor and a signed request."""
    descriptor = Descriptor(
        run_id=RUN_ID,
        version=1_760_000_000,
        spec=spec(),
        endpoints=("https://run.example",),
        relays=("http://relay.example:8001",),
        peers=(f"/ip4/192.0.2.1/tcp/8701/p2p/{peer_id_of(_key(NODE_KEY).public_key().public_bytes_raw())}",),
        head=PolicyHead(version=7, manifest_digest="ab" * 32),
        revoked=(),
        issued_at=1_760_000_000,
        expires_at=1_760_086_400,
    )
    header, envelope = sign_request(claim(), key=_key(NODE_KEY))
    return {
        "run_private_key": RUN_KEY.hex(),
        "run_public_key": _public(RUN_KEY),
        "run_id": RUN_ID,
        "spec": encode(spec()).decode(),
        "spec_digest": spec().digest,
        "descriptor": seal(
            encode(descriptor), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=_key(RUN_KEY)
        ).hex(),
        "request": {
            "private_key": NODE_KEY.hex(),
            "claim": encode(claim()).decode(),
            "authorization": header,
            "submission": digest(envelope),
        },
    }


def peer_vectors() -> dict[str, Any]:
    """Section 13: the name of a key, addresses of each form, a string to join by, and what a peer says about itself."""
    node, relay = (_key(seed).public_key().public_bytes_raw() for seed in (NODE_KEY, RUN_KEY))
    addresses = (
        Address("ip4", "192.0.2.1", 8701, node),
        Address("ip6", "2001:db8::1", 8701, node),
        Address("dns", "peer.example.org", 443, node),
        Address("dns4", "localhost", 1, node),
        Address("dns6", "a-1.example", 65535, node),
        Address("ip4", "198.51.100.7", 8701, node, relay=relay),
    )
    record = PeerRecord(
        run_id=RUN_ID,
        addresses=(str(addresses[0]), str(addresses[-1])),
        issued_at=1_760_000_000,
        expires_at=1_760_003_600,
    )
    return {
        "public_key": node.hex(),
        "private_key": NODE_KEY.hex(),
        "peer_id": peer_id_of(node),
        "addresses": [
            {
                "address": str(one),
                "kind": one.kind,
                "host": one.host,
                "port": one.port,
                "public_key": one.node.hex(),
                "relay_public_key": None if one.relay is None else one.relay.hex(),
            }
            for one in addresses
        ],
        "join": str(Invitation(RUN_ID, addresses[:2])),
        "run_id": RUN_ID,
        "record": encode(record).decode(),
        "envelope": sign_peer(record, key=_key(NODE_KEY)).hex(),
    }


def control_vectors() -> dict[str, Any]:
    """An asker with authority, what it asks, both answers, and the work of a challenge."""
    asker, now = bytes(range(64, 96)), 1_760_000_000
    granted = Authority(
        run_id=RUN_ID,
        node=_public(asker),
        purposes=("status", "challenge"),
        subject=None,
        issued_at=now,
        expires_at=now + 3600,
    )
    authority = sign_authority(granted, key=_key(RUN_KEY))
    asked = ControlRequest(
        run_id=RUN_ID,
        to=_public(NODE_KEY),
        ask=AskChallenge(samples=3, max_tokens=64),
        nonce=DIGEST_B[:32],
        issued_at=now + 60,
        authority=authority,
    )
    request = sign_control(asked, key=_key(asker))
    no = ControlReply(
        run_id=RUN_ID,
        request=digest(request),
        reason=ControlReason.NOT_ALLOWED,
        detail="",
        answered_at=now + 61,
        body=None,
    )
    yes = msgspec.structs.replace(no, reason=None, body=DrainBody(slots=2, undelivered=1))
    node = bytes.fromhex(_public(NODE_KEY))
    manifest = challenge_manifest(run_id=RUN_ID, manifest_digest=DIGEST_A, node=node, nonce=asked.nonce)
    return {
        "run_id": RUN_ID,
        "authority": {"canonical": encode(granted).decode(), "envelope": authority.hex()},
        "request": {"canonical": encode(asked).decode(), "envelope": request.hex()},
        "replies": [
            {"canonical": encode(reply).decode(), "envelope": sign_reply(reply, key=_key(NODE_KEY)).hex()}
            for reply in (yes, no)
        ],
        "challenge": {
            "manifest_digest": DIGEST_A,
            "stands_for_it": manifest,
            "first_seed": sample_seed(run_id=RUN_ID, manifest_digest=manifest, slot=CHALLENGE_SLOT, sample=0).hex(),
        },
    }


def sampling_vectors() -> dict[str, Any]:
    """Section 4: Philox words, table entries, noise, and choices made with it."""
    words = [0, 1, 2047, 2048, 4095, 4096, 4097, 8191, 8192, 2**31 - 1, 2**31, 2**32 - 1]
    table, index = gumbel_table(), table_index(np.array(words, dtype=np.uint64))
    seeds = [bytes(16), bytes([255]) * 16, bytes(range(16))]
    noise = []
    for seed in seeds:
        for position in (0, 1, 2047):
            row = gumbel_noise([seed], [position], vocabulary=10)[0]
            noise.append(
                {"seed": seed.hex(), "position": position, "float32_le_hex": row.astype("<f4").tobytes().hex()}
            )
    return {
        "philox4x32_10": [_philox([0] * 6), _philox([2**32 - 1] * 6), _philox(_PI_WORDS)],
        "table": {
            "entries": len(table),
            "digest": TABLE_DIGEST,
            "lookups": [
                {"word": w, "index": int(i), "float32_le_hex": table[i].astype("<f4").tobytes().hex()}
                for w, i in zip(words, index, strict=True)
            ],
        },
        "noise": noise,
        "choices": _choices(),
    }


_PI_WORDS = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]


def _philox(words: list[int]) -> dict[str, list[str]]:
    out = philox4x32(
        np.array(words[:4], dtype=np.uint64).reshape(4, 1), np.array(words[4:], dtype=np.uint64).reshape(2, 1)
    )
    return {
        "counter": [f"{w:08x}" for w in words[:4]],
        "key": [f"{w:08x}" for w in words[4:]],
        "output": [f"{int(w):08x}" for w in out[:, 0]],
    }


def _choices() -> list[dict[str, Any]]:
    """The forced tokens of one seed over eight positions, for constant logits (exact in float32) and two T."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -8.0], dtype=np.float32)
    seed = bytes(range(16))
    noise = gumbel_noise([seed] * 8, list(range(8)), vocabulary=8)
    return [
        {
            "seed": seed.hex(),
            "logits": logits.tolist(),
            "temperature": temperature,
            "tokens": np.argmax(logits / np.float32(temperature) + noise, axis=1).tolist(),
        }
        for temperature in (1.0, 0.5)
    ]


def slot_vectors() -> dict[str, Any]:
    """Section 5: problems and seeds of some slots of two policies, and length targets."""
    slots = []
    for manifest_digest in (DIGEST_A, DIGEST_B):
        for slot in (0, 1, 2, 2**32, 2**53 - 1):
            drawn = slot_problem(spec(), run_id=RUN_ID, manifest_digest=manifest_digest, slot=slot)
            seeds = group_seeds(spec(), run_id=RUN_ID, manifest_digest=manifest_digest, slot=slot)
            slots.append(
                {
                    "manifest_digest": manifest_digest,
                    "slot": slot,
                    "environment": drawn.environment,
                    "problem": str(drawn.problem),
                    "seeds": [s.hex() for s in seeds],
                }
            )
    weights = [environment.weight for environment in spec().environments]
    where = {"run_id": RUN_ID, "weights": weights, "group_size": 4}
    return {**where, "slots": slots, "lengths": _lengths(), "pools": _pools()}


def _pools() -> dict[str, Any]:
    """Section 5.1: of a run with four problems and pools, which candidate some slots are for."""
    environment = EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=10, kept=b"\x29\x02"))
    rules = PoolsSpec(easy=1, normal=2, hard=1)
    run = RunSpec(name="pools", environments=(environment,), batch=BatchSpec(pools=rules))
    means = {"0": 1.0, "5": 0.0, "9": 0.5}
    where = {"run_id": RUN_ID, "manifest_digest": DIGEST_A}
    slots = [
        {
            "slot": slot,
            "pool": str(slot_pool(rules, **where, slot=slot)),
            "problems": [one.problem for one in candidates(run, **where, slot=slot)],
            "candidate": first_candidate(run, **where, slot=slot, mean_of=lambda one: means.get(str(one.problem))),
        }
        for slot in (*range(12), 2**53 - 1)
    ]
    return {**where, "spec": encode(run).decode(), "means": means, "slots": slots}


def _lengths() -> dict[str, Any]:
    """Problems of the second environment, and what a right and a wrong answer of some length is worth."""
    wanted = spec().environments[1]
    environment = load_environment(wanted)
    cases = []
    for index in (0, 1, 2, 3, 2**63 - 1):
        problem = environment.problem(index)
        answer = problem.data["asked"].data["answer"]
        right = f"<think></think>{answer}"
        cases += [
            {
                "problem": str(index),
                "prompt": problem.prompt,
                "target": problem.data["target_tokens"],
                "completion": completion,
                "tokens": tokens,
                "reward": grade(environment, problem, [completion], tokens=tokens),
            }
            for completion, tokens in ((right, 10), (right, 9), (right, 200), ("", 4), (answer, 10))
        ]
    return {"environment": encode(wanted).decode(), "cases": cases}


def chat_vectors() -> dict[str, Any]:
    """Section 5.3: conversations, replies and problems as text, by named formats and by reduced ones."""
    published = json.loads(PUBLISHED_CHATS.read_bytes())["models"]
    reduced = {
        name: decode(ChatFormat, published[name]["format"].encode(), max_bytes=MAX_FORMAT_BYTES)
        for name in ("qwen3", "llama3.1", "mistral", "glm4.5/no-think")
    }
    return {name: _chat_cases(chat) for name, chat in (CHAT_FORMATS | reduced).items()}


def _chat_cases(chat: ChatFormat) -> dict[str, Any]:
    said = f"so <|im_end|>{''.join(chat.marks)}"
    replies = [[{"role": "user", "content": said}]]
    if chat.results is not None:
        results = [{"role": "tool", "tool_call_id": f"call{at:05}", "content": f"{said} {at}"} for at in range(2)]
        replies += [results, [*results, {"role": "user", "content": "Go on."}]]
    wanted = spec().environments[1]
    problem = load_environment(wanted, chat=chat).problem(3)
    return {
        "format": encode(chat).decode(),
        "conversations": [
            {"messages": messages, "tools": tools, "text": text, "opening": render_chat(messages, chat, tools=tools)[1]}
            for messages, tools, text in conversations(chat, 6, seed=2)
        ],
        "replies": [{"messages": messages, "text": render_reply(messages, chat)} for messages in replies],
        "turn": {"written": "x</think>7", "seen": whole_turn("x</think>7", chat)},
        "problem": {"environment": encode(wanted).decode(), "problem": "3", "prompt": problem.prompt},
    }


FRAME_TEXTS = (
    (4, 4, "@..\n.*.\n\nljjxhhhk kkl\nx"),
    (2, 4, "one\ntwo long\nthree\n\nll\x07\x00j \n"),
    (2, 4, "\n\nnothing was printed\n"),
    (4, 8, "a@b@\n~\u20ac\n\n\u20achl\n\n"),
)
"""Screens, and the characters that their terminals are fed, a token each."""


def frame_vectors() -> dict[str, Any]:
    """Section 4.9: after each token row, column and phase, and each frame that differs from the one before."""
    cases = []
    for rows, columns, text in FRAME_TEXTS:
        terminal = Terminal.blank(rows, columns)
        before, places, frames = terminal.frame(), [], []
        for index, character in enumerate(text):
            terminal.feed(ord(character))
            places.append([*terminal.cursor, terminal.phase.name.lower()])
            frame = terminal.frame()
            if (frame != before).any():
                frames.append({"after": index + 1, "cells": _cells(frame)})
            before = frame
        codepoints = [ord(character) for character in text]
        cases.append({"rows": rows, "columns": columns, "codepoints": codepoints, "places": places, "frames": frames})
    return {"cases": cases}


def _cells(frame: Cells) -> list[str]:
    """Of each cell that is not empty: row, column, code point, foreground and background."""
    found = []
    for row, column in np.argwhere(frame):
        cell = int(frame[row, column])
        parts = (row, column, cell & CODEPOINT, cell >> FOREGROUND_BIT & 15, cell >> BACKGROUND_BIT)
        found.append(" ".join(map(str, parts)))
    return found


def dataset_vectors() -> dict[str, Any]:
    """Sections 5.3, 5.4 and 10.2: a file, its problems, what is held out of it, and the id that it travels under."""
    rows = [
        {"q": "Q:1+1=?\nA:", "a": 2, "level": 1},
        {"q": [{"role": "user", "content": "é?"}, {"role": "tool", "content": "\u2028"}], "a": "è", "level": None},
        {"q": "Q:2+3=?\nA:", "a": "5", "level": "easy"},
        *({"q": f"Q:{at}", "a": at, "level": at / 2} for at in range(6)),
    ]
    found = []
    for system in ("", "Answer."):
        with TemporaryDirectory() as folder:
            for column in ("prompt", "messages"):
                chosen = [row for row in rows if isinstance(row["q"], str) == (column == "prompt")]
                columns = Columns(
                    prompt="q" if column == "prompt" else None,
                    messages="q" if column == "messages" else None,
                    answer="a",
                    metadata=("level",),
                )
                settings = ConvertSettings(
                    name="vectors", columns=columns, grader=ExactGrader(), system=system, held_out=HELD_OUT
                )
                lines = [SourceRow(Path("rows.jsonl"), at, row) for at, row in enumerate(chosen, 1)]
                for salt in (msgspec.UNSET, bytes(range(32))):
                    chosen_settings = replace(settings, salt=salt)
                    found.append(_dataset(convert(lines, chosen_settings, to=Path(folder), check_answer=check_answer)))
    return {"run_id": RUN_ID, "share": HELD_OUT, "files": found}


def _dataset(made: Converted) -> dict[str, Any]:
    apart = made.spec.answers
    environment = EnvironmentSpec(
        name="dataset:vectors",
        dataset=made.spec,
        problems=ProblemsSpec(count=made.header.leased),
        answers="operator" if apart else msgspec.UNSET,
    )
    files = {apart.digest: made.answers} if apart else {made.spec.digest: made.path}
    source = load_environment(environment, files)
    problems = [source.problem(index) for index in range(made.header.rows)]
    return {
        "environment": encode(environment).decode(),
        "content_id": content_line(RUN_ID, made.spec.digest),
        "file": base64.b64encode(made.path.read_bytes()).decode(),
        "answers": base64.b64encode(made.answers.read_bytes()).decode() if apart else None,
        "held_out": made.header.held_out,
        "problems": [
            {
                "prompt": problem.prompt,
                "opening": problem.opening,
                "messages": list(problem.messages),
                "answer": problem.data["answer"],
                "reward": source.reward(problem, f"5</think>\n{problem.data['answer']} "),
            }
            for problem in problems
        ],
    }


def segment_vectors() -> dict[str, Any]:
    """Sections 4.6, 6.2 and 6.3: what may be said about segments, and where their chunks are cut."""
    leased, lead, published, tokens, chunk_tokens = 7, 2, (7, 9), 10, 4
    cases = [
        ([7], [10]),
        ([9], [10]),
        ([7, 9], [4, 6]),
        ([7, 9], [1, 9]),
        ([], []),
        ([7, 9], [10]),
        ([7, 9], [0, 10]),
        ([7, 9], [4, 5]),
        ([9, 7], [4, 6]),
        ([7, 7], [4, 6]),
        ([6, 7], [4, 6]),
        ([7, 8], [4, 6]),
        ([7, 10], [4, 6]),
    ]
    rules = msgspec.structs.replace(
        spec(),
        sampling=SamplingSpec(group_size=2, max_new_tokens=tokens, max_version_lead=lead),
        proofs=ProofSpec(scheme="toploc/1", chunk_tokens=chunk_tokens, top_k=4),
    )
    expected = Expected(
        version=leased,
        published=published,
        prompt_ids=[1],
        seeds=[bytes(16)] * 2,
        vocabulary=8,
        eos_ids=frozenset({0}),
    )
    return {
        "leased": leased,
        "max_version_lead": lead,
        "published": list(published),
        "tokens": tokens,
        "chunk_tokens": chunk_tokens,
        "cases": [_segments(versions, lengths, expected, rules) for versions, lengths in cases],
    }


def _segments(versions: list[int], lengths: list[int], expected: Expected, rules: RunSpec) -> dict[str, Any]:
    """One case: the reason it is refused for, or its chunks as [version, first position, tokens]."""
    tokens, chunk_tokens = rules.sampling.max_new_tokens, rules.proofs.chunk_tokens
    rollout = Rollout(
        seed=bytes(16),
        prompt_ids=[1],
        completion_ids=[2] * tokens,
        logprobs=[0.0] * tokens,
        segment_versions=versions,
        segment_tokens=lengths,
        proofs=[bytes(proof_bytes(rules.proofs, tokens=chunk_tokens))]
        * chunk_count(lengths, chunk_tokens=chunk_tokens),
    )
    case: dict[str, Any] = {
        "segment_versions": versions,
        "segment_tokens": lengths,
        "reason": None,
        "chunks": None,
        "proof_bytes": None,
    }
    try:
        check_rollouts([rollout] * 2, expected=expected, spec=rules)
    except Refusal as refusal:
        return case | {"reason": refusal.reason.value}
    return case | {
        "chunks": [
            [segment.version, start, min(chunk_tokens, segment.end - start)]
            for segment in rollout.segments
            for start in range(segment.start, segment.end, chunk_tokens)
        ],
        "proof_bytes": {
            proofs.scheme: [
                proof_bytes(proofs, tokens=tokens) for tokens in chunk_sizes(lengths, chunk_tokens=chunk_tokens)
            ]
            for proofs in schemes(rules.proofs)
        },
    }


def submission_vectors() -> dict[str, Any]:
    """Section 6.1: the one encoding of some rows, bounds, and files that are refused with their reasons.

    Frames are of raw blocks, because what a compressor writes depends on its version; readers take any.
    """
    rules = msgspec.structs.replace(
        spec(),
        sampling=SamplingSpec(group_size=2, max_prompt_tokens=4, max_new_tokens=8, max_version_lead=1),
        proofs=ProofSpec(scheme="toploc/1", chunk_tokens=4, top_k=4),
    )
    rollouts = [
        Rollout(bytes(range(16)), [5, 300, 2**31 - 1], [7, 1], [-0.5, 0.0], [7], [2], [bytes(range(10))]),
        Rollout(b"\xff" * 16, [5], [1, -1], [-80.0, -1.0], [7, 2**40], [1, 1], [bytes(10), b"\x01" * 10]),
    ]
    content = zstandard.decompress(write_rollouts(rollouts))
    bounds = bounds_of(rules)
    return {
        "group_size": 2,
        "max_prompt_tokens": 4,
        "max_new_tokens": 8,
        "max_version_lead": 1,
        "max_turns": rules.sampling.max_turns,
        "max_submission_bytes": rules.limits.max_submission_bytes,
        "proofs": {"scheme": "toploc/1", "chunk_tokens": 4, "top_k": 4},
        "bounds": {name: getattr(bounds, name) for name in (*_BOUNDS, "content_bytes")},
        "rows": [
            msgspec.structs.asdict(one) | {"seed": one.seed.hex(), "proofs": [proof.hex() for proof in one.proofs]}
            for one in rollouts
        ],
        "content": content.hex(),
        "file": _raw_frame(content).hex(),
        "refused": [
            {"why": why, "file": body.hex(), "reason": _reason_of(body, rules)}
            for why, body in _refused(content, most=bounds.content_bytes).items()
        ],
    }


_BOUNDS = ("prompt_tokens", "completion_tokens", "segments", "proofs", "proof_bytes")


def _raw_frame(content: bytes, *, size: int | None = None, descriptor: int = 0xA0) -> bytes:
    """A frame of one segment and one raw block, whose header says `size` (by default the truth) in four bytes."""
    said = len(content) if size is None else size
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return bytes.fromhex("28b52ffd") + bytes([descriptor]) + said.to_bytes(4, "little") + block


def _refused(content: bytes, *, most: int) -> dict[str, bytes]:
    whole, seed = _raw_frame(content), b"\xa4seed\xc4\x10"
    rows = content[content.index(b"\xa4rows") :]
    one_row = msgspec.msgpack.encode(
        msgspec.msgpack.decode(content) | {"rows": msgspec.msgpack.decode(content)["rows"][:1]}
    )
    return {
        "no bytes": b"",
        "no frame": content,
        "a byte after the frame": whole + b"\0",
        "two frames": whole + whole,
        "a skippable frame before it": bytes.fromhex("502a4d1804000000") + bytes(4) + whole,
        "a size that is too small": _raw_frame(content, size=len(content) - 1),
        "a size that is too large": _raw_frame(content, size=len(content) + 1),
        "a size beyond the bound": _raw_frame(content, size=most + 1),
        "no size": bytes.fromhex("28b52ffd0058") + whole[9:],
        "a window of 16 MiB": bytes.fromhex("28b52ffd8070") + whole[5:],
        "a checksum": _raw_frame(content, descriptor=0xA4) + bytes(4),
        "a byte after the value": _raw_frame(content + b"\0"),
        "a value cut short": _raw_frame(content[:-1]),
        "text that is not UTF-8": _raw_frame(content.replace(b"swarmproof/", b"swarmproo\xff/")),
        "another version": _raw_frame(content.replace(b"rollouts/3", b"rollouts/2")),
        "the format missing": _raw_frame(b"\x81" + rows),
        "the format last": _raw_frame(b"\x82" + rows + content[1 : -len(rows)]),
        "an unknown field": _raw_frame(b"\x83" + content[1:] + b"\xa6reward\xcb" + bytes(8)),
        "a field twice": _raw_frame(content.replace(b"\x87" + seed, b"\x88" + seed + bytes(16) + seed, 1)),
        "a length that is not the shortest": _raw_frame(content.replace(seed, b"\xa4seed\xc5\x00\x10", 1)),
        "an array cut within an item": _raw_frame(
            content.replace(b"_ids\xc4\x08", b"_ids\xc4\x07", 1).replace(
                b"\x07\0\0\0\x01\0\0\0", b"\x07\0\0\0\x01\0\0", 1
            )
        ),
        "a row too few": _raw_frame(one_row),
    }


def _reason_of(body: bytes, rules: RunSpec) -> str:
    try:
        read_rollouts(body, spec=rules)
    except Refusal as refusal:
        return refusal.reason.value
    raise AssertionError("it was read")


def turn_vectors() -> dict[str, Any]:
    """Section 4.7: what an environment says is put between the tokens, and where a rollout is over."""
    sampling = SamplingSpec(max_new_tokens=12, max_turns=3, max_reply_tokens=5)
    cases: list[tuple[list[int], list[int], list[list[int] | None]]] = [
        ([7, 7, 1], [3], [None]),
        ([7, 1, 8, 8, 1], [5], [[50, 51]]),
        ([7, 2, 8, 8, 1, 9, 1], [7], [[50], [51, 52]]),
        ([7, 1, 8, 1], [4], [[]]),
        ([7, 1], [2], [[50]]),
        ([7, 1, 8], [3], [[50]]),
        ([7, 1, 8, 1, 9], [5], [[50, 51, 52], [53, 54, 55]]),
        ([7, 1, 8, 1, 9], [5], [[1, 2, 3, 4, 5, 6]]),
        ([1, 1, 1, 1], [4], [[50], [51], [52]]),
        ([7, 1, *[8] * 9, 1], [12], [[50], [51]]),
        ([7, 7, 7, 1, *[8] * 8], [4, 8], [[50]]),
        ([7, 7, 7, 1, *[8] * 8], [6, 6], [[50]]),
    ]
    return {
        "prompt_ids": [3, 4],
        "eos_ids": [1, 2],
        "max_new_tokens": sampling.max_new_tokens,
        "max_turns": sampling.max_turns,
        "max_reply_tokens": sampling.max_reply_tokens,
        "chunk_tokens": 4,
        "cases": [_turns(*case, sampling=sampling) for case in cases],
        "rules": rule_vectors(sampling),
    }


TEXTS = {
    1: "",
    2: "",
    7: "a",
    8: "b<",
    9: "/s",
    10: ">",
    11: "é",
    12: "></s>c",
    13: "</think>",
    14: "",
    60: "</",
    61: "think>",
}


def rule_vectors(sampling: SamplingSpec) -> dict[str, Any]:
    """Section 4.10: stop strings, and thoughts that are longer than a budget."""
    budget = {"tokens": 3, "end_ids": [60, 61]}
    plain = {"stop": [], "thinking": None, "max_new_tokens": 12, "says": [[50], [51, 52], None]}
    cases: list[dict[str, Any]] = [
        {"completion_ids": [7, 8, 9, 10], "stop": ["x", "</s>"]},
        {"completion_ids": [7, 8, 9, 10, 7, 7, 12, 8, 9, 10], "stop": ["</s>"]},
        {"completion_ids": [8, 14, 14, 14, 14, 14, 14, 14, 14, 9, 10], "stop": ["</s>"]},
        {"completion_ids": [8, *[14] * 9, 9], "stop": ["</s"]},
        {"completion_ids": [8, *[14] * 10, 9], "stop": ["</s"]},
        {"completion_ids": [8, 9, 1, 10], "stop": ["</s>"]},
        {"completion_ids": [7, 11], "stop": ["aé"]},
        {"completion_ids": [7, 7, 7, 7, 7], "max_new_tokens": 5},
        {"completion_ids": [7, 7, 7, 7, 1, 7, 7, 7, 1], "thinking": budget},
        {"completion_ids": [7, 13, 7, 7, 1], "thinking": budget},
        {"completion_ids": [7, 7, 1, 7], "thinking": budget},
        {"completion_ids": [7, 7, 7], "thinking": budget, "max_new_tokens": 5},
        {"completion_ids": [7, 7, 7, 7], "thinking": budget, "max_new_tokens": 6},
        {"completion_ids": [7, 7, 8, 9, 10, 1], "thinking": budget, "stop": ["</s>"]},
        {"completion_ids": [7, 8, 9, 10, 7], "thinking": budget, "stop": ["</s>"]},
        {"completion_ids": [7, 7, 7, 1, 7, 7, 7, 1], "thinking": {"tokens": 3, "end_ids": [60] * 3}},
    ]
    return {
        "texts": {str(token): text for token, text in TEXTS.items()},
        "cases": [_ruled(plain | one, sampling) for one in cases],
    }


def _ruled(case: dict[str, Any], sampling: SamplingSpec) -> dict[str, Any]:
    """One case, with what was put between its tokens, its turns, and where it is over."""

    def text(tokens: Sequence[int]) -> str:
        return "".join(TEXTS[token] for token in tokens)

    thinking = case["thinking"] and ThinkingBudget(
        case["thinking"]["tokens"],
        tuple(case["thinking"]["end_ids"]),
        lambda tokens: "</think>" not in text(tokens),
    )
    stop = StopStrings(case["stop"], text) if case["stop"] else None
    rules, tokens = TurnRules(case["max_new_tokens"], stop, thinking), case["completion_ids"]
    found = replay(
        tokens, eos_ids={1, 2}, sampling=sampling, ask=lambda turns: case["says"][len(turns) - 1], rules=rules
    )
    return case | {
        "replies": [[before, list(ids)] for before, ids in found.replies],
        "turns": turns_of(tokens[: found.end], {1, 2}, rules),
        "end": found.end,
        "most": found.most,
    }


def _turns(
    tokens: list[int], segment_tokens: list[int], says: list[list[int] | None], *, sampling: SamplingSpec
) -> dict[str, Any]:
    """One case: what was said, after how many tokens it was over, what the last one was drawn over, and the chunks."""
    says = [*says, None, None, None][: sampling.max_turns]
    found = replay(tokens, eos_ids={1, 2}, sampling=sampling, ask=lambda turns: says[len(turns) - 1])
    case: dict[str, Any] = {
        "completion_ids": tokens,
        "segment_tokens": segment_tokens,
        "says": says,
        "replies": [[before, list(ids)] for before, ids in found.replies],
        "end": found.end,
        "context_ids": None,
        "chunks": None,
    }
    if (found.end or sampling.max_new_tokens) != len(tokens):
        return case
    cut = pieces(segment_tokens, found.replies)
    return case | {
        "context_ids": [3, 4, *interleaved(tokens[:-1], found.replies)],
        "chunks": chunk_sizes(cut, chunk_tokens=4),
    }


def schemes(proofs: ProofSpec) -> list[ProofSpec]:
    """`proofs` under each scheme that there is."""
    return [msgspec.structs.replace(proofs, scheme=name) for name in get_args(get_type_hints(ProofSpec)["scheme"])]


def proof_vectors() -> dict[str, Any]:
    """Section 6.2: proofs of a chunk of two states of 16 elements, under each scheme."""
    states = torch.tensor([[(37 * i + 11 * row) % 101 - 50 for i in range(16)] for row in range(2)]).bfloat16() / 8
    seed = bytes(range(16))
    proofs = ProofSpec(chunk_tokens=2, top_k=4, sketch_step=0.02)
    return {
        "seed": seed.hex(),
        "hidden": 16,
        "states_bfloat16_be_hex": [
            "".join(f"{value & 0xFFFF:04x}" for value in row) for row in states.view(torch.int16).tolist()
        ],
        "top_k": proofs.top_k,
        "sketch_step": proofs.sketch_step,
        "proofs": {one.scheme: build_proofs([states], [seed], spec=one)[0].hex() for one in schemes(proofs)},
    }


def admission_vectors() -> dict[str, Any]:
    """Section 7: figures and what they lead to, with the default limits."""
    good = Figures(
        exponent_mismatches=38.0,
        mantissa_mean=10.0,
        mantissa_median=8.0,
        token_margin=1.0,
        margin_mean=0.05,
        logprob_error=0.5,
    )
    groups = [
        [good, good],
        [good, msgspec.structs.replace(good, logprob_error=0.51)],
        [msgspec.structs.replace(good, logprob_error=9.0), msgspec.structs.replace(good, token_margin=1.01)],
        [msgspec.structs.replace(good, token_margin=9.0), msgspec.structs.replace(good, mantissa_median=8.5)],
        [msgspec.structs.replace(good, margin_mean=1e308), good],
    ]
    return {
        "limits": msgspec.to_builtins(LimitsSpec()),
        "groups": [
            {
                "figures": msgspec.to_builtins(group),
                "worst": msgspec.to_builtins(worst(group)),
                "finding": msgspec.to_builtins(judge_rows(dict(enumerate(group)), limits=LimitsSpec())),
            }
            for group in groups
        ],
    }


EVIDENCE_LIMITS = LimitsSpec(
    false_rejections=1e-6,
    honest=HonestSpec(
        exponents=LevelSpec(mean=0.25, variance=0.5, largest=8.0),
        sketch=LevelSpec(mean=0.25, variance=0.0625, largest=2.0, shared_variance=0.001),
        margin=LevelSpec(mean=0.0005, variance=0.0001, largest=0.1),
    ),
)


def evidence_vectors() -> dict[str, Any]:
    """Sections 7.2 and 7.3: what totals show by themselves, and a node's slots together. Nats have 12 digits."""
    honest = Totals(
        exponents=Total(count=16, sum=4.0), sketch=Total(count=500, sum=125.0), margin=Total(count=500, sum=0.25)
    )
    groups = [
        Totals(),
        honest,
        msgspec.structs.replace(honest, exponents=Total(count=16, sum=20.0)),
        msgspec.structs.replace(honest, exponents=Total(count=16, sum=40.0)),
        msgspec.structs.replace(honest, sketch=Total(count=500, sum=250.0)),
        msgspec.structs.replace(honest, sketch=Total(count=1, sum=2.0)),
        msgspec.structs.replace(honest, margin=Total(count=500, sum=1.0)),
        msgspec.structs.replace(honest, margin=Total(count=500, sum=2.5)),
    ]
    worse = msgspec.structs.replace(honest, sketch=Total(count=500, sum=137.5), margin=Total(count=500, sum=1.25))
    return {
        "limits": msgspec.to_builtins(EVIDENCE_LIMITS),
        "groups": [
            {
                "totals": msgspec.to_builtins(totals),
                "nats": {name: _nats(value) for name, value in evidences(totals, limits=EVIDENCE_LIMITS)},
                "finding": _finding(judge_group(totals, limits=EVIDENCE_LIMITS)),
            }
            for totals in groups
        ],
        "slots": _drifting([honest, honest, *[worse] * 8, *[honest] * 12]),
    }


def _drifting(slots: list[Totals]) -> list[dict[str, Any]]:
    """A node's slots, its drift after each, and what that leads to."""
    drift, steps = Drift(), []
    for totals in slots:
        drift = follow(drift, totals, limits=EVIDENCE_LIMITS)
        steps.append(
            {
                "totals": msgspec.to_builtins(totals),
                "drift": {name: _nats(getattr(drift, name)) for name in Drift.__struct_fields__},
                "finding": _finding(judge_drift(drift, limits=EVIDENCE_LIMITS)),
            }
        )
    return steps


def _finding(finding: Finding | None) -> dict[str, Any] | None:
    if finding is None:
        return None
    return msgspec.to_builtins(finding) | {"value": _nats(finding.value), "limit": _nats(finding.limit)}


def _nats(value: float) -> float:
    """Logarithms differ in the last place between machines."""
    return float(f"{value:.12g}")


def log_vectors() -> dict[str, Any]:
    """Section 8: the reference tree with its roots and proofs, and one entry of each type."""
    store: dict[tuple[int, int], bytes] = {}
    roots = [root(0, lambda level, index: store[level, index]).hex()]
    for index, leaf in enumerate(CT_LEAVES):
        for level, at, value in completed_nodes(
            index, leaf_hash(bytes.fromhex(leaf)), lambda level, index: store[level, index]
        ):
            store[level, at] = value
        roots.append(root(index + 1, lambda level, index: store[level, index]).hex())

    def node(level: int, index: int) -> bytes:
        return store[level, index]

    return {
        "leaves": list(CT_LEAVES),
        "roots": roots,
        "inclusion": [
            {"index": i, "size": n, "proof": [h.hex() for h in inclusion_proof(i, n, node)]}
            for i, n in ((0, 1), (0, 8), (5, 8), (2, 3), (1, 5))
        ],
        "consistency": [
            {"first": a, "second": b, "proof": [h.hex() for h in consistency_proof(a, b, node)]}
            for a, b in ((1, 1), (1, 8), (6, 8), (2, 5))
        ],
        "entries": [
            {"canonical": encode(entry).decode(), "leaf_hash": leaf_hash(encode(entry)).hex()}
            for entry in log_entries()
        ],
        "log_key": str(log_key(RUN_ID, _key(RUN_KEY).public_key().public_bytes_raw())),
        **_witnessed(Checkpoint(origin_of(RUN_ID), 8, bytes.fromhex(roots[8]))),
    }


def _witnessed(checkpoint: Checkpoint) -> dict[str, Any]:
    name, key, at = "witness.example/w1", _key(b"\xc3" * 32), 1_760_000_100
    verifier = VerifierKey(name, KeyKind.WITNESS, key.public_key().public_bytes_raw())
    cosignature = cosign_text(checkpoint.text, name=name, key=key, at=at)
    signed = parse_note(seal_checkpoint(checkpoint, key=_key(RUN_KEY)))
    return {
        "checkpoint": join_note(signed.text, [*signed.signatures, cosignature]).decode(),
        "witness": {"key": str(verifier), "time": at},
    }


def membership_vectors() -> dict[str, Any]:
    """Section 3.7: a run that takes new keys by work, an invite, a solved puzzle, and prices."""
    rules = MembershipSpec(policy="work", bits=12, most_bits=16)
    asking = msgspec.structs.replace(spec(), membership=rules)
    now = 1_760_000_000
    invite = Invite(run_id=RUN_ID, id=DIGEST_A, keys=3, node=None, issued_at=now, expires_at=now + 86_400)
    bound = msgspec.structs.replace(invite, keys=1, node=_public(NODE_KEY))
    puzzle = Puzzle(salt=DIGEST_B, bits=rules.bits, expires_at=now + 1200)
    seed = work_seed(run_id=RUN_ID, node=_public(NODE_KEY), salt=puzzle.salt)
    counter = find_work(seed, bits=rules.bits, start=0, attempts=2**20)
    if counter is None:
        raise AssertionError("the puzzle of the vectors has a solution")
    registration = m.Registration(software="swarmproof 0.1.0", engine="torch", instance="0f" * 16, name="gpu-7")
    shown = {"invite": sign_invite(bound, key=_key(RUN_KEY)), "work": ProofOfWork(salt=puzzle.salt, counter=counter)}
    return {
        "run_id": RUN_ID,
        "node": _public(NODE_KEY),
        "spec": encode(asking).decode(),
        "spec_digest": asking.digest,
        "invites": [
            {
                "canonical": encode(each).decode(),
                "envelope": sign_invite(each, key=_key(RUN_KEY)).hex(),
                "token": invite_token(sign_invite(each, key=_key(RUN_KEY))),
            }
            for each in (invite, bound)
        ],
        "puzzle": encode(puzzle).decode(),
        "seed": seed.hex(),
        "attempts": [{"counter": at, "zero_bits": work_bits(seed, at)} for at in (0, 1, 2**53 - 1, counter)],
        "solution": counter,
        "prices": [
            {"waiting": waiting, "capacity": 8, "bits": price_bits(rules, waiting=waiting, capacity=8)}
            for waiting in (0, 7, 8, 15, 16, 31, 32, 63, 64, 1000)
        ],
        "registrations": [
            encode(msgspec.structs.replace(registration, **{name: value})).decode() for name, value in shown.items()
        ],
    }


GRADED: list[tuple[GraderSpec, str, tuple[str, ...]]] = [
    (ExactGrader(), "Paris", ("Paris", " Paris\n", "paris", "<think>Rome</think>Paris", "Paris.", "Paris</think>Rome")),
    (ExactGrader(ignore_case=True), "Stra\u00dfe", ("STRA\u00dfE", "STRASSE", "stra\u00dfe")),
    (
        ChoiceGrader(),
        "B",
        (
            "B",
            "(B).",
            "The answer is **B**.",
            r"\boxed{\text{B}}",
            "answer: A or B",
            "A B C D",
            "I like B",
            "E",
            "b",
            "Answer: B) Vitamin C",
            r"\boxed{B. Vitamin C}",
            "The answer is B because A is wrong.",
            "**Answer**: B",
            "Answer:\nB",
            "B. Paris",
            "A. Paris",
            "answer is B, or C",
            "answer is B and A",
            "A or B",
            "A vitamin",
        ),
    ),
    (ChoiceGrader(choices=2), "A", ("answer is A, not C", "answer is A, not B")),
    (
        NumberGrader(),
        "1234.5",
        (
            "1,234.5",
            "about 12, no: 1234.50",
            "1.2345e3",
            "2469/2",
            "= $1234.5.",
            r"\boxed{1234.5} 7",
            r"The answer is \(1234.5\).",
            r"\[1234.5\]",
            r"\boxed{1{,}234.5\text{ cm}}",
            r"\boxed{\text{1234.5}}",
            "1234.5 m^2",
            r"1\,234.5 \text{ m}^{2}",
            r"\boxed{1234.5 2^2}",
            "1234.5-0",
            "NaN",
        ),
    ),
    (NumberGrader(absolute=0.3), "1", ("1.3", "0.7", "1.30001", "\u0661")),
    (NumberGrader(relative=0.01), "-200", ("-202", "-197.99", "\u2212198", "198")),
    (NumberGrader(), "50%", ("50 %", "50", "0.5", "0.5%", "5000")),
    (
        JsonGrader(),
        '{"a": [1, true], "b": null}',
        (
            '{"b":null,"a":[1.0,true]}',
            '```json\n{"a": [1e0, true], "b": null}\n```\nDone.',
            '{"a":[1,1],"b":null}',
            '{"a":[1,true],"a":[1,true],"b":null}',
            '{"a":[true,1],"b":null}',
            "NaN",
        ),
    ),
    (RegexGrader(), r"(?:\d{3}-){2}\d{4}", ("555-123-4567", "x555-123-4567", "555-123-45678", "\u0665" * 12)),
    (RegexGrader(), "(" + "|" * 900 + "a(?:b|c){0,1}){64}", ("ab" * 64, "a" * 63, "a" * 65, "")),
    (RegexGrader(ignore_case=True), "[^A-Y]+|no", ("z9!", "NO", "a", "nope", "")),
    (
        MathGrader(),
        r"\frac{1}{2}",
        (
            r"\boxed{0.5}",
            r"\boxed{\frac{\sqrt{2}}{\sqrt8}}",
            r"$\frac24$",
            "The answer is 50%.",
            r"\boxed{1}\boxed{\frac12}",
            r"\boxed{\frac12}\boxed{1}",
            r"\boxed{\frac12",
            r"\boxed{\frac12 \text{ or } 1}",
            r"\boxed{\infty/\infty}",
            "x=1/2",
        ),
    ),
    (MathGrader(), r"1+\sqrt{2}", (r"\frac{1}{\sqrt2-1}", r"\sqrt{3+2\sqrt{2}}", "2.41421356", r"\sqrt{2}-1")),
    (MathGrader(), r"x^2-1", ("(x-1)(x+1)", "y=x^2-1", "x^2+1", r"\frac{x^4-1}{x^2+1}")),
    (
        MathGrader(),
        r"(-\infty,1)\cup[2,\infty)",
        (r"[2,\infty) \cup (-\infty,1)", r"[2,\infty)", r"(-\infty,1]\cup[2,\infty)"),
    ),
    (MathGrader(), r"\{1,-1\}", (r"x=\pm 1", "1 and -1", "(1,-1)", "1", "So $1$, or $-1$.", r"So \(1\) and \(-1\)")),
    (
        MathGrader(),
        "42",
        (
            *(
                "$41$ or $42$",
                "$41$, $42$",
                r"\[41\] OR \[42\]",
                "41 or $42$",
                "$42$ or",
                "$a$ $42$",
                "$a$ and so $42$",
            ),
            *("$42$ for $41$", r"\(41\) \(42\)"),
        ),
    ),
    (MathGrader(), "100, 200", ("100,200", "200 and 100", "(100,200)", r"x\in\{100,200\}")),
    (MathGrader(), "[100,200]", (r"x\in[100,200]", "100<=x<=200", "100,200")),
    (
        MathGrader(),
        "5",
        (
            *(r"$5\text{ m}$", r"5\,\mathrm{m}^2", r"5~\text{cm}", "So\n\\[\n5\n\\]", "The answer is **5** meters."),
            *("5 = x", r"$\approx 5$", r"\boldsymbol{5}", r"$\text{not } 5$", "5 not", r"5\text{ or more}"),
        ),
    ),
    (
        MathGrader(evaluated=True),
        "42",
        (
            *("42", "84/2", "x = 42", "6*7", r"\boxed{42.0}", "42!/41!", r"\boxed{6(7)}", "2{21}"),
            *("2*21=42", "x = 2*21 = 42", "x_2*21 = 42", "x_{n+1} = 42", "f(x) = 42", "= 42"),
        ),
    ),
    (
        MathGrader(evaluated=True),
        "11/2",
        (r"$5\frac12$", "5 1/2", r"2\frac{11}{4}", "1 1/2", r"5.4\overline{9}", "5.5 = x"),
    ),
]
"""Graders that need no sandbox, an expected answer of each, and completions."""

REFUSED_ANSWERS: list[tuple[GraderSpec, str]] = [
    (ExactGrader(), " \n"),
    (ChoiceGrader(), "E"),
    (NumberGrader(), "about 7 or 8"),
    (JsonGrader(), "[" * 33 + "]" * 33),
    (JsonGrader(), '{"a":1,"a":1}'),
    (RegexGrader(), "a**"),
    (RegexGrader(), "(a{99}){99}"),
    (MathGrader(), "$ $"),
    (MathGrader(), "1" * 1001),
    (UnitTestsGrader(), '{"cases":[]}'),
    (UnitTestsGrader(), '{"function":"f","cases":[{"arguments":1,"output":1}]}'),
    (UnitTestsGrader(), '{"function":"f()","cases":[{"arguments":[],"output":1}]}'),
]


def grading_vectors() -> dict[str, Any]:
    graded = [
        {
            "grader": encode(spec).decode(),
            "answer": answer,
            "completion": text,
            "reward": grade_answer(spec, answer, text),
        }
        for spec, answer, completions in GRADED
        for text in completions
    ]
    return {"graded": graded, "refused": [_refused_answer(spec, answer) for spec, answer in REFUSED_ANSWERS]}


def _refused_answer(spec: GraderSpec, answer: str) -> dict[str, str]:
    try:
        check_answer(spec, answer)
    except BadAnswer as error:
        return {"grader": encode(spec).decode(), "answer": answer, "code": error.code}
    raise AssertionError(f"{answer!r} is not refused")


def all_vectors() -> dict[str, dict[str, Any]]:
    return {
        "wire": wire_vectors(),
        "run": run_vectors(),
        "sampling": sampling_vectors(),
        "slots": slot_vectors(),
        "chat": chat_vectors(),
        "datasets": dataset_vectors(),
        "submissions": submission_vectors(),
        "segments": segment_vectors(),
        "turns": turn_vectors(),
        "frames": frame_vectors(),
        "proofs": proof_vectors(),
        "admission": admission_vectors(),
        "evidence": evidence_vectors(),
        "log": log_vectors(),
        "peers": peer_vectors(),
        "control": control_vectors(),
        "membership": membership_vectors(),
        "grading": grading_vectors(),
    }


def render(vectors: dict[str, Any]) -> str:
    """The text of one vector file."""
    return json.dumps(vectors, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, vectors in all_vectors().items():
        (FOLDER / f"{name}.json").write_text(render(vectors), encoding="utf-8")
