"""What an operator's Prometheus gets from a process, and what it costs the process if something is wrong with it."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.error import URLError

import pytest
from ports import free_port
from prometheus_client import CollectorRegistry, generate_latest

from node.errors import ConfigError
from node.joining.metrics import PEER, LatestStatus
from node.runtime.metrics import StatusCollector, process_registry, serving_metrics
from node.worker.events import EventKind, Observer
from node.worker.metrics import WORKER, StatusProbe

STATUS: dict[str, Any] = {
    "version": 3,
    "head_version": 4,
    "slots": [{"slot": 1}, {"slot": 2}],
    "undelivered": 1,
    "tokens": 1000,
    "generated": 10,
    "admitted": 7,
    "rejected": 2,
    "indeterminate": 1,
    "admitted_tokens": 700,
    "lost": 0,
    "expired": 0,
    "engine_restarts": 0,
    "switches": 3,
    "broadcast_bytes": {"fetched": 5, "results": 6},
    "coordinator_away": False,
    "run_is_over": True,
    "network": None,
}


@contextmanager
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_without_a_port_nothing_listens():
    before = threading.active_count()
    with serving_metrics(process_registry("worker"), "127.0.0.1", None):
        assert threading.active_count() == before


def test_metrics_are_served_while_the_process_works_and_not_afterwards(tmp_path):
    port = free_port()
    registry = process_registry("worker", folders={"state": tmp_path, "missing": tmp_path / "none"})
    with serving_metrics(registry, "127.0.0.1", port):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'swarmproof_build_info{role="worker",version="' in text
    assert 'swarmproof_disk_free_bytes{folder="state"}' in text
    assert 'folder="missing"' not in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_that_is_taken_is_one_sentence():
    with (
        taken_port() as port,
        pytest.raises(ConfigError, match="--metrics-port") as caught,
        serving_metrics(process_registry("worker"), "127.0.0.1", port),
    ):
        raise AssertionError("it would work unseen")
    assert caught.value.code == "cannot_bind"


def test_a_worker_is_what_it_says_of_itself():
    latest = LatestStatus()
    registry = CollectorRegistry()
    registry.register(StatusCollector(WORKER, latest))
    assert value(registry, "swarmproof_worker_slots") is None, "it has not joined yet"
    latest.note(STATUS)
    assert value(registry, "swarmproof_worker_slots") == 2
    assert value(registry, "swarmproof_worker_policy_version") == 3
    assert value(registry, "swarmproof_worker_tokens_total") == 1000
    assert value(registry, "swarmproof_worker_verdicts_total", outcome="rejected") == 2
    assert value(registry, "swarmproof_worker_fetched_bytes_total") == 5
    assert value(registry, "swarmproof_worker_run_over") == 1
    assert value(registry, "swarmproof_worker_neighbours") is None, "it is in no network"
    latest.note(STATUS | {"version": None})
    assert value(registry, "swarmproof_worker_policy_version") is None, "no engine runs"


def test_a_peer_that_relays_for_nobody_has_no_figures_of_that():
    latest = LatestStatus()
    network = {"up": True, "neighbours": ["a", "b"], "known": 5, "restarts": 0, "frames": {"sent": 3}, "relay": None}
    latest.note({"descriptor_version": 7, "network": network})
    registry = CollectorRegistry()
    registry.register(StatusCollector(PEER, latest))
    assert value(registry, "swarmproof_peer_neighbours") == 2
    assert value(registry, "swarmproof_peer_frames_total", fate="sent") == 3
    assert value(registry, "swarmproof_peer_circuits") is None


class WatchingObserver(Observer):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def attach(self, status):
        self.told.append(status)

    def notify(self, kind, /, **keys):
        self.told.append((kind, keys))

    def fetching(self, version):
        self.told.append(version)
        return nullcontext()


async def test_a_worker_is_asked_on_its_own_loop_and_its_onlooker_sees_all_the_same():
    """Another thread must not read what the loop is changing."""
    witness, asked_in = WatchingObserver(), []

    def status():
        asked_in.append(threading.current_thread())
        return STATUS

    probe = StatusProbe(witness)
    assert await asyncio.to_thread(probe) is None
    probe.attach(status)
    probe.notify(EventKind.STOPPING)
    with probe.fetching(3):
        pass
    assert await asyncio.to_thread(probe) == STATUS
    assert asked_in == [threading.main_thread()]
    assert witness.told == [status, (EventKind.STOPPING, {}), 3]


def test_a_worker_that_has_ended_is_no_error_of_a_scrape():
    probe = StatusProbe(WatchingObserver())

    async def work() -> None:
        probe.attach(lambda: STATUS)

    asyncio.run(work())
    registry = CollectorRegistry()
    registry.register(StatusCollector(WORKER, probe))
    assert b"swarmproof_worker_slots" in generate_latest(registry)
    assert value(registry, "swarmproof_worker_slots") is None
