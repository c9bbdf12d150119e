"""What an operator says of a server is what it keeps to: whose line is full else is the contributor's."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node import cli
from node.joining.session import JoinSettings
from node.relay.advice import Serving
from node.relay.daemon import RelaySettings, run_relay
from shardcast import ServerLimits

RUN_ID = "ab" * 32
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
STARTS = {
    "publish": "node.broadcast.publishing.run_publish",
    "relay": "node.relay.daemon.run_relay",
    "worker": "node.worker.daemon.run_worker",
}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Runs a command as far as its settings; returns what it printed and the limits of its server."""
    (tmp_path / "weights").touch()

    def run(command, *options):
        seen = []

        async def record(settings, **_):
            seen.append(settings.limits if command == "publish" else settings.server_limits)

        monkeypatch.setattr(STARTS[command], record)
        joining = ("--coordinator", "http://h:1", "--run-id", RUN_ID)
        arguments = (str(tmp_path / "weights"),) if command == "publish" else joining
        result = CliRunner().invoke(cli.main, [command, *arguments, "--state", str(tmp_path / "state"), *options])
        return result, seen

    return run


@pytest.mark.parametrize("command", STARTS)
def test_rate_and_connections_are_the_servers(start, command):
    result, (limits,) = start(command, "--max-rate", "2.5", "--connections-per-address", "40")
    assert result.exit_code == 0, result.output
    assert (limits.max_bytes_per_s, limits.max_connections_per_address) == (2_500_000, 40)
    assert start(command)[1] == [ServerLimits()]
    assert start(command, "--connections-per-address", "0")[1] == [ServerLimits(max_connections_per_address=None)]


@pytest.mark.parametrize(
    "wrong",
    [("--max-rate", "0.01"), ("--max-rate", "nan"), ("--max-rate", "inf"), ("--connections-per-address", "-1")],
)
def test_a_rate_at_which_no_chunk_would_arrive_in_time_is_refused(start, wrong):
    result, seen = start("relay", *wrong)
    assert (result.exit_code, seen) == (2, [])
    assert wrong[0] in result.output


def accepted(url):
    """How many of three connections at once are kept open."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        peers = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(3)]
        kept = 0
        for peer in peers:
            peer.settimeout(60)
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"GET /v1/head HTTP/1.1\r\nHost: a\r\n\r\n")
                kept += peer.recv(1) != b""
        return kept


@pytest.mark.system
async def test_relays_and_workers_that_serve_keep_to_them(swarm, tmp_path):
    limits = ServerLimits(max_connections_per_address=1)
    settings = RelaySettings(
        join=JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,)),
        state=tmp_path / "relay",
        host="127.0.0.1",
        port=0,
        upstreams=(swarm.origin_url,),
        server_limits=limits,
    )
    stop, known = asyncio.Event(), swarm.coordinator.relays
    relay = asyncio.create_task(run_relay(settings, key=OTHER_KEY, stop=stop))
    await swarm.until(lambda: swarm.coordinator.relays != known)
    assert await asyncio.to_thread(accepted, swarm.coordinator.relays[-1]) == 1
    stop.set()
    await relay
    swarm.coordinator.relays = known
    async with swarm.working(serving=Serving(host="127.0.0.1", port=0), server_limits=limits):
        await swarm.until(lambda: swarm.coordinator.relays != known)
        assert await asyncio.to_thread(accepted, swarm.coordinator.relays[-1]) == 1
