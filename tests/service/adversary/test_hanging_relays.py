"""Announced relays that hang: they must cost the leader, and the honest ones beside them, next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from announced_relays import hanging, probing, registered
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from swarm import publish, small_spec
from waiting import until

from coordinator.run.home import Home, create_home
from coordinator.run.relays import RelayRegistry
from node.protocol.messages import RelayAnnouncement
from shardcast import OriginServer

pytestmark = pytest.mark.system  # waits on real clocks

HANGING = 64


@pytest.fixture
def run(tmp_path: Path, tiny_policy_path: Path) -> Iterator[tuple[Home, str]]:
    """A run with one policy, and the URL at which its origin serves."""
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path / "run", public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    origin = DatedOrigin(tmp_path / "origin", key, home.run_id)
    server = OriginServer(origin)
    port = server.start()
    publish(home, origin, server, tiny_policy_path, version=0)
    yield home, f"http://127.0.0.1:{port}"
    server.stop()
    origin.close()
    home.database.close()


def announce(home: Home, number: int, url: str, address: str) -> None:
    registry = RelayRegistry(home.database, fixed=(), salt=b"")
    registry.announce(f"{number:064x}", RelayAnnouncement(url=url, version=0), address=address, now=time.time())


def test_hanging_relays_of_a_few_networks_hold_up_no_honest_one(run: tuple[Home, str]) -> None:
    """Each takes 4 s of a probe: 64 of three networks, one batch after the other, were 16 s for whoever came last."""
    home, honest = run

    def probed() -> int:
        return sum(row.probed_at is not None for url, row in registered(home).items() if url != honest)

    with hanging() as (url, _):
        for number in range(HANGING):
            announce(home, number, f"{url}/{number}", f"127.0.{number % 3}.1")
        with probing(home):
            until(probed)
            announce(home, HANGING, honest, "127.0.9.1")
            until(lambda: registered(home)[honest].good_at is not None)
            assert probed() < HANGING // 3, "it waited for others' probes"
        assert all(row.good_at is None for url, row in registered(home).items() if url != honest)


def test_the_leaders_end_waits_for_no_hanging_relay(run: tuple[Home, str]) -> None:
    home, _ = run
    with hanging() as (url, connected):
        for number in range(8):
            announce(home, number, f"{url}/{number}", f"127.0.{number}.1")
        with probing(home):
            until(lambda: len(connected) == 8)
        assert all(row.probed_at is None for row in registered(home).values()), "it waited for their probes to fail"
