"""Figures of the operator's processes: true, cheap, and there when something is wrong."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry
from sqlalchemy import insert, text
from swarm import Peer, serve, small_spec
from waiting import until

from coordinator.errors import StorageFault
from coordinator.http.connections import ConnectionLimits
from coordinator.metrics.roles import VerifierMetrics, leader_registry, role_registry
from coordinator.run.home import Home, create_home
from coordinator.run.leader import Leader
from coordinator.run.service import Coordinator
from coordinator.storage import training
from coordinator.storage.schema import steps
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def home(tmp_path: Path, key: Ed25519PrivateKey) -> Home:
    return create_home(tmp_path / "data", public_key=key.public_key().public_bytes_raw(), spec=small_spec())


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_a_new_run_has_every_verdict_at_zero(home: Home) -> None:
    """Else the first rejection of a kind would be no increase, and wake nobody."""
    registry = leader_registry(home, leads=lambda: False)
    assert value(registry, "swarmproof_verdicts_total", outcome="admitted", reason="") == 0
    for reason in (Reason.WRONG_TOKEN, Reason.PROOF_MISMATCH, Reason.MALFORMED_SUBMISSION, Reason.WRONG_BODY):
        assert value(registry, "swarmproof_verdicts_total", outcome="rejected", reason=reason.value) == 0
    for door in (Reason.BANNED, Reason.TOO_MANY_REQUESTS):
        assert value(registry, "swarmproof_verdicts_total", outcome="rejected", reason=door.value) is None
    assert value(registry, "swarmproof_policy_version") == -1
    assert value(registry, "swarmproof_steps_finished_total") == 0
    assert value(registry, "swarmproof_step_reward") is None


def test_the_newest_steps_rewards_of_each_environment_are_figures(home: Home) -> None:
    registry = leader_registry(home, leads=lambda: False)
    stats = {"reward": 0.5, "reward/arithmetic": 0.25, "reward/dataset:math": 0.75}
    with home.database.write() as connection:
        row = {"step": 0, "assigned_at": 0.0, "reward_mean": 0.5, "staleness_mean": 0.0}
        connection.execute(insert(steps).values(**row))
        training.finish_step(connection, 0, stats=stats, now=1.0)
    for name, reward in (("arithmetic", 0.25), ("dataset:math", 0.75), ("reverse", None)):
        assert value(registry, "swarmproof_step_environment_reward", environment=name) == reward


def test_a_database_that_is_gone_is_a_figure_and_no_failed_scrape(home: Home, tmp_path: Path) -> None:
    """The figures of the process itself are wanted most when something is wrong."""
    registry = leader_registry(home, leads=lambda: True)
    assert value(registry, "swarmproof_database_up") == 1
    home.database.close()
    (tmp_path / "data" / "swarmproof.sqlite3").write_bytes(b"no database" * 1000)
    assert value(registry, "swarmproof_database_up") == 0
    assert value(registry, "swarmproof_policy_version") is None
    assert value(registry, "swarmproof_leader") == 1
    assert value(registry, "process_open_fds")


def test_who_leads_is_seen_and_when_it_said_so(home: Home) -> None:
    leader = Leader(home)
    registry = leader_registry(home, leads=lambda: leader.leading)
    assert value(registry, "swarmproof_leader") == 0
    assert value(registry, "swarmproof_role_seen_timestamp_seconds", role="leader") is None
    leader.work(now := time.time())
    assert value(registry, "swarmproof_role_seen_timestamp_seconds", role="leader") == pytest.approx(now)


def test_transactions_and_what_they_waited_for_are_measured(home: Home) -> None:
    registry = role_registry("verifier", home)

    def count(name: str, kind: str) -> float:
        return value(registry, f"swarmproof_database_{name}_seconds_count", kind=kind) or 0.0

    def spent(name: str, kind: str) -> float:
        return value(registry, f"swarmproof_database_{name}_seconds_sum", kind=kind) or 0.0

    before, seconds = count("transaction", "write"), spent("transaction", "write")
    waits = count("wait", "write")
    with home.database.write() as connection:
        connection.execute(text("SELECT 1"))
        time.sleep(0.05)
    with pytest.raises(ValueError, match="undone"), home.database.write():
        raise ValueError("undone")
    assert count("transaction", "write") == before + 2, "one that is rolled back takes its time, too"
    assert count("wait", "write") == waits + 2
    assert spent("transaction", "write") - seconds >= 0.05
    reads = count("transaction", "read")
    with home.database.read():
        pass
    assert count("transaction", "read") == reads + 1


def test_blobs_are_measured_and_a_missing_one_is_an_error(home: Home) -> None:
    registry = role_registry("verifier", home)

    def moved(operation: str) -> float:
        return value(registry, "swarmproof_blob_bytes_total", operation=operation) or 0.0

    put, got = moved("put"), moved("get")
    errors = value(registry, "swarmproof_blob_errors_total", operation="get") or 0.0
    name = home.blobs.put(b"x" * 1000)
    assert home.blobs.get(name, max_bytes=1000) == b"x" * 1000
    assert (moved("put") - put, moved("get") - got) == (1000, 1000)
    with pytest.raises(StorageFault):
        home.blobs.get("0" * 64, max_bytes=10)
    assert value(registry, "swarmproof_blob_errors_total", operation="get") == errors + 1


def test_a_verifier_counts_what_it_decided_and_what_came_too_late(home: Home) -> None:
    registry = role_registry("verifier", home)
    metrics = VerifierMetrics(registry)
    verdict = Verdict(outcome=Outcome.ADMITTED, tokens=70)
    metrics.decided(verdict, in_time=True)
    metrics.decided(verdict, in_time=False)
    assert value(registry, "swarmproof_verifier_verdicts_total", outcome="admitted") == 1
    assert value(registry, "swarmproof_verifier_verdicts_total", outcome="rejected") == 0
    assert value(registry, "swarmproof_verifier_tokens_total") == 70
    assert value(registry, "swarmproof_verifier_late_verdicts_total") == 1


def figures(url: str) -> str:
    return Peer(url, "").send("GET", "/metrics").body.decode()


def test_who_is_connected_and_who_is_refused_is_counted(home: Home, key: Ed25519PrivateKey) -> None:
    with serve(Coordinator(home, key=key), connections=ConnectionLimits(connections_per_address=1)) as url:
        stranger = Peer(url, home.run_id)
        assert stranger.send("POST", "/v1/leases", b"{}", {"Authorization": "Bearer x"}).status == 401
        assert stranger.send("GET", "/nowhere").status == 404
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with (
            socket.create_connection(address),
            socket.create_connection(address, timeout=60) as second,
            contextlib.suppress(ConnectionResetError),
        ):
            assert second.recv(1) == b"", "one at a time"
        time.sleep(1.1)  # figures are up to a second old
        # Of the one that asks.
        text_ = until(lambda: found if "swarmproof_connections 1.0" in (found := figures(url)) else "")
    assert "swarmproof_refused_connections_total 1.0" in text_
    assert 'swarmproof_refusals_total{reason="bad_signature"} 1.0' in text_
    assert 'swarmproof_refusals_total{reason="banned"} 0.0' in text_


def test_a_request_in_the_log_names_the_node_that_signed_it_and_never_its_header(
    home: Home, key: Ed25519PrivateKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A library that another test has imported may have switched off all loggers that were there.
    monkeypatch.setattr(logging.getLogger("coordinator.http.middleware"), "disabled", False)
    with caplog.at_level(logging.DEBUG, logger="coordinator.http.middleware"), serve(Coordinator(home, key=key)) as url:
        peer = Peer(url, home.run_id)
        assert peer.register().status == 200
        deadline = time.monotonic() + 120  # the line follows the answer
        while "POST /v1/nodes: 200" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    lines = [record.getMessage() for record in caplog.records if record.name == "coordinator.http.middleware"]
    assert any(line.startswith("POST /v1/nodes: 200 after ") for line in lines), lines
    assert "Swarmproof " not in caplog.text
