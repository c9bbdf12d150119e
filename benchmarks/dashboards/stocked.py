"""A run that has been going for long, written into an empty home at once: what it would have taken days to become.

The rows are those that the coordinator's own functions leave behind: tallies, and a log whose hashes are right. Numbers
are drawn with a fixed seed.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, Table, insert

from coordinator.run.home import Home
from coordinator.storage import log
from coordinator.storage.schema import (
    deliveries,
    groups,
    leases,
    log_entries,
    log_nodes,
    nodes,
    policies,
    relays,
    slots,
    steps,
    submissions,
    verdict_tallies,
)
from coordinator.storage.tallies import WIDTHS
from node.protocol import merkle
from node.protocol.admission import Figures, Outcome
from node.protocol.evidence import Totals
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.reasons import Reason
from shardcast.manifest import DEFAULT_LIMITS, Manifest, Payload, SignedManifest, seal_manifest
from shardcast.wire import digest, encode

AT_ONCE = 5000
TOKENS = 384
SUBMISSIONS_PER_S = 4.0
_FIGURES = Figures(**dict.fromkeys(Figures.__struct_fields__, 0.001))
_REASONS = (
    Reason.WRONG_TOKEN,
    Reason.PROOF_MISMATCH,
    Reason.WRONG_LOGPROB,
    Reason.MALFORMED_SUBMISSION,
    Reason.WRONG_SEED,
)


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Size of a long run. One submission in `one_bad_of` is rejected."""

    workers: int
    submissions: int
    relays: int = 24
    groups_per_step: int = 16
    one_bad_of: int = 12
    seed: int = 1
    software: str = "swarmproof 0.1.0"
    engines: Sequence[str] = ("torch", "vllm")


@dataclass
class _Shelf:
    """Rows on their way into the database, and the log's leaves."""

    connection: Connection
    first_index: int
    run_id: str
    key: Ed25519PrivateKey
    rows: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    tables: dict[str, Table] = field(default_factory=dict)
    leaves: list[bytes] = field(default_factory=list)
    manifests: dict[int, str] = field(default_factory=dict)

    def put(self, table: Table, **row: Any) -> None:
        self.tables[table.name] = table
        self.rows[table.name].append(row)

    def append(self, entry: LogEntry) -> int:
        self.leaves.append(encode(entry))
        return self.first_index + len(self.leaves) - 1

    def store(self) -> None:
        """Insert everything in an order that foreign keys allow."""
        in_order = (nodes, relays, policies, slots, leases, submissions, groups, deliveries, steps, verdict_tallies)
        for table in in_order:
            _insert(self.connection, table, iter(self.rows[table.name]))
        append_many(self.connection, self.leaves)


def stock(home: Home, what: Stock, *, key: Ed25519PrivateKey, now: float) -> list[str]:
    """Fill `home`, the run of `key`, up; returns the ids of the submissions, the oldest first."""
    rng = random.Random(what.seed)
    names = [digest(f"worker {number}".encode()) for number in range(what.workers)]
    with home.database.write() as connection:
        shelf = _Shelf(connection, first_index=log.size(connection), run_id=home.run_id, key=key)
        found = _submissions(shelf, what, names, rng, now=now)
        _relays(shelf, what, head=len(shelf.rows["policies"]) - 1, now=now)
        shelf.store()
    return found


def _submissions(shelf: _Shelf, what: Stock, names: list[str], rng: random.Random, *, now: float) -> list[str]:
    counted: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    done: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    found, ready = [], list[str]()
    _policy(shelf, 0, at=now - what.submissions / SUBMISSIONS_PER_S - 60)
    version = 0
    for number in range(what.submissions):
        at = now - (what.submissions - number) / SUBMISSIONS_PER_S
        name = names[number % len(names)] if names else digest(b"nobody")
        bad = number % what.one_bad_of == what.one_bad_of - 1
        reason = rng.choice(_REASONS) if bad else None
        wait = rng.lognormvariate(0.3, 0.6)
        own = _submission(shelf, number, name, reason, version=version, at=at, wait=wait, rng=rng)
        found.append(own)
        done[name][bad] += 1
        _count(counted, bad, reason, at=at + wait, wait=wait)
        if not bad:
            ready.append(own)
        if len(ready) == what.groups_per_step:
            _step(shelf, version, ready, at=at + wait, rng=rng)
            ready, version = [], version + 1
            _policy(shelf, version, at=at + wait + 1)
    _nodes(shelf, what, names, done, rng, now=now)
    _deliveries(shelf, names, done)
    for key, value in counted.items():
        row = dict(zip(verdict_tallies.columns.keys(), (*key, *value), strict=True))
        shelf.put(verdict_tallies, **row)
    return found


