"""A run's past, written into an empty database by a few statements: what N submissions leave behind.

Whatever N is, there are STEPS steps, with as many policies, and NODES nodes, over 30 days: so what a page or a request
takes beside the same of a smaller N is the submissions' part. One submission in twelve was rejected, one slot in ten
was leased once before in vain. Names are scattered over their indexes as digests are. The log's leaves are verdicts
that pages can read, its tree is right, and the counters agree with the rows.
"""

# ruff: noqa: S608  (statements of this module's own constants)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, insert, text

from coordinator.run.home import Home
from coordinator.storage import counters, log
from coordinator.storage.log_tree import LogTree
from coordinator.storage.schema import log_entries, log_nodes
from coordinator.storage.tallies import WIDTHS
from coordinator.storage.training import PolicyRecord
from coordinator.storage.whole_tables import continue_sequences
from node.protocol.admission import Figures, Outcome
from node.protocol.evidence import Totals
from node.protocol.messages import BatchEntry, PolicyEntry, VerdictEntry
from node.protocol.reasons import Reason
from shardcast.manifest import DEFAULT_LIMITS, Manifest, Payload, seal_manifest
from shardcast.wire import digest, encode

STEPS: Final = 1000
NODES: Final = 1000
DAYS: Final = 30
TOKENS: Final = 384
REWARDS: Final = (0.0, 1.0) * 4
BAD_OF: Final = 12
LAPSED_OF: Final = 10
ENVELOPE_BYTES: Final = 473
"""Of a signed request in a submission's row."""
_AT_ONCE: Final = 10_000
_SUBMISSION, _LEASE, _LAPSED, _BODY, _NODE = range(5)
_MARKS: Final[dict[str, Any]] = {"submission": "a" * 64, "node": "b" * 64, "body": "c" * 64}
_NUMBERS: Final[dict[str, Any]] = {"version": 1111111111, "slot": 1222222222, "decided_at": 1333333333}


def fill(home: Home, submissions: int, *, now: float) -> None:
    """Write a past of `submissions` into the database of a run that has none; its newest policy is STEPS - 1."""
    with home.database.write() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA cache_size = -500000")
        for statement in _statements(connection.dialect.name, submissions):
            connection.execute(text(statement), {"now": now, "span": DAYS * 86400.0})
        counters.recount(connection)
        continue_sequences(connection)
        _append(connection, _leaves(submissions, now=now))
    if connection.dialect.name == "postgresql":  # as autovacuum does within minutes
        with home.database.write() as connection:
            connection.exec_driver_sql("ANALYZE")


def newest_policy(run_id: str, key: Ed25519PrivateKey, version: int) -> PolicyRecord:
    """Return a policy of one byte whose signed manifest pages can read."""
    content = digest(b"load")
    payload = Payload(chunk_bytes=DEFAULT_LIMITS.min_chunk_bytes, payload_bytes=1, chunk_digests=bytes.fromhex(content))
    manifest = Manifest(
        run_id=run_id,
        version=version,
        previous=None,
        issued_at=0,
        expires_at=2**32,
        result_digest=content,
        full=payload,
        deltas=(),
    )
    signed = seal_manifest(manifest, key)
    return PolicyRecord(version, manifest_digest=signed.digest, result_digest=content, manifest=signed.envelope)


def _scattered(number: int, kind: int) -> str:
    """Return the name that `_name` has the database make."""
    return f"{(number * 2654435761 + kind) & 0xFFFFFFFF:08x}{number * 8 + kind:056x}"


def _name(dialect: str, number: str, kind: int) -> str:
    first, second = f"((({number}) * 2654435761 + {kind}) & 4294967295)", f"({number}) * 8 + {kind}"
    if dialect == "sqlite":
        return f"printf('%08x%056x', {first}, {second})"
    return f"lpad(to_hex({first}), 8, '0') || lpad(to_hex({second}), 56, '0')"


def _version(number: int, submissions: int) -> int:
    return number * STEPS // submissions


