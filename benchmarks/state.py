"""Cost of comparing a run's stored state with its log: `python -m benchmarks.state [--entries N] [--json]`.

The run is made by bulk inserts: verdicts of 100 nodes, one policy and one batch of 64 groups after each 64 of them, all
tables as the log says. Blobs are left out; what they cost is reading them. SQLite in a temporary folder.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import insert

from benchmarks.report import make_parser, report
from coordinator.integrity.check import check_state
from coordinator.integrity.derivation import LogFold
from coordinator.integrity.differences import Difference
from coordinator.integrity.start import check_start
from coordinator.run.history import KeptHistory, current_checkpoint
from coordinator.run.home import Home, create_home
from coordinator.storage import log
from coordinator.storage.accounts import LogAccounts
from coordinator.storage.log_tree import LogTree
from coordinator.storage.schema import (
    deliveries,
    groups,
    leases,
    log_entries,
    nodes,
    policies,
    slots,
    steps,
    submissions,
    verdict_tallies,
)
from node.protocol.admission import Figures, Outcome
from node.protocol.checkpoints import seal_checkpoint
from node.protocol.evidence import Totals
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.run import EnvironmentSpec, RunSpec
from shardcast.manifest import DEFAULT_LIMITS, Manifest, Payload, seal_manifest
from shardcast.wire import digest, encode

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
GROUPS, NODES = 64, 100
FIGURES = Figures(**dict.fromkeys(Figures.__struct_fields__, 0.0))
TABLES = {
    table.name: table
    for table in (nodes, policies, slots, leases, submissions, groups, steps, verdict_tallies, deliveries)
}


def _spec() -> RunSpec:
    spec = RunSpec(name="state", environments=(EnvironmentSpec(name="arithmetic"),))
    batch = msgspec.structs.replace(spec.batch, groups_per_step=GROUPS)
    return msgspec.structs.replace(spec, batch=batch, training=msgspec.structs.replace(spec.training, steps=10**6))


class _Maker:
    """Writes entries, and the rows that follow from them."""

    def __init__(self, home: Home) -> None:
        self._home, self._tree = home, LogTree()
        self._fold = LogFold(run_id=home.run_id, spec=home.spec)
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in (*TABLES, log_entries.name)}
        self._nodes: list[tuple[int, int, bytes]] = []
        self._verdicts: list[VerdictEntry] = []
        self.size = 0

    def entry(self, entry: LogEntry) -> None:
        leaf = encode(entry)
        self._nodes += self._tree.append(leaf)
        if self.size:  # the first is `create_home`'s
            self._rows[log_entries.name].append({"index": self.size, "leaf": leaf})
        for _ in self._fold.follow(self.size, entry):
            pass
        self.size += 1

    def policy(self, version: int) -> PolicyEntry:
        payload = Payload(chunk_bytes=DEFAULT_LIMITS.min_chunk_bytes, payload_bytes=1, chunk_digests=bytes(32))
        of = {"run_id": self._home.run_id, "version": version, "result_digest": "44" * 32, "full": payload}
        signed = seal_manifest(Manifest(**of, previous=None, issued_at=1, expires_at=2, deltas=()), KEY)
        entry = PolicyEntry(version=version, manifest_digest=signed.digest, result_digest="44" * 32)
        self.entry(entry)
        row = {"version": version, "manifest_digest": signed.digest, "result_digest": "44" * 32}
        self._rows["policies"].append(row | {"manifest": signed.envelope, "published_at": 1.0})
        return entry

    def verdict(self, policy: PolicyEntry, number: int) -> None:
        name, slot = digest(number.to_bytes(8, "big")), number + 1
        node = f"{number % NODES:064x}"
        entry = VerdictEntry(
            submission=name,
            node=node,
            version=policy.version,
            manifest_digest=policy.manifest_digest,
            slot=number,
            request=name,
            body=name,
            outcome=Outcome.ADMITTED,
            reason=None,
            finding=None,
            detail="",
            figures=FIGURES,
            totals=Totals(),
            rewards=(0.0, 1.0),
            tokens=100,
            decided_at=number,
        )
        at, rows = self.size, self._rows
        self.entry(entry)
        self._verdicts.append(entry)
        rows["slots"].append(
            {"id": slot, "version": policy.version, "number": number, "state": "used", "opened_at": 1.0}
        )
        times = {"issued_at": 1.0, "expires_at": 2.0, "ended_at": 2.0}
        rows["leases"].append({"lease": name, "slot_id": slot, "node": node, "state": "submitted"} | times)
        judged = {"submission": name, "lease": name, "slot_id": slot, "node": node, "request": name, "body": name}
        judged |= {"body_bytes": 1, "received_at": 1.0, "state": "done", "outcome": "admitted", "detail": ""}
        rows["submissions"].append(judged | {"tokens": 100, "log_index": at, "decided_at": float(number)})
        rows["groups"].append({"slot_id": slot, "submission": name, "blob": name, "reward_mean": 0.5, "signal": True})

    def batch(self, step: int) -> None:
        self.entry(BatchEntry(step=step, submissions=tuple(entry.submission for entry in self._verdicts)))
        for row in self._rows["groups"][-len(self._verdicts) :]:
            row["step"] = step
        self._verdicts.clear()

    def write(self) -> None:
        for _ in self._fold.end():
            pass
        made = self._fold.tables
        for (node,), columns in made["nodes"].items():
            known = {"node": node, "software": "", "engine": "", "registered_at": 0.0, "seen_at": 0.0}
            self._rows["nodes"].append(known | columns)
        for (step,), columns in made["steps"].items():
            self._rows["steps"].append({"step": step, "assigned_at": 1.0} | columns)
        for key, columns in made["verdict_tallies"].items():
            named = dict(zip(("width", "start", "kind", "outcome", "reason"), key, strict=True))
            self._rows["verdict_tallies"].append(named | columns | {"wait_seconds": 0.0, "longest_wait": 0.0})
        for key, columns in made["deliveries"].items():
            self._rows["deliveries"].append(dict(zip(("node", "environment", "signal"), key, strict=True)) | columns)
        with self._home.database.write() as connection:
            for name, table in {**TABLES, log_entries.name: log_entries}.items():
                connection.execute(insert(table), self._rows[name])
            log.add_nodes(connection, self._nodes[1:])
            checkpoint = current_checkpoint(connection, run_id=self._home.run_id)
        KeptHistory(self._home.folder, run_id=self._home.run_id, signer=self._home.public_key).keep(
            checkpoint, seal_checkpoint(checkpoint, key=KEY)
        )


def measure(entries: int, *, repeats: int) -> dict[str, Any]:
    """Make a run of about `entries` entries, and measure both checks."""
    with tempfile.TemporaryDirectory() as folder:
        public_key = KEY.public_key().public_bytes_raw()
        home = create_home(Path(folder), public_key=public_key, spec=_spec())
        made = _Maker(home)
        made.entry(RunEntry(run_id=home.run_id, spec_digest=home.spec.digest))
        policy, number, step = made.policy(0), 0, 0
        while made.size < entries:
            for _ in range(GROUPS):
                made.verdict(policy, number)
                number += 1
            made.batch(step)
            step += 1
            policy = made.policy(step)
        made.write()
        starts = []
        for _ in range(repeats):
            begun = time.perf_counter()
            check_start(home)
            starts.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with home.database.read() as connection:
            LogAccounts(rules=home.spec.standing).of(connection, "0" * 64)
        accounts = time.perf_counter() - begun
        found: list[Difference] = []
        begun = time.perf_counter()
        check_state(home, (), with_blobs=False, report=found.append)
        seconds = time.perf_counter() - begun
        home.database.close()
    if found:
        raise SystemExit(f"{len(found)} differences, e.g. {found[0].sentence}")
    return {
        "entries": entries,
        "start_seconds": statistics.median(starts),
        "start_seconds_most": max(starts),
        "accounts_seconds": accounts,
        "check_seconds": seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    report("state", options, measure(options.entries, repeats=options.repeats))


if __name__ == "__main__":
    main()