def _submission(
    shelf: _Shelf,
    number: int,
    node: str,
    reason: Reason | None,
    *,
    version: int,
    at: float,
    wait: float,
    rng: random.Random,
) -> str:
    own, body, slot = digest(f"submission {number}".encode()), digest(f"body {number}".encode()), number + 1
    outcome = Outcome.ADMITTED if reason is None else Outcome.REJECTED
    hit = min(0.97, 0.15 + 0.8 * version / (version + 40))
    rewards = tuple(float(rng.random() < hit) for _ in range(8)) if reason is None else None
    entry = VerdictEntry(
        submission=own,
        node=node,
        version=version,
        manifest_digest=shelf.manifests[version],
        slot=number,
        request=own,
        body=body,
        outcome=outcome,
        reason=reason,
        finding=None,
        detail="" if reason is None else "Row 3: token_margin is 4.2, the limit is 1.",
        figures=_FIGURES,
        totals=Totals(),
        rewards=rewards,
        tokens=TOKENS,
        decided_at=int(at + wait),
    )
    shelf.put(slots, id=slot, version=version, number=number, state="stale" if reason else "used", opened_at=at)
    lease = digest(f"lease {number}".encode())
    shelf.put(leases, lease=lease, slot_id=slot, node=node, state="submitted", issued_at=at - 20, expires_at=at + 40)
    shelf.put(
        submissions,
        submission=own,
        lease=lease,
        slot_id=slot,
        node=node,
        request=own,
        body=body,
        body_bytes=20_000,
        received_at=at,
        state="done",
        outcome=outcome.value,
        reason=None if reason is None else reason.value,
        detail=entry.detail,
        tokens=TOKENS,
        log_index=shelf.append(entry),
        decided_at=at + wait,
    )
    if rewards is not None:
        group = {"slot_id": slot, "submission": own, "blob": body, "reward_mean": sum(rewards) / 8, "step": None}
        shelf.put(groups, **group, signal=min(rewards) < max(rewards))
    return own


def _deliveries(shelf: _Shelf, names: list[str], done: Mapping[str, list[int]]) -> None:
    """Make the second worker one that withholds groups with signal, and the third one that fails now and then."""
    for number, name in enumerate(names):
        for signal in (0, 1):
            delivered = done[name][0] // (8 if number == 1 and signal else 2)
            missed = delivered * 3 if number == 1 and signal else delivered // 20 if number == 2 else 0
            shelf.put(deliveries, node=name, environment=0, signal=signal, delivered=delivered, missed=missed)


def _count(
    counted: defaultdict[tuple[Any, ...], list[float]], bad: bool, reason: Reason | None, *, at: float, wait: float
) -> None:
    outcome = Outcome.REJECTED if bad else Outcome.ADMITTED
    for width in WIDTHS:
        start = int(at) // width * width if width else 0
        own = counted[width, start, "full", outcome.value, reason.value if reason else ""]
        own[0], own[1], own[2], own[3] = own[0] + 1, own[1] + TOKENS, own[2] + wait, max(own[3], wait)


def _step(shelf: _Shelf, step: int, ready: list[str], *, at: float, rng: random.Random) -> None:
    chosen = set(ready)
    own = [row for row in shelf.rows["groups"][-2 * len(ready) :] if row["submission"] in chosen]
    for row in own:
        row["step"] = step
    mean = sum(row["reward_mean"] for row in own) / len(own)
    values = {"assigned_at": at, "finished_at": at + 1, "reward_mean": mean, "staleness_mean": rng.random()}
    shelf.put(steps, step=step, stats=json.dumps(_statistics(step)), **values)
    shelf.append(BatchEntry(step=step, submissions=tuple(ready)))


