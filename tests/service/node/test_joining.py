"""Coming to a run: a contributor types one line, and whatever is away, old or hostile must not end it or mislead it.

Coordinators are real servers with prepared replies; where peers have a part, the test brings what they would say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT
from msgspec import structs
from ports import free_port
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, RUN_KEY, answers, sealed_descriptor, served
from waiting import eventually

from node.client.http import Backoff
from node.discovery.descriptor import DescriptorStore
from node.errors import BadReply, ConfigError, StateError
from node.joining import session as joining
from node.joining.session import JoinSettings, RunSession, join_run
from node.protocol.peers import Address
from node.protocol.run import Descriptor
from shardcast.errors import Stale

KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
QUICK = Backoff(first_seconds=0.02, max_seconds=0.1)
NOBODY = Address("ip4", "127.0.0.1", 9, OTHER_KEY.public_key().public_bytes_raw())
SOON = 60.0


def described(version: int, *endpoints: str, **changes: object) -> Descriptor:
    return structs.replace(DESCRIPTOR, **({"version": version, "endpoints": endpoints} | changes))


@contextlib.asynccontextmanager
async def joined(tmp_path: Path, *coordinators: str, peers: tuple[Address, ...] = ()) -> AsyncIterator[RunSession]:
    entry = JoinSettings(run_id=RUN_ID, coordinators=coordinators, peers=peers, host="127.0.0.1")
    async with asyncio.timeout(SOON), join_run(entry, key=KEY, state=tmp_path, backoff=QUICK) as session:
        yield session


class Peers:
    """In place of the peer-to-peer network: what the test has `say` is what neighbours would bring."""

    def __init__(self) -> None:
        self.store: DescriptorStore | None = None
        self.neighbours: list[str] = []

    async def network(self, _stack, entry, *, key, state, store) -> Peers | None:
        self.store = store
        return self if entry.peers else None

    def say(self, envelope: bytes) -> None:
        assert self.store is not None
        self.store.offer(envelope, source="a peer")

    def status(self) -> dict[str, object]:
        return {"up": True, "neighbours": self.neighbours}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    stand_in = Peers()
    monkeypatch.setattr(joining, "_network", stand_in.network)
    return stand_in


# -- by a coordinator's URL


async def test_a_url_and_the_runs_id_are_enough(tmp_path: Path) -> None:
    async with served(answers(sealed_descriptor(described(5)))) as url, joined(tmp_path, url) as session:
        assert session.descriptor.version == 5
        assert session.run_key == RUN_KEY.public_key().public_bytes_raw() == session.client.run_key
        assert session.status() == {
            "descriptor_version": 5,
            "head_version": -1,
            "endpoints": [url],
            "network": None,
        }


async def test_a_coordinator_that_is_away_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, f"http://127.0.0.1:{port}")))
        await asyncio.sleep(0.3)
        assert not coming.done()
        await stack.enter_async_context(served(answers(sealed_descriptor()), port=port))
        assert (await coming).descriptor.version == DESCRIPTOR.version


async def test_the_coordinator_of_another_run_is_refused(tmp_path: Path) -> None:
    """Without peers nobody else can know: a person mistyped, or was lured."""
    async with served(answers(sealed_descriptor(key=OTHER_KEY))) as url:
        with pytest.raises(BadReply, match="does not prove that it serves this run"):
            async with joined(tmp_path, url):
                pass


async def test_an_older_descriptor_than_was_seen_before_the_restart_is_not_gone_back_to(tmp_path: Path) -> None:
    """A rollback: whoever sits at a coordinator's address serves last month's relays and revocations."""
    async with served(answers(sealed_descriptor(described(7)))) as url, joined(tmp_path, url):
        pass
    async with served(answers(sealed_descriptor(described(6)))) as url, joined(tmp_path, url) as session:
        assert session.descriptor.version == 7


async def test_a_run_that_changed_its_rules_is_not_joined_again(tmp_path: Path) -> None:
    async with served(answers(sealed_descriptor(described(7)))) as url, joined(tmp_path, url):
        pass
    other = described(8, spec=structs.replace(DESCRIPTOR.spec, seed=1))
    async with served(answers(sealed_descriptor(other))) as url:
        with pytest.raises(StateError, match="rules"):
            async with joined(tmp_path, url):
                pass


# -- by peers


async def test_a_descriptor_from_a_peer_leads_to_the_coordinators(tmp_path: Path, peers: Peers) -> None:
    async with contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, peers=(NOBODY,))))
        await eventually(lambda: peers.store is not None)
        peers.say(sealed_descriptor(described(5, "http://192.0.2.1:8700", "http://192.0.2.2:8700")))
        session = await coming
        assert session.client.urls == ("http://192.0.2.1:8700", "http://192.0.2.2:8700")
        assert session.client.run_key == RUN_KEY.public_key().public_bytes_raw()
        assert session.status()["network"] == peers.status()


async def test_as_many_endpoints_as_a_descriptor_may_name_and_one_more_are_taken(tmp_path: Path, peers: Peers) -> None:
    """16 endpoints and --coordinator are one too many: the worker must not end over it."""
    named = [f"http://192.0.2.{number}:8700" for number in range(16)]
    async with contextlib.AsyncExitStack() as stack:
        own = f"http://127.0.0.1:{free_port()}"
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, own, peers=(NOBODY,))))
        await eventually(lambda: peers.store is not None)
        peers.say(sealed_descriptor(described(5, *named)))
        assert (await coming).client.urls == (own, *named[:15])


async def test_who_is_at_an_old_address_by_now_does_not_end_a_node_that_has_peers(
    tmp_path: Path, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """The last descriptor has expired, and another run, or a hotel's portal, answers where it points."""
    strangers = (sealed_descriptor(key=OTHER_KEY), lambda: web.Response(status=403), lambda: web.Response(status=302))
    async with served(answers(*strangers)) as url:
        remember(tmp_path, described(5, url))
        async with contextlib.AsyncExitStack() as stack:
            coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, peers=(NOBODY,))))
            await eventually(lambda: len(caplog.records) >= 3)
            assert not coming.done()
            peers.say(sealed_descriptor(described(6, "http://192.0.2.1:8700")))
            assert (await coming).descriptor.version == 6


