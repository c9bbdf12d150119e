"""The fields of every message, in order: one table each, so a new field is one line (sections 2, 3, 8, 10, 13, 14).

Ranges of RunSpec are those of docs/run-toml.md.
"""

from __future__ import annotations

import re
import unicodedata

from .chat import CHAT_FORMAT
from .peers import PEER_ADDRESS
from .values import (
    BOOLEAN,
    COUNT,
    DIGEST,
    FLOAT,
    NONCE,
    PLAIN_URL,
    PUBLIC_KEY,
    STRING,
    TEXT,
    URL,
    ArrayOf,
    ObjectOf,
    OneOf,
    OrNull,
    Record,
    Scalar,
    binary,
    integer,
    matching,
    number,
    one_of,
    text,
)

INT31 = 2**31 - 1
CODE = matching("[a-z0-9_]{1,64}")
SIGNED = integer(-(2**53) + 1, 2**53 - 1)
CANDIDATE = integer(0, 31)
OUTCOME = one_of("admitted", "rejected", "indeterminate")
PUZZLE_BITS = integer(1, 28)
LEFT_OUT_CANDIDATE = frozenset({"candidate"})

# Section 2: runs.

LEVEL = Record(
    {
        "mean": number(-1e9, 1e9),
        "variance": number(1e-18, 1e9),
        "largest": number(-1e9, 1e9),
        "shared_variance": number(0.0, 1e9),
    }
)
STATISTICS = ("exponents", "mantissa", "sketch", "far", "margin", "logprob")
FILE = {"digest": DIGEST, "bytes": integer(1, 4294967296)}
ENVIRONMENT = Record(
    {
        "name": text(1, 200),
        "weight": integer(1, 1_000_000),
        "arguments": ObjectOf(Scalar(lambda value: any(of.accepts(value) for of in (STRING, SIGNED, FLOAT, BOOLEAN)))),
        "length": OrNull(
            Record(
                {
                    "targets": ArrayOf(integer(1, INT31), 64, 1),
                    "penalty": number(above=0.0, most=1.0),
                    "form": one_of("sentence", "short"),
                }
            )
        ),
        "package": Record(
            {
                "name": matching("[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?"),
                "version": matching("[0-9][0-9a-z.!+]{0,63}"),
                "lock": Record({"digest": DIGEST, "bytes": integer(1, 262144)}),
            }
        ),
        "problems": Record({"count": integer(1, 1048576), "kept": OrNull(binary(98304))}),
        "dataset": Record({**FILE, "answers": Record(FILE)}, frozenset({"answers"})),
        "answers": one_of("operator"),
        "max_prompt_tokens": integer(1, INT31),
        "max_new_tokens": integer(1, INT31),
        "stop": ArrayOf(text(1, 64), 8, 1),
        "thinking": Record({"tokens": integer(1, INT31), "end": text(1, 500)}),
        "tool": Record(
            {"python": matching(r"3\.[0-9]{1,2}"), "steps": integer(1000, 500_000), "characters": integer(16, 16384)}
        ),
    },
    frozenset(
        {"package", "problems", "dataset", "answers", "max_prompt_tokens", "max_new_tokens", "stop", "thinking", "tool"}
    ),
)
POOLS = Record(
    {
        "easy": integer(0, 1_000_000),
        "normal": integer(0, 1_000_000),
        "hard": integer(0, 1_000_000),
        "easy_from": number(0.0, 1.0),
        "hard_to": number(0.0, 1.0),
    }
)
LORA = Record(
    {
        "rank": integer(1, 1024),
        "alpha": number(above=0.0, most=1e9),
        "targets": ArrayOf(
            one_of(
                *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
                *("qkv_proj", "gate_up_proj"),
            ),
            9,
            1,
        ),
    }
)
WIDTH = number(0.0, 1e9)
RUN_SPEC = Record(
    {
        "name": text(1, 100),
        "environments": ArrayOf(ENVIRONMENT, 100, 1),
        "seed": COUNT,
        "model": Record({"initial": text(1, 500), "dtype": one_of("float32", "bfloat16", "float16")}),
        "sampling": Record(
            {
                "group_size": integer(2, 1024),
                "temperature": number(above=0.01, most=10.0),
                "max_prompt_tokens": integer(1, INT31),
                "max_new_tokens": integer(1, INT31),
                "max_version_lead": integer(0, 16),
                "max_turns": integer(1, 64),
                "max_reply_tokens": integer(0, 1048576),
                "chat": CHAT_FORMAT,
            },
            frozenset({"chat"}),
        ),
        "proofs": Record(
            {
                "scheme": one_of("toploc/1", "sketch/1", "toploc/1+sketch/1"),
                "chunk_tokens": integer(1, 4096),
                "top_k": integer(1, 4096),
                "sketch_step": number(1e-6, 0.0625),
            }
        ),
        "batch": Record(
            {
                "groups_per_step": integer(1, INT31),
                "only_signal": BOOLEAN,
                "max_async": integer(0, 64),
                "gap_seconds": WIDTH,
                "gap_share": number(above=0.0, most=1.0),
                "lease_seconds": number(above=0.0, most=1e9),
                "max_leases_per_node": integer(1, INT31),
                "rejection_backoff_seconds": WIDTH,
                "rejection_backoff_max_seconds": WIDTH,
                "pools": POOLS,
            },
            frozenset({"pools"}),
        ),
        "limits": Record(
            {
                "exponent_mismatches": WIDTH,
                "mantissa_mean": WIDTH,
                "mantissa_median": WIDTH,
                "sketch_distance": WIDTH,
                "token_margin": WIDTH,
                "rollout_margin_mean": WIDTH,
                "logprob_error": WIDTH,
                "false_rejections": number(1e-100, 0.1),
                "honest": Record(dict.fromkeys(STATISTICS, OrNull(LEVEL))),
                "suspects": ArrayOf(one_of("int8", "previous"), 2),
                "suspicion": WIDTH,
                "second_looks": number(0.0, 1.0),
                "readings": integer(1, 2),
                "max_submission_bytes": integer(1024, INT31),
            }
        ),
        "standing": Record(
            {
                "probation": integer(1, INT31),
                "full_rate_floor": number(above=0.0, most=1.0),
                "vesting": integer(1, INT31),
                "ban_after": integer(1, INT31),
                "stake": COUNT,
            }
        ),
        "training": Record(
            {
                "steps": integer(1, INT31),
                "optimizer": one_of("adamw", "muon"),
                "learning_rate": number(above=0.0, most=1e9),
                "beta1": number(0.0, below=1.0),
                "beta2": number(0.0, below=1.0),
                "muon_momentum": number(0.0, below=1.0),
                "weight_decay": WIDTH,
                "warmup_steps": integer(0, 1_000_000),
                "minibatches": integer(1, INT31),
                "objective": one_of("clipped", "masked", "cispo"),
                "clip_epsilon": number(above=0.0, most=1e9),
                "clip_delta": number(above=0.0, most=1e9),
                "mask_low": number(0.0, 1.0),
                "mask_high": number(1.0, 1e9),
                "kl_coefficient": WIDTH,
                "entropy_coefficient": WIDTH,
                "gradient_clip": number(above=0.0, most=1e9),
                "normalize_advantage": BOOLEAN,
                "ratio": one_of("token", "sequence"),
                "aggregation": one_of("tokens", "completions", "length"),
                "clip_epsilon_high": number(above=0.0, most=1e9),
                "overlong_share": number(0.0, 1.0),
                "loss": text(1, 200),
                "lora": LORA,
                "teacher": Record({"folder": text(1, 500), "coefficient": number(above=0.0, most=1e9)}),
            },
            frozenset({"ratio", "aggregation", "clip_epsilon_high", "overlong_share", "loss", "lora", "teacher"}),
        ),
        "broadcast": Record({"keep_versions": integer(1, INT31)}),
        "membership": Record(
            {
                "policy": one_of("invite", "stake", "work"),
                "stake": integer(1, 2**53 - 1),
                "bits": PUZZLE_BITS,
                "most_bits": PUZZLE_BITS,
            }
        ),
    },
    frozenset({"membership"}),
)
POLICY_HEAD = Record({"version": COUNT, "manifest_digest": DIGEST})
DESCRIPTOR = Record(
    {
        "run_id": DIGEST,
        "version": COUNT,
        "spec": RUN_SPEC,
        "endpoints": ArrayOf(URL, 16),
        "relays": ArrayOf(URL, 256),
        "peers": ArrayOf(PEER_ADDRESS, 32),
        "head": OrNull(POLICY_HEAD),
        "revoked": ArrayOf(PUBLIC_KEY, 256),
        "issued_at": COUNT,
        "expires_at": COUNT,
    }
)