def _statistics(step: int) -> dict[str, float]:
    """Make up a step's statistics, in the sizes of the demonstration's."""
    wave = math.sin(step / 3) + math.sin(step * 1.7)
    return {
        "entropy": 0.25 * math.exp(-step / 40) + 0.01 * wave + 0.04,
        "clip_fraction": 0.004 + 0.001 * wave,
        "logprob_gap": 0.02 + 0.004 * wave,
        "grad_norm": 0.3 + 0.08 * wave,
        "train_seconds": 1.0,
    }


def _policy(shelf: _Shelf, version: int, *, at: float) -> None:
    signed = _manifest(shelf, version)
    digests = {"manifest_digest": signed.digest, "result_digest": signed.manifest.result_digest}
    shelf.put(policies, version=version, **digests, manifest=signed.envelope, published_at=at)
    shelf.append(PolicyEntry(version=version, **digests))
    shelf.manifests[version] = signed.digest


def _manifest(shelf: _Shelf, version: int) -> SignedManifest:
    """Sign a policy of one byte: a coordinator that starts reads the newest ones."""
    content = digest(b"policy %d" % version)
    manifest = Manifest(
        run_id=shelf.run_id,
        version=version,
        previous=None,
        issued_at=0,
        expires_at=2**32,
        result_digest=content,
        full=Payload(chunk_bytes=DEFAULT_LIMITS.min_chunk_bytes, payload_bytes=1, chunk_digests=bytes.fromhex(content)),
        deltas=(),
    )
    return seal_manifest(manifest, shelf.key)


def _nodes(
    shelf: _Shelf, what: Stock, names: list[str], done: dict[str, list[int]], rng: random.Random, *, now: float
) -> None:
    for number, name in enumerate(names):
        good, bad = done.get(name, [0, 0])
        shelf.put(
            nodes,
            node=name,
            software=what.software,
            engine=what.engines[number % len(what.engines)],
            registered_at=now - 90_000 + number,
            seen_at=now - rng.expovariate(1 / 90),
            admitted=good,
            rejected=bad,
            tokens=good * TOKENS,
            verified=0 if bad and rng.random() < 0.3 else good,
            strikes=min(3, bad) if number % 40 == 0 else 0,
            instance_name="a private name",
            address="192.0.2.77",
        )


def _relays(shelf: _Shelf, what: Stock, *, head: int, now: float) -> None:
    rng = random.Random(what.seed)
    for number in range(what.relays):
        behind = rng.choice((0, 0, 0, 0, 1, 1, 3))
        shelf.put(
            relays,
            node=digest(f"relay {number}".encode()),
            url=f"http://relay-{number:03}.example:8720",
            seen_at=now + 3600,  # so that they do not go away while somebody looks
            received="[]",
            place=f"198.51.100.{number % 8 * 32}/24",
            version=None if number % 17 == 16 else max(0, head - behind),
        )


def append_many(connection: Connection, leaves: Sequence[bytes]) -> None:
    """Append many leaves at once, as `log.append` does one."""
    first = log.size(connection)
    hashes: dict[tuple[int, int], bytes] = {}

    def node(level: int, at: int) -> bytes:
        known = hashes.get((level, at))
        return known if known is not None else log._node(connection, level, at)  # noqa: SLF001

    def rows() -> Iterator[dict[str, Any]]:
        for index, leaf in enumerate(leaves, first):
            for level, at, value in merkle.completed_nodes(index, merkle.leaf_hash(leaf), node):
                hashes[level, at] = value
                yield {"level": level, "index": at, "hash": value}

    _insert(connection, log_entries, ({"index": index, "leaf": leaf} for index, leaf in enumerate(leaves, first)))
    _insert(connection, log_nodes, rows())


def _insert(connection: Connection, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    while part := list(islice(rows, AT_ONCE)):
        connection.execute(insert(table), part)
