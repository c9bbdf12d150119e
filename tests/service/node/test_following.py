"""Following a run after joining it: where no peer brings what is new, some node has to have it from a coordinator.

What would break for whom: with the peer gone that everybody began with, workers would learn of each policy up to
fifteen seconds late; or a coordinator with enough who wait would be asked without a pause by all the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, sealed_descriptor, served
from waiting import SECONDS, eventually

from node.joining import session as joining
from node.joining.session import JoinSettings, RunSession, join_run
from node.protocol.peers import Address

KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
NOBODY = Address("ip4", "127.0.0.1", 9, OTHER_KEY.public_key().public_bytes_raw())


class Coordinator:
    """Serves the run's descriptor, and holds an answer back as long as it is asked to, unless others wait already."""

    def __init__(self) -> None:
        self.version, self.is_full = 1, False
        self.waits: list[float] = []
        self._published = asyncio.Event()

    def publish(self) -> int:
        """One more version."""
        self.version += 1
        self._published.set()
        self._published = asyncio.Event()
        return self.version

    async def answer(self, request: web.Request) -> web.Response:
        after, wait = int(request.query.get("after", -1)), float(request.query.get("wait", 0.0))
        self.waits.append(wait)
        if self.version <= after and not self.is_full:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._published.wait(), wait)
        return web.Response(body=sealed_descriptor(structs.replace(DESCRIPTOR, version=self.version)))


class Silent:
    """A network whose peers never bring anything."""

    def status(self) -> dict[str, object]:
        return {"neighbours": ["a", "b"]}


@contextlib.asynccontextmanager
async def following(coordinator: Coordinator, state: Path, *, by_peers: bool = True) -> AsyncIterator[RunSession]:
    async with served(coordinator.answer) as url:
        entry = JoinSettings(run_id=RUN_ID, coordinators=(url,), peers=(NOBODY,) if by_peers else ())
        async with asyncio.timeout(2 * SECONDS), join_run(entry, key=KEY, state=state) as session:
            task = asyncio.create_task(session.follow())
            yield session
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


AT_ONCE = 20.0
"""On a busy machine; `REFRESH_SECONDS` are longer wherever a test asks for it."""


async def version(session: RunSession, wanted: int) -> float:
    """How long it took until it was known."""
    began = time.monotonic()
    await eventually(lambda: session.descriptor.version >= wanted, what=lambda: "nobody told this node")
    return time.monotonic() - began


@pytest.fixture(autouse=True)
def silent_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def network(_stack: object, entry: JoinSettings, **_settings: object) -> Silent | None:
        return Silent() if entry.peers else None

    monkeypatch.setattr(joining, "_network", network)


async def test_a_node_that_waits_at_the_coordinator_has_what_is_new_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 200.0)
    coordinator = Coordinator()
    async with following(coordinator, tmp_path) as session:
        await eventually(lambda: any(coordinator.waits))
        for _ in range(2):
            assert await version(session, coordinator.publish()) < AT_ONCE


async def test_a_coordinator_where_enough_wait_is_left_alone(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.is_full = True
    async with following(coordinator, tmp_path):
        await asyncio.sleep(1.0)
    assert len(coordinator.waits) <= 2  # for the first descriptor, and to find that it does not wait


async def test_a_node_that_found_what_nobody_brought_waits_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.4)
    monkeypatch.setattr(joining, "WAITING", 0)  # it is never drawn
    coordinator = Coordinator()
    async with following(coordinator, tmp_path) as session:
        await asyncio.sleep(0.9)
        assert not any(coordinator.waits)
        monkeypatch.setattr(joining, "REFRESH_SECONDS", 60.0)
        await version(session, coordinator.publish())
        await eventually(lambda: coordinator.waits[-1] > 10.0)
        assert await version(session, coordinator.publish()) < AT_ONCE


async def test_a_node_without_peers_takes_no_place_from_those_who_would_pass_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "REFRESH_SECONDS", 0.2)
    coordinator = Coordinator()
    async with following(coordinator, tmp_path, by_peers=False) as session:
        await version(session, coordinator.publish())
        assert not any(coordinator.waits)
