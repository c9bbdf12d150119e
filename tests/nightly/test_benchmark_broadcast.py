"""The benchmark of broadcasting at its smallest, and the parts of it that a wrong figure would come from.

What would break for whom: whoever repeats the measurement finds a figure missing; or a link lets through more than it
says, a liar tells the truth, or a worker that got nothing, or the wrong file, counts as served, and every figure after
it is too good.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
import venv

import pytest
from locations import ROOT

from benchmarks.broadcasting import bad_relay, full, ours
from benchmarks.broadcasting.delivery import Delivery, Payload, deliver
from benchmarks.broadcasting.processes import NodeEnded, Swarm
from benchmarks.broadcasting.trees import NotServed

pytestmark = [pytest.mark.timeout(280)]

MIB = 2**20

PROMISED = {
    "full_seconds",
    "workers_never_served",
    "cpu_s_per_gib",
    "client_memory_mib",
    "client_written_over_size",
    "share_of_bound_depth1",
    "share_of_bound_depth2",
    "share_of_bound_depth3",
    "extra_hop_s",
    "origin_bytes_16_over_2_workers",
    "one_bad_relay_slowdown",
    "idle_connections_500_p99_ms",
    "head_ms_per_hop",
    "delta_ratio_066",
    "delta_ratio_185",
    "delta_over_entropy",
    "delta_encode_gb_per_s",
    "delta_decode_gb_per_s",
}

# Of a peer that says where what it publishes lies, by a file that its workers find without any network.
FAKE_PEER = """
    from pathlib import Path
    from types import SimpleNamespace

    PUBLISHED = Path({published!r})
    server = SimpleNamespace(ShardcastServer=type("ShardcastServer", (), {{}}))
    http_server = SimpleNamespace(server_port=9)

    class OriginServer:
        http_server = http_server
        def __init__(self, folder, port): pass
        def broadcast(self, path): PUBLISHED.write_text(path)

    class MiddleNode:
        http_server = http_server
        def __init__(self, upstreams, folder, port, check_interval): pass

    class ClientNode:
        def __init__(self, servers, folder): self.path = Path(folder)
        def list_available_versions(self): return {{"v1": ""}} if PUBLISHED.exists() else {{}}
        def download_version(self, version):
            data = Path(PUBLISHED.read_text()).read_bytes()
            {serves}
            self.path.write_bytes(data)
            return str(self.path)
