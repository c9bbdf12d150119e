"""A process that waits for its disk is alive, and the run does not go on: its page has to say so."""

from __future__ import annotations

import errno
from contextlib import contextmanager

import pytest
from actors import PUBLIC_KEY
from run_files import small_run_toml
from sqlalchemy.exc import OperationalError
from waiting import until

from coordinator.errors import StoreAway
from coordinator.run.health import read_health
from coordinator.run.heartbeat import Condition, heartbeat
from coordinator.run.home import create_home
from coordinator.storage.faults import trouble_of
from coordinator.storage.heartbeats import Role, read_heartbeats
from coordinator.storage.verdicts import clock
from node.protocol.run import parse_run_toml
from shardcast.errors import LocalFault


def test_what_a_trainer_waits_for_is_part_of_the_runs_health_until_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.run.heartbeat.BEAT_SECONDS", 0.01)
    spec = parse_run_toml(small_run_toml("waits", steps=12, groups_per_step=2))
    home = create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=spec)

    def problems():
        return {one.rule.code: one.text for one in read_health(home, has_sources=True, now=clock()).problems}

    def is_there() -> bool:
        with home.database.read() as connection:
            return bool(read_heartbeats(connection))

    condition = Condition()
    with heartbeat(home, Role.TRAINER, "host", condition):
        until(is_there)
        assert not {"no_trainer", "trainer_waits"} & problems().keys()
        condition.trouble = trouble_of(OSError(errno.ENOSPC, "No space left on device", "/srv/run/policy"))
        until(lambda: problems().get("trainer_waits") == "The trainer waits: its disk is full.")
        condition.trouble = ""
        until(lambda: "trainer_waits" not in problems())
    home.database.close()


def test_two_verifiers_of_one_name_are_told_apart_from_one_that_was_restarted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("coordinator.run.heartbeat.BEAT_SECONDS", 0.01)
    spec = parse_run_toml(small_run_toml("names", steps=12, groups_per_step=2))
    home = create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=spec)

    def beats(since: float = 0.0) -> bool:
        with home.database.read() as connection:
            return any(one.seen_at > since for one in read_heartbeats(connection))

    for _ in range(2):
        with heartbeat(home, Role.VERIFIER, "verifier-1", Condition()):
            now = clock()
            until(lambda since=now: beats(since))
    assert "another verifier" not in caplog.text
    with (
        heartbeat(home, Role.VERIFIER, "verifier-1", Condition()),
        heartbeat(home, Role.VERIFIER, "verifier-1", Condition()),
    ):
        until(lambda: "another verifier of this run runs under the name verifier-1" in caplog.text)
    home.database.close()


def test_a_heartbeat_whose_write_was_done_though_its_reply_was_lost_is_ones_own(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("coordinator.run.heartbeat.BEAT_SECONDS", 0.01)
    spec = parse_run_toml(small_run_toml("lost", steps=12, groups_per_step=2))
    home = create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=spec)
    write, writes = home.database.write, []

    @contextmanager
    def loses_each_third_reply(*, durable=True):
        with write(durable=durable) as connection:
            yield connection
        writes.append(durable)
        if len(writes) % 3 == 0:
            raise OSError(errno.EIO, "the connection was lost")

    monkeypatch.setattr(home.database, "write", loses_each_third_reply)
    with heartbeat(home, Role.VERIFIER, "verifier-1", Condition()):
        until(lambda: len(writes) > 10)
    assert "another verifier" not in caplog.text
    home.database.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/srv/secret"), "read_only"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/secret"), "no_access"),
        (OSError(errno.EIO, "Input/output error", "/srv/secret"), "disk_fails"),
        (LocalFault("no space left for /srv/secret", code="disk_full"), "disk_full"),
        (OperationalError("SELECT 1", {}, Exception("the host db.internal is away")), "database_away"),
        (StoreAway("s3.internal refused"), "store_away"),
    ],
)
def test_what_anybody_can_read_names_neither_files_nor_hosts(error, code):
    assert trouble_of(error) == code