# Section 3: requests and the HTTP API.

SLOT_NAME = Record({"manifest_digest": DIGEST, "slot": COUNT, "candidate": integer(0, 31)}, frozenset({"candidate"}))
REQUEST_CLAIM = Record(
    {
        "run_id": DIGEST,
        "method": one_of("GET", "POST", "PUT"),
        "path": text(0, 500),
        "body_digest": DIGEST,
        "body_bytes": COUNT,
        "issued_at": COUNT,
        "nonce": NONCE,
        "slot": SLOT_NAME,
    },
    frozenset({"slot"}),
)
WITHOUT_A_SHAPE = re.compile(
    "[\u115f\u1160\u3164\uffa0\u034f\u17b4\u17b5\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)


def _kind(char: str) -> str:
    """Return what a character is in a nickname: l(etter), m(ark), o(ther), or nothing that belongs there (x)."""
    category = unicodedata.category(char)
    if char in " ._-" or category == "Nd":
        return "o"
    if WITHOUT_A_SHAPE.match(char):
        return "x"
    return {"Lu": "l", "Ll": "l", "Lt": "l", "Lm": "l", "Lo": "l", "Mn": "m", "Mc": "m"}.get(category, "x")


def is_nickname(value: str) -> bool:
    """Whether a string is a nickname (3.8)."""
    kinds = "".join(_kind(char) for char in value)
    named = re.fullmatch("(l m{0,4} | o)*", kinds, re.VERBOSE) is not None
    spaced = value == value.strip(" ") and "  " not in value
    return 1 <= len(value) <= 32 and named and spaced and unicodedata.is_normalized("NFC", value)


HARDWARE = Record(dict.fromkeys(("device", "engine", "dtype"), matching("[A-Za-z0-9 ._()/+,:-]{1,64}")))
REGISTRATION = Record(
    {
        "software": TEXT,
        "engine": TEXT,
        "instance": NONCE,
        "name": TEXT,
        "invite": binary(1536),
        "work": Record({"salt": DIGEST, "counter": COUNT}),
        "nickname": Scalar(lambda value: isinstance(value, str) and is_nickname(value)),
        "hardware": HARDWARE,
    },
    frozenset({"invite", "work", "nickname", "hardware"}),
)
RECEIVED_FROM = Record({"url": PLAIN_URL, "bytes_per_s": COUNT})
RELAY_ANNOUNCEMENT = Record({"url": PLAIN_URL, "received": ArrayOf(RECEIVED_FROM, 32), "version": OrNull(COUNT)})
RELAY_LIST = Record({"relays": ArrayOf(URL, 256), "stripes": ArrayOf(ArrayOf(URL, 16), 16)})
LEASE_REQUEST = Record(
    {
        "held_versions": ArrayOf(COUNT, 64),
        "slots": integer(1, 1024),
        "instance": NONCE,
        "lacks": ArrayOf(integer(0, 99), 100, 1),
    },
    frozenset({"lacks"}),
)
LEASE = Record(
    {
        "lease_id": DIGEST,
        "version": COUNT,
        "manifest_digest": DIGEST,
        "slot": COUNT,
        "expires_at": COUNT,
        "candidate": CANDIDATE,
    },
    LEFT_OUT_CANDIDATE,
)
LEASE_REPLY = Record(
    {"leases": ArrayOf(LEASE, 1024), "head_version": integer(-1, 2**53 - 1), "retry_after_seconds": FLOAT}
)
REJECTION = Record({"submission": DIGEST, "reason": CODE, "detail": TEXT, "decided_at": COUNT, "log_index": COUNT})
NODE_STANDING = Record(
    {
        "node": PUBLIC_KEY,
        "known": BOOLEAN,
        "banned": BOOLEAN,
        "banned_at": OrNull(COUNT),
        **dict.fromkeys(("verified", "strikes", "probation", "ban_after", "admitted", "rejected"), COUNT),
        **dict.fromkeys(("indeterminate", "vested", "unvested", "void", "stake", "leases", "unjudged"), COUNT),
        "most_slots": COUNT,
        "wait_seconds": FLOAT,
        "full_rate": FLOAT,
        "rejections": ArrayOf(REJECTION, 10),
        "nickname": TEXT,
        "hardware": HARDWARE,
    },
    frozenset({"nickname", "hardware"}),
)
UPLOAD_REQUEST = Record({"body": DIGEST, "body_bytes": COUNT, "sha256": DIGEST})
UPLOAD_REPLY = Record({"url": matching("[!-~]{0,4096}"), "expires_at": COUNT})
SUBMISSION_REPLY = Record({"submission": DIGEST})
ERROR_REPLY = Record({"code": STRING, "message": STRING, "server_time": COUNT, "submission": OrNull(DIGEST)})
EMPTY = Record({})
RECEIPT_STATE = Record({"state": one_of("queued", "verifying")})
HASHES = Record({"hashes": ArrayOf(DIGEST, 64)})

# Section 8: the log.

FIGURE_NAMES = (
    "exponent_mismatches",
    "mantissa_mean",
    "mantissa_median",
    "token_margin",
    "margin_mean",
    "logprob_error",
    "sketch_distance",
    *(f"{name}_evidence" for name in STATISTICS),
)
FIGURES = Record(dict.fromkeys(FIGURE_NAMES, FLOAT))
TOTAL = Record({"count": COUNT, "sum": FLOAT})
TOTALS = Record(dict.fromkeys(STATISTICS, TOTAL))
FINDING = Record({"reason": CODE, "row": OrNull(COUNT), "figure": STRING, "value": FLOAT, "limit": FLOAT})
ENTRY = OneOf(
    "type",
    {
        "run": Record({"type": one_of("run"), "run_id": DIGEST, "spec_digest": DIGEST}),
        "policy": Record(
            {"type": one_of("policy"), "version": COUNT, "manifest_digest": DIGEST, "result_digest": DIGEST}
        ),
        "verdict": Record(
            {
                "type": one_of("verdict"),
                "submission": DIGEST,
                "node": PUBLIC_KEY,
                "version": COUNT,
                "manifest_digest": DIGEST,
                "slot": COUNT,
                "request": DIGEST,
                "body": DIGEST,
                "outcome": OUTCOME,
                "reason": OrNull(CODE),
                "finding": OrNull(FINDING),
                "detail": STRING,
                "figures": OrNull(FIGURES),
                "totals": OrNull(TOTALS),
                "rewards": OrNull(ArrayOf(FLOAT, 1024)),
                "tokens": COUNT,
                "decided_at": COUNT,
                "spot": OrNull(COUNT),
                "recheck": BOOLEAN,
                "candidate": CANDIDATE,
            },
            LEFT_OUT_CANDIDATE,
        ),
        "batch": Record(
            {
                "type": one_of("batch"),
                "step": COUNT,
                "submissions": ArrayOf(DIGEST, 2**20),
                "gaps": ArrayOf(Record({"version": COUNT, "slot": COUNT}), 2**20),
                "missed": ArrayOf(
                    Record(
                        {
                            "version": COUNT,
                            "slot": COUNT,
                            "node": PUBLIC_KEY,
                            "how": one_of("expired", "returned", "overtaken"),
                        }
                    ),
                    1000,
                ),
            }
        ),
    },
)
RECEIPT = Record(
    {
        "run_id": DIGEST,
        "submission": DIGEST,
        "node": PUBLIC_KEY,
        "version": COUNT,
        "slot": COUNT,
        "outcome": OUTCOME,
        "reason": OrNull(CODE),
        "detail": STRING,
        "tokens": COUNT,
        "log_index": COUNT,
        "leaf_hash": DIGEST,
    }
)

# Section 10: broadcast.

HEAD = Record({"run_id": DIGEST, "version": COUNT, "manifest_digest": DIGEST, "issued_at": COUNT, "expires_at": COUNT})
PAYLOAD = Record(
    {"chunk_bytes": integer(4096, 2**24), "payload_bytes": integer(1, 2**41), "chunk_digests": binary(2**17 * 32)}
)
DELTA = Record({"base": DIGEST, "base_version": COUNT, "payload": PAYLOAD})
MANIFEST = Record(
    {
        "run_id": DIGEST,
        "version": COUNT,
        "previous": OrNull(DIGEST),
        "issued_at": COUNT,
        "expires_at": COUNT,
        "result_digest": DIGEST,
        "full": PAYLOAD,
        "deltas": ArrayOf(DELTA, 4),
    }
)

# Sections 13 and 14: peers and control.

PEER_RECORD = Record({"run_id": DIGEST, "addresses": ArrayOf(PEER_ADDRESS, 8), "issued_at": COUNT, "expires_at": COUNT})
PURPOSES = ("status", "invite", "challenge", "drain", "restart", "logs")
AUTHORITY = Record(
    {
        "run_id": DIGEST,
        "node": PUBLIC_KEY,
        "purposes": ArrayOf(one_of(*PURPOSES), len(PURPOSES), 1),
        "subject": OrNull(PUBLIC_KEY),
        "issued_at": COUNT,
        "expires_at": COUNT,
    }
)


def by_purpose(**fields: dict[str, object]) -> OneOf:
    """The records of each purpose, tagged by it."""
    return OneOf(
        "purpose",
        {name: Record({"purpose": one_of(name)} | fields.get(name, {})) for name in PURPOSES},
    )


ASK = by_purpose(
    invite={"endpoint": OrNull(URL)},
    challenge={"samples": integer(1, 8), "max_tokens": integer(1, 128)},
    logs={"lines": integer(1, 200)},
)
REPLY_BODY = by_purpose(
    status={
        **dict.fromkeys(("software", "engine", "doing"), TEXT),
        **dict.fromkeys(("draining", "run_is_over", "dismissed", "coordinator_away"), BOOLEAN),
        "version": SIGNED,
        "held_versions": ArrayOf(COUNT, 64),
        "descriptor_version": SIGNED,
        "head_version": SIGNED,
        **dict.fromkeys(("slots", "undelivered", "neighbours", "tokens"), COUNT),
        "tokens_per_s": FLOAT,
        **dict.fromkeys(("switches", "engine_restarts", "admitted", "rejected", "indeterminate"), COUNT),
        **dict.fromkeys(("lost", "expired", "admitted_tokens"), COUNT),
        "reasons": ObjectOf(COUNT),
        "seconds": COUNT,
    },
    invite={"room": COUNT},
    challenge={"version": COUNT, "manifest_digest": DIGEST, "rollouts": binary(512 * 1024)},
    drain={"slots": COUNT, "undelivered": COUNT},
    restart={"slots": COUNT},
    logs={"lines": ArrayOf(text(0, 300), 200)},
)
CONTROL_REQUEST = Record(
    {
        "run_id": DIGEST,
        "to": PUBLIC_KEY,
        "ask": ASK,
        "nonce": NONCE,
        "issued_at": COUNT,
        "authority": OrNull(binary(4096)),
    }
)
CONTROL_REPLY = Record(
    {
        "run_id": DIGEST,
        "request": DIGEST,
        "reason": OrNull(CODE),
        "detail": TEXT,
        "answered_at": COUNT,
        "body": OrNull(REPLY_BODY),
    }
)