"""


@pytest.fixture
def payload(tmp_path):
    return Payload.made(tmp_path / "payload", MIB)


@pytest.fixture
def fake_peer(tmp_path):
    """Makes an environment whose shardcast serves as it is told to, and the side of it that looks each second."""

    def make(serves):
        environment = tmp_path / "environment"
        venv.create(environment, with_pip=False, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "shardcast").mkdir()
        source = textwrap.dedent(FAKE_PEER).format(published=str(tmp_path / "published"), serves=serves)
        (packages / "shardcast" / "__init__.py").write_text(source)
        return full.sides(environment)["peer_1s"]

    return make


def test_a_quick_run_measures_everything_but_the_peer():
    command = [sys.executable, "-m", "benchmarks.broadcast", "--json", "--quick", "--no-peer"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["benchmark"] == "broadcast"
    figures = line["figures"]
    assert [figures[key] for key in full.PEER_KEYS] == [None] * len(full.PEER_KEYS)
    assert all(line["notes"][key] == "not asked for (--no-peer)" for key in full.PEER_KEYS)
    assert {key: line["notes"].get(key) for key in PROMISED if figures.get(key) is None} == {}
    assert figures["workers_never_served"] == 0
    assert figures["client_written_over_size"] >= 1
    assert figures["client_memory_mib"] > 10
    # Nothing is faster than the link, and each of two relays takes the file once.
    assert 0 < max(figures[f"share_of_bound_depth{depth}"] for depth in (1, 2, 3)) <= 1
    assert figures["origin_bytes_over_size_2_workers"] >= 2
    assert figures["origin_bytes_16_over_2_workers"] < 1.5
    assert figures["one_bad_relay_slowdown"] == max(
        figures[f"one_{case}_relay_slowdown"] for case in ("corrupt", "missing", "slow")
    )
    assert figures["idle_connections_still_open"] == 500
    assert all(figure is None or math.isfinite(figure) for figure in figures.values())


def test_two_workers_share_the_uplink_that_feeds_them(payload):
    bytes_per_s = 1e6
    with Swarm() as swarm:
        origin = ours.start_origin(swarm)
        throttle = ours.Throttle(swarm)
        link = throttle.link(origin.url, bytes_per_s)
        workers = [ours.start_worker(swarm, [link]).ready() for _ in range(2)]
        found = deliver(payload, origin, workers, nodes=swarm.nodes, patience_s=60)
        assert found.served == 2
        assert found.cpu_s > 0
        sent_bytes = throttle.sent_bytes(link)
    assert sent_bytes >= 2 * payload.size_bytes
    assert 2 * payload.size_bytes / bytes_per_s <= found.seconds < 2 * sent_bytes / bytes_per_s


def test_a_liar_serves_nobody_and_its_workers_are_not_waited_for(payload):
    with Swarm() as swarm:
        origin = ours.start_origin(swarm)
        liar = swarm.start("liar", [sys.executable, "-m", "benchmarks.broadcasting.hostile", origin.url])
        worker = ours.start_worker(swarm, [liar.url]).ready()
        started = time.monotonic()
        found = deliver(payload, origin, [worker], nodes=[], patience_s=4)
        assert time.monotonic() - started < 10
        assert (found.workers, found.served, found.seconds) == (1, 0, 4)


def test_nobody_listens_where_a_relay_is_missing(payload):
    with bad_relay.nobody() as url, Swarm() as swarm:
        origin = ours.start_origin(swarm).ready()
        worker = ours.start_worker(swarm, [url]).ready()
        assert deliver(payload, origin, [worker], nodes=[], patience_s=2).served == 0


def test_no_time_is_made_of_a_broadcast_that_failed(payload):
    with pytest.raises(NotServed, match="2 of 2 workers"):
        bad_relay.broadcast("clean", payload, 1e4, patience_s=2, within=None)


@pytest.mark.parametrize(
    ("serves", "served"),
    [("pass", 2), ("return None", 0), ("data = data[:-1] + bytes(1)", 0), ("raise ValueError", 0)],
    ids=["the file", "nothing", "another file", "and ends"],
)
def test_of_the_peer_only_who_has_the_right_file_is_served(fake_peer, payload, serves, served):
    setting = full.Setting(payload, workers=2, repeats=1, patience_s=3, within=None)
    found = full.broadcast(fake_peer(serves), setting, share=0)
    assert found.served == served
    assert (found.seconds == 3) == (not served)


def test_a_peer_that_serves_nobody_is_not_compared_by_what_it_spends(payload):
    nothing = Delivery(seconds=120, workers=8, served=0, cpu_s=1, peak_bytes=1, written_bytes=0)
    all_of_it = Delivery(seconds=6, workers=8, served=8, cpu_s=1, peak_bytes=1, written_bytes=MIB)
    figures = full.peer_figures({"ours": [all_of_it], "peer_defaults": [nothing], "peer_1s": [nothing]}, payload)
    assert figures["cpu_s_per_gib_vs_peer"] is None
    assert figures["workers_never_served_peer"] == 8
    assert figures["full_speedup_vs_peer_defaults"] == 20


def test_a_node_that_ends_says_why_and_nothing_is_left_of_a_swarm(tmp_path):
    with pytest.raises(NodeEnded, match="no such thing"), Swarm(tmp_path) as swarm:
        sleeper = swarm.start("sleeper", ["sleep", "60"])
        swarm.start("failing", [sys.executable, "-c", "raise SystemExit('no such thing')"]).ready()
    assert sleeper.exit_code == -9
    assert list(tmp_path.iterdir()) == []
