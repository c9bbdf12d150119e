"""A backup of a run that is being served, restored on either database: what an operator has left after a lost disk.

At stake are verdicts that nobody can follow any more, a log that says something else than the one that was signed, and
contributors whose work is refused by the run that has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT
from postgresql import new_database
from sqlalchemy import func, select
from swarm import Peer, Swarm, running, serve, small_spec, verifying

from coordinator.backup.create import back_up
from coordinator.backup.manifest import BackupManifest, read_manifest
from coordinator.backup.restore import SETTLE_SECONDS, restore
from coordinator.run.home import open_home
from coordinator.run.service import Coordinator
from coordinator.storage.schema import LeaseState, log_entries, submissions
from node.protocol.admission import Outcome
from node.protocol.messages import Lease
from node.protocol.reasons import Refusal
from shardcast.wire import digest

WAITING = 2000
KEY = Ed25519PrivateKey.generate()
SPEC = small_spec()
SPEC = msgspec.structs.replace(
    SPEC, batch=msgspec.structs.replace(SPEC.batch, groups_per_step=60, lease_seconds=3600.0)
)


def no_wait(_seconds: float) -> None:
    """For who knows that the old coordinator has long stopped."""


def work(swarm: Swarm, peer: Peer, *, wrong: bool = False) -> Outcome:
    """One slot, generated as it must be, or with log-probabilities that are not the policy's.

    Wrong ones are never the same: a slot that was rejected goes to others, and a file is taken once.
    """
    return finish(swarm, peer, peer.lease(), wrong=wrong)


def finish(swarm: Swarm, peer: Peer, lease: Lease, *, wrong: bool = False) -> Outcome:
    rows = swarm.honest(lease)
    if wrong:
        shift = random.uniform(0.5, 1.0)
        rows[0] = msgspec.structs.replace(rows[0], logprobs=[value - shift for value in rows[0].logprobs])
    return swarm.judge(peer, rows, lease).outcome


@dataclass(frozen=True)
class BackedUp:
    """A run, the backup that was made while it worked, and a lease that was held then."""

    swarm: Swarm
    folder: Path
    worker: Peer
    cheat: Peer
    held: Lease


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[BackedUp]:
    """The last of several backups, each of which was made while two nodes worked."""
    folder = tmp_path_factory.mktemp("run")
    with running(folder, tiny_policy_path, spec=SPEC, key=KEY) as swarm:
        worker, cheat = swarm.peer(), swarm.peer()
        assert work(swarm, worker) is Outcome.ADMITTED
        assert work(swarm, cheat, wrong=True) is Outcome.REJECTED
        held, stop = worker.lease(), threading.Event()

        def keep_working(wrong: bool) -> None:
            peer = swarm.peer()
            while not stop.is_set():
                work(swarm, peer, wrong=wrong)

        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(keep_working, wrong) for wrong in (False, True)]
            sizes = []
            while len(set(sizes)) < 4:
                sizes.append(back_up(swarm.home, folder / "backup").manifest.log_size)
            stop.set()
            for one in working:
                one.result()
        work(swarm, worker)
        yield BackedUp(swarm, folder / "backup", worker, cheat, held)


@contextlib.contextmanager
def restored(scene: BackedUp, folder: Path, to: Path, *, url: str | None) -> Iterator[Swarm]:
    """The run that is in the backup `folder`, served with a verifier at work."""
    restore(folder, to, database_url=url, wait=no_wait)
    home = open_home(to, database_url=url)
    origin = scene.swarm.origin_url
    try:
        with (
            serve(Coordinator(home, key=KEY, relay_urls=(origin,))) as served,
            verifying(home, source=origin, state=to / "verifier"),
        ):
            yield replace(scene.swarm, home=home, url=served)
    finally:
        home.database.close()


def audited(swarm: Swarm, state: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What an auditor says of all verdicts."""
    capsys.readouterr()
    code = swarm.audit(state)
    report = json.loads(capsys.readouterr().out)
    assert (code, report["outcome"], report["problems"]) == (0, "agree", []), report
    assert set(report["results"]) - {"agree"} == {name for name, count in report["results"].items() if not count}
    return report


