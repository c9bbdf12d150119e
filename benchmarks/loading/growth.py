"""What the database's part of each request, verdict and page costs with a long past, and its maintenance.

In this process, without HTTP, whose part does not depend on the past: processor time of this thread, the least of a few
rounds, so that other load of the machine matters through its caches alone. SQLite. Maintenance is in seconds of the
clock: the migrations from the first schema, of which one counts everything once, and VACUUM.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from alembic import command
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import create_engine

from benchmarks.loading.history import ENVELOPE_BYTES, STEPS, fill, newest_policy
from coordinator.dashboard.assets import Assets
from coordinator.dashboard.pages import Pages
from coordinator.http.metrics import Metrics
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.run.status import run_status
from coordinator.storage import nodes, training, verdicts, work
from coordinator.storage.database import Database, migrations
from coordinator.storage.work import StoredSubmission
from node.protocol.admission import Outcome, Verdict
from node.protocol.messages import LeaseRequest, Registration
from node.protocol.run import BatchSpec, EnvironmentSpec, RunSpec, TrainingSpec

T = TypeVar("T")

WORKERS: Final = 64
ROUNDS: Final = 5
READS: Final = 15
VERDICT_BATCH: Final = 16
GROUP_SIZE: Final = 8
GROWING: Final = ("lease", "upload", "verdict", "receipt", "status", "metrics", "page")
"""Figures in milliseconds that must not depend on the past."""
INSTANCE: Final = "0" * 32
SPEC: Final = RunSpec(
    name="growth",
    environments=(EnvironmentSpec(name="arithmetic"),),
    batch=BatchSpec(groups_per_step=1_000_000, max_leases_per_node=64),
    training=TrainingSpec(steps=1_000_000),
)


def growth(folder: Path, submissions: int) -> dict[str, float]:
    """Measure with `submissions` in a new database; return milliseconds by kind, and seconds and bytes of the rest."""
    key = Ed25519PrivateKey.generate()
    home = create_home(folder, public_key=key.public_key().public_bytes_raw(), spec=SPEC)
    start = time.thread_time()
    fill(home, submissions, now=time.time())
    found = {"fill_s": time.thread_time() - start}
    with home.database.write() as connection:
        training.record_policy(connection, newest_policy(home.run_id, key, STEPS), now=time.time())
    coordinator = Coordinator(home, key=key)
    names = [secrets.token_hex(32) for _ in range(WORKERS)]
    with home.database.write() as connection:
        for name in names:
            shown = Registration(software="growth", engine="none", instance=INSTANCE, name="growth")
            nodes.register(connection, name, shown, now=time.time())
    rounds = [_round(coordinator, names) for _ in range(ROUNDS)]
    found |= {kind: min(one[kind] for one in rounds) for kind in rounds[0]}
    found |= _reads(coordinator)
    url = home.database.url
    home.database.close()
    return found | _maintenance(url) | {"bytes": float(sum(one.stat().st_size for one in folder.glob("*.sqlite3")))}


def _round(coordinator: Coordinator, names: Sequence[str]) -> dict[str, float]:
    """Lease, submit, judge and read the receipt of one slot of each node; return milliseconds for one."""
    home = coordinator.home
    taken = dict[str, float]()
    leases = _timed(taken, "lease", [partial(_lease, home, name) for name in names])
    pairs = list(zip(names, leases, strict=True))
    submitted = _timed(
        taken, "upload", [lambda name=name, lease=lease: _submit(home, name, lease) for name, lease in pairs]
    )
    group = home.blobs.put(b"load")
    _timed(taken, "verdict", [partial(_judge, home, group)] * (WORKERS // VERDICT_BATCH))
    taken["verdict"] /= VERDICT_BATCH
    _timed(taken, "receipt", [partial(coordinator.receipt, name) for name in submitted])
    return taken


def _timed(taken: dict[str, float], kind: str, calls: Sequence[Callable[[], T]]) -> list[T]:
    start = time.thread_time()
    found = [call() for call in calls]
    taken[kind] = 1000 * (time.thread_time() - start) / len(calls)
    return found


def _lease(home: Home, node: str) -> str:
    request = LeaseRequest(held_versions=(STEPS,), slots=1, instance=INSTANCE)
    with home.database.write(durable=False) as connection:
        reply = work.lease(connection, node=node, request=request, spec=home.spec, now=time.time())
    return reply.leases[0].lease_id


def _submit(home: Home, node: str, lease: str) -> str:
    stored = StoredSubmission(secrets.token_bytes(ENVELOPE_BYTES), body=secrets.token_hex(32), body_bytes=1)
    with home.database.write(durable=False) as connection:
        return work.submit(connection, stored, node=node, lease_id=lease, spec=home.spec, now=time.time())


def _judge(home: Home, group: str) -> str:
    verdict = Verdict(outcome=Outcome.ADMITTED, tokens=GROUP_SIZE, rewards=(0.0, 1.0) * (GROUP_SIZE // 2))
    now, spec = time.time(), home.spec
    with home.database.write() as connection:
        claimed = verdicts.claim(connection, verifier="growth", spec=spec, now=now, seconds=60.0, most=VERDICT_BATCH)
    with home.database.write() as connection:
        for one in claimed:
            verdicts.record(connection, one, verdict, spec=spec, now=now, group=group)
    return group


def _reads(coordinator: Coordinator) -> dict[str, float]:
    """Measure status, metrics and page; the first of each is left out, which compiles and reads the whole curve."""
    pages, metrics = Pages(coordinator, Assets()), Metrics(coordinator)
    reads: dict[str, Callable[[], object]] = {
        "status": lambda: run_status(coordinator, now=time.time()),
        "metrics": metrics.render,
        "page": pages.snapshot,
    }
    found = {}
    for name, read in reads.items():
        read()
        found[name] = min(_read_ms(read) for _ in range(READS))
    return found


def _read_ms(read: Callable[[], object]) -> float:
    start = time.thread_time()
    read()
    return 1000 * (time.thread_time() - start)


def _maintenance(url: str) -> dict[str, float]:
    """Measure the migrations from the first schema, and VACUUM."""
    database = Database(url)
    with database.write() as connection:
        config = migrations()
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    start = time.perf_counter()
    database.migrate()
    migrated = time.perf_counter()
    database.close()
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("VACUUM")
    engine.dispose()
    return {"migration_s": migrated - start, "vacuum_s": time.perf_counter() - migrated}