def _statements(dialect: str, submissions: int) -> Iterator[str]:
    def numbers(count: int) -> str:
        # The rows are counted by the database: a Python loop over a million takes minutes.
        start = "WITH RECURSIVE numbers(n) AS (SELECT CAST(0 AS BIGINT) UNION ALL SELECT n + 1 FROM numbers"
        return f"{start} WHERE n + 1 < {count})"

    def name(kind: int, number: str = "n") -> str:
        return _name(dialect, number, kind)

    node = name(_NODE, f"n % {NODES}")
    version, index = f"n * {STEPS} / {submissions}", f"n + 2 + 2 * (n * {STEPS} / {submissions})"
    at = f"(:now - :span * (1.0 - n * 1.0 / {submissions}))"
    bad = f"n % {BAD_OF} = {BAD_OF - 1}"
    many, some, one_each = numbers(submissions), numbers(NODES), numbers(STEPS)
    yield f"""INSERT INTO nodes (node, software, engine, registered_at, seen_at, admitted, rejected, tokens,
            rejected_streak, not_before, verified) {some}
        SELECT {name(_NODE)}, 'load', 'none', :now - :span, :now - n, 0, 0, 0, 0, 0, 9 FROM numbers"""
    yield f"""INSERT INTO policies {one_each}
        SELECT n, '{"0" * 64}', '{"0" * 64}', CAST('' AS {_bytes(dialect)}), :now - :span FROM numbers"""
    yield f"""INSERT INTO steps {one_each} SELECT n, :now - :span, :now - :span, 0.5, 0.0, '{{}}' FROM numbers"""
    yield f"""INSERT INTO slots (id, version, number, state, opened_at) {many}
        SELECT n + 1, {version}, n, CASE WHEN {bad} THEN 'stale' ELSE 'used' END, {at} FROM numbers"""
    lease = "INSERT INTO leases (lease, slot_id, node, state, issued_at, expires_at, ended_at)"
    yield f"{lease} {many} SELECT {name(_LEASE)}, n + 1, {node}, 'submitted', {at}, {at} + 600, NULL FROM numbers"
    yield f"""{lease} {many} SELECT {name(_LAPSED)}, n + 1, {node}, 'expired', {at} - 600, {at}, {at} FROM numbers
        WHERE n % {LAPSED_OF} = 0"""
    yield f"""INSERT INTO submissions (submission, lease, slot_id, node, request, body, body_bytes, received_at, state,
            attempts, outcome, reason, detail, tokens, log_index, decided_at, envelope) {many}
        SELECT {name(_SUBMISSION)}, {name(_LEASE)}, n + 1, {node}, {name(_SUBMISSION)}, {name(_BODY)}, 20000, {at},
            'done', 1, CASE WHEN {bad} THEN 'rejected' ELSE 'admitted' END, CASE WHEN {bad} THEN 'wrong_token' END, '',
            {TOKENS}, {index}, {at} + 20, {_envelope(dialect)} FROM numbers"""
    yield f"""INSERT INTO groups (slot_id, submission, blob, reward_mean, signal, step) {many}
        SELECT n + 1, {name(_SUBMISSION)}, {name(_BODY)}, 0.5, true, {version} FROM numbers WHERE NOT ({bad})"""
    count = "SELECT count(*) FROM submissions WHERE submissions.node = nodes.node AND outcome ="
    yield f"UPDATE nodes SET admitted = ({count} 'admitted'), rejected = ({count} 'rejected')"
    yield f"UPDATE nodes SET tokens = admitted * {TOKENS}"
    yield """INSERT INTO rejections
        SELECT node, reason, count(*) FROM submissions WHERE outcome = 'rejected' GROUP BY node, reason"""
    for width in WIDTHS:
        start = f"CAST(decided_at AS BIGINT) / {width} * {width}" if width else "0"
        yield f"""INSERT INTO verdict_tallies SELECT {width}, {start}, 'full', outcome, coalesce(reason, ''), count(*),
            sum(tokens), 20.0 * count(*), 20.0 FROM submissions GROUP BY 2, outcome, reason"""


def _bytes(dialect: str) -> str:
    return "BLOB" if dialect == "sqlite" else "BYTEA"


def _envelope(dialect: str) -> str:
    return f"zeroblob({ENVELOPE_BYTES})" if dialect == "sqlite" else f"decode(repeat('00', {ENVELOPE_BYTES}), 'hex')"


def _leaves(submissions: int, *, now: float) -> Iterator[bytes]:
    """Yield what the log has after the run's own entry: each policy, what was made with it, and the step of that."""
    admitted, rejected = _template(Outcome.ADMITTED), _template(Outcome.REJECTED)
    number = 0
    for version in range(STEPS):
        zero = "0" * 64
        yield encode(PolicyEntry(version=version, manifest_digest=zero, result_digest=zero))
        used = []
        while number < submissions and _version(number, submissions) == version:
            bad, own = number % BAD_OF == BAD_OF - 1, _scattered(number, _SUBMISSION)
            yield (rejected if bad else admitted) % {
                b"submission": own.encode(),
                b"node": _scattered(number % NODES, _NODE).encode(),
                b"body": _scattered(number, _BODY).encode(),
                b"version": version,
                b"slot": number,
                b"decided_at": int(now - DAYS * 86400.0 * (1.0 - number / submissions) + 20),
            }
            if not bad:
                used.append(own)
            number += 1
        yield encode(BatchEntry(step=version, submissions=tuple(used)))


def _template(outcome: Outcome) -> bytes:
    """Return a verdict's leaf with places for what tells one from another."""
    bad = outcome is Outcome.REJECTED
    entry = VerdictEntry(
        **_MARKS,
        **_NUMBERS,
        request=_MARKS["submission"],
        manifest_digest="0" * 64,
        outcome=outcome,
        reason=Reason.WRONG_TOKEN if bad else None,
        finding=None,
        detail="",
        figures=Figures(**dict.fromkeys(Figures.__struct_fields__, 0.001)),
        totals=Totals(),
        rewards=None if bad else REWARDS,
        tokens=TOKENS,
    )
    leaf = encode(entry)
    for name, mark in _MARKS.items():
        leaf = leaf.replace(mark.encode(), f"%({name})s".encode())
    for name, number in _NUMBERS.items():
        leaf = leaf.replace(str(number).encode(), f"%({name})d".encode())
    return leaf


def _append(connection: Connection, leaves: Iterable[bytes]) -> None:
    """Append leaves behind the run's first entry."""
    tree = LogTree()
    tree.append(log.leaves(connection, 0, 1)[0])
    numbered = enumerate(leaves, 1)
    while some := list(islice(numbered, _AT_ONCE)):
        completed = [node for _, leaf in some for node in tree.append(leaf)]
        connection.execute(insert(log_entries), [{"index": index, "leaf": leaf} for index, leaf in some])
        rows = [{"level": level, "index": at, "hash": value} for level, at, value in completed]
        connection.execute(insert(log_nodes), rows)
