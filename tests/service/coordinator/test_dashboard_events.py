"""Server-sent events: whoever watches costs little, and nobody can take the streams from everybody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from waiting import eventually

from coordinator.dashboard.events import EventHub, StreamLimits
from coordinator.http.rate_limits import TooManyRequests

HOST = "192.0.2.1"


class Page:
    """What there is to send, and how often it was asked for."""

    def __init__(self) -> None:
        self.texts = {"cards": "one", "queue": "same"}
        self.reads = 0

    async def read(self) -> dict[str, str]:
        self.reads += 1
        return dict(self.texts)


def hub_of(page: Page, **changes: float) -> EventHub:
    values = {"tick_seconds": 0.01, "heartbeat_seconds": 0.05, "stream_seconds": 60.0} | changes
    return EventHub(page.read, limits=StreamLimits(per_address=2, streams=3), **values)


async def next_event(stream: AsyncIterator[bytes]) -> dict[str, str]:
    async for message in stream:
        if b"data: " in message:
            return json.loads(message.partition(b"data: ")[2])
    raise AssertionError("the stream has ended")


async def test_a_listener_gets_everything_first_and_then_what_has_changed() -> None:
    page = Page()
    hub = hub_of(page)
    subscription = hub.subscribe(HOST)
    stream = hub.stream(subscription, mark="")
    assert await next_event(stream) == {"cards": "one", "queue": "same"}
    page.texts["cards"] = "two"
    assert await next_event(stream) == {"cards": "two"}
    await stream.aclose()
    hub.unsubscribe(subscription)


async def test_one_producer_reads_for_all_and_ends_with_the_last() -> None:
    page = Page()
    hub = hub_of(page, tick_seconds=1.0)
    subscriptions = [hub.subscribe(f"192.0.2.{number}") for number in range(3)]
    streams = [hub.stream(subscription, mark="") for subscription in subscriptions]
    for stream in streams:
        assert await next_event(stream) == page.texts
    assert page.reads == 1
    for subscription in subscriptions:
        hub.unsubscribe(subscription)
    await asyncio.sleep(1.5)
    assert page.reads == 1
    assert len(hub) == 0


async def test_one_address_cannot_take_every_stream_nor_all_together_more_than_there_are() -> None:
    hub = hub_of(Page())
    subscriptions = [hub.subscribe(HOST), hub.subscribe(HOST)]
    with pytest.raises(TooManyRequests):
        hub.subscribe(HOST)
    hub.subscribe("192.0.2.9")
    with pytest.raises(TooManyRequests):
        hub.subscribe("192.0.2.10")
    hub.unsubscribe(subscriptions[0])
    hub.unsubscribe(subscriptions[0])  # the second time it is nobody's
    hub.subscribe(HOST)
    with pytest.raises(TooManyRequests):
        hub.subscribe("192.0.2.10")


async def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    hub = hub_of(Page())
    hub.subscribe("2001:db8::1")
    hub.subscribe("2001:db8::2")
    with pytest.raises(TooManyRequests):
        hub.subscribe("2001:db8::3")


async def test_a_slow_listener_gets_the_newest_and_nothing_piles_up() -> None:
    page = Page()
    hub = hub_of(page)
    subscription = hub.subscribe(HOST)
    stream = hub.stream(subscription, mark="")
    await next_event(stream)
    for number in range(20):
        page.texts["cards"] = str(number)
        await asyncio.sleep(0.02)
    reads = page.reads
    await eventually(lambda: page.reads > reads + 1)  # the second of them comes when the first is ready to be sent
    assert await next_event(stream) == {"cards": "19"}
    await stream.aclose()
    hub.unsubscribe(subscription)


async def test_who_comes_back_gets_only_what_it_missed_unless_another_process_answers() -> None:
    page = Page()
    hub = hub_of(page)
    first = await hub.now("")
    assert first["sections"] == page.texts
    page.texts["cards"] = "two"
    assert (await hub.now(str(first["mark"])))["sections"] == {"cards": "two"}
    for other in ("deadbeef-1", "", "-", f"{first['mark']}x", str(first["mark"]).partition("-")[0] + "-" + "9" * 99):
        assert (await hub.now(other))["sections"] == page.texts


async def test_a_quiet_run_is_heard_of_by_a_heartbeat_and_no_stream_is_held_for_ever() -> None:
    hub = hub_of(Page(), stream_seconds=0.3)
    subscription = hub.subscribe(HOST)
    messages = [message async for message in hub.stream(subscription, mark="")]
    assert b": still here\n\n" in messages
    hub.unsubscribe(subscription)


async def test_a_database_that_is_away_for_a_moment_does_not_end_the_streams() -> None:
    page = Page()
    failing = iter([OSError("away")])

    async def read() -> dict[str, str]:
        for error in failing:
            raise error
        return await page.read()

    hub = EventHub(read, tick_seconds=0.01)
    subscription = hub.subscribe(HOST)
    stream = hub.stream(subscription, mark="")
    assert await next_event(stream) == page.texts
    await stream.aclose()
    hub.unsubscribe(subscription)
