"""A peer that introduces others waits at a coordinator for each descriptor: it must neither miss one nor storm it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from msgspec import structs
from prepared_replies import DESCRIPTOR, OTHER_KEY, RUN_ID, answers, sealed_descriptor, served

from node.client.http import Backoff
from node.discovery.descriptor import DescriptorStore
from node.joining import peer as peer_module
from node.joining.peer import _follow
from node.joining.session import JoinSettings

SOON = 60.0


def envelope(version: int, *endpoints: str) -> bytes:
    return sealed_descriptor(structs.replace(DESCRIPTOR, version=version, endpoints=endpoints))


@contextlib.asynccontextmanager
async def following(*urls: str) -> AsyncIterator[DescriptorStore]:
    store = DescriptorStore(RUN_ID)
    task = asyncio.create_task(_follow(JoinSettings(run_id=RUN_ID, coordinators=urls), store))
    try:
        yield store
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_version(store: DescriptorStore, version: int) -> None:
    deadline = time.monotonic() + SOON
    while store.last is None or store.last.descriptor.version != version:
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_each_descriptor_is_asked_for_by_the_version_before_it() -> None:
    handler = answers(envelope(4), envelope(7), envelope(9))
    async with served(handler) as url, following(url) as store:
        await until_version(store, 9)
    asked = [dict(request.query) for request in handler.seen]
    assert asked[:3] == [{}, {"after": "4", "wait": "25"}, {"after": "7", "wait": "25"}]


async def test_a_coordinator_that_does_not_wait_is_not_stormed() -> None:
    """It has as many who wait as it takes, is older than this peer, or is a cache that answers at once."""
    handler = answers(envelope(4))
    async with served(handler) as url, following(url) as store:
        await until_version(store, 4)
        began = time.monotonic()
        await asyncio.sleep(1.5)
        took = time.monotonic() - began
    assert len(handler.seen) <= 3 + took / peer_module.PAUSE_SECONDS


async def test_whoever_answers_in_a_coordinators_place_is_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_module, "BACKOFF", Backoff(first_seconds=0.01, max_seconds=0.05))
    junk = (b"junk", sealed_descriptor(key=OTHER_KEY), lambda: web.Response(status=404), b"")
    async with served(answers(*junk, envelope(5))) as url, following(url) as store:
        await until_version(store, 5)
    assert all("\n" not in record.getMessage() for record in caplog.records)
    assert len(caplog.records) >= 4


async def test_a_coordinator_that_the_descriptor_names_is_asked_when_the_first_is_gone() -> None:
    """The machine beside which this peer was started has gone; the run has moved, and said where."""
    second = answers(envelope(8))
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(second))
        first = await stack.enter_async_context(served(answers(envelope(6, url), lambda: web.Response(status=503))))
        store = await stack.enter_async_context(following(first))
        await until_version(store, 8)
    assert second.seen