async def test_a_coordinator_that_is_behind_is_not_asked_without_end(tmp_path: Path, peers: Peers) -> None:
    """Its clock, or its backup, is behind what was seen: what it sends is no news, and time has to pass."""
    handler = answers(sealed_descriptor(described(4)))
    async with served(handler) as url:
        remember(tmp_path, described(5, url))
        async with contextlib.AsyncExitStack() as stack:
            coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, peers=(NOBODY,))))
            await eventually(lambda: len(handler.seen) >= 2)
            began, asked = time.monotonic(), len(handler.seen)
            await asyncio.sleep(0.5)
            assert len(handler.seen) - asked <= (time.monotonic() - began) / 0.05 + 1
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def test_a_coordinator_that_never_answers_does_not_hold_up_what_peers_know(tmp_path: Path, peers: Peers) -> None:
    asked = asyncio.Event()

    async def hang(_request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(3600)
        return web.Response()

    async with served(hang) as url, contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, url, peers=(NOBODY,))))
        await asyncio.wait_for(asked.wait(), SOON)
        await eventually(lambda: peers.store is not None)
        began = time.monotonic()
        peers.say(sealed_descriptor(described(5)))
        session = await coming
        assert time.monotonic() - began < 20.0, "for its answer it would have been 30 s"
        assert session.descriptor.version == 5


async def test_it_says_what_is_missing_and_not_every_second(
    tmp_path: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "SAY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger="node.joining.session")
    async with contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, peers=(NOBODY,))))
        await eventually(lambda: "no peer answers" in caplog.text)
        peers.neighbours = ["12D3KooW"]
        await eventually(lambda: "none of 1 peers that answer has the run's descriptor" in caplog.text)
        peers.say(sealed_descriptor(described(5)))
        await eventually(lambda: "names no coordinator; its operator has to give --endpoint" in caplog.text)
        peers.say(sealed_descriptor(described(6, "http://192.0.2.1:8700")))
        await coming
    assert len(caplog.records) <= 6, "after 0.1 s, 0.2 s, 0.4 s, …"