@pytest.mark.parametrize("kinds", [("sqlite", "postgresql", "sqlite"), ("postgresql", "postgresql")], ids="-".join)
def test_a_run_is_restored_audited_and_goes_on_from_database_to_database(
    backed_up: BackedUp, kinds: tuple[str, ...], postgresql: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each restored run is backed up again, and that backup restored on the next database, with one auditor for all."""
    folder, held = backed_up.folder, backed_up.held
    for number, kind in enumerate(kinds):
        url = new_database(postgresql) if kind == "postgresql" else None
        manifest = read_manifest(folder)
        with restored(backed_up, folder, tmp_path / f"run-{number}", url=url) as swarm:
            worker, cheat = (replace(peer, url=swarm.url) for peer in (backed_up.worker, backed_up.cheat))
            first = audited(swarm, tmp_path / "auditor", capsys)
            assert first["checkpoint"]["size"] >= manifest.log_size
            assert finish(swarm, worker, held) is Outcome.ADMITTED, "what was leased before the backup"
            assert work(swarm, cheat, wrong=True) is Outcome.REJECTED
            held = worker.lease()
            folder = tmp_path / f"backup-{number}"
            back_up(swarm.home, folder)
            later = audited(swarm, tmp_path / "auditor", capsys)
        assert later["log"]["admitted"] > first["log"]["admitted"] > 0
        assert later["log"]["rejected"] > first["log"]["rejected"] > 0


def test_a_backup_is_of_one_moment(backed_up: BackedUp, tmp_path: Path) -> None:
    """Workers wrote while it was made: a verdict without its log entry, or the other way round, is neither's fault."""
    restore(backed_up.folder, tmp_path / "run", wait=no_wait)
    home = open_home(tmp_path / "run")
    with home.database.read() as connection:
        decided = select(func.count()).where(submissions.c.log_index.is_not(None))
        logged = connection.execute(select(func.count()).select_from(log_entries)).scalar_one()
        assert connection.execute(decided).scalar_one() == logged - 2  # the run's and the policy's
        orphans = select(submissions.c.submission).where(submissions.c.log_index >= logged)
        assert connection.execute(orphans).all() == []
    home.database.close()


def test_a_second_backup_copies_only_what_is_new(backed_up: BackedUp, tmp_path: Path) -> None:
    home = backed_up.swarm.home
    first = back_up(home, tmp_path).copied
    second = back_up(home, tmp_path).copied
    work(backed_up.swarm, backed_up.worker)
    third = back_up(home, tmp_path).copied
    assert first.blobs > 8
    assert second.blobs == 0
    assert third.blobs in {3, 4}  # request, body, group, and what was measured
    assert not first.missing | second.missing | third.missing


def test_every_blob_of_a_run_is_in_its_backup(backed_up: BackedUp, tmp_path: Path) -> None:
    """A new column that names blobs, which a backup does not know of, would be found missing on the worst of days."""
    home = backed_up.swarm.home
    back_up(home, tmp_path)
    stored = {path.name for path in (home.folder / "blobs").glob("??/*")}
    assert {path.name for path in (tmp_path / "blobs").glob("??/*")} == stored


def test_what_was_signed_for_the_old_coordinator_is_not_good_for_the_new_one(
    backed_up: BackedUp, tmp_path: Path
) -> None:
    """Replay: a request that the old coordinator accepted after the backup, whose nonce the new one never saw."""
    begun, waited = time.time(), []
    restore(backed_up.folder, tmp_path / "run", wait=waited.append)
    assert len(waited) == 1
    served_at = begun + waited[0]
    latest = backed_up.worker.claim("POST", "/v1/leases", b"", issued_at=int(begun) + 60)  # by a clock that is ahead
    home = open_home(tmp_path / "run")
    service = Coordinator(home, key=KEY)
    node, where = backed_up.worker.node, {"method": "POST", "path": "/v1/leases"}
    with service.accept(node, latest, **where, now=begun + 30):
        pass  # so long it would have been taken
    with pytest.raises(Refusal, match="clock_skew"), service.accept(node, latest, **where, now=served_at + 1):
        pass
    assert waited[0] <= SETTLE_SECONDS
    home.database.close()


# -- killed processes, and the command line


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "node.cli", *map(str, arguments)]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def add_work(swarm_data: Path, count: int) -> None:
    """Submissions that wait for a verdict, each with blobs of its own."""
    home = open_home(swarm_data)
    rows: dict[str, list[dict[str, Any]]] = {"slots": [], "leases": [], "submissions": []}
    with home.database.read() as connection:
        node = connection.execute(select(submissions.c.node)).scalars().first()
    for number in range(count):
        blob = home.blobs.put(f"blob {number}".encode())
        slot, lease = 10_000 + number, digest(f"lease {number}".encode())
        rows["slots"].append({"id": slot, "version": 9, "number": number, "state": "submitted", "opened_at": 1.0})
        held = {"slot_id": slot, "node": node, "lease": lease}
        rows["leases"].append({**held, "state": LeaseState.SUBMITTED, "issued_at": 1.0, "expires_at": 2.0})
        taken = {
            "submission": blob,
            "request": blob,
            "body": blob,
            "body_bytes": 1,
            "received_at": 1.0,
            "state": "queued",
        }
        rows["submissions"].append(held | taken)
    with home.database.write() as connection:
        for table, added in rows.items():
            connection.execute(submissions.metadata.tables[table].insert(), added)
    home.database.close()


def test_a_backup_that_is_killed_leaves_the_one_before(backed_up: BackedUp, tmp_path: Path) -> None:
    """With kill -9, while it writes tables and while it copies blobs."""
    data, folder = tmp_path / "data", tmp_path / "backup"
    restore(backed_up.folder, data, wait=no_wait)
    assert ran("backup", "--data", data, folder).returncode == 0
    before = read_manifest(folder)
    add_work(data, WAITING)
    stored = len(list((folder / "blobs").glob("??/*")))

    def writes_tables() -> bool:
        return len(list((folder / "tables").iterdir())) > 1

    def copies_blobs() -> bool:
        return len(list((folder / "blobs").glob("??/*"))) > stored + 100

    for begun in (writes_tables, copies_blobs):
        process = subprocess.Popen(command("backup", "--data", data, folder), cwd=ROOT, env=ENVIRONMENT)
        while not begun():
            assert process.poll() is None, "it was over before it could be killed"
        process.kill()
        assert process.wait() == -9
        assert read_manifest(folder) == before
        to = tmp_path / begun.__name__
        assert restore(folder, to, wait=no_wait).manifest == before
    made = json.loads(ran("backup", "--data", data, folder, "--json").stdout)
    assert made["rows"]["submissions"] == WAITING + rows_of(before, "submissions")
    assert 0 < made["blobs_copied"] < WAITING
    assert len(list((folder / "tables").iterdir())) == 1, "of the killed ones nothing is left but blobs"


def rows_of(manifest: BackupManifest, table: str) -> int:
    return next(one.rows for one in manifest.tables if one.name == table)