# -- what is known stays current


async def test_news_from_peers_changes_the_coordinators_at_once(tmp_path: Path, peers: Peers) -> None:
    async with contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(joined(tmp_path, peers=(NOBODY,))))
        await eventually(lambda: peers.store is not None)
        peers.say(sealed_descriptor(described(5, "http://192.0.2.1:8700")))
        session = await coming
        following = asyncio.create_task(session.follow())
        await asyncio.to_thread(
            peers.say, sealed_descriptor(described(6, "http://192.0.2.2:8700", "http://192.0.2.3:1"))
        )
        await eventually(lambda: set(session.client.urls) == {"http://192.0.2.2:8700", "http://192.0.2.3:1"})
        assert session.descriptor.version == 6
        following.cancel()


async def test_a_coordinator_is_asked_when_peers_are_silent(
    tmp_path: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eclipse: neighbours that withhold news must not keep a node at an old list of coordinators."""
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.1)
    handler = answers(sealed_descriptor(described(5)), sealed_descriptor(described(6)))
    async with served(handler) as url, joined(tmp_path, url, peers=(NOBODY,)) as session:
        following = asyncio.create_task(session.follow())
        await eventually(lambda: session.descriptor.version == 6)
        following.cancel()


async def test_following_survives_whatever_a_coordinator_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.1)
    replies = (
        sealed_descriptor(described(5)),
        lambda: web.Response(status=500),
        b"junk",
        sealed_descriptor(key=OTHER_KEY),
        lambda: web.Response(status=404),
        sealed_descriptor(described(4)),
        sealed_descriptor(described(6)),
    )
    async with served(answers(*replies)) as url, joined(tmp_path, url) as session:
        following = asyncio.create_task(session.follow())
        await eventually(lambda: session.descriptor.version == 6 or following.done())
        assert not following.done()
        following.cancel()


async def test_a_descriptor_that_expires_between_two_looks_at_the_clock_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.05)
    asked = []

    def expired(_board: DescriptorStore, _client: object) -> None:
        asked.append(1)
        raise Stale("expired", code="expired")

    async with served(answers(sealed_descriptor(described(5)))) as url, joined(tmp_path, url) as session:
        monkeypatch.setattr(joining, "offer", expired)
        following = asyncio.create_task(session.follow())
        await eventually(lambda: len(asked) >= 2)
        assert not following.done()
        following.cancel()


# -- what is needed for it

BLOCKED = """
import sys
sys.modules["libp2p"] = None
from node.cli import main
main({arguments!r})
"""


def without_libp2p(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.system
@pytest.mark.parametrize("command", ["relay", "peer"])
def test_without_libp2p_joining_by_peers_is_one_sentence(tmp_path: Path, command: str) -> None:
    join = f"swarmproof://{RUN_ID}{NOBODY}"
    done = without_libp2p(command, "--join", join, "--state", str(tmp_path))
    said = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in said] == ["Error", "hint"], done.stderr
    assert said[0].startswith("Error: Joining by peers needs libp2p")
    assert f"pip install -e '{ROOT}[p2p]'" in said[0]
    assert "--coordinator URL" in said[0]


async def test_a_port_that_another_process_listens_on_is_named(tmp_path: Path) -> None:
    """libp2p shares ports: two nodes at one would each get half of the other's calls, and wonder."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        entry = JoinSettings(run_id=RUN_ID, peers=(NOBODY,), host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: another process listens there"):
            async with join_run(entry, key=KEY, state=tmp_path, backoff=QUICK):
                pass


async def test_an_address_that_is_not_this_machines_is_named(tmp_path: Path) -> None:
    entry = JoinSettings(run_id=RUN_ID, peers=(NOBODY,), host="192.0.2.77")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77:0"):
        async with join_run(entry, key=KEY, state=tmp_path, backoff=QUICK):
            pass


def remember(state: Path, descriptor: Descriptor) -> None:
    """As of an earlier start of the node, and expired since."""
    DescriptorStore(RUN_ID, state=state, clock=lambda: 0.0).offer(
        sealed_descriptor(structs.replace(descriptor, issued_at=1, expires_at=10)), source=""
    )
